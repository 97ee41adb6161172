"""One decoder for all dense model families, for training and sampling. Families differ in the options of `DecoderConfig`.

A `Block` does not implement attention, but passes queries, keys and values to a function `attend`. In training, this function
attends within a row. In prefill, it also stores keys and values. In decoding, it attends to the KV cache. In this way, trainer
and sampler use the same definition of the network. The sampler's weights may be `Quantized`.

In activations, features are the first dimension and tokens the last. In weights, outputs are the first dimension, as in
transformers. With few tokens, as in decoding, XLA on CPU is about 1.15 times as fast with this order as with the opposite
order. In training, both orders have the same speed.

Layers are stacked along a leading axis and scanned, so compile time does not grow with depth. Gated DeltaNet layers are a second stack. Every parameter declares
its logical axes, and `parallel.sharding` maps them to mesh axes.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Integer

from dapo_jax.dapo.tokens import NO_ROUTE
from dapo_jax.models.experts import as_stored, chosen, mixture
from dapo_jax.models.gated_delta import DeltaState, Mixed, ancestors, empty, over_rows
from dapo_jax.models.joined import OF_ATTENTION, OF_MLP, split
from dapo_jax.models.layout import Layout, output_dimensions
from dapo_jax.models.lora import LORA_PARTS, adapted_in, adapter
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.models.rope import rope_frequencies
from dapo_jax.numerics.precision import capped, product, rounded
from dapo_jax.numerics.quantization import Quantized

Attend = Callable[..., tuple[Array, Any]]
"""A function that maps query, key and value, each [heads, head_dim, tokens], to the attention output and a second value, which `Block` returns unchanged.
In Gated DeltaNet layers, its argument is a `Mixed`."""

RopeTables = tuple[Array, ...]
"""Cosine and sine of the RoPE angles, each [rotated / 2, tokens], and with `query_growth`, also the factor of each query, [1, tokens]."""

WHOLE = Layout()

REMAT_POLICIES: dict[str, Callable[..., Any] | None] = {
    # Reshapes and orders in memory (`as_stored`) are not stored, because they include a copy of a weight in each layer.
    "none": lambda primitive, *_, **__: primitive.name not in ("reshape", "layout_constraint"),
    "full": None,
    "dots": jax.checkpoint_policies.save_only_these_names("projection"),
}


def rms_norm(
    x: Float[Array, "dim tokens"], weight: Float[Array, " dim"], eps: float
) -> Float[Array, "dim tokens"]:
    """Applies RMS normalization over the first axis. The computation is in float32, and the result has the dtype of `x`."""
    wide = x.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=0, keepdims=True) + eps)
    return (scaled * weight.astype(jnp.float32)[:, None]).astype(x.dtype)


def rope_tables(positions: Int[Array, " tokens"], config: DecoderConfig) -> tuple[RopeTables, ...]:
    """Returns the tables of each rotation in `config.ropes` for the given positions."""
    width = max(rope.width(config.head_dim) if rope else 2 for rope in config.ropes)
    growth: RopeTables = ()
    if config.query_growth is not None:
        beta, original = config.query_growth
        growth = (1.0 + beta * jnp.log1p(jnp.floor(positions.astype(jnp.float32)[None] / original)),)
    tables = []
    for rope in config.ropes:
        # Without a rotation, the angles are 0, which is exact.
        still = np.zeros(width // 2, np.float32)
        frequencies = still if rope is None else rope_frequencies(width, rope.theta, rope.scaling)
        angles = jnp.asarray(frequencies)[:, None] * positions.astype(jnp.float32)[None]
        amplitude = rope.scaling.amplitude if rope and rope.scaling else 1.0
        tables.append((jnp.cos(angles) * amplitude, jnp.sin(angles) * amplitude, *growth))
    return tuple(tables)


def rotary(
    x: Float[Array, "heads head_dim tokens"], rope: RopeTables
) -> Float[Array, "heads head_dim tokens"]:
    """Applies rotary position embedding (Su et al. 2021). As in Llama, dimension i is paired with dimension i + rotated / 2. Other dimensions pass unchanged."""
    cos, sin = (part[None] for part in rope[:2])
    rotated, wide = 2 * cos.shape[1], x.astype(jnp.float32)
    first, second = jnp.split(wide[:, :rotated], 2, axis=1)
    rest = [] if rotated == x.shape[1] else [wide[:, rotated:]]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, *rest], axis=1).astype(
        x.dtype
    )


def _weight(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], fan_in: int) -> nnx.Param[Array]:
    return nnx.Param(jax.random.normal(rngs.params(), shape) * fan_in**-0.5, axes=axes)


def _filled(value: float, shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param[Array]:
    # Without an explicit dtype, the arrays would be weakly typed, and all programs would be compiled again after the first update.
    return nnx.Param(jnp.full(shape, value, jnp.float32), axes=axes)


def _table(rngs: nnx.Rngs, config: DecoderConfig) -> nnx.Param[Array]:
    """Returns an embedding table with one row per vocabulary entry. The initial values do not depend on the number of padding rows."""
    initial = jax.random.normal(rngs.params(), (config.vocab_size, config.embed_dim)) * config.embed_dim**-0.5
    rows = ((0, config.vocab_rows - config.vocab_size), (0, 0))
    return nnx.Param(jnp.pad(initial, rows), axes=("vocab", "embed"))


def _norm(
    config: DecoderConfig, shape: tuple[int, ...], axes: tuple[str, ...] = ("norm",)
) -> nnx.Param[Array]:
    return _filled(1.0 - config.norm_offset, shape, axes)


def _offset(config: DecoderConfig, weight: Array) -> Array:
    """Returns the factors of a norm with the stored weight `weight`."""
    return weight + config.norm_offset if config.norm_offset else weight


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"silu": jax.nn.silu, "gelu_tanh": jax.nn.gelu}


class Block(nnx.Module):
    """One transformer layer: attention and a gated MLP. Both add their output to the residual stream, and have a norm before them, after them, or both."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        compute_dtype: str = "float32",
        layout: Layout = WHOLE,
        delta: bool = False,
    ) -> None:
        """Initializes a layer. With `delta`, it has Gated DeltaNet in place of attention (see `dapo_jax.models.gated_delta`)."""
        embed, hidden, dim = config.embed_dim, config.mlp_dim, config.head_dim
        heads, kv_heads = config.heads, config.kv_heads
        self.delta = delta
        self.config, self.compute_dtype, self.layout = config, compute_dtype, layout
        if config.norm_place != "outputs":
            self.attention_norm = _norm(config, (embed,))
            self.mlp_norm = _norm(config, (embed,))
        if config.norm_place != "inputs":
            self.attention_out_norm = _norm(config, (embed,))
            self.mlp_out_norm = _norm(config, (embed,))
        # The two matrices whose results are added to the residual stream have smaller initial values in deeper models.
        writers = 2 * config.layers
        if delta:
            self._init_delta(config, rngs, writers)
        else:
            width = dim * (1 + config.attention_gate)
            self.query = _weight(rngs, (heads, width, embed), ("heads", "head_dim", "embed"), embed)
            self.key = _weight(rngs, (kv_heads, dim, embed), ("kv_heads", "head_dim", "embed"), embed)
            self.value = _weight(rngs, (kv_heads, dim, embed), ("kv_heads", "head_dim", "embed"), embed)
            self.output = _weight(
                rngs, (embed, heads, dim), ("embed", "heads", "head_dim"), heads * dim * writers
            )
        many, each = ((), ()) if config.experts is None else ((config.experts.count,), ("experts",))
        if config.experts is not None:
            # The last axis keeps the router in float32, as it keeps norms.
            self.router = _weight(rngs, (*many, embed), ("features", "norm"), embed)
        self.gate = _weight(rngs, (*many, hidden, embed), (*each, "mlp", "embed"), embed)
        self.up = _weight(rngs, (*many, hidden, embed), (*each, "mlp", "embed"), embed)
        self.down = _weight(rngs, (*many, embed, hidden), (*each, "embed", "mlp"), hidden * writers)
        if config.qkv_bias:
            self.query_bias = _filled(0.0, (heads, dim), ("heads", "head_dim"))
            self.key_bias = _filled(0.0, (kv_heads, dim), ("kv_heads", "head_dim"))
            self.value_bias = _filled(0.0, (kv_heads, dim), ("kv_heads", "head_dim"))
        if config.output_bias:
            self.output_bias = _filled(0.0, (embed,), ("features",))
        if config.mlp_bias:
            self.gate_bias = _filled(0.0, (hidden,), ("mlp",))
            self.up_bias = _filled(0.0, (hidden,), ("mlp",))
            self.down_bias = _filled(0.0, (embed,), ("features",))
        if config.qk_norm == "head" and not delta:
            self.query_norm = _norm(config, (dim,))
            self.key_norm = _norm(config, (dim,))
        if config.qk_norm == "all":
            self.query_norm = _norm(config, (heads, dim), ("heads", "norm"))
            self.key_norm = _norm(config, (kv_heads, dim), ("kv_heads", "norm"))
        if config.lora is not None:
            for name in adapted_in(config.lora.targets, delta=delta).values():
                weight = getattr(self, name)
                pair = adapter(rngs, config.lora.rank, weight[...], weight.get_metadata()["axes"])
                for part, made in zip(LORA_PARTS, pair, strict=True):
                    setattr(self, f"{name}_{part}", made)

    def _init_delta(self, config: DecoderConfig, rngs: nnx.Rngs, writers: int) -> None:
        sizes, embed = config.delta, config.embed_dim
        assert sizes is not None
        keys, values = (sizes.key_heads, sizes.key_dim), (sizes.value_heads, sizes.value_dim)
        of_keys, of_values = ("kv_heads", "head_dim"), ("heads", "head_dim")
        self.query = _weight(rngs, (*keys, embed), (*of_keys, "embed"), embed)
        self.key = _weight(rngs, (*keys, embed), (*of_keys, "embed"), embed)
        self.value = _weight(rngs, (*values, embed), (*of_values, "embed"), embed)
        # The last axis keeps the filters in float32, as it keeps norms.
        one, taps = ("features", "norm"), sizes.taps
        self.query_conv = _weight(rngs, (*keys, 1, taps), (*of_keys, *one), taps)
        self.key_conv = _weight(rngs, (*keys, 1, taps), (*of_keys, *one), taps)
        self.value_conv = _weight(rngs, (*values, 1, taps), (*of_values, *one), taps)
        self.value_gate = _weight(rngs, (*values, embed), (*of_values, "embed"), embed)
        self.write = _weight(rngs, (sizes.value_heads, embed), ("heads", "embed"), embed)
        self.forget = _weight(rngs, (sizes.value_heads, embed), ("heads", "embed"), embed)
        # As in Mamba-2 (Dao and Gu 2024, https://arxiv.org/abs/2405.21060), rates are uniform from 1 to 16, and steps log-uniform from 0.001 to 0.1.
        rates, steps = (
            jax.random.uniform(rngs.params(), (sizes.value_heads,), jnp.float32, *ends)
            for ends in ((1.0, 16.0), (math.log(0.001), math.log(0.1)))
        )
        self.decay = nnx.Param(jnp.log(rates), axes=("heads_norm",))
        self.step_bias = nnx.Param(jnp.log(jnp.expm1(jnp.exp(steps))), axes=("heads_norm",))
        self.delta_norm = _filled(1.0, (sizes.value_dim,), ("norm",))
        self.output = _weight(rngs, (embed, *values), ("embed", *of_values), sizes.outputs * writers)

    def _attended(
        self, x: Float[Array, "embed tokens"], rope: RopeTables, attend: Attend
    ) -> tuple[Float[Array, "features tokens"], Any]:
        """Returns the input of the output projection, and the second result of `attend`."""
        if self.delta:
            query, key, value, gate, write, forget = self._project(OF_ATTENTION, x)
            steps = jax.nn.softplus(forget + self.step_bias[...][:, None])
            decay = -jnp.exp(self.decay[...])[:, None] * steps
            filters = self.query_conv[...], self.key_conv[...], self.value_conv[...]
            out, kept = attend(Mixed(query, key, value, decay, jax.nn.sigmoid(write), filters))
            per_head = jax.vmap(rms_norm, in_axes=(0, None, None))
            out = per_head(out, self.delta_norm[...], self.config.norm_eps) * jax.nn.silu(gate)
            return out.reshape(-1, out.shape[2]), kept
        query, key, value, gate = self._queries_keys_values(x, rope)
        out, kept = attend(query, key, value)
        out = out if gate is None else out * jax.nn.sigmoid(gate)
        return out.reshape(-1, out.shape[2]), kept

    def _queries_keys_values(
        self, x: Float[Array, "embed tokens"], rope: RopeTables
    ) -> tuple[
        Float[Array, "heads dim tokens"], Float[Array, "kv dim tokens"], Float[Array, "kv dim tokens"],
        Float[Array, "heads dim tokens"] | None,
    ]:  # fmt: skip
        """Returns queries, keys, values, and the gate before its sigmoid if there is one. RoPE is applied to queries and keys."""
        config = self.config
        query, key, value = self._project(OF_ATTENTION[:3], x)
        query, gate = jnp.split(query, 2, axis=1) if config.attention_gate else (query, None)
        if config.qkv_bias:
            query, key, value = (
                part + self._bias(name) for part, name in ((query, "query"), (key, "key"), (value, "value"))
            )
        if config.qk_norm != "none" and not config.qk_norm_after_rope:
            if self.query.get_metadata("joined", None) and len(self.query.get_value()) == 1:
                kernel = partial(self._heads_normed, together=True)
                query, key = jax.lax.platform_dependent(query, key, cuda=kernel, default=self._heads_normed)
            else:
                query, key = self._heads_normed(query, key)
        if (most := config.clip_qkv) is not None:
            query, key, value = (jnp.clip(part, -most, most) for part in (query, key, value))
        query, key = rotary(query, rope), rotary(key, rope)
        if config.qk_norm_after_rope:
            query, key = self._heads_normed(query, key)
        if config.query_growth is not None:
            query = query * rope[2][None]
        if config.query_scale is not None:
            # Attention divides by the square root of head_dim.
            query = query * (config.query_scale * config.head_dim**0.5)
        return query, key, value, gate

    def _heads_normed(self, query: Array, key: Array, *, together: bool = False) -> tuple[Array, Array]:
        """Normalizes queries and keys. `together`: one kernel of a GPU computes the sums of all heads. Several devices would have to exchange heads."""
        if not together or self.config.qk_norm != "head":
            return self._normed("query_norm", query), self._normed("key_norm", key)
        both = jnp.concatenate([query, key])
        factors = jax.lax.rsqrt(jnp.mean(both * both, axis=1, keepdims=True) + self.config.norm_eps)
        of_query, of_key = (_offset(self.config, norm[...]) for norm in (self.query_norm, self.key_norm))
        query = query * factors[: len(query)] * of_query[None, :, None]
        return query, key * factors[len(query) :] * of_key[None, :, None]

    def _bias(self, name: str) -> Array:
        return rounded(getattr(self, f"{name}_bias")[...], self.compute_dtype)[..., None]

    def _normed(self, name: str, x: Array) -> Array:
        """Normalizes features [features, tokens], or queries or keys [heads, head_dim, tokens]."""
        config, weight = self.config, _offset(self.config, getattr(self, name)[...])
        if x.ndim == 2:
            return rms_norm(x, weight, config.norm_eps)
        if config.qk_norm == "head":
            return jax.vmap(rms_norm, in_axes=(0, None, None))(x, weight, config.norm_eps)
        wide = x.astype(jnp.float32)
        heads = config.heads if name == "query_norm" else config.kv_heads
        total = self.layout.over_heads((wide * wide).sum((0, 1)))
        scaled = wide * jax.lax.rsqrt(total / (heads * config.head_dim) + config.norm_eps)[None, None]
        return (scaled * weight[..., None]).astype(x.dtype)

    def __call__(
        self, x: Float[Array, "embed part"], rope: RopeTables, attend: Attend, routes: Integer[Array, "tokens chosen"] | None = None
    ) -> tuple[Float[Array, "embed part"], Any, Int[Array, "tokens chosen"] | None]:  # fmt: skip
        """Returns the layer's output, the second result of `attend`, and the router's own choice of experts (None if there are no experts).

        `rope` contains the RoPE tables for the tokens' positions. `routes` contains the experts to use, or `NO_ROUTE` for the router's own choice.
        """
        inner, outer = (
            partial(part, dtype=self.compute_dtype) for part in (self.layout.inner, self.layout.outer)
        )
        before, after = self.config.norm_place != "outputs", self.config.norm_place != "inputs"

        def added(x: Array, name: str, product: Array) -> Array:
            """Adds a product, with its bias and its norm, to the residual stream."""
            change = outer(product)
            if hasattr(self, f"{name}_bias"):
                change = change + self._bias(name)
            if after:
                change = self._normed("attention_out_norm" if name == "output" else "mlp_out_norm", change)
            return x + (change if self.config.residual_scale == 1.0 else change * self.config.residual_scale)

        normed = inner(self._normed("attention_norm", x) if before else x)
        attended, kept = self._attended(normed, rope, attend)
        x = added(x, "output", *self._project(("output",), attended))
        y = self._normed("mlp_norm", x) if before else x
        if self.config.experts is not None:
            scores = self.layout.inner(self._scores(y), "float32")
            own, used, factors = chosen(scores, self.config.experts, routes)
            matrices = self.gate[...], self.up[...], self.down[...]
            mix = partial(mixture, activation=_ACTIVATIONS[self.config.activation], dtype=self.compute_dtype)
            given = mix, inner(y), factors, used, matrices, self.compute_dtype
            return added(x, "down", self.layout.experts(*given)), kept, own
        y = inner(y)

        gate, up = self._project(OF_MLP, y)
        if self.config.mlp_bias:
            gate, up = gate + self._bias("gate"), up + self._bias("up")
        gated = _ACTIVATIONS[self.config.activation](gate) * up
        return added(x, "down", *self._project(("down",), gated)), kept, None

    def _scores(self, y: Float[Array, "embed part"]) -> Float[Array, "experts part"]:
        """Returns the router's scores in float32, whatever the compute dtype is, because the choice must not depend on rounding."""
        wide = np.promote_types(self.compute_dtype, np.float32)
        operands = self.router[...].astype(wide), y.astype(wide)
        return jnp.einsum("ei,it->et", *operands, precision=jax.lax.Precision.HIGHEST)

    def _project(self, names: Sequence[str], x: Float[Array, "inputs tokens"]) -> list[Array]:
        """Multiplies `x` by the weights `names`, and adds the contribution of their adapters. The weights may be joined.

        The results are named so that a `jax.checkpoint` policy can select them.
        """
        products = dict(zip(names, self._products(names, x), strict=True))
        if adapted := [name for name in names if hasattr(self, f"{name}_{LORA_PARTS[0]}")]:
            assert self.config.lora is not None
            first, second = ([f"{name}_{part}" for name in adapted] for part in LORA_PARTS)
            for name, low, b in zip(adapted, self._products(first, x), second, strict=True):
                products[name] = products[name] + self._products([b], low)[0] * self.config.lora.scale
        return [checkpoint_name(each, "projection") for each in products.values()]

    def _products(self, names: Sequence[str], x: Float[Array, "inputs tokens"]) -> list[Array]:
        """Multiplies `x` by parameters. Their logical axes state the dimensions that a product sums over (see `output_dimensions`)."""
        products = []
        for variable in (getattr(self, name) for name in names):
            weight, axes = variable.get_value(), variable.get_metadata()["axes"]
            if weight is None:  # It is joined with an earlier matrix.
                continue
            outputs = output_dimensions(axes).stop
            if len(axes) > outputs + 1:
                # If heads and head_dim were separate axes, XLA would transpose the weight in every call.
                weight = weight.reshape(len(weight), -1)
            sharding = self.layout.weight_sharding(axes[: outputs + 1])
            # Results of adapters are small, so their partial sums are added in float32.
            in_parts = "rank" not in axes and self.layout.in_parts(axes[outputs])
            spec = "hdi,it->hdt" if outputs == 2 else "oi,it->ot"
            made = product(spec, weight, x, self.compute_dtype, sharding, in_parts=in_parts)
            shapes = variable.get_metadata("joined", None)
            products += [made] if shapes is None else split(made, shapes)
        return products


