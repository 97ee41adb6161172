"""8-bit arrays: int8 values with scale factors."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """An 8-bit array that represents `values * scale`. The scale is constant along the dimensions that a product sums over, so it can be factored out."""

    values: Int8[Array, "..."] | Any
    scale: Float[Array, "..."] | Any
    """Scale factors, with as many dimensions as the values. Summed dimensions have length 1."""

    def __getitem__(self, _: Any) -> "Quantized":
        """Returns the whole array. Only the index `...` is supported."""
        return self

    def __len__(self) -> int:
        return len(self.values)

    def reshape(self, first: int, rest: int) -> "Quantized":
        """Merges all dimensions except the first into one. Products sum over the merged dimension, so the scale must be constant along it."""
        return Quantized(self.values.reshape(first, rest), self.scale.reshape(first, 1))

    def rows(self, index: Int[Array, " tokens"]) -> Float[Array, "tokens _"]:
        """Returns the rows `index` of a table, dequantized. The table must have one scale per row."""
        return Quantized(self.values[index], self.scale[index]).whole

    @property
    def whole(self) -> Float[Array, "..."]:
        """Returns the dequantized array in float32."""
        return self.values.astype(jnp.float32) * self.scale


def quantized(x: Float[Array, "..."], summed: tuple[int, ...]) -> Quantized:
    """Quantizes `x` to 8 bits. The scale is constant along the dimensions `summed`, and maps their largest absolute value to 127."""
    largest = jnp.abs(x).max(summed, keepdims=True).astype(jnp.float32)
    scale = jnp.where(largest > 0, largest, 1.0) / 127
    return Quantized(jnp.round(x.astype(jnp.float32) / scale).astype(jnp.int8), scale)
