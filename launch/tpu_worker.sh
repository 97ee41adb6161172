#!/usr/bin/env bash
# Commands that tpu_vm.sh runs on every worker of a slice. A run has its own session, so it continues when the
# connection to the worker is lost. Each command may be repeated, because gcloud repeats commands.
#
#   tpu_worker.sh setup EXTRAS    unpacks the copied files, installs Python and the library
#   tpu_worker.sh start ARGS      starts `dapo-jax train ARGS`, unless it is already running
#   tpu_worker.sh follow          prints the log until the run ends; exits with its status
#   tpu_worker.sh address         prints the address of this machine
#   tpu_worker.sh ray HEAD TPUS   keeps a node of Ray running, with TPUS chips for sample workers; on HEAD, it is the head
#   tpu_worker.sh nodes HEAD N    waits until N nodes have joined
#
# Tested with mock commands; not yet run with the real service.
set -euo pipefail

readonly UV=0.13.8 PYTHON=3.12
readonly PORT=6379
readonly SCRIPT="$HOME/tpu_worker.sh" RUN="$HOME/dapo_jax_run"
mkdir -p "$RUN"
cd "$RUN"

# Returns whether a run holds its lock. The command line of its process is not a reliable sign, because it is empty for a moment at the start.
under_way() {
  ! flock --shared --nonblock lock true
}

setup() {
  if under_way; then
    echo "a run is under way, so nothing is installed"
    return
  fi
  rm -rf code files
  mkdir code files
  tar -xzf ../dapo_jax_code.tar.gz -C code
  tar -xzf ../dapo_jax_files.tar.gz -C files
  if [[ -f ../dapo_jax_tokens ]]; then mv ../dapo_jax_tokens tokens; fi
  chmod 600 tokens
  # The images have Python 3.10; uv installs its own Python, without root.
  [[ -x bin/uv ]] || curl -LsSf "https://astral.sh/uv/$UV/install.sh" | UV_INSTALL_DIR="$RUN/bin" UV_NO_MODIFY_PATH=1 sh
  [[ -x env/bin/python ]] || bin/uv venv --quiet --python "$PYTHON" env
  # --reinstall-package, because uv assumes that the same version means the same code.
  bin/uv pip install --quiet --python env/bin/python --reinstall-package dapo_jax \
    --constraint "code/constraints/py${PYTHON/./}.txt" "$RUN/code[$1]"
}

start() {
  local wanted
  wanted=$(printf '%s\n' "$@" | grep -vx -e --resume)
  if under_way; then
    [[ $wanted == "$(cat wanted)" ]] && return
    echo "another run is under way on this TPU: $(tr '\n' ' ' <wanted)" >&2
    exit 2
  fi
  printf '%s\n' "$wanted" >wanted
  rm -f status
  exec 9>lock
  flock 9
  setsid nohup bash "$SCRIPT" job "$@" >>log 2>&1 </dev/null &
  echo $! >pid
}

use_tokens() {
  set -a
  # shellcheck source=/dev/null
  . ./tokens
  set +a
}

job() {
  local code=0
  use_tokens
  cd files
  DAPO_JAX_DISTRIBUTED=1 ../env/bin/dapo-jax train "$@" 9>&- || code=$?
  # ssh uses 255 for a broken connection.
  echo $((code == 255 ? 1 : code)) >../status.new
  mv ../status.new ../status
}

follow() {
  if under_way; then
    tail --lines=100 --sleep-interval=0.2 --pid="$(cat pid)" -F log
  elif [[ -f log ]]; then
    tail --lines=100 log
  fi
  [[ -f status ]] || { echo "the run has left no exit status: the worker was restarted, or no run was started" >&2 && exit 1; }
  exit "$(cat status)"
}

address() {
  hostname -I | cut -d' ' -f1
}

ray() { # HEAD TPUS
  if ! flock --shared --nonblock ray.lock true; then
    [[ $* == "$(cat ray.wanted)" ]] && return
    kill -- "-$(cat ray.pid)"
    env/bin/ray stop --force
  fi
  echo "$*" >ray.wanted
  exec 8>ray.lock
  flock 8
  setsid nohup bash "$SCRIPT" node "$@" >>ray.log 2>&1 </dev/null &
  echo $! >ray.pid
}

# Starts the node again when it ends. Without chips for sample workers, it offers nothing to Ray.
node() { # HEAD TPUS
  local options=(--address="$1:$PORT")
  if [[ " $(hostname -I) " == *" $1 "* ]]; then options=(--head --node-ip-address="$1" --port="$PORT" --include-dashboard=false); fi
  [[ $2 -gt 0 ]] || options+=(--num-cpus=0 --num-gpus=0)
  use_tokens
  while :; do
    env/bin/ray start "${options[@]}" --resources="{\"TPU\": $2}" --disable-usage-stats --block 8>&- || true
    sleep 5
  done
}

nodes() { # HEAD N
  use_tokens
  until [[ $(env/bin/ray status --address="$1:$PORT" | grep -c '^ 1 node_') -ge $2 ]]; do
    [[ $SECONDS -lt 300 ]] || { echo "fewer than $2 nodes of Ray have joined after 300 s" >&2 && return; }
    sleep 1
  done
}

case ${1-} in
  setup | start | job | follow | address | ray | node | nodes) "$@" ;;
  *) echo "tpu_worker.sh: ${1-} must be one of setup, start, follow, address, ray, nodes" >&2 && exit 2 ;;
esac
