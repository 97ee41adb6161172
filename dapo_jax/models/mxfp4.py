"""Reads matrices of experts in MXFP4, as in released gpt-oss files: 4-bit numbers, and a scale for each 32 of them.

The format is in the Open Compute Project's specification of microscaling (https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.models.tensors import Cut, Shape

SUFFIXES = ("_blocks", "_scales")
"""The suffixes of the two tensors of a matrix: pairs of numbers [experts, outputs, inputs / 32, 16], and scales [experts, outputs, inputs / 32]."""

_SIZES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_SIZES, -_SIZES])
"""The value of each code. The first bit is the sign."""


class Mxfp4Tensor(NamedTuple):
    """The matrices of all experts [experts, inputs, outputs], like a `safetensors_files.StoredTensor`."""

    blocks: Any
    scales: Any

    @property
    def path(self) -> Any:
        return self.blocks.path

    @property
    def shape(self) -> Shape:
        experts, outputs, groups, _ = self.blocks.shape
        return experts, groups * 32, outputs

    def read(self, cut: Cut) -> np.ndarray:
        """Returns the part `cut` in float32."""
        experts, inputs, outputs = cut
        blocks, scales = (part.read((experts, outputs)) for part in self)
        return dequantized(blocks, scales).swapaxes(1, 2)[:, inputs]


def dequantized(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the values of blocks [..., groups, 16] with scales [..., groups] as float32 [..., groups x 32]. They are exact in bfloat16, too."""
    # The lower half of a byte is the first number.
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    values = np.ldexp(_VALUES[codes], scales.astype(np.int32)[..., None] - 127)
    return values.reshape(*scales.shape[:-1], -1)


def joined(tensors: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Replaces the two tensors of each matrix by an `Mxfp4Tensor` with their common name.

    Raises:
        ValueError: one of the two tensors is missing, or their shapes do not fit.
    """
    found = dict(tensors)
    for name in sorted({name[: -len(SUFFIXES[0])] for name in tensors if name.endswith(SUFFIXES)}):
        pair = Mxfp4Tensor(*(found.pop(name + suffix, None) for suffix in SUFFIXES))
        blocks, scales = (None if part is None else part.shape for part in pair)
        if scales is None or len(scales) != 3 or blocks != (*scales, 16):
            raise ValueError(
                f"{where}: {name} in MXFP4 has the tensors _blocks {blocks} and _scales {scales}; it needs _blocks [experts, outputs, inputs / 32, 16] and "
                "_scales [experts, outputs, inputs / 32]"
            )
        found[name] = pair
    return found
