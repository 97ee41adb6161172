# shellcheck shell=bash disable=SC2034,SC2154
# Functions to request and use a slice of TPU VMs through a queued resource. tpu_vm.sh sources this file and sets its variables; it is not run by itself.

ROOT=$(cd "$(dirname "$0")/.." && pwd)
queued=(gcloud compute tpus queued-resources)
# With these settings, the connection to a lost VM is closed within two minutes.
ssh_flags=(--ssh-flag=-oServerAliveInterval=30 --ssh-flag=-oServerAliveCountMax=4 --ssh-flag=-oConnectTimeout=20)
state=NONE
patient="" # set once a run has started: gcloud may then fail for a while
export COPYFILE_DISABLE=1 # otherwise tar on macOS adds extra files

kind="" # the option whose type is checked, if it is not --type
sampler_count=0 head=""

# Sets `type` to gcloud's name for the TPU type, and `image` to the VM image.
check_type() {
  local shape=${type#*:} generation=${type%%[-:]*} cores=1
  case $generation in
    v4) image=tpu-ubuntu2204-base cores=2 ;;
    v5p) image=v2-alpha-tpuv5 cores=2 ;;
    v5litepod | v5e) image=v2-alpha-tpuv5-lite generation=v5litepod ;;
    v6e) image=v2-alpha-tpuv6e ;;
    tpu7x) die "--${kind:-type}=$type: TPU7x is available only on GKE; use launch/gke_xpk.sh" ;;
    *) die "--${kind:-type}=$type must be one of v4-N, v5p-N, v5litepod-N, v6e-N" ;;
  esac
  if [[ $type =~ ^[a-z0-9]+:[0-9]+(x[0-9]+)+$ ]]; then
    die "--${kind:-type}=$type is a topology; for ${shape//x/ x } chips x $cores cores, use --type=$generation-$((${shape//x/*} * cores))"
  fi
  [[ $type =~ ^[a-z0-9]+-[1-9][0-9]*$ ]] || die "--${kind:-type}=$type has no size; use for example $generation-8"
  check_size "$type"
  type=$generation-${type##*-} image=${runtime:-$image}
}

# Sets `state` to the state of the queued resource, NONE if it does not exist, or UNKNOWN if gcloud fails.
look() {
  local error asked=("${queued[@]}" describe "$name" "${where[@]}" --format="value(state.state)")
  if [[ -n $dry_run ]]; then
    quoted "${asked[@]}"
    return
  fi
  (umask 077 && mkdir -p "$stage")
  error=$(mktemp "$stage/error.XXXXXX") # a separate file, because several calls may run at the same time
  if ! state=$("${asked[@]}" 2>"$error"); then
    if grep -q NOT_FOUND "$error"; then
      state=NONE
    else
      state=UNKNOWN
      cat "$error" >&2
    fi
  fi
  rm -f "$error"
}

wait_while() { # STATES
  local last=""
  while look && [[ $state =~ ^($1)$ ]]; do
    [[ $state == "$last" ]] || say "$name is $state"
    last=$state
    sleep "$poll"
  done
}

create() {
  run "${queued[@]}" create "$name" --node-id="$name" --accelerator-type="$type" --runtime-version="$image" \
    "${where[@]}" ${capacity[@]+"${capacity[@]}"} ${create_flags[@]+"${create_flags[@]}"} --quiet || return
  state=ACTIVE # for --dry-run; otherwise gcloud is asked next
}

down() {
  run "${queued[@]}" delete "$name" "${where[@]}" --force --quiet
}

# Requests the slice if it does not exist or was preempted.
request() {
  [[ -z $dry_run ]] || state=NONE
  wait_while "SUSPENDING|DELETING${patient:+|UNKNOWN}"
  if [[ $state == FAILED || $state == SUSPENDED ]]; then
    down || return
    state=NONE
  fi
  if [[ $state == NONE ]]; then create || return; fi
}

# Waits until the slice is ready. Fails if the request is refused.
ready() {
  wait_while "CREATING|ACCEPTED|PROVISIONING|WAITING_FOR_RESOURCES${patient:+|UNKNOWN}"
  [[ -n $dry_run ]] || say "$name is $state"
  [[ $state == ACTIVE ]]
}

on_workers() { # WORKER COMMAND
  run gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker="$1" --quiet "${ssh_flags[@]}" --command="$2" </dev/null
}

