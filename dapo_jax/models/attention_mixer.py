"""The mixer with attention: queries, keys and values with rotary embedding, whose keys and values are cached in pages."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from dapo_jax.models.architecture import Architecture
from dapo_jax.models.attention import Sinks, causal_attention, part_attention
from dapo_jax.models.layer_kinds import Attend, DecodingStep, Mixer, Paged, PrefillPart, TrainingRows
from dapo_jax.models.parameters import Parameter, norm, repeated_heads
from dapo_jax.models.projections import Projections, rms_norm, rotary, with_offset
from dapo_jax.models.rope import RopeTables
from dapo_jax.numerics.precision import rounded

_INPUTS = ("query", "key", "value")


@dataclass(frozen=True)
class Attention(Mixer):
    """Causal attention. Its options are fields of `Architecture`, and so are its sizes if they are 0 here."""

    kv_heads: int = 0
    head_dim: int = 0
    is_near: bool = False
    """Whether the layer has a window, if layers with and without a window are different kinds."""
    value_norm: bool = False
    """Whether values are normalized over each head, without weights (Gemma 4)."""
    keys_are_values: bool = False
    """Whether values are the keys before their norm and rotation. Then there is no matrix for values."""
    shares: bool = False
    """Whether the layer has only queries, and reads the keys and values of its `source`."""

    stack = "blocks"
    group = "attention"
    targets = ("q_proj", "k_proj", "v_proj", "o_proj")

    def parameters(self, config: Architecture) -> dict[str, Parameter]:
        embed, (kv_heads, dim) = config.embed_dim, self._sizes(config)
        of_inputs = {
            name: ("heads", config.heads) if name == "query" else ("kv_heads", kv_heads)
            for name in self._inputs
        }
        found = {
            name: Parameter(
                shape=(count, dim * (1 + config.attention_gate) if name == "query" else dim, embed), axes=(axis, "head_dim", "embed"),
                fan_in=embed, tensor=f"self_attn.{name[0]}_proj.weight", target=f"{name[0]}_proj", joins=_INPUTS, is_rotated=name != "value",
            )
            for name, (axis, count) in of_inputs.items()
        }  # fmt: skip
        # The two matrices whose results are added to the residual stream have smaller initial values in deeper models.
        found["output"] = Parameter(
            shape=(embed, config.heads, dim), axes=("embed", "heads", "head_dim"), fan_in=config.heads * dim * 2 * config.layers,
            tensor="self_attn.o_proj.weight", target="o_proj",
        )  # fmt: skip
        for name, (axis, count) in of_inputs.items() if config.qkv_bias else ():
            tensor = f"self_attn.{name[0]}_proj.bias"
            found[f"{name}_bias"] = Parameter(
                shape=(count, dim), axes=(axis, "head_dim"), tensor=tensor, is_rotated=name != "value"
            )
        if config.output_bias:
            found["output_bias"] = Parameter(
                shape=(embed,), axes=("features",), tensor="self_attn.o_proj.bias"
            )
        for name, (axis, count) in list(of_inputs.items())[:2] if config.qk_norm != "none" else ():
            tensor = f"self_attn.{name[0]}_norm.weight"
            if config.qk_norm == "head":
                found[f"{name}_norm"] = norm(config, dim, tensor=tensor)
            else:
                found[f"{name}_norm"] = norm(config, count, dim, axes=(axis, "head_dim"), tensor=tensor)
        if config.sinks:
            found["sinks"] = Parameter(shape=(config.heads,), axes=("heads",), tensor="self_attn.sinks")
        return found

    def mix(
        self, layer: Any, x: Float[Array, "embed tokens"], rope: RopeTables, attend: Attend
    ) -> tuple[Float[Array, "features tokens"], Any]:
        query, key, value, gate = self._queries_keys_values(layer, x, rope)
        sinks = [rounded(layer.sinks[...], layer.compute_dtype)] if layer.config.sinks else []
        out, kept = attend(query, *(() if self.shares else (key, value, *sinks)))
        out = out if gate is None else out * jax.nn.sigmoid(gate)
        return out.reshape(-1, out.shape[2]), kept

    def over_rows(self, config: Architecture, rows: TrainingRows) -> Attend:
        segments = rows.segment_ids, rows.prefix_ids
        same: dict[str, Any] = {"windows": config.windows, "cap": config.score_cap}
        same["sequences"] = rows.layout.sequences(*segments)

        def attend(query: Array, *own: Any, window: Array | None = None, shared: Any = ()) -> Any:
            key, value, *sinks = *shared, *own
            near = None if window is None else (window, rows.positions)
            how: dict[str, Any] = {"near": near, "sinks": sinks[0] if sinks else None}
            return rows.layout.attend(query, key, value, *segments, rows.dtype, **how, **same), (key, value)

        return attend

    def prefill(self, config: Architecture, part: PrefillPart, **data: Any) -> Attend:
        how: dict[str, Any] = {"cap": config.score_cap, "dtype": part.dtype}

        def whole(query: Array, key: Any = None, value: Any = None, sinks: Sinks = None) -> tuple[Array, Any]:
            near, (keys, values) = (
                (data["window"], part.positions) if data else None,
                part.before or (key, value),
            )
            attended = causal_attention(query, keys, values, part.segment_ids, near=near, sinks=sinks, **how)
            return attended, None if key is None else part.store(keys, values, len(part.segment_ids))

        def chunk(query: Array, key: Any = None, value: Any = None, sinks: Sinks = None) -> tuple[Array, Any]:
            keys, values = part.before
            if key is not None:
                keys, values = (
                    lax.dynamic_update_slice_in_dim(buffer, new.astype(buffer.dtype), part.start, axis=2)
                    for buffer, new in zip(part.before, (key, value), strict=True)
                )
            out = part_attention(query, keys, values, part.start, sinks=sinks, **data, **how)
            return out, None if key is None else (keys, values)

        return chunk if part.is_chunk else whole

    def step(self, config: Architecture, step: DecodingStep, **data: Any) -> Attend:
        return partial(step.extend, step.state, **data)

    def state(self, config: Architecture, layer: int) -> Paged | None:
        window = config.windows[layer] if config.windows else 0
        return None if self.shares else Paged(*self._sizes(config), window)

    @property
    def source(self) -> Mixer | None:
        return replace(self, shares=False) if self.shares else None

    def _sizes(self, config: Architecture) -> tuple[int, int]:
        """Returns the number of key heads, with repeated ones, and the number of dimensions of a head."""
        kv_heads = repeated_heads(self.kv_heads or config.kv_heads, config.head_shards)
        return kv_heads, self.head_dim or config.head_dim

    @property
    def _inputs(self) -> tuple[str, ...]:
        """The names of the matrices that multiply the layer's input."""
        return _INPUTS[: 1 if self.shares else 2 if self.keys_are_values else 3]

    def data(self, config: Architecture) -> Mapping[str, tuple[int, ...]]:
        return {"window": config.windows} if config.windows else {}

    def row_dim(self, config: Architecture) -> int:
        return self._sizes(config)[1]

    def flops(self, config: Architecture, *, decoding: bool) -> tuple[int, int]:
        """Each pair requires one product with a key and one with a value in every head."""
        return 0, 4 * config.heads * self.row_dim(config)

    def _queries_keys_values(
        self, layer: Projections, x: Float[Array, "embed tokens"], rope: RopeTables
    ) -> tuple[
        Float[Array, "heads dim tokens"], Float[Array, "kv dim tokens"] | Any, Float[Array, "kv dim tokens"] | Any,
        Float[Array, "heads dim tokens"] | None,
    ]:  # fmt: skip
        """Returns queries, keys, values (None if they are shared), and the gate before its sigmoid if there is one. RoPE is applied to queries and keys."""
        config = layer.config
        query, *own = layer.project(self._inputs, x)
        query, gate = jnp.split(query, 2, axis=1) if config.attention_gate else (query, None)
        if config.qkv_bias:
            query, *own = (
                part + layer.bias(name) for part, name in zip((query, *own), self._inputs, strict=True)
            )
        key, value = (*own, *own)[:2] if own else (None, None)
        if self.value_norm and value is not None:
            per_head = jax.vmap(rms_norm, in_axes=(0, None, None))
            value = per_head(value, jnp.ones(value.shape[1]), config.norm_eps)
        normed = partial(_heads_normed, layer)
        if config.qk_norm != "none" and not config.qk_norm_after_rope:
            variable: Any = getattr(layer, _INPUTS[0])
            if variable.get_metadata("joined", None) and len(variable.get_value()) == 1:
                kernel = partial(normed, together=True)
                query, key = jax.lax.platform_dependent(query, key, cuda=kernel, default=normed)
            else:
                query, key = normed(query, key)
        if (most := config.clip_qkv) is not None:
            query, key, value = (jnp.clip(part, -most, most) for part in (query, key, value))
        query, key = rotary(query, rope), None if key is None else rotary(key, rope)
        if config.qk_norm_after_rope:
            query, key = normed(query, key)
        if config.query_growth is not None:
            query = query * rope[2][None]
        if config.query_scale is not None:
            # Attention divides by the square root of head_dim.
            query = query * (config.query_scale * query.shape[1] ** 0.5)
        return query, key, value, gate


