#!/usr/bin/env bash
# Trains on TPU slices of a GKE cluster with XPK (pip install xpk), as a JobSet that restarts itself.
# Tested with mock commands; not yet run with the real service.
#
# XPK does not support Kubernetes secrets, so the tokens are copied from this environment into the workload's manifest, which everyone
# with read access to JobSets in the cluster's namespace can read. The tokens do not appear in any command or file of this script.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"
# shellcheck source-path=SCRIPTDIR source=slices.sh
. "$(dirname "$0")/slices.sh"

usage() {
  cat <<'END'
usage: launch/gke_xpk.sh COMMAND --name NAME --cluster CLUSTER [options] [CONFIG [key=value ...]]

  train    submit `dapo-jax train CONFIG key=value ... --resume` as a workload
  logs     follow the log of worker 0 (kubectl, with the cluster's credentials)
  down     delete the workload

  --name NAME         name of the workload
  --cluster CLUSTER   cluster created by `xpk cluster create`, or prepared for it
  --type TYPE         v4-N, v5p-N, tpu7x-N (N TensorCores, two per chip), v5litepod-N, v6e-N (N chips)
  --slices N          number of such slices (default 1); parallel.data must be a multiple of it
  --zone ZONE, --project PROJECT    (default: gcloud's)
  --image IMAGE       image with the library and the files of the run. Default: python:3.12 with the current folder, which must
                      be a checkout of the library; docker builds and pushes it, and the pods install it when they start
  --extras LIST       extras of the library to install without --image (default gcs,hub,tpu,wandb)
  --restarts N        maximum number of restarts of the JobSet, including preemptions (default 100)
  --dry-run           print the commands without running them

run_dir must be on gs://. HF_TOKEN, WANDB_API_KEY and JAX_COMPILATION_CACHE_DIR are passed on if they are set. So is LIBTPU_INIT_ARGS; if it is not set, the TPU
compiler's flags are those from libtpu_args in common.sh. Every start resumes from the last
checkpoint in run_dir, if there is one. Status 2 (a usage or configuration error) ends the workload.
END
}

name="" cluster="" type="" slices=1 zone="" project="" image="" extras=$EXTRAS restarts=100
training=()
case ${1-} in
  train | logs | down) command=$1 && shift ;;
  -h | --help) usage && exit ;;
  *) die "COMMAND=${1-} must be one of train, logs, down; see --help" ;;
esac
while [[ $# -gt 0 ]]; do
  taken=1 option=${1%%=*}
  case $option in
    --name | --cluster | --type | --slices | --zone | --project | --image | --extras | --restarts)
      value_of "$@" && printf -v "${option#--}" %s "$value" ;;
    --dry-run) flag "$1" && dry_run=1 ;;
    -h | --help) usage && exit ;;
    --resume) ;; # always set
    [!-]*) training+=("$1") ;;
    *) die "$1 is not an option; see --help" ;;
  esac
  shift "$taken"
done

[[ $name =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ && ${#name} -le 40 ]] ||
  die "--name=$name must have at most 40 lower-case letters, digits and hyphens, and start with a letter"
[[ -n $cluster ]] || die "--cluster is needed"
for option in slices restarts; do
  [[ ${!option} =~ ^[0-9]+$ ]] || die "--$option=${!option} must be a whole number"
done
where=(--cluster="$cluster" ${zone:+--zone="$zone"} ${project:+--project="$project"})


submit() {
  local program flags source=(--base-docker-image=python:3.12 --script-dir=.) environment=$HOME/.cache/dapo_jax/launch/$name.env
  [[ $type =~ ^(v4|v5p|tpu7x|v5litepod|v6e)-[1-9][0-9]*$ ]] ||
    die "--type=$type must be one of v4-N, v5p-N, tpu7x-N, v5litepod-N, v6e-N"
  check_size "$type"
  share . # the whole folder is copied into the image
  [[ -z $image ]] || extras="" # the image has the extras already
  check_training ${training[@]+"${training[@]}"}
  [[ $slices -le 1 || $data_axis == -1 || $((data_axis % slices)) -eq 0 ]] ||
    die "--slices=$slices, parallel.data=$data_axis: only the parallel.data axis may span slices; set parallel.data=$slices or a multiple of it"
  check_mesh
  flags=LIBTPU_INIT_ARGS=$(libtpu_args "$type" "$slices")
  program="dapo-jax train $(quoted "${training[@]}" --resume)"
  if [[ -n $image ]]; then
    source=(--docker-image="$image")
  else
    grep -qs '^name = "dapo_jax"' pyproject.toml || die "$PWD is not the library's checkout; change to the checkout, or pass --image"
    program="pip install --quiet --constraint constraints/py312.txt $(quoted ".[$extras]") || exit 1; $program" # pip also uses status 2
  fi
  # For a name without a value, XPK uses the value from this environment.
  if [[ -n $dry_run ]]; then
    echo "# $environment has DAPO_JAX_DISTRIBUTED=1 '$flags' $(tokens_set | tr '\n' ' ')"
  else
    mkdir -p "${environment%/*}"
    { echo DAPO_JAX_DISTRIBUTED=1 && printf '%s\n' "$flags" && tokens_set; } >"$environment"
  fi
  # Restarts on every exit status except 0 and 2. XPK's own list contains 42 and 127 to 255.
  run xpk workload create --workload="$name" "${where[@]}" --tpu-type="$type" --num-slices="$slices" "${source[@]}" \
    --env-file="$environment" --max-restarts="$restarts" --restart-on-exit-codes=1,3-126 --command="$program"
}

case $command in
  train) submit ;;
  logs)
    run kubectl logs --follow --tail=1000 --container=jax-tpu \
      --selector="xpk.google.com/workload=$name,batch.kubernetes.io/job-completion-index=0" ;;
  down) run xpk workload delete --workload="$name" "${where[@]}" --force ;;
esac
