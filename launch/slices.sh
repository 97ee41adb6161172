# shellcheck shell=bash disable=SC2034,SC2154
# Checks slice sizes, and whether a mesh fits on the slices. tpu_vm.sh and gke_xpk.sh source this file; it is not run by itself.

devices="" # number of JAX devices per slice; empty if it is not known
chips=""   # number of chips per slice
hosts=""   # number of hosts per slice

# Refuses a slice size that is not offered, and sets `devices`, `chips` and `hosts`.
check_size() { # TYPE
  local size=${1##*-} sizes="1, 4, 8, 16, 32, 64, 128 or 256 chips"
  case $1 in
    v4-* | v5p-* | tpu7x-*) chips=$((size % 2 ? 0 : size / 2)) sizes="4, 8, 16, 32 or a multiple of 64 chips, each with two cores" ;;
    *) chips=$size ;;
  esac
  case $sizes,$chips in
    *,4 | *,8 | *,16 | *,32 | 1*,1 | 1*,64 | 1*,128 | 1*,256) ;;
    4*) [[ $chips -gt 0 && $((chips % 64)) -eq 0 ]] || die "--${kind:-type}=$1 does not exist; ${1%-*} has $sizes" ;;
    *) die "--${kind:-type}=$1 does not exist; ${1%-*} has $sizes" ;;
  esac
  hosts=$(((chips + 3) / 4))
  case $1 in
    v4-*) ;; # depending on the libtpu version, a device is a chip or a core
    tpu7x-*) devices=$size ;;
    *) devices=$chips ;;
  esac
  if [[ $1 != v4-* && $1 != v5p-* && $chips -eq 8 ]]; then hosts=1; fi
}

# Refuses a mesh that does not use exactly the devices of the slices.
check_mesh() {
  local name size product=1 rest="" all=$((devices * ${slices:-1}))
  while read -r name size; do
    case $name in
      data: | fsdp: | tensor: | context:) if [[ $size == -1 ]]; then rest=1; else product=$((product * size)); fi ;;
    esac
  done <<<"$mesh"
  [[ -z $devices || $product -eq $all || (-n $rest && $((all % product)) -eq 0) ]] ||
    die "the parallel axes need ${rest:+a multiple of }$product devices, but --type=$type${slices:+ --slices=$slices} has $all; set parallel.fsdp=-1, or axes whose product is $all"
}
