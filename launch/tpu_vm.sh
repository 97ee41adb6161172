#!/usr/bin/env bash
# Trains on a slice of Cloud TPU VMs, through gcloud's queued resources. Requests the slice again when it is preempted.
# Tested with mock commands; not yet run with the real service.
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

  train    request the TPU, copy, start, follow the logs; resume after preemption; delete the TPU when the run is finished
  watch    like train, for a run that was started before: follow, resume, delete
  up       request the TPU and wait until it is ready
  logs     follow the log of one worker (--worker 0)
  status   print the state of the queued resource
  down     delete the TPU
  samplers request preempted sample workers again while the run continues, and start Ray on them

  --name NAME          name of the queued resource and of the TPU
  --type TYPE          v4-N, v5p-N (N TensorCores, two per chip), v5litepod-N (or v5e-N), v6e-N (N chips)
  --zone ZONE          for example us-east5-a
  --project PROJECT    (default: gcloud's)
  --spot | --reserved  the kind of capacity (default: on demand)
  --file PATH          a file or folder that the run needs in addition to CONFIG and its own rewards, such as its data; repeatable
  --extras LIST        extras of the library to install (default gcs,hub,tpu,wandb)
  --keep               do not delete the TPU when the run is finished
  --restarts N         maximum number of restarts after failures; preemptions do not count (default 10)
  --runtime VERSION    the TPU's image (default: by TYPE)
  --create-flag FLAG   passed to gcloud's `queued-resources create`, for example --network=NAME; repeatable
  --poll SECONDS       time between checks of the queued resource (default 30)
  --worker N           the worker whose log to follow (default 0)
  --samplers TYPE[:N]  also request N (default 1) TPUs of one host for sample workers (v6e-8, v6e-4:2); pass it to all commands
  --spot-samplers      request spot capacity for the sample workers
  --dry-run            print the commands without running them

Paths are relative to the current folder. run_dir must be on gs://. HF_TOKEN, WANDB_API_KEY and JAX_COMPILATION_CACHE_DIR are passed on if they are set. So is
LIBTPU_INIT_ARGS; if it is not set, the TPU compiler's flags are those from libtpu_args in common.sh.
Exit status: 0 if the run is finished, 2 for an error that a retry cannot fix, otherwise the status of the last failure. After a
failure the TPU still exists and costs money: fix the cause and start again, or delete the TPU with `down`.
END
}

name="" type="" zone="" project="" runtime="" extras=$EXTRAS restarts=10 poll=30 worker=0 keep="" samplers="" sampler_capacity=()
capacity=() create_flags=() training=()
case ${1-} in
  train | watch | up | logs | status | down | samplers) command=$1 && shift ;;
  -h | --help) usage && exit ;;
  *) die "COMMAND=${1-} must be one of train, watch, up, logs, status, down, samplers; see --help" ;;
esac
while [[ $# -gt 0 ]]; do
  taken=1 option=${1%%=*}
  case $option in
    --name | --type | --zone | --project | --runtime | --extras | --restarts | --poll | --worker | --samplers)
      value_of "$@" && printf -v "${option#--}" %s "$value" ;;
    --file) value_of "$@" && share "$value" ;;
    --create-flag) value_of "$@" && create_flags+=("$value") ;;
    --spot | --reserved) flag "$1" && capacity+=("$1") ;;
    --spot-samplers) flag "$1" && sampler_capacity=(--spot) ;;
    --keep) flag "$1" && keep=1 ;;
    --dry-run) flag "$1" && dry_run=1 ;;
    -h | --help) usage && exit ;;
    --resume | [!-]*) training+=("$1") ;;
    *) die "$1 is not an option; see --help" ;;
  esac
  shift "$taken"
done

[[ $name =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] || die "--name=$name must have only lower-case letters, digits and hyphens, and start with a letter"
[[ -n $zone ]] || die "--zone is needed, for example us-east5-a"
for option in restarts poll worker; do
  [[ ${!option} =~ ^[0-9]+$ ]] || die "--$option=${!option} must be a whole number"
done
[[ ${#capacity[@]} -le 1 ]] || die "${capacity[*]}: choose only one"
stage=$HOME/.cache/dapo_jax/launch/$name
[[ -z $samplers ]] || check_samplers
case $command in
  train | watch)
    check_type
    [[ -z $samplers ]] || add_samplers
    check_training ${training[@]+"${training[@]}"}
    check_mesh
    ;;
  up | samplers) check_type ;;
esac
[[ $command != samplers || -n $samplers ]] || die "samplers needs --samplers"
[[ $command == train || $command == watch || ${#training[@]} -eq 0 ]] || die "$command does not accept ${training[0]}"
[[ -n $dry_run ]] || command -v gcloud >/dev/null || die "gcloud is not on PATH; see https://cloud.google.com/sdk/docs/install"
where=(--zone="$zone" ${project:+--project="$project"})

# Follows the run to its end, even if the TPU is preempted or fails.
watch_over() { # CODE: the status so far
  local code=$1 failures=0 again=("${training[@]}")
  [[ " ${training[*]} " == *" --resume "* ]] || again+=(--resume)
  patient=1
  [[ $code -ne 0 ]] || follow || code=$?
  while [[ $code -ne 0 ]]; do
    [[ $code -ne 2 ]] || { say "the run ended with status 2, which a retry cannot fix; $name is still up" && exit 2; }
    look
    case $state in
      SUSPENDED | SUSPENDING) ;; # preempted
      NONE | DELETING) say "$name was deleted, so the run has ended; it can be resumed" && exit "$code" ;;
      *) [[ $code -eq 75 ]] || failures=$((failures + 1)) ;; # 75: a signal stopped the run, which has saved
    esac
    [[ $failures -le $restarts ]] || { say "$failures failures, more than --restarts=$restarts; $name is still up" && exit "$code"; }
    say "status $code, $name is $state; resuming from the last checkpoint (failure $failures of $restarts)"
    sleep "$poll"
    code=0
    { up_all && start_all "${again[@]}" && follow; } || code=$?
  done
  [[ -n $dry_run ]] || say "done: ${training[0]}"
  [[ -n $keep ]] || down_all
}

trap 'say "interrupted; the run on the TPU continues. Use watch to follow it again, or down to delete the TPU" && exit 130' INT
case $command in
  train)
    up_all || [[ $state == SUSPEND* ]] || exit 1 # a refused request is not repeated
    code=0
    { [[ $state == ACTIVE ]] && start_all "${training[@]}"; } || code=$?
    watch_over "$code"
    ;;
  watch)
    [[ -z $dry_run ]] || state=ACTIVE
    look
    [[ $state != NONE ]] || die "there is no TPU --name=$name in --zone=$zone to watch"
    watch_over 0
    ;;
  up) up_all ;;
  logs) on_workers "$worker" "tail --lines=1000 -F dapo_jax_run/log" ;;
  status) look && { [[ -n $dry_run ]] || echo "$state"; } ;;
  down) down_all ;;
  samplers) ask_head && for_samplers renew ;;
esac
