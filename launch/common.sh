# shellcheck shell=bash disable=SC2034
# Shared code of tpu_vm.sh and gke_xpk.sh, which source it and use its variables. Uses no features of
# bash 4, because macOS has 3.2.

readonly TOKENS=(HF_TOKEN WANDB_API_KEY)
readonly EXTRAS="gcs,hub,tpu,wandb"
dry_run=""
data_axis=1 # parallel.data of the configuration
mesh=""     # parallel of the configuration, a line for each axis
shared=()   # what the workers need besides the library: paths inside the current folder

say() { echo "$(basename "$0"): $*" >&2; }

die() { # a usage error: nothing was started
  say "$*"
  exit 2
}

# The words as one line that a shell reads back as the same words.
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

# Runs a command, or with --dry-run prints it.
run() {
  if [[ -n $dry_run ]]; then
    quoted "$@"
  else
    "$@"
  fi
}

# The value of an option, given as `--name value` or `--name=value`; sets `value` and `taken`, the words it took.
value_of() {
  if [[ $1 == --*=* ]]; then
    value=${1#*=} taken=1
  else
    [[ $# -ge 2 ]] || die "$1 needs a value"
    value=$2 taken=2
  fi
  [[ -n $value ]] || die "${1%%=*} needs a value"
}

# Refuses `--name=value` for an option that takes none.
flag() {
  [[ $1 != *=* ]] || die "${1%%=*} takes no value"
}

# Adds a path to the files for the workers, under the same name relative to where the run starts.
share() {
  case $1 in
    /* | "~"* | .. | ../* | */.. | */../*)
      die "$1 is not inside the current folder, whose paths are the workers' paths; copy it here, or put it into the bucket" ;;
  esac
  [[ -e $1 ]] || die "$1 does not exist in $PWD"
  shared+=("$1")
}

# Refuses arguments that would fail on the workers: loads the configuration as they will, and finds its files.
check_training() { # CONFIG [key=value ...] [--resume]
  [[ $# -gt 0 && $1 != -* && $1 != *=* ]] || die "CONFIG is missing: a YAML file, then key=value ..., then --resume"
  local word resolved run_dir path overrides=()
  for word in "${@:2}"; do
    [[ $word == --resume ]] || overrides+=("$word")
  done
  # A name and no file is a configuration that comes with the library, and so is on the workers already.
  if [[ -e $1 || $1 == */* || $1 == *.yaml ]]; then share "$1"; fi
  command -v dapo-jax >/dev/null || die "dapo-jax is not on PATH; it reads CONFIG before anything is paid for: pip install -e ."
  resolved=$(dapo-jax config "$1" ${overrides[@]+"${overrides[@]}"}) || exit
  data_axis=$(sed -n '/^parallel:/,/^[^ ]/s/^  data: //p' <<<"$resolved")
  mesh=$(sed -n '/^parallel:/,/^[^ ]/p' <<<"$resolved")
  if grep -q "^  wandb: true$" <<<"$resolved"; then
    [[ -z $extras || ,$extras, == *,wandb,* ]] ||
      die "log.wandb=true needs the extra wandb on the workers; add it to --extras=$extras, or set log.wandb=false"
    [[ -n ${WANDB_API_KEY:-} ]] ||
      die "log.wandb=true, and WANDB_API_KEY, which the workers would get, is not set here; set it, or log.wandb=false"
  fi
  run_dir=$(sed -n "s/^run_dir: //p" <<<"$resolved" | tr -d "'\"")
  [[ $run_dir == gs://?* ]] ||
    die "run_dir=$run_dir would be on the workers' disks, which go when a worker is preempted; set run_dir=gs://BUCKET/FOLDER"
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

# Sets LIBTPU_INIT_ARGS for the workers: its value here, or the usual flags for training language models on
# TPUs. All are in JAX's "List of XLA compiler flags" (docs/xla_flags.md) and in MaxText's benchmarks/xla_flags_library.py.
libtpu_args() { # TYPE SLICES
  if [[ -n ${LIBTPU_INIT_ARGS+set} ]]; then
    printf '%s\n' "$LIBTPU_INIT_ARGS"
    return
  fi
  # Weights are gathered while products run: MaxText's CF_FOR_ALL_GATHER. From libtpu 0.0.50 on its fusions are refused elsewhere than on
  # v5e, where they could give wrong results.
  local flags=(--xla_enable_async_all_gather=true --xla_tpu_overlap_compute_collective_tc=true)
  if [[ $1 == v5litepod-* || $1 == v5e-* ]]; then
    flags+=(
      --xla_tpu_enable_async_collective_fusion=true
      --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true
      --xla_tpu_enable_async_collective_fusion_multiple_steps=true
    )
  fi
  # Gradients are summed over the network between slices while others are made: MaxText's DATA_PARALLEL_OVERLAP.
  if [[ $2 -gt 1 ]]; then
    flags+=(--xla_tpu_enable_data_parallel_all_reduce_opt=true --xla_tpu_data_parallel_opt_different_sized_ops=true)
  fi
  # Room for larger tiles in the 128 MiB of a v6e's vector memory: MaxText's DENSE_VMEM_LIMIT_FLAG.
  if [[ $1 == v6e-* ]]; then flags+=(--xla_tpu_scoped_vmem_limit_kib=98304); fi
  printf '%s\n' "${flags[*]}"
}

# Names of the tokens that are set here. Their values never appear in an argument or a message.
tokens_set() {
  local token
  for token in "${TOKENS[@]}"; do
    if [[ -n ${!token:-} ]]; then echo "$token"; fi
  done
}
