"""The mixer with attention: queries, keys and values with rotary embedding, whose keys and values are cached in pages."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from dapo_jax.models.architecture import Architecture
from dapo_jax.models.attention import causal_attention, part_attention
from dapo_jax.models.layer_kinds import Attend, DecodingStep, Mixer, Paged, PrefillPart, TrainingRows
from dapo_jax.models.parameters import Parameter, norm
from dapo_jax.models.projections import Projections, rms_norm, rotary, with_offset
from dapo_jax.models.rope import RopeTables

_INPUTS = ("query", "key", "value")


@dataclass(frozen=True)
class Attention(Mixer):
    """Causal attention. Its sizes and options are fields of `Architecture`."""

    stack = "blocks"
    group = "attention"
    targets = ("q_proj", "k_proj", "v_proj", "o_proj")

    def parameters(self, config: Architecture) -> dict[str, Parameter]:
        embed, dim = config.embed_dim, config.head_dim
        heads, kv_heads = ("heads", config.heads), ("kv_heads", config.kv_heads)
        of_inputs = {"query": heads, "key": kv_heads, "value": kv_heads}
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
            bias = "self_attn.o_proj.bias"
            found["output_bias"] = Parameter(shape=(embed,), axes=("features",), tensor=bias)
        for name, (axis, count) in list(of_inputs.items())[:2] if config.qk_norm != "none" else ():
            tensor = f"self_attn.{name[0]}_norm.weight"
            if config.qk_norm == "head":
                found[f"{name}_norm"] = norm(config, dim, tensor=tensor)
            else:
                found[f"{name}_norm"] = norm(config, count, dim, axes=(axis, "head_dim"), tensor=tensor)
        return found

    def mix(
        self, layer: Projections, x: Float[Array, "embed tokens"], rope: RopeTables, attend: Attend
    ) -> tuple[Float[Array, "features tokens"], Any]:
        query, key, value, gate = self._queries_keys_values(layer, x, rope)
        out, kept = attend(query, key, value)
        out = out if gate is None else out * jax.nn.sigmoid(gate)
        return out.reshape(-1, out.shape[2]), kept

    def over_rows(self, config: Architecture, rows: TrainingRows) -> Attend:
        segments = rows.segment_ids, rows.prefix_ids
        same: dict[str, Any] = {"windows": config.windows, "cap": config.score_cap}
        same["sequences"] = rows.layout.sequences(*segments)

        def attend(query: Array, key: Array, value: Array, window: Array | None = None) -> tuple[Array, None]:
            near = None if window is None else (window, rows.positions)
            return rows.layout.attend(query, key, value, *segments, rows.dtype, near=near, **same), None

        return attend

    def prefill(self, config: Architecture, part: PrefillPart, **data: Any) -> Attend:
        how: dict[str, Any] = {"cap": config.score_cap, "dtype": part.dtype}

        def whole(query: Array, key: Array, value: Array) -> tuple[Array, Any]:
            near = (data["window"], part.positions) if data else None
            attended = causal_attention(query, key, value, part.segment_ids, near=near, **how)
            return attended, part.store(key, value, len(part.segment_ids))

        def chunk(query: Array, key: Array, value: Array) -> tuple[Array, Any]:
            keys, values = (
                lax.dynamic_update_slice_in_dim(buffer, new.astype(buffer.dtype), part.start, axis=2)
                for buffer, new in zip(part.before, (key, value), strict=True)
            )
            return part_attention(query, keys, values, part.start, **data, **how), (keys, values)

        return whole if part.before is None else chunk

    def step(self, config: Architecture, step: DecodingStep, **data: Any) -> Attend:
        return partial(step.extend, step.state, **data)

    def state(self, config: Architecture, layer: int) -> Paged:
        return Paged(config.kv_heads, config.head_dim, config.windows[layer] if config.windows else 0)

    def data(self, config: Architecture) -> Mapping[str, tuple[int, ...]]:
        return {"window": config.windows} if config.windows else {}

    def flops(self, config: Architecture, *, decoding: bool) -> tuple[int, int]:
        """Each pair requires one product with a key and one with a value in every head."""
        return 0, 4 * config.heads * config.head_dim

    def _queries_keys_values(
        self, layer: Projections, x: Float[Array, "embed tokens"], rope: RopeTables
    ) -> tuple[
        Float[Array, "heads dim tokens"], Float[Array, "kv dim tokens"], Float[Array, "kv dim tokens"],
        Float[Array, "heads dim tokens"] | None,
    ]:  # fmt: skip
        """Returns queries, keys, values, and the gate before its sigmoid if there is one. RoPE is applied to queries and keys."""
        config = layer.config
        query, key, value = layer.project(_INPUTS, x)
        query, gate = jnp.split(query, 2, axis=1) if config.attention_gate else (query, None)
        if config.qkv_bias:
            query, key, value = (
                part + layer.bias(name) for part, name in zip((query, key, value), _INPUTS, strict=True)
            )
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
        query, key = rotary(query, rope), rotary(key, rope)
        if config.qk_norm_after_rope:
            query, key = normed(query, key)
        if config.query_growth is not None:
            query = query * rope[2][None]
        if config.query_scale is not None:
            # Attention divides by the square root of head_dim.
            query = query * (config.query_scale * config.head_dim**0.5)
        return query, key, value, gate


def _heads_normed(layer: Any, query: Array, key: Array, *, together: bool = False) -> tuple[Array, Array]:
    """Normalizes queries and keys. `together`: one kernel of a GPU computes the sums of all heads. Several devices would have to exchange heads."""
    config = layer.config
    if not together or config.qk_norm != "head":
        query = _normed(layer, query, layer.query_norm, config.heads)
        return query, _normed(layer, key, layer.key_norm, config.kv_heads)
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
