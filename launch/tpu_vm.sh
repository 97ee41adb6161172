#!/usr/bin/env bash
# Trains on a slice of Cloud TPU VMs, through gcloud's queued resources; recreates it when it is preempted.
# Tested with stubbed clients; not yet run against the real service.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"
# shellcheck source-path=SCRIPTDIR source=slices.sh
. "$(dirname "$0")/slices.sh"
# shellcheck source-path=SCRIPTDIR source=tpu_slice.sh
. "$(dirname "$0")/tpu_slice.sh"

usage() {
  cat <<'END'
usage: launch/tpu_vm.sh COMMAND --name NAME --type TYPE --zone ZONE [options] [CONFIG [key=value ...] [--resume]]

  train    up, copy, start, follow the logs; resume after preemption; delete the TPU when the run is done
  watch    as train, for a run that is under way or has ended: follow, resume, delete
  up       request the TPU and wait until it is there
  logs     follow the log of one worker (--worker 0)
  status   what the queued resource says
  down     delete the TPU

  --name NAME          of the queued resource and of the TPU
  --type TYPE          v4-N, v5p-N (N TensorCores, two a chip), v5litepod-N (or v5e-N), v6e-N (N chips)
  --zone ZONE          such as us-east5-a
  --project PROJECT    (default: gcloud's)
  --spot | --reserved  the kind of capacity (default: on demand)
  --file PATH          a file or folder the run needs besides CONFIG and its own rewards, such as its data; repeatable
  --extras LIST        of the library (default gcs,hub,tpu,wandb)
  --keep               do not delete the TPU when the run is done
  --restarts N         after how many failures to give up; preemptions do not count (default 10)
  --runtime VERSION    the TPU's image (default: by TYPE)
  --create-flag FLAG   handed to gcloud's `queued-resources create`, such as --network=NAME; repeatable
  --poll SECONDS       between looks at the queued resource (default 30)
  --worker N           whose log (default 0)
  --dry-run            print the commands and run none

Paths are relative to the current folder. run_dir must be on gs://. HF_TOKEN and WANDB_API_KEY are handed on if they are set, and
LIBTPU_INIT_ARGS: without it the TPU compiler's flags are those of libtpu_args in common.sh.
Exit status: 0 done, 2 for what a retry would not mend, else that of the last failure; the TPU then stays up: mend, or `down`.
END
}

name="" type="" zone="" project="" runtime="" extras=$EXTRAS restarts=10 poll=30 worker=0 keep=""
capacity=() create_flags=() training=()
case ${1-} in
  train | watch | up | logs | status | down) command=$1 && shift ;;
  -h | --help) usage && exit ;;
  *) die "COMMAND=${1-} is none of train, watch, up, logs, status, down; see --help" ;;
esac
while [[ $# -gt 0 ]]; do
  taken=1 option=${1%%=*}
  case $option in
    --name | --type | --zone | --project | --runtime | --extras | --restarts | --poll | --worker)
      value_of "$@" && printf -v "${option#--}" %s "$value" ;;
    --file) value_of "$@" && share "$value" ;;
    --create-flag) value_of "$@" && create_flags+=("$value") ;;
    --spot | --reserved) flag "$1" && capacity+=("$1") ;;
    --keep) flag "$1" && keep=1 ;;
    --dry-run) flag "$1" && dry_run=1 ;;
    -h | --help) usage && exit ;;
    --resume | [!-]*) training+=("$1") ;;
    *) die "$1 is no option of it; see --help" ;;
  esac
  shift "$taken"
done

[[ $name =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] || die "--name=$name must be lower-case letters, digits and hyphens"
[[ -n $zone ]] || die "--zone is needed, such as us-east5-a"
for option in restarts poll worker; do
  [[ ${!option} =~ ^[0-9]+$ ]] || die "--$option=${!option} must be a whole number"
done
[[ ${#capacity[@]} -le 1 ]] || die "${capacity[*]}: choose one"
case $command in
  train | watch) check_type && check_training ${training[@]+"${training[@]}"} && check_mesh ;;
  up) check_type ;;
esac
[[ $command == train || $command == watch || ${#training[@]} -eq 0 ]] || die "$command takes no ${training[0]}"
[[ -n $dry_run ]] || command -v gcloud >/dev/null || die "gcloud is not on PATH; see https://cloud.google.com/sdk/docs/install"
stage=$HOME/.cache/dapo_jax/launch/$name
where=(--zone="$zone" ${project:+--project="$project"})

# Follows the run to its end, whatever happens to the TPU on the way.
watch_over() { # CODE: how it has gone so far
  local code=$1 failures=0 again=("${training[@]}")
  [[ " ${training[*]} " == *" --resume "* ]] || again+=(--resume)
  patient=1
  [[ $code -ne 0 ]] || follow || code=$?
  while [[ $code -ne 0 ]]; do
    [[ $code -ne 2 ]] || { say "the run ended with status 2, which a retry would not mend; $name is still up" && exit 2; }
    look
    case $state in
      SUSPENDED | SUSPENDING) ;; # preempted
      NONE | DELETING) say "$name was deleted, so the run is over; it can be resumed" && exit "$code" ;;
      *) [[ $code -eq 75 ]] || failures=$((failures + 1)) ;; # 75: it was told to stop, and has saved
    esac
    [[ $failures -le $restarts ]] || { say "$failures failures, over --restarts=$restarts; $name is still up" && exit "$code"; }
    say "status $code, $name is $state: resuming from the last checkpoint (failure $failures of $restarts)"
    sleep "$poll"
    code=0
    { up && copy && start "${again[@]}" && follow; } || code=$?
  done
  [[ -n $dry_run ]] || say "done: ${training[0]}"
  [[ -n $keep ]] || down
}

trap 'say "interrupted here; what runs on the TPU goes on: watch rejoins it, down deletes it" && exit 130' INT
case $command in
  train)
    up || [[ $state == SUSPEND* ]] || exit 1 # a request that is refused is not repeated
    code=0
    { [[ $state == ACTIVE ]] && copy && start "${training[@]}"; } || code=$?
    watch_over "$code"
    ;;
  watch)
    [[ -z $dry_run ]] || state=ACTIVE
    look
    [[ $state != NONE ]] || die "there is no TPU --name=$name in --zone=$zone to watch"
    watch_over 0
    ;;
  up) up ;;
  logs) on_workers "$worker" "tail --lines=1000 -F dapo_jax_run/log" ;;
  status) look && { [[ -n $dry_run ]] || echo "$state"; } ;;
  down) down ;;
esac
