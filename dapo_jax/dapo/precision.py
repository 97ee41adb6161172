"""Matrix products in a compute dtype, with sums, results and gradients in float32.

What is stored (weights, keys, values) is rounded to the compute dtype wherever it is multiplied, so that all programs agree
on it. What flows (activations, cotangents) is rounded only on accelerators, which need it for their speed. On CPU, which
is for trying things out, products are in float32: sampler and trainer then agree five times better in bfloat16.
"""

import re
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Int8, Num


class WeightSharding(NamedTuple):
    """The way in which a weight is split, inside `shard_map`."""

    axis: str
    """The mesh axis over which it is split between its uses."""
    dim: int
    """Which of its dimensions."""
    parts_first: bool = False
    """The way to sum gradients that every TPU compiler takes, but which sums some of them on every device; False: the plain way."""

    def gathered(self, part: Array) -> Array:
        """The whole of it."""
        return lax.all_gather(part, self.axis, axis=self.dim, tiled=True)

    def summed(self, whole: Array) -> Array:
        """Its part of the sum over all devices along the axis."""
        if not self.parts_first:
            return lax.psum_scatter(whole, self.axis, scatter_dimension=self.dim, tiled=True)
        shape, count = whole.shape, lax.axis_size(self.axis)
        parts = whole.reshape(*shape[: self.dim], count, shape[self.dim] // count, *shape[self.dim + 1 :])
        return lax.psum_scatter(jnp.moveaxis(parts, self.dim, 0), self.axis, scatter_dimension=0, tiled=False)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """An array in 8 bits: `values` times `scale`, a number for all that is summed over in a product, so that it comes out of the sum."""

    values: Int8[Array, "..."] | Any
    scale: Float[Array, "..."] | Any
    """The factors, of as many dimensions as the values; 1 along those that are summed over."""

    def __getitem__(self, _: Any) -> "Quantized":
        """All of it: what `[...]` gives of an array."""
        return self

    def __len__(self) -> int:
        return len(self.values)

    def reshape(self, first: int, rest: int) -> "Quantized":
        """All dimensions but the first, which are summed over, as one."""
        return Quantized(self.values.reshape(first, rest), self.scale.reshape(first, 1))

    def rows(self, index: Int[Array, " tokens"]) -> Float[Array, "tokens _"]:
        """Rows of a table with a scale for each."""
        return Quantized(self.values[index], self.scale[index]).whole

    @property
    def whole(self) -> Float[Array, "..."]:
        """The array that it stands for, in float32."""
        return self.values.astype(jnp.float32) * self.scale


def quantized(x: Float[Array, "..."], summed: tuple[int, ...]) -> Quantized:
    """`x` in 8 bits; the largest of what is summed over, along the dimensions `summed`, becomes 127."""
    largest = jnp.abs(x).max(summed, keepdims=True).astype(jnp.float32)
    scale = jnp.where(largest > 0, largest, 1.0) / 127
    return Quantized(jnp.round(x.astype(jnp.float32) / scale).astype(jnp.int8), scale)


def product(
    spec: str,
    stored: Num[Array, "..."] | Quantized,
    flowing: Float[Array, "..."],
    dtype: str,
    sharding: WeightSharding | None = None,
    *,
    in_parts: bool = False,
) -> Float[Array, "..."]:
    """`einsum(spec, stored, flowing)` in `dtype` with a result in float32, or in float64 if `dtype` is.

    Its gradients are products of the same kind, in the dtypes of `stored` and `flowing`. Plain differentiation would
    multiply the float32 cotangent by low-precision operands, for which accelerators have no fast product, and
    would round the gradient of float32 weights.

    Args:
        spec: `stored,flowing->out` without "..."; each index is in two of the three or in all.
        stored: weights, keys or values: rounded to `dtype`; whole numbers are those of a cache in eight bits.
        flowing: activations: rounded to `dtype`, but not on CPU.
        dtype: the compute dtype.
        sharding: how `stored` is split; it is put together for this product, and again for its gradient, and thrown away.
            None: it is whole, or the compiler takes care of it.
        in_parts: each device has a part of the sum, and the compiler adds them up: they move, and are added, in `dtype`, but not on CPU.
            That is half the bytes of float32, and what training does (`parallel.training_layout`).
    """
    if not isinstance(stored, Quantized):
        return _product(spec, stored, flowing, dtype, sharding, in_parts)
    first, _, out = re.split(",|->", spec)
    kept = "".join(index for index in first if index in out)
    scale = stored.scale.reshape([stored.values.shape[first.index(index)] for index in kept])
    plain = _einsum(spec, stored.values, flowing, dtype, in_parts)
    return jnp.einsum(f"{out},{kept}->{out}", plain, scale)


@partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4, 5))
def _product(
    spec: str, stored: Array, flowing: Array, dtype: str, sharding: WeightSharding | None, in_parts: bool
) -> Array:
    return _einsum(spec, gathered(stored, dtype, sharding), flowing, dtype, in_parts)


