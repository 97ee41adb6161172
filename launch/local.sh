#!/usr/bin/env bash
# Starts one run as several processes on this machine, each with simulated CPU devices, as on a pod.
#
#   launch/local.sh [--dry-run] PROCESSES DEVICES_EACH COMMAND...
#   launch/local.sh 2 4 train configs/quickstart.yaml run_dir=runs/two_processes
#
# COMMAND is everything after `dapo-jax`. Each output line starts with the number of its process. When a process fails,
# the others are stopped, and the script exits with the status of that process. --dry-run prints the commands. PYTHON selects another
# interpreter; XLA_FLAGS, if set, is passed on.
set -euo pipefail

dry_run=
if [ "${1:-}" = --dry-run ]; then
  dry_run=1
  shift
fi
if [ $# -lt 3 ] || ! [[ $1 =~ ^[1-9][0-9]*$ && $2 =~ ^[1-9][0-9]*$ ]]; then
  echo "usage: launch/local.sh [--dry-run] PROCESSES DEVICES_EACH COMMAND...   (found: $*)" >&2
  exit 2
fi
processes=$1 devices=$2
shift 2

python=${PYTHON:-python}
# The processes share the cores. With JAX's default, each process would start a thread for every core.
cores=$(getconf _NPROCESSORS_ONLN)
threads=$((cores / processes > 1 ? cores / processes : 1))
several=$([ "$threads" = 1 ] && echo false || echo true)
# The first flag starts with --, because otherwise XLA would take the value for a file name.
flags="--xla_cpu_multi_thread_eigen=$several intra_op_parallelism_threads=$threads"
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("localhost", 0)); print(s.getsockname()[1])')
settings=(
  JAX_PLATFORMS=cpu
  JAX_CPU_COLLECTIVES_IMPLEMENTATION=gloo
  "JAX_NUM_CPU_DEVICES=$devices"
  "JAX_COORDINATOR_ADDRESS=localhost:$port"
  "JAX_NUM_PROCESSES=$processes"
  "XLA_FLAGS=${XLA_FLAGS:-$flags}"
  PYTHONUNBUFFERED=1
)
command=("$python" -m dapo_jax.cli "$@")

if [ -n "$dry_run" ]; then
  for ((index = 0; index < processes; index++)); do
    printf '%q ' env "${settings[@]}" "JAX_PROCESS_ID=$index" "${command[@]}"
    echo
  done
  exit 0
fi

one() { # runs process $1 and prints its output, including the last lines after it was ended
  trap : TERM
  env "${settings[@]}" "JAX_PROCESS_ID=$1" "${command[@]}" 2>&1 |
    (
      trap '' TERM
      while IFS= read -r line || [ -n "$line" ]; do printf '%s\n' "[$1] $line"; done
    )
  return "${PIPESTATUS[0]}"
}

running() { # prints the process groups that have not ended
  for group in "${groups[@]}"; do
    if kill -0 "$group" 2>/dev/null; then echo "$group"; fi
  done
}

settle() { # waits up to $1 seconds until all processes have ended
  for ((tenth = 0; tenth < $1 * 10; tenth++)); do
    if [ -z "$(running)" ]; then return 0; fi
    sleep 0.1
  done
  return 1
}

signal_all() {
  for group in $(running); do kill "-$1" -- "-$group" 2>/dev/null || true; done
}

end_all() { # sends TERM, waits, then sends KILL
  trap '' INT TERM
  signal_all TERM
  settle 20 || signal_all KILL
}

groups=()
set -m # each process has its own group, with its child processes
for ((index = 0; index < processes; index++)); do
  one "$index" &
  groups+=("$!")
done
trap 'end_all; exit 130' INT
trap 'end_all; exit 143' TERM

status=0 left=("${groups[@]}")
while [ ${#left[@]} -gt 0 ] && [ "$status" = 0 ]; do
  sleep 0.2
  still=()
  for group in "${left[@]}"; do
    if kill -0 "$group" 2>/dev/null; then
      still+=("$group")
    else
      wait "$group" || status=$?
      if [ "$status" != 0 ]; then break; fi
    fi
  done
  left=(${still[@]+"${still[@]}"})
done
if [ "$status" != 0 ]; then
  settle 10 || end_all # the other processes detect the failure themselves and report it
fi
exit "$status"
