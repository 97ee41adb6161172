"""Matrix products whose operands have a compute dtype or 8 bits, but whose sums, results and gradients are in float32.

Stored operands (weights, keys, values) are rounded to the compute dtype in every product, so that all programs use the same values.
Flowing operands (activations, cotangents) are rounded only on accelerators, whose fast products require it. On CPU, they
stay in float32, which makes the numerical difference between sampler and trainer five times smaller in bfloat16.
"""

import re
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Num

from dapo_jax.numerics.quantization import Quantized


class WeightSharding(NamedTuple):
    """How a weight is sharded over a mesh axis, inside `shard_map`."""

    axis: str
    """The mesh axis over which the weight is sharded while no product uses it."""
    dim: int
    """The dimension that is sharded."""
    parts_first: bool = False
    """If True, gradients are summed in a form that every TPU compiler accepts. However, each device then computes some of these sums in full."""
    as_stored: bool = False
    """If True, shards keep the default order in memory. A collective on a GPU wants `dim` first, and the compiler would otherwise reorder all layers' weights and gradients."""

    def gathered(self, part: Array) -> Array:
        """Gathers the whole weight from the shards on all devices."""
        return lax.all_gather(self._in_order(part), self.axis, axis=self.dim, tiled=True)

    def summed(self, whole: Array) -> Array:
        """Sums `whole` over all devices along the axis, and returns this device's shard of the sum."""
        if not self.parts_first:
            return self._in_order(lax.psum_scatter(whole, self.axis, scatter_dimension=self.dim, tiled=True))
        shape, count = whole.shape, lax.axis_size(self.axis)
        parts = whole.reshape(*shape[: self.dim], count, shape[self.dim] // count, *shape[self.dim + 1 :])
        return lax.psum_scatter(jnp.moveaxis(parts, self.dim, 0), self.axis, scatter_dimension=0, tiled=False)

    def _in_order(self, part: Array) -> Array:
        return with_layout_constraint(part, Layout(tuple(range(part.ndim)))) if self.as_stored else part


def product(
    spec: str,
    stored: Num[Array, "..."] | Quantized,
    flowing: Float[Array, "..."],
    dtype: str,
    sharding: WeightSharding | None = None,
    *,
    in_parts: bool = False,
) -> Float[Array, "..."]:
    """Returns `einsum(spec, stored, flowing)`, multiplied in `dtype`. The result is float32, or float64 if `dtype` is float64.

    Gradients are computed with the same kind of product, and have the dtypes of `stored` and `flowing`. JAX's default gradient
    would multiply a float32 cotangent by low-precision operands, for which accelerators have no fast product. It
    would also round the gradient of float32 weights.

    Args:
        spec: einsum subscripts `stored,flowing->out` without ellipses. Each index must occur in at least two of the three terms.
        stored: weights, keys or values, which are rounded to `dtype`. An integer array is an 8-bit KV cache without its scales.
        flowing: activations, which are rounded to `dtype` except on CPU.
        dtype: the compute dtype.
        sharding: how `stored` is sharded. It is gathered for this product and again for the gradient, and the copy is freed after each use.
            If None, `stored` is whole, or the compiler decides its placement.
        in_parts: each device computes a partial sum, and the compiler adds them. Except on CPU, partial sums are transferred and added in `dtype`,
            as in training (`parallel.training_layout`). For 16-bit dtypes, this halves the transferred bytes.
    """
    if not isinstance(stored, Quantized):
        return _product(spec, stored, flowing, dtype, sharding, in_parts)
    first, _, out = re.split(",|->", spec)
    kept = "".join(index for index in first if index in out)
    scale = stored.scale.reshape([stored.values.shape[first.index(index)] for index in kept])
    plain = _einsum(spec, stored.values, flowing, dtype, in_parts, turned=out[-1] not in first)
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
    """Gathers a weight and rounds it to `dtype`. The shards are rounded first, so they are also transferred in `dtype`."""
    weight = rounded(stored, dtype)
    return weight if sharding is None else sharding.gathered(weight.astype(dtype))


def rounded(x: Num[Array, "*shape"], dtype: str) -> Float[Array, "*shape"]:
    """Rounds `x` to the precision of `dtype`, and returns it in float32 or wider.

    Unlike a cast to `dtype` and back, which XLA may remove, this always rounds.
    """
    kind, wide = jnp.finfo(dtype), x.astype(_wide(dtype))
    # An array that already has this dtype needs no rounding.
    loses = x.dtype != np.dtype(dtype) and wide.dtype != np.dtype(dtype)
    return lax.reduce_precision(wide, kind.nexp, kind.nmant) if loses else wide


def capped(x: Float[Array, "..."], cap: float | None) -> Float[Array, "..."]:
    """Returns c tanh(x / c) for a cap c, or `x` if there is no cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def _einsum(spec: str, left: Array, right: Array, dtype: str, in_parts: bool = False, turned: bool = False) -> Array:  # fmt: skip
    """Computes an einsum. If `turned`, a GPU stores the result with its last index first, as it stores the residual stream."""
    wide = _wide(dtype)

    def narrow(left: Array, right: Array, spec: str = spec) -> Array:
        # The compiler adds the devices' partial sums in the dtype of the result. Each device accumulates its partial sum in float32.
        result = np.dtype(dtype) if in_parts else wide
        return jnp.einsum(
            spec, left.astype(dtype), right.astype(dtype), preferred_element_type=result
        ).astype(wide)

    def last_first(left: Array, right: Array) -> Array:
        first, second, out = re.split(",|->", spec)
        # XLA would turn a product of two dimensions around.
        made = narrow(right, left[None], f"{second},z{first}->{out[-1]}z{out[:-1]}")
        return jnp.moveaxis(made, 0, -1)[0]

    def in_full(left: Array, right: Array) -> Array:
        return jnp.einsum(spec, left.astype(wide), right.astype(wide))

    if np.dtype(dtype) == wide:
        return in_full(left, right)
    gpu = last_first if turned else narrow
    return lax.platform_dependent(left, right, cpu=in_full, cuda=gpu, default=narrow)


def _wide(dtype: str) -> np.dtype:
    return np.promote_types(dtype, np.float32)
