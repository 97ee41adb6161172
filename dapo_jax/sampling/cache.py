"""The key/value cache of the decoding slots, opaque behind `empty`, `fill`, `append` and `attend`.

Dense for now: each layer has [slots, kv_heads, capacity, head_dim] for keys and for values (on CPU attention over this
order of axes is 12 times faster than over [slots, capacity, kv_heads, head_dim]).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from dapo_jax.models.attention import cached_attention


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values."""

    keys: Float[Array, "slots kv_heads capacity head_dim"] | Any
    values: Float[Array, "slots kv_heads capacity head_dim"] | Any


def empty(slots: int, kv_heads: int, capacity: int, head_dim: int, dtype: str) -> LayerCache:
    """A cache in which nothing is written yet."""
    shape = (slots, kv_heads, capacity, head_dim)
    return LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def fill(cache: LayerCache, prompts: LayerCache, slot: Int[Array, ""], row: Int[Array, ""]) -> LayerCache:
    """Copies row `row` of prefilled prompts to the front of slot `slot`."""

    def copy(into: Array, source: Array) -> Array:
        part = lax.dynamic_slice_in_dim(source, row, 1, axis=0)
        return lax.dynamic_update_slice(
            into, part, (slot, jnp.zeros_like(slot), jnp.zeros_like(slot), jnp.zeros_like(slot))
        )

    return LayerCache(copy(cache.keys, prompts.keys), copy(cache.values, prompts.values))


def append(
    cache: LayerCache,
    key: Float[Array, "slots kv_heads head_dim"],
    value: Float[Array, "slots kv_heads head_dim"],
    lengths: Int[Array, " slots"],
) -> LayerCache:
    """Writes one token per slot behind the `lengths` tokens that are there."""

    def write(into: Array, new: Array) -> Array:
        zero = jnp.zeros((), lengths.dtype)

        def one_slot(into: Array, new: Array, at: Array) -> Array:
            return lax.dynamic_update_slice(into, new[:, None], (zero, at, zero))

        return jax.vmap(one_slot)(into, new.astype(into.dtype), lengths)

    return LayerCache(write(cache.keys, key), write(cache.values, value))


def attend(
    cache: LayerCache, query: Float[Array, "slots heads head_dim"], lengths: Int[Array, " slots"]
) -> Float[Array, "slots heads head_dim"]:
    """Attention of one query per slot over the first `lengths` tokens of the slot."""
    return cached_attention(query, cache.keys, cache.values, lengths)