class EmbeddingAndHead(nnx.Module):
    """The layers before and after the blocks: embedding, final norm and unembedding."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        compute_dtype: str = "float32",
        layout: Layout = WHOLE,
    ) -> None:
        self.config, self.compute_dtype, self.layout = config, compute_dtype, layout
        self.embedding = _table(rngs, config)
        self.final_norm = _norm(config, (config.embed_dim,))
        if not config.tied_embeddings:
            self.lm_head = _table(rngs, config)

    def embed(self, tokens: Int[Array, " tokens"]) -> Float[Array, "embed part"]:
        """Returns the embeddings of `tokens`, which are the initial residual stream."""
        table = self.embedding[...]
        if isinstance(table, Quantized):
            found = rounded(table.rows(tokens), self.compute_dtype).T
        else:
            found = self.layout.lookup(table, tokens, self.compute_dtype)
        scale = self.config.embed_scale
        return found if scale == 1.0 else found * rounded(jnp.float32(scale), self.compute_dtype)

    def unembedding(self) -> Float[Array, "vocab embed"] | Quantized:
        """Returns the matrix that maps final hidden states to logits, with one row per vocabulary entry."""
        return (self.embedding if self.config.tied_embeddings else self.lm_head)[...]

    def normed(self, x: Float[Array, "embed tokens"]) -> Float[Array, "tokens embed"]:
        """Applies the final norm and the divisor of the logits, and transposes the result, so that it has one row per token."""
        normed = rms_norm(x, _offset(self.config, self.final_norm[...]), self.config.norm_eps)
        if self.config.logit_divisor != 1.0:
            normed = normed / self.config.logit_divisor
        # Without the barrier, XLA fuses the transpose into the product with the unembedding, which is slower on CPU.
        return jax.lax.optimization_barrier(normed.T)

    def logits(self, hidden: Float[Array, "*tokens embed"]) -> Float[Array, "*tokens vocab"]:
        """Returns float32 logits for hidden states after the final norm. Logits of vocabulary padding are -inf."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        logits = capped(
            product("ve,te->tv", self.unembedding(), flat, self.compute_dtype), self.config.logit_cap
        )
        if logits.shape[1] != self.config.vocab_size:
            entry = jnp.arange(logits.shape[1], dtype=jnp.int32)
            logits = jnp.where(entry[None] < self.config.vocab_size, logits, -jnp.inf)
        return logits.reshape(*hidden.shape[:-1], -1)