# Copies this checkout, the run's files, the tokens and the compiler flags to all workers, and installs the library there.
copy() {
  local token flags
  flags=$(libtpu_args "$type" 1)
  if [[ -z $dry_run ]]; then
    trap 'rm -f "$stage/dapo_jax_tokens"' EXIT
    rm -f "$stage/dapo_jax_tokens"
    (umask 077 && mkdir -p "$stage" && {
      for token in $(tokens_set); do
        printf '%s=%q\n' "$token" "${!token}"
      done
      printf 'LIBTPU_INIT_ARGS=%q\n' "$flags"
      if [[ -n $samplers ]]; then
        # All machines have the same token, also machines that are requested later.
        [[ -s $stage/ray_token ]] || openssl rand -hex 32 >"$stage/ray_token"
        printf 'RAY_AUTH_MODE=token\nRAY_memory_monitor_refresh_ms=0\nRAY_AUTH_TOKEN=%s\n' "$(cat "$stage/ray_token")"
      fi
    } >"$stage/dapo_jax_tokens") || return
  else
    echo "# $stage/dapo_jax_tokens, mode 600, has LIBTPU_INIT_ARGS='$flags' ${samplers:+RAY_AUTH_TOKEN }$(tokens_set | tr '\n' ' ')"
  fi
  run tar -czf "$stage/dapo_jax_code.tar.gz" --exclude=__pycache__ -C "$ROOT" \
    pyproject.toml setup.py README.md LICENSE constraints configs dapo_jax || return
  run tar -czf "$stage/dapo_jax_files.tar.gz" --exclude=__pycache__ -T /dev/null ${shared[@]+"${shared[@]}"} || return
  # ssh to several workers shares one standard input, so the tokens are copied as a file; scp keeps its mode.
  run gcloud compute tpus tpu-vm scp "$ROOT/launch/tpu_worker.sh" "$stage/dapo_jax_code.tar.gz" "$stage/dapo_jax_files.tar.gz" \
    "$stage/dapo_jax_tokens" "$name:" "${where[@]}" --worker=all --quiet || return
  [[ -n $dry_run ]] || rm -f "$stage/dapo_jax_tokens"
  on_workers all "bash tpu_worker.sh setup $(quoted "$extras")"
}

start() { # CONFIG [key=value ...] [--resume]
  on_workers all "bash tpu_worker.sh start $(quoted "$@")"
}

follow() {
  on_workers all "bash tpu_worker.sh follow"
}

# Refuses sample workers with several hosts. Sets `sampler_count`, and the type, the image and the number of chips of each sample worker.
check_samplers() {
  local kind=samplers type=${samplers%%:*} image="" runtime="" devices="" chips="" hosts=""
  sampler_count=1
  if [[ $samplers == *:* ]]; then sampler_count=${samplers#*:}; fi
  check_type
  [[ $sampler_count =~ ^[1-9][0-9]*$ ]] || die "--samplers=$samplers needs a number after the colon, for example $type:2"
  [[ $hosts -eq 1 ]] || die "--samplers=$samplers has $hosts hosts, but a sample worker has one; use for example ${type%-*}-$((${type##*-} / hosts)):$((sampler_count * hosts))"
  sampler_type=$type sampler_image=$image sampler_chips=$chips
}

# Adds the keys for sample workers to the configuration. The machines need the extra `cluster`.
add_samplers() {
  [[ $((sampler_count % hosts)) -eq 0 ]] || die "--samplers=$samplers: $sampler_count must be a multiple of the $hosts hosts of --type=$type"
  [[ ,$extras, == *,cluster,* ]] || extras=$extras,cluster
  [[ ${#training[@]} -eq 0 ]] || training=("${training[0]}" cluster.address=auto "cluster.samplers=$((sampler_count / hosts))"
    "cluster.resources={TPU: $sampler_chips}" ${training[@]+"${training[@]:1}"})
}

# Runs a command with the variables of each sample worker's machine: NAME-sampler-0 and so on.
for_samplers() { # COMMAND
  local index trainer=$name
  for ((index = 0; index < sampler_count; index++)); do
    local name=$trainer-sampler-$index type=$sampler_type image=$sampler_image capacity=(${sampler_capacity[@]+"${sampler_capacity[@]}"})
    "$@" || return
  done
}

up_all() {
  request && for_samplers request && ready && for_samplers ready
}

# Deletes all machines, also after one that could not be deleted, because each costs money.
down_all() {
  local failed=""
  for_samplers try_down
  try_down
  [[ -z $failed ]]
}

try_down() {
  down || failed=1
}

# Sets `head` to the address of the head of the Ray cluster, which is the first host of the trainer.
ask_head() {
  head=HEAD
  if [[ -n $dry_run ]]; then on_workers 0 "bash tpu_worker.sh address"; else head=$(on_workers 0 "bash tpu_worker.sh address" | tail -n 1); fi
}

# Installs the library on a sample worker's machine, and starts Ray there.
join() {
  copy && on_workers all "bash tpu_worker.sh ray $head $sampler_chips"
}

renew() {
  look
  [[ $state == ACTIVE ]] || { request && ready && join; }
}

start_all() { # CONFIG [key=value ...] [--resume]
  copy || return
  if [[ -n $samplers ]]; then
    ask_head && on_workers all "bash tpu_worker.sh ray $head 0" && for_samplers join &&
      on_workers 0 "bash tpu_worker.sh nodes $head $((hosts + sampler_count))" || return
  fi
  start "$@"
}
