"""Matrix products in a compute dtype, with sums, results and gradients in float32.

Stored operands (weights, keys, values) are rounded to the compute dtype wherever they are multiplied, so all programs use the same
values. Flowing operands (activations, cotangents) are rounded only on accelerators, which need it for their speed. On CPU, products are
in float32: sampler and trainer then agree five times better in bfloat16.
"""

import re
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Num

from dapo_jax.dapo.quantization import Quantized


class WeightSharding(NamedTuple):
    """The way in which a weight is split, inside `shard_map`."""

    axis: str
    """The mesh axis over which the weight is split between its uses."""
    dim: int
    """The dimension that is split."""
    parts_first: bool = False
    """True: sum gradients in a way that every TPU compiler accepts, but that sums some of them on every device."""

    def gathered(self, part: Array) -> Array:
        """Returns the whole weight from the part of each device."""
        return lax.all_gather(part, self.axis, axis=self.dim, tiled=True)

    def summed(self, whole: Array) -> Array:
        """Returns this device's part of the sum over all devices along the axis."""
        if not self.parts_first:
            return lax.psum_scatter(whole, self.axis, scatter_dimension=self.dim, tiled=True)
        shape, count = whole.shape, lax.axis_size(self.axis)
        parts = whole.reshape(*shape[: self.dim], count, shape[self.dim] // count, *shape[self.dim + 1 :])
        return lax.psum_scatter(jnp.moveaxis(parts, self.dim, 0), self.axis, scatter_dimension=0, tiled=False)


def product(
    spec: str,
    stored: Num[Array, "..."] | Quantized,
    flowing: Float[Array, "..."],
    dtype: str,
    sharding: WeightSharding | None = None,
    *,
    in_parts: bool = False,
) -> Float[Array, "..."]:
    """Returns `einsum(spec, stored, flowing)`, multiplied in `dtype`, as float32, or as float64 if `dtype` is float64.

    Its gradients are products of the same kind, in the dtypes of `stored` and `flowing`. Plain differentiation would
    multiply the float32 cotangent by low-precision operands, for which accelerators have no fast product, and
    would round the gradient of float32 weights.

    Args:
        spec: `stored,flowing->out` without "..."; each index is in two of the three or in all.
        stored: weights, keys or values: rounded to `dtype`; integers are the values of a cache in eight bits.
        flowing: activations: rounded to `dtype`, but not on CPU.
        dtype: the compute dtype.
        sharding: how `stored` is split; it is gathered for this product, and again for its gradient, and then freed.
            None: it is whole, or the compiler places it.
        in_parts: each device has a part of the sum, and the compiler adds them up. Except on CPU the parts are sent and added in `dtype`,
            in half the bytes of float32, as in training (`parallel.training_layout`).
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
    """Returns the whole weight, rounded to `dtype`, which is also the dtype in which its parts are sent."""
    weight = rounded(stored, dtype)
    return weight if sharding is None else sharding.gathered(weight.astype(dtype))


def rounded(x: Num[Array, "*shape"], dtype: str) -> Float[Array, "*shape"]:
    """Returns `x` rounded to `dtype`, as float32 or wider.

    Unlike a cast there and back, which XLA may drop, this always rounds.
    """
    kind, wide = jnp.finfo(dtype), x.astype(_wide(dtype))
    # An array of this dtype is rounded already.
    loses = x.dtype != np.dtype(dtype) and wide.dtype != np.dtype(dtype)
    return lax.reduce_precision(wide, kind.nexp, kind.nmant) if loses else wide


def _einsum(spec: str, left: Array, right: Array, dtype: str, in_parts: bool = False) -> Array:
    wide = _wide(dtype)

    def narrow(left: Array, right: Array) -> Array:
        # The compiler adds the parts in the dtype of the result; each part is summed in float32 before.
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
