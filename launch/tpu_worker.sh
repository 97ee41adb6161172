#!/usr/bin/env bash
# Commands that tpu_vm.sh runs on every worker of a slice. A run has its own session: it continues when the
# connection to the worker is lost. Each verb may be repeated, as gcloud does.
#
#   tpu_worker.sh setup EXTRAS    unpack the copied files, install Python and the library
#   tpu_worker.sh start ARGS      `dapo-jax train ARGS`, unless it is running
#   tpu_worker.sh follow          the log until the run ends; exits as it did
#
# Tested with stubbed clients; not yet run against the real service.
set -euo pipefail

readonly UV=0.13.8 PYTHON=3.12
readonly SCRIPT="$HOME/tpu_worker.sh" RUN="$HOME/dapo_jax_run"
mkdir -p "$RUN"
cd "$RUN"

# Whether a run holds its lock. Its command line would not do: the kernel shows none while `start` becomes the run.
under_way() {
  ! flock --shared --nonblock lock true
}

setup() {
  if under_way; then
    echo "a run is under way: nothing is installed over it"
    return
  fi
  rm -rf code files
  mkdir code files
  tar -xzf ../dapo_jax_code.tar.gz -C code
  tar -xzf ../dapo_jax_files.tar.gz -C files
  if [[ -f ../dapo_jax_tokens ]]; then mv ../dapo_jax_tokens tokens; fi
  chmod 600 tokens
  # The images have Python 3.10; uv brings its own, without root.
  [[ -x bin/uv ]] || curl -LsSf "https://astral.sh/uv/$UV/install.sh" | UV_INSTALL_DIR="$RUN/bin" UV_NO_MODIFY_PATH=1 sh
  [[ -x env/bin/python ]] || bin/uv venv --quiet --python "$PYTHON" env
  # --reinstall-package: uv would take code of the same version for the same code.
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

job() {
  local code=0
  set -a
  # shellcheck source=/dev/null
  . ./tokens
  set +a
  cd files
  DAPO_JAX_DISTRIBUTED=1 ../env/bin/dapo-jax train "$@" 9>&- || code=$?
  # 255 would be taken for a broken connection.
  echo $((code == 255 ? 1 : code)) >../status.new
  mv ../status.new ../status
}

follow() {
  if under_way; then
    tail --lines=100 --sleep-interval=0.2 --pid="$(cat pid)" -F log
  elif [[ -f log ]]; then
    tail --lines=100 log
  fi
  [[ -f status ]] || { echo "the run ended without a word: the worker was restarted, or nothing was started" >&2 && exit 1; }
  exit "$(cat status)"
}

case ${1-} in
  setup | start | job | follow) "$@" ;;
  *) echo "tpu_worker.sh: ${1-} is none of setup, start, follow" >&2 && exit 2 ;;
esac