def _product_forward(
    spec: str, stored: Array, flowing: Array, dtype: str, sharding: WeightSharding | None, in_parts: bool
) -> tuple[Array, tuple[Array, Array]]:
    return _product(spec, stored, flowing, dtype, sharding, in_parts), (stored, flowing)


def _product_backward(
    spec: str,
    dtype: str,
    sharding: WeightSharding | None,
    _: bool,
    operands: tuple[Array, Array],
    cotangent: Array,
) -> tuple[Array, Array]:
    stored, flowing = operands
    first, second, out = re.split(",|->", spec)
    d_stored = _einsum(f"{out},{second}->{first}", cotangent, flowing, dtype)
    if sharding is not None:
        d_stored = sharding.summed(d_stored)
    d_flowing = _einsum(f"{first},{out}->{second}", gathered(stored, dtype, sharding), cotangent, dtype)
    return d_stored.astype(stored.dtype), d_flowing.astype(flowing.dtype)


_product.defvjp(_product_forward, _product_backward)


def gathered(stored: Num[Array, "..."], dtype: str, sharding: WeightSharding | None) -> Float[Array, "..."]:
    """A weight rounded to `dtype` and put together; what moves between devices has that dtype."""
    weight = rounded(stored, dtype)
    return weight if sharding is None else sharding.gathered(weight.astype(dtype))


def rounded(x: Num[Array, "*shape"], dtype: str) -> Float[Array, "*shape"]:
    """`x` rounded to `dtype`, as float32 or wider.

    Unlike a cast there and back, which XLA may drop, this always rounds.
    """
    kind, wide = jnp.finfo(dtype), x.astype(_wide(dtype))
    # What is stored in the dtype is rounded already.
    loses = x.dtype != np.dtype(dtype) and wide.dtype != np.dtype(dtype)
    return lax.reduce_precision(wide, kind.nexp, kind.nmant) if loses else wide


def _einsum(spec: str, left: Array, right: Array, dtype: str, in_parts: bool = False) -> Array:
    wide = _wide(dtype)

    def narrow(left: Array, right: Array) -> Array:
        # The dtype of the result is that in which the compiler adds up the parts; each part is summed in float32 before.
        result = np.dtype(dtype) if in_parts else wide
        return jnp.einsum(
            spec, left.astype(dtype), right.astype(dtype), preferred_element_type=result
        ).astype(wide)

    def in_full(left: Array, right: Array) -> Array:
        return jnp.einsum(spec, left.astype(wide), right.astype(wide))

    if np.dtype(dtype) == wide:
        return in_full(left, right)
    return lax.platform_dependent(left, right, cpu=in_full, default=narrow)


def _wide(dtype: str) -> np.dtype:
    return np.promote_types(dtype, np.float32)