def _heads_normed(layer: Any, query: Array, key: Array | None, *, together: bool = False) -> Any:
    """Normalizes queries and keys. `together`: one kernel of a GPU computes the sums of all heads. Several devices would have to exchange heads."""
    config = layer.config
    if key is None:
        return _normed(layer, query, layer.query_norm, config.heads), None
    if not together or config.qk_norm != "head":
        query = _normed(layer, query, layer.query_norm, config.heads)
        return query, _normed(layer, key, layer.key_norm, repeated_heads(config.kv_heads, config.head_shards))
    both = jnp.concatenate([query, key])
    factors = jax.lax.rsqrt(jnp.mean(both * both, axis=1, keepdims=True) + config.norm_eps)
    of_query, of_key = (with_offset(config, norm[...]) for norm in (layer.query_norm, layer.key_norm))
    query = query * factors[: len(query)] * of_query[None, :, None]
    return query, key * factors[len(query) :] * of_key[None, :, None]


def _normed(layer: Projections, x: Float[Array, "heads dim tokens"], stored: Any, heads: int) -> Array:
    """Normalizes queries or keys, over each head, or over all `heads` together. A device may have a part of the heads."""
    config, weight = layer.config, with_offset(layer.config, stored[...])
    if config.qk_norm == "head":
        return jax.vmap(rms_norm, in_axes=(0, None, None))(x, weight, config.norm_eps)
    wide = x.astype(jnp.float32)
    total = layer.layout.over_heads((wide * wide).sum((0, 1)))
    scaled = wide * jax.lax.rsqrt(total / (heads * config.head_dim) + config.norm_eps)[None, None]
    return (scaled * weight[..., None]).astype(x.dtype)


ATTENTION = Attention()
