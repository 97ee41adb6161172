"""The TPU generations and GPU models that `dapo-jax plan` knows, with their peak rates and memory.

The peak rates of TPUs are from Google's pages (https://cloud.google.com/tpu/docs/v4, .../v5e, .../v5p, .../v6e, .../tpu7x). The peak rates
of GPUs are from NVIDIA's data sheets (https://www.nvidia.com/en-us/data-center/h100, .../h200, .../a100, .../l40s, and the pages on HGX B200
and RTX PRO 6000 Blackwell), without sparsity. The pages give the interconnect bandwidth as the sum of both directions, but this
module uses one direction.

`hbm_gib` of a TPU is the memory that libtpu 0.0.42 allows a program, as its error messages show: "exceeds available HBM (15.75G)". For a
GPU, it is the fraction `MEMORY_FRACTION` of the memory that the driver reports, which is a little less than the data sheet's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dapo_jax.parallel.gpu_settings import MEMORY_FRACTION


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One TPU generation or GPU model. Peak rates are per JAX device, which is a chip or one of its two cores."""

    name: str
    """The chip's name in topology names, such as v5p or h100. For a TPU, this is also libtpu's name."""
    aliases: tuple[str, ...] = ()
    """Prefixes of Google Cloud's slice names, such as v5litepod in v5litepod-16."""
    counts_cores: bool = False
    """True if the number in a slice's name counts cores, two per chip, rather than chips."""
    axes: int = 2
    """Number of dimensions of the interconnect grid. GPUs form a grid of machines x GPUs per machine."""
    kind: str = ""
    """Prefix of a GPU's `device_kind` in JAX. Empty for a TPU."""
    target: str = ""
    """XLA's description of a GPU, as the text of a `GpuTargetConfigProto`. Empty for a TPU."""
    links: str = "ICI"
    """The name of the links between the devices of a slice or a machine."""
    hbm_gib: float
    peak_flops: float
    """Peak rate of bfloat16 matrix products, in operations per second."""
    device_hbm_bytes_s: float
    """Memory bandwidth of one device, in bytes per second."""
    device_ici_bytes_s: float
    """Bytes per second that one device can receive over all its links together."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """Shares of the roofline that were measured on this chip, by phase of a step. They are in `benchmarks/baselines`."""

    @property
    def device_hbm_bytes(self) -> int:
        """Bytes of one device's memory that programs and arrays may use."""
        return int(self.hbm_gib * 2**30)


