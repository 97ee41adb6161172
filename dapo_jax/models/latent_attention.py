"""Latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434): the keys and values of all heads are products with one latent per token.

A token has a latent c of `rank` numbers, which is normalized, and a rotated key k of `rotated_dim` numbers for all heads. Head h has the keys
[W_k c; k] and the values W_v c. Only c and k are cached. Two forms have the same results up to rounding:

* Expanded, in training and prefill: keys and values of all heads are computed, and attention is ordinary attention.
* Absorbed, in decoding: q^T W_k c = (W_k^T q)^T c, and sum p W_v c = W_v sum p c. So all heads attend to one key [c; k], whose value is c.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from dapo_jax.models.architecture import Architecture
from dapo_jax.models.attention import causal_attention, part_attention
from dapo_jax.models.layer_kinds import Attend, DecodingStep, Mixer, Paged, PrefillPart, TrainingRows
from dapo_jax.models.parameters import Parameter, norm
from dapo_jax.models.projections import Projections, rotary
from dapo_jax.models.rope import RopeTables
from dapo_jax.numerics.precision import product
from dapo_jax.numerics.quantization import Quantized

Queries = Float[Array, "heads key_dim tokens"]
Latents = Float[Array, "1 latent tokens"]
"""The latent of each token, and below it, the rotated key."""


@dataclass(frozen=True)
class LatentAttention(Mixer):
    """The sizes of latent attention. `Architecture.head_dim` is `rotated_dim`, and `Architecture.kv_heads` is the number of heads."""

    rank: int
    """Number of entries of a latent."""
    plain_dim: int
    """Number of dimensions of a query and a key that are not rotated. They precede the rotated dimensions."""
    rotated_dim: int
    """Number of rotated dimensions of a query and a key."""
    value_dim: int
    query_rank: int | None = None
    """Number of entries of a second latent, from which queries are computed. If None, they are computed from the layer's input."""
    norm_eps: float = 1e-6
    """Epsilon of the norms of latents. It does not depend on `Architecture.norm_eps`."""

    stack = "latent_blocks"
    group = "latent_attention"
    targets = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")

    def __post_init__(self) -> None:
        if self.rotated_dim % 2:
            raise ValueError(f"qk_rope_head_dim={self.rotated_dim} must be even, because RoPE rotates pairs")

    @property
    def key_dim(self) -> int:
        """Number of dimensions of a query and a key."""
        return self.plain_dim + self.rotated_dim

    @property
    def latent_dim(self) -> int:
        """Number of cached entries of a token."""
        return self.rank + self.rotated_dim

    def parameters(self, config: Architecture) -> dict[str, Parameter]:
        embed, heads, rank = config.embed_dim, config.heads, self.query_rank
        of_heads, of_latents = ("heads", "head_dim", "embed"), ("features", "embed")
        joins = ("query_latent", "latent") if rank else ()

        def matrix(name: str, axes: tuple[str, ...], *shape: int, joins: tuple[str, ...] = ()) -> Parameter:
            return Parameter(
                shape=shape, axes=axes, fan_in=shape[-1], tensor=f"self_attn.{name}.weight", target=name, joins=joins
            )  # fmt: skip

        found = {
            "query": matrix("q_b_proj" if rank else "q_proj", of_heads, heads, self.key_dim, rank or embed),
            "latent": matrix("kv_a_proj_with_mqa", of_latents, self.latent_dim, embed, joins=joins),
            "latent_norm": norm(config, self.rank, tensor="self_attn.kv_a_layernorm.weight"),
            "key_value": matrix("kv_b_proj", of_heads, heads, self.plain_dim + self.value_dim, self.rank),
            "output": Parameter(
                shape=(embed, heads, self.value_dim), axes=("embed", "heads", "head_dim"), fan_in=heads * self.value_dim * 2 * config.layers,
                tensor="self_attn.o_proj.weight", target="o_proj",
            ),
        }  # fmt: skip
        if rank:
            found["query_latent"] = matrix("q_a_proj", of_latents, rank, embed, joins=joins)
            found["query_latent_norm"] = norm(config, rank, tensor="self_attn.q_a_layernorm.weight")
        return found

    def mix(
        self, layer: Projections, x: Float[Array, "embed tokens"], rope: RopeTables, attend: Attend
    ) -> tuple[Float[Array, "features tokens"], Any]:
        query, latent = layer.project(("query_latent" if self.query_rank else "query", "latent"), x)
        if self.query_rank:
            (query,) = layer.project(("query",), layer.normed("query_latent_norm", query, self.norm_eps))
        plain, turned = jnp.split(query, [self.plain_dim], axis=1)
        latent, key = jnp.split(latent, [self.rank])
        query = jnp.concatenate([plain, self._rotated(turned, rope)], axis=1) * self._scale(layer.config)
        latent = layer.normed("latent_norm", latent, self.norm_eps)[None]
        out, kept = attend(layer, query, jnp.concatenate([latent, self._rotated(key[None], rope)], axis=1))
        return out.reshape(-1, out.shape[2]), kept

    def _scale(self, config: Architecture) -> float:
        """Returns the factor of the scores."""
        scaling = config.ropes[0].scaling if config.ropes[0] else None
        growth = 0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0 if scaling else 1.0
        return self.key_dim**-0.5 * growth**2

    def _rotated(self, x: Float[Array, "heads rotated_dim tokens"], rope: RopeTables) -> Array:
        """Rotates pairs of the dimensions 2i and 2i + 1. The results have another order, which is the same for queries and keys."""
        return rotary(jnp.concatenate([x[:, ::2], x[:, 1::2]], axis=1), rope)

    def over_rows(self, config: Architecture, rows: TrainingRows) -> Attend:
        segments = rows.segment_ids, rows.prefix_ids
        sequences = rows.layout.sequences(*segments)

        def attend(layer: Projections, query: Queries, latent: Latents) -> tuple[Array, None]:
            expanded = self._expanded(layer, query, latent)
            out = rows.layout.attend(*expanded, *segments, rows.dtype, sequences=sequences)
            return out[:, : self.value_dim], None

        return attend

    def prefill(self, config: Architecture, part: PrefillPart, **data: Any) -> Attend:
        def whole(layer: Projections, query: Queries, latent: Latents) -> tuple[Array, Any]:
            expanded = self._expanded(layer, query, latent)
            out = causal_attention(*expanded, part.segment_ids, dtype=part.dtype)
            return out[:, : self.value_dim], part.store(latent, None, len(part.segment_ids))

        def chunk(layer: Projections, query: Queries, latent: Latents) -> tuple[Array, Any]:
            # The expanded keys and values of all earlier chunks would need much memory.
            buffer, _ = part.before
            keys = lax.dynamic_update_slice_in_dim(buffer, latent.astype(buffer.dtype), part.start, axis=2)
            out = part_attention(self._absorbed(layer, query), keys, keys, part.start, dtype=part.dtype)
            return self._values(layer, out[:, : self.rank]), (keys, None)

        return whole if part.before is None else chunk

    def step(self, config: Architecture, step: DecodingStep, **data: Any) -> Attend:
        def attend(layer: Projections, query: Queries, latent: Latents) -> tuple[Array, Any]:
            query = self._absorbed(layer, query)
            out, state = step.extend(step.state, query, latent, None)
            return self._values(layer, out), state

        return attend

    def state(self, config: Architecture, layer: int) -> Paged:
        return Paged(1, self.latent_dim, value_dim=self.rank)

    def row_dim(self, config: Architecture) -> int:
        return max(self.key_dim, self.value_dim)

    def flops(self, config: Architecture, *, decoding: bool) -> tuple[int, int]:
        """Each pair requires one product with a key and one with a value in every head. In decoding, these are the cached entries and the latent."""
        return 0, 2 * config.heads * (
            self.latent_dim + self.rank if decoding else self.key_dim + self.value_dim
        )

    def _expanded(self, layer: Projections, query: Queries, latent: Latents) -> tuple[Array, Array, Array]:
        """Returns queries, keys and values of all heads, each [heads, row_dim, tokens]. They are padded to `row_dim`, because kernels need it."""
        latent, key = jnp.split(latent[0], [self.rank])
        (both,) = layer.project(("key_value",), latent)
        plain, value = jnp.split(both, [self.plain_dim], axis=1)
        key = jnp.concatenate([plain, jnp.broadcast_to(key, (len(both), *key.shape))], axis=1)
        width = self.row_dim(layer.config)
        # Attention divides by the square root of the number of dimensions.
        parts = query * width**0.5, key, value
        query, key, value = (jnp.pad(part, ((0, 0), (0, width - part.shape[1]), (0, 0))) for part in parts)
        return query, key, value

    def _absorbed(self, layer: Any, query: Queries) -> Float[Array, "heads latent tokens"]:
        """Returns the queries of latents: W_k^T q, and below it, the rotated dimensions."""
        plain, turned = jnp.split(query, [self.plain_dim], axis=1)
        made = self._multiplied(layer, slice(self.plain_dim), plain, transposed=True)
        return jnp.concatenate([made, turned], axis=1) * self.latent_dim**0.5

    def _values(self, layer: Any, mean: Float[Array, "heads rank tokens"]) -> Array:
        """Returns W_v times a mean of latents, for each head."""
        return self._multiplied(layer, slice(self.plain_dim, None), mean)

    def _multiplied(self, layer: Any, rows: slice, x: Array, *, transposed: bool = False) -> Array:
        """Multiplies `x` by some rows of each head's matrix of keys and values, or by their transpose, and adds the contribution of its adapter."""
        weight: Any = jax.tree.map(lambda matrix: matrix[:, rows], layer.key_value[...])
        scaled = x
        if transposed and isinstance(weight, Quantized):
            weight, scaled = weight.values, x * weight.scale
        spec = "hdr,hdt->hrt" if transposed else "hdr,hrt->hdt"
        made = product(spec, weight, scaled, layer.compute_dtype)
        if not hasattr(layer, "key_value_lora_a"):
            return made
        a, b = layer.key_value_lora_a[...], layer.key_value_lora_b[...][:, rows]
        steps = [("kr,hrt->hkt", a), ("hdk,hkt->hdt", b)]
        for spec, matrix in [("hdk,hdt->hkt", b), ("kr,hkt->hrt", a)] if transposed else steps:
            x = product(spec, matrix, x, layer.compute_dtype)
        return made + x * layer.config.lora.scale
