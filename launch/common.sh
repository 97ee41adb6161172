# shellcheck shell=bash disable=SC2034
# Code that tpu_vm.sh and gke_xpk.sh share. They source this file, which also uses their variables. macOS has bash 3.2, so no
# features of bash 4 are used.

# Variables that the workers get. They may be secret.
readonly PASSED_ON=(HF_TOKEN WANDB_API_KEY JAX_COMPILATION_CACHE_DIR)
readonly EXTRAS="gcs,hub,tpu,wandb"
dry_run=""
data_axis=1 # parallel.data of the configuration
mesh=""     # the `parallel` section of the configuration, one line per axis
shared=()   # files that the workers need in addition to the library: paths inside the current folder

say() { echo "$(basename "$0"): $*" >&2; }

die() { # usage error: nothing has been started
  say "$*"
  exit 2
}

# Quotes the words on one line, so that a shell parses it into the same words.
quoted() {
  local word line=""
  for word; do
    if [[ ! $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]]; then
      word="'$(printf %s "$word" | sed "s/'/'\\\\''/g")'"
    fi
    line="$line${line:+ }$word"
  done
  printf '%s\n' "$line"
}

# Runs a command, or prints it with --dry-run.
run() {
  if [[ -n $dry_run ]]; then
    quoted "$@"
  else
    "$@"
  fi
}

# Parses the value of an option, given as `--name value` or `--name=value`. Sets `value`, and `taken` to the number of words used.
value_of() {
  if [[ $1 == --*=* ]]; then
    value=${1#*=} taken=1
  else
    [[ $# -ge 2 ]] || die "$1 needs a value"
    value=$2 taken=2
  fi
  [[ -n $value ]] || die "${1%%=*} needs a value"
}

# Refuses `--name=value` for an option without a value.
flag() {
  [[ $1 != *=* ]] || die "${1%%=*} takes no value"
}

# Marks a file or folder to be copied to the workers. Its path relative to the run's working folder stays the same.
share() {
  case $1 in
    /* | "~"* | .. | ../* | */.. | */../*)
      die "$1 is not inside the current folder, and the workers have only files inside it; copy it here, or put it into the bucket" ;;
  esac
  [[ -e $1 ]] || die "$1 does not exist in $PWD"
  shared+=("$1")
}

# Refuses arguments that would fail on the workers. Loads the configuration as the workers will, and finds the files that it uses.
check_training() { # CONFIG [key=value ...] [--resume]
  [[ $# -gt 0 && $1 != -* && $1 != *=* ]] || die "CONFIG is missing: a YAML file, then key=value ..., then --resume"
  local word resolved run_dir path overrides=()
  for word in "${@:2}"; do
    [[ $word == --resume ]] || overrides+=("$word")
  done
  # A name without a file is one of the library's own configurations, which the workers already have.
  if [[ -e $1 || $1 == */* || $1 == *.yaml ]]; then share "$1"; fi
  command -v dapo-jax >/dev/null || die "dapo-jax is not on PATH, but must check CONFIG before anything costs money: pip install -e ."
  resolved=$(dapo-jax config "$1" ${overrides[@]+"${overrides[@]}"}) || exit
  data_axis=$(sed -n '/^parallel:/,/^[^ ]/s/^  data: //p' <<<"$resolved")
  mesh=$(sed -n '/^parallel:/,/^[^ ]/p' <<<"$resolved")
  if grep -q "^  - wandb$" <<<"$resolved"; then
    [[ -z $extras || ,$extras, == *,wandb,* ]] ||
      die "log.trackers=[wandb] needs the extra wandb on the workers; add it to --extras=$extras, or leave wandb out"
    [[ -n ${WANDB_API_KEY:-} ]] ||
      die "log.trackers=[wandb] needs WANDB_API_KEY, which is not set here and is copied to the workers; set it, or leave wandb out"
  fi
  run_dir=$(sed -n "s/^run_dir: //p" <<<"$resolved" | tr -d "'\"")
  [[ $run_dir == gs://?* ]] ||
    die "run_dir=$run_dir would be on a worker's disk, which is lost when the worker is preempted; set run_dir=gs://BUCKET/FOLDER"
  while IFS= read -r path; do
    share "$path"
  done < <(sed -nE "s/^ *(- )?grader: ['\"]?((trl|verl):)?(.*\.py):[A-Za-z_][A-Za-z0-9_]*['\"]?$/\4/p" <<<"$resolved" | sort -u)
  while IFS= read -r path; do
    is_shared "$path" || die "the workers do not have $path, which CONFIG names; add --file $path, or put it into the bucket"
  done < <(sed -nE -e "s/^ *(- )?path: ['\"]?([^'\":]+)['\"]?$/\2/p" \
    -e "s/^ *(- )?source: ['\"]?([^'\":]*\/[^'\":]*)['\"]?$/\2/p" <<<"$resolved" | grep -v '^[/~]')
}

is_shared() {
  local path
  for path in ${shared[@]+"${shared[@]}"}; do
    [[ ($path == . && -e $1) || $1 == "$path" || $1 == "${path%/}"/* || ${1%/} == "${path%/}" ]] && return
  done
  return 1
}

# Prints LIBTPU_INIT_ARGS for the workers: the value that is set here, or the usual flags for training language models on
# TPUs. All flags are in JAX's "List of XLA compiler flags" (docs/xla_flags.md) and in MaxText's benchmarks/xla_flags_library.py.
libtpu_args() { # TYPE SLICES
  if [[ -n ${LIBTPU_INIT_ARGS+set} ]]; then
    printf '%s\n' "$LIBTPU_INIT_ARGS"
    return
  fi
  # Gathers weights during computation: MaxText's CF_FOR_ALL_GATHER. Since libtpu 0.0.50, these fusions are rejected on all
  # chips except v5e, because their results could be wrong.
  local flags=(--xla_enable_async_all_gather=true --xla_tpu_overlap_compute_collective_tc=true)
  if [[ $1 == v5litepod-* || $1 == v5e-* ]]; then
    flags+=(
      --xla_tpu_enable_async_collective_fusion=true
      --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true
      --xla_tpu_enable_async_collective_fusion_multiple_steps=true
    )
  fi
  # Sums gradients over the network between slices while other gradients are computed: MaxText's DATA_PARALLEL_OVERLAP.
  if [[ $2 -gt 1 ]]; then
    flags+=(--xla_tpu_enable_data_parallel_all_reduce_opt=true --xla_tpu_data_parallel_opt_different_sized_ops=true)
  fi
  # Allows larger tiles in the 128 MiB of vector memory of a v6e: MaxText's DENSE_VMEM_LIMIT_FLAG.
  if [[ $1 == v6e-* ]]; then flags+=(--xla_tpu_scoped_vmem_limit_kib=98304); fi
  printf '%s\n' "${flags[*]}"
}

# Prints the names of the token variables that are set in this environment. The values never appear in an argument or a message.
tokens_set() {
  local token
  for token in "${PASSED_ON[@]}"; do
    if [[ -n ${!token:-} ]]; then echo "$token"; fi
  done
}