class Decoder(nnx.Module):
    """The network for training. It processes whole rows of tokens with the layers of `EmbeddingAndHead` and the blocks."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        compute_dtype: str = "float32",
        remat: str = "none",
        layout: Layout = WHOLE,
    ) -> None:
        """Initializes random weights in float32.

        Args:
            config: sizes and architecture options.
            rngs: random keys.
            compute_dtype: dtype of matrix products.
            remat: `none` stores all activations, `full` recomputes layers in the backward pass, `dots` stores only the results of projections.
            layout: how arrays are distributed over devices.
        """
        self.remat = remat
        how: dict[str, Any] = {"compute_dtype": compute_dtype, "layout": layout}
        self.ends = EmbeddingAndHead(config, rngs=rngs, **how)
        self.blocks = nnx.vmap(lambda keys: Block(config, rngs=keys, **how))(
            rngs.split(config.count("blocks"))
        )
        if count := config.count("delta_blocks"):
            self.delta_blocks = nnx.vmap(lambda keys: Block(config, rngs=keys, delta=True, **how))(
                rngs.split(count)
            )

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        positions: Int[Array, "batch seq"],
        segment_ids: Int[Array, "batch seq"],
        prefix_ids: Int[Array, "batch seq"] | None = None,
        routes: Integer[Array, "batch seq layers chosen"] | None = None,
    ) -> Any:
        """Returns the final hidden states of whole rows, [batch, row, embed]. Column t depends on the tokens of its segment (and of its prompt) up to t.

        With experts, it also returns a dictionary: `flipped` [batch, seq], the number of layers in which the router's own choice differs from the forced
        choice in `routes`, and `load` [layers, experts], the number of tokens that use each expert, without padding.
        """
        config, layout, dtype = self.ends.config, self.ends.layout, self.ends.compute_dtype
        tables = rope_tables(positions.reshape(-1), config)
        given = config.rope_of_layer, config.windows
        turns, windows = (jnp.asarray(part, jnp.int32) if part else None for part in given)
        tables = tables[0] if turns is None else tuple(map(jnp.stack, zip(*tables, strict=True)))

        same: dict[str, Any] = {"windows": config.windows, "cap": config.score_cap}
        same["sequences"] = layout.sequences(segment_ids, prefix_ids)

        def attend(query: Array, key: Array, value: Array, window: Array | None) -> tuple[Array, None]:
            near = None if window is None else (window, positions)
            out = layout.attend(query, key, value, segment_ids, prefix_ids, dtype, near=near, **same)
            return out, None

        def counted(own: Array, forced: Array | None) -> dict[str, Array]:
            assert config.experts is not None
            used = own if forced is None else jnp.where(forced == NO_ROUTE, own, forced)
            kept = (own[:, :, None] == used[:, None]).any(2).all(1)
            real = (segment_ids.reshape(-1) > 0).astype(jnp.int32)
            hits = jax.nn.one_hot(used, config.experts.count, dtype=jnp.int32) * real[:, None, None]
            return {"flipped": (~kept).astype(jnp.int32), "load": hits.sum((0, 1), dtype=jnp.int32)}

        def scanned(stack: str, **mix: Any) -> tuple[Callable[..., Any], Any, nnx.State]:
            """Returns a function that applies a layer of this stack, and the layers' indices and weights to scan."""
            blocks = getattr(self, stack)
            count = config.count(stack)
            graph, apart, stacked = nnx.split(blocks, lambda _, leaf: _is_tuple(leaf.get_value()), ...)

            def chosen(at: int) -> nnx.State:
                return jax.tree.map(lambda arrays: as_stored(arrays[at]), apart, is_leaf=_is_tuple)

            def layer(x: Array, given: tuple[Any, ...]) -> tuple[Array, dict[str, Array] | None]:
                index, turn, window, weights, forced = given
                if apart:
                    weights = nnx.merge_state(
                        weights, jax.lax.switch(index, [partial(chosen, at) for at in range(count)])
                    )
                rope = tables if turn is None else tuple(table[turn] for table in tables)
                how = mix.get("attend") or partial(attend, window=window)
                x, _, own = nnx.merge(graph, weights)(x, rope, how, forced)
                return x, None if own is None else counted(own, forced)

            # Without `jax.checkpoint`, the scan would store a copy of each chosen layer's weights for the backward pass.
            if self.remat != "none" or apart:
                layer = jax.checkpoint(layer, policy=REMAT_POLICIES[self.remat])
            return layer, jnp.arange(count, dtype=jnp.int32) if apart else None, stacked

        # With a single token axis, the backward pass on CPU is 1.6 times as fast as with two axes.
        x = self.ends.embed(tokens.reshape(-1))
        if routes is not None:
            routes = routes.astype(jnp.int32).reshape(-1, *routes.shape[2:]).transpose(1, 0, 2)
        layer, index, stacked = scanned("blocks")
        if config.delta is None:
            x, counts = jax.lax.scan(layer, x, (index, turns, windows, stacked, routes))
        else:
            prefix = layout.prompts(prefix_ids)
            places = () if prefix is None else ancestors(segment_ids, prefix, config.delta.taps - 1)
            mix = partial(over_rows, segment_ids=segment_ids, prefix_ids=prefix, places=places)
            delta_layer, *delta = scanned("delta_blocks", attend=mix)
            x, counts = _in_periods(
                x, config.period, {"blocks": layer, "delta_blocks": delta_layer},
                {"blocks": (index, None, None, stacked, None), "delta_blocks": (delta[0], None, None, delta[1], None)},
            ), None  # fmt: skip
        hidden = self.ends.layout.rows(self.ends.normed(x), tokens.shape, self.ends.compute_dtype)
        if counts is None:
            return hidden
        return hidden, {**counts, "flipped": counts["flipped"].sum(0, dtype=jnp.int32).reshape(tokens.shape)}


