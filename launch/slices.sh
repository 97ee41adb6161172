# shellcheck shell=bash disable=SC2154
# The sizes in which slices are offered, and the meshes that fit them; sourced by tpu_vm.sh and gke_xpk.sh, not run.

devices="" # JAX devices of a slice; empty where that is not known

# Refuses a size in which a slice is not offered; sets `devices`.
check_size() { # TYPE
  local size=${1##*-} chips sizes="1, 4, 8, 16, 32, 64, 128 or 256 chips"
  case $1 in
    v4-* | v5p-* | tpu7x-*) chips=$((size % 2 ? 0 : size / 2)) sizes="4, 8, 16, 32 or a multiple of 64 chips, each with two cores" ;;
    *) chips=$size ;;
  esac
  case $sizes,$chips in
    *,4 | *,8 | *,16 | *,32 | 1*,1 | 1*,64 | 1*,128 | 1*,256) ;;
    4*) [[ $chips -gt 0 && $((chips % 64)) -eq 0 ]] || die "--type=$1 is no slice; ${1%-*} has $sizes" ;;
    *) die "--type=$1 is no slice; ${1%-*} has $sizes" ;;
  esac
  case $1 in
    v4-*) ;; # its versions of libtpu differ: a device is a chip, or a core
    tpu7x-*) devices=$size ;;
    *) devices=$chips ;;
  esac
}

# Refuses a mesh that is not of the slices' devices.
check_mesh() {
  local name size product=1 rest="" all=$((devices * ${slices:-1}))
  while read -r name size; do
    case $name in
      data: | fsdp: | tensor: | context:) if [[ $size == -1 ]]; then rest=1; else product=$((product * size)); fi ;;
    esac
  done <<<"$mesh"
  [[ -z $devices || $product -eq $all || (-n $rest && $((all % product)) -eq 0) ]] ||
    die "the axes of parallel make a mesh of ${rest:+a multiple of }$product devices, and --type=$type${slices:+ --slices=$slices} has $all: set parallel.fsdp=-1, or axes whose product is $all"
}
