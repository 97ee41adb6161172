"""The devices of each TPU generation: their peaks, which the roofline divides by, and their memory.

The peaks are from Google's pages, per chip (https://cloud.google.com/tpu/docs/v4, .../v5e, .../v5p, .../v6e, .../tpu7x). These give the
interconnect for both directions together; here it is one direction, the bytes that a chip can receive. `hbm_gib` is the memory that
libtpu 0.0.42 allows a program. Its refusals name it: "exceeds available HBM (15.75G)".
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One generation. Numbers are per chip, except `hbm_gib`, which is per device."""

    name: str
    """The name in libtpu's topologies."""
    aliases: tuple[str, ...]
    """The text before the number in a slice's name, such as v5litepod in v5litepod-16."""
    counts_cores: bool
    """True if that number counts cores, two per chip."""
    devices: int
    """JAX devices per chip, as libtpu describes it."""
    hbm_gib: float
    tflops: float
    """Peak of bfloat16 matrix products, in 1e12 operations per second."""
    hbm_gb_s: float
    ici_gb_s: float
    """Interconnect: all links, one direction."""
    axes: int
    """Dimensions of the interconnect's grid."""

    @property
    def device_flops(self) -> float:
        """Floating-point operations per second of one device."""
        return self.tflops * 1e12 / self.devices

    @property
    def device_hbm_bytes_s(self) -> float:
        """Bytes per second between one device and its memory."""
        return self.hbm_gb_s * 1e9 / self.devices

    @property
    def device_ici_bytes_s(self) -> float:
        """Bytes per second that one device can receive from others."""
        return self.ici_gb_s * 1e9 / self.devices

    @property
    def device_hbm_bytes(self) -> int:
        """Bytes of one device's memory that programs and arrays may take."""
        return int(self.hbm_gib * 2**30)


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        # 275 TFLOP/s, 32 GB, 1228 GB/s; 6 links of 50 GB/s each way. libtpu describes the two cores as separate devices;
        # a v4 host joins them to one device with twice the memory.
        Chip(name="v4", aliases=("v4",), counts_cores=True, devices=2, hbm_gib=15.25, tflops=275.0, hbm_gb_s=1228.0,
             ici_gb_s=300.0, axes=3),
        # 197 TFLOP/s, 16 GB, 819 GB/s (800 GiB/s on some pages), 400 GB/s both ways.
        Chip(name="v5e", aliases=("v5litepod", "v5e"), counts_cores=False, devices=1, hbm_gib=15.75, tflops=197.0,
             hbm_gb_s=819.0, ici_gb_s=200.0, axes=2),
        # 459 TFLOP/s, 95 GiB, 2765 GB/s, 1200 GB/s both ways.
        Chip(name="v5p", aliases=("v5p",), counts_cores=True, devices=1, hbm_gib=95.74, tflops=459.0, hbm_gb_s=2765.0,
             ici_gb_s=600.0, axes=3),
        # 918 TFLOP/s, 32 GB, 1638 GB/s, 800 GB/s both ways.
        Chip(name="v6e", aliases=("v6e",), counts_cores=False, devices=1, hbm_gib=31.25, tflops=918.0, hbm_gb_s=1638.0,
             ici_gb_s=400.0, axes=2),
        # 2307 TFLOP/s, 192 GiB, 7380 GB/s, 1200 GB/s both ways; two devices per chip.
        Chip(name="tpu7x", aliases=(), counts_cores=True, devices=2, hbm_gib=94.75, tflops=2307.0, hbm_gb_s=7380.0,
             ici_gb_s=600.0, axes=3),
    )
}  # fmt: skip