def _in_periods(
    x: Array, period: tuple[str, ...], layers: dict[str, Callable[..., Any]], given: dict[str, Any]
) -> Array:
    """Applies layers of several stacks. `period` contains the stacks of the layers in one period, and `given` the scanned arguments of each stack."""
    of_period = {
        name: jax.tree.map(
            lambda leaf, name=name: leaf.reshape(-1, period.count(name), *leaf.shape[1:]), given[name]
        )
        for name in given
    }

    def one(x: Array, given: dict[str, Any]) -> tuple[Array, None]:
        taken = dict.fromkeys(given, 0)
        for name, run in groupby(period):
            first, taken[name] = taken[name], taken[name] + len(list(run))
            part = jax.tree.map(lambda leaf, cut=slice(first, taken[name]): leaf[cut], given[name])
            x, _ = jax.lax.scan(layers[name], x, part)
        return x, None

    return jax.lax.scan(one, x, of_period)[0]


def graph_of(config: DecoderConfig, **how: Any) -> nnx.GraphDef[Any]:
    """Returns the graph definition of `Decoder(config, **how)`. `nnx.merge` combines a graph definition with parameters."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), **how)))[0]


def empty_state(config: DecoderConfig, sequences: int, compute_dtype: str) -> DeltaState:
    """Returns the state of a Gated DeltaNet layer before the first token. It is float32, or float64 if the compute dtype is float64."""
    sizes = config.delta
    assert sizes is not None
    keys, values = (sizes.key_heads, sizes.key_dim), (sizes.value_heads, sizes.value_dim)
    return empty(sequences, keys, values, sizes.taps, np.promote_types(compute_dtype, np.float32))


def stacks_of(params: nnx.State) -> tuple[str, ...]:
    """Returns the names of the stacks of layers in parameters, which may consist of adapters only (see `DecoderConfig.places`)."""
    return tuple(name for name in ("blocks", "delta_blocks") if name in params)


def unstacked(params: nnx.State) -> nnx.State:
    """Converts parameters with stacked layers to parameters with separate arrays per layer, as the sampler stores them."""
    made = {}
    for name in stacks_of(params):
        blocks = params[name]
        count = len(jax.tree.leaves(blocks)[0])
        made[name] = {index: jax.tree.map(lambda leaf, index=index: leaf[index], blocks) for index in range(count)}  # fmt: skip
    return nnx.State({**params, **made})


def is_apart(params: nnx.State) -> bool:
    """Returns whether the parameters have separate arrays per layer (see `unstacked`)."""
    return any(0 in params[name] for name in stacks_of(params))


def in_tuples(params: nnx.State) -> nnx.State:
    """Converts the result of `unstacked` to the structure of `Decoder`. Each block variable contains a tuple with one array per layer."""
    made = {}
    for name in stacks_of(params):
        layers = [params[name][index] for index in range(len(params[name]))]
        made[name] = jax.tree.map(lambda *arrays: arrays, *layers)
    return nnx.State({**params, **made})


def _is_tuple(value: Any) -> bool:
    return isinstance(value, tuple)