def _gpu(
    name: str, kind: str, *, capability: tuple[int, int], cores: int, ghz: float, l2_mib: int | float, gib: float,
    tflops: int | float, gb_s: int, link_gb_s: int, measured: Mapping[str, float] | None = None,
) -> Chip:  # fmt: skip
    """Returns a GPU model from its data sheet. `kind` is JAX's name, `gib` the memory reported by the driver, `link_gb_s` the link bandwidth in one direction.

    The limits of each compute capability are in the CUDA programming guide: shared memory per multiprocessor in KiB, threads per
    multiprocessor, and float32 units per multiprocessor.
    """
    shared, threads, units = {
        (8, 0): (164, 2048, 64), (8, 9): (100, 1536, 128), (9, 0): (228, 2048, 128), (10, 0): (228, 2048, 128), (12, 0): (100, 1536, 128),
    }[capability]  # fmt: skip
    major, minor = capability
    extension = " feature_extension: ACCELERATED_FEATURES" if major in (9, 10) else ""
    target = f"""
        gpu_device_info {{
          cuda_compute_capability {{ major: {major} minor: {minor}{extension} }}
          core_count: {cores}  fpus_per_core: {units}  clock_rate_ghz: {ghz}
          device_memory_size: {int(gib * 2**30)}  memory_bandwidth: {int(gb_s * 1e9)}  l2_cache_size: {int(l2_mib * 2**20)}
          shared_memory_per_block: 49152  shared_memory_per_block_optin: {(shared - 1) * 2**10}  shared_memory_per_core: {shared * 2**10}
          registers_per_core_limit: 65536  registers_per_block_limit: 65536
          threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: {threads}
          block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 8 }}
        runtime_version {{ major: 12 minor: 8 }}
        device_description_str: "{kind}"
    """
    return Chip(
        name=name,
        kind=kind,
        target=target,
        links="NVLink" if link_gb_s > 64 else "PCIe",
        hbm_gib=MEMORY_FRACTION * gib,
        peak_flops=tflops * 1e12,
        device_hbm_bytes_s=gb_s * 1e9,
        device_ici_bytes_s=link_gb_s * 1e9,
        measured=measured or {},
    )


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        # Per chip: 275 TFLOP/s, 32 GB, 1228 GB/s; 6 links of 50 GB/s in each direction. libtpu describes the two cores
        # of a chip as separate devices, but on a v4 host, they are one device with twice the memory.
        Chip(name="v4", aliases=("v4",), counts_cores=True, axes=3, hbm_gib=15.25, peak_flops=275e12 / 2,
             device_hbm_bytes_s=1228e9 / 2, device_ici_bytes_s=300e9 / 2),
        # Per chip: 197 TFLOP/s, 16 GB, 819 GB/s (800 GiB/s on some pages); links 400 GB/s in both directions together.
        Chip(name="v5e", aliases=("v5litepod", "v5e"), counts_cores=False, axes=2, hbm_gib=15.75, peak_flops=197e12,
             device_hbm_bytes_s=819e9, device_ici_bytes_s=200e9),
        # Per chip: 459 TFLOP/s, 95 GiB, 2765 GB/s; links 1200 GB/s in both directions together.
        Chip(name="v5p", aliases=("v5p",), counts_cores=True, axes=3, hbm_gib=95.74, peak_flops=459e12,
             device_hbm_bytes_s=2765e9, device_ici_bytes_s=600e9),
        # Per chip: 918 TFLOP/s, 32 GB, 1638 GB/s; links 800 GB/s in both directions together.
        Chip(name="v6e", aliases=("v6e",), counts_cores=False, axes=2, hbm_gib=31.25, peak_flops=918e12,
             device_hbm_bytes_s=1638e9, device_ici_bytes_s=400e9),
        # Per chip of two devices: 2307 TFLOP/s, 192 GiB, 7380 GB/s; links 1200 GB/s in both directions together.
        Chip(name="tpu7x", aliases=(), counts_cores=True, axes=3, hbm_gib=94.75, peak_flops=2307e12 / 2,
             device_hbm_bytes_s=7380e9 / 2, device_ici_bytes_s=600e9 / 2),
        # NVLink, both directions together: 900 GB/s (H100, H200), 600 GB/s (A100), 1800 GB/s (B200). The last two GPUs use PCIe Gen5 x16 and Gen4 x16.
        _gpu("h100", "NVIDIA H100 80GB HBM3", capability=(9, 0), cores=132, ghz=1.98, l2_mib=50, gib=79.1,
             tflops=989.4, gb_s=3350, link_gb_s=450),
        _gpu("h200", "NVIDIA H200", capability=(9, 0), cores=132, ghz=1.98, l2_mib=50, gib=139.8,
             tflops=989.4, gb_s=4800, link_gb_s=450, measured={"decode": 0.227, "update": 0.104}),
        _gpu("a100-80gb", "NVIDIA A100-SXM4-80GB", capability=(8, 0), cores=108, ghz=1.41, l2_mib=40, gib=79.2,
             tflops=312, gb_s=2039, link_gb_s=300),
        _gpu("b200", "NVIDIA B200", capability=(10, 0), cores=148, ghz=1.965, l2_mib=126.5, gib=178.3,
             tflops=2250, gb_s=7700, link_gb_s=900),
        _gpu("rtx6000pro", "NVIDIA RTX PRO 6000 Blackwell", capability=(12, 0), cores=188, ghz=2.617, l2_mib=128, gib=94.9,
             tflops=503.8, gb_s=1792, link_gb_s=64),
        _gpu("l40s", "NVIDIA L40S", capability=(8, 9), cores=142, ghz=2.52, l2_mib=96, gib=44.4,
             tflops=362, gb_s=864, link_gb_s=32),
    )
}  # fmt: skip
