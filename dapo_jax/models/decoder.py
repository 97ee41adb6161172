"""The decoder of all model families, for training and sampling. Families differ in the options and the layers of `DecoderConfig`.

A `Block` does not combine tokens itself, but passes the inputs of its mixer to a function `attend`, which the mixer returns (see `kinds.Mixer`): in
training, a function of whole rows, and in the sampler, functions that read and write the layer's state. In this way, trainer
and sampler use the same definition of the network. The sampler's weights may be `Quantized`.

Layers of one kind are stacked along a leading axis and scanned, so compile time does not grow with depth. Every parameter declares
its logical axes, and `parallel.sharding` maps them to mesh axes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Integer

from dapo_jax.dapo.tokens import NO_ROUTE
from dapo_jax.models.device_layout import Layout
from dapo_jax.models.experts import as_stored
from dapo_jax.models.layer_kinds import Attend, LayerKind, TrainingRows
from dapo_jax.models.lora import adapter
from dapo_jax.models.parameters import Parameter, norm
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.models.projections import Projections, rms_norm, rope_tables, with_offset
from dapo_jax.models.rope import RopeTables
from dapo_jax.numerics.precision import capped, product, rounded
from dapo_jax.numerics.quantization import Quantized

WHOLE = Layout()

REMAT_POLICIES: dict[str, Callable[..., Any] | None] = {
    # Reshapes and orders in memory (`as_stored`) are not stored, because they include a copy of a weight in each layer.
    "none": lambda primitive, *_, **__: primitive.name not in ("reshape", "layout_constraint"),
    "full": None,
    "dots": jax.checkpoint_policies.save_only_these_names("projection"),
}


class Block(Projections):
    """One layer: a mixer and an MLP. Both add their output to the residual stream, and have a norm before them, after them, or both."""

    def __init__(
        self,
        config: DecoderConfig,
        kind: LayerKind,
        *,
        rngs: nnx.Rngs,
        compute_dtype: str = "float32",
        layout: Layout = WHOLE,
    ) -> None:
        self.kind, self.config, self.compute_dtype, self.layout = kind, config, compute_dtype, layout
        parameters = kind.parameters(config)
        for name, parameter in parameters.items():
            setattr(self, name, parameter.variable(rngs))
        if config.lora is not None:
            targets = {parameter.target: name for name, parameter in parameters.items()}
            for name in (targets[target] for target in config.lora.targets if target in targets):
                for part, variable in adapter(rngs, config.lora.rank, name, parameters[name]).items():
                    setattr(self, part, variable)

    def __call__(
        self, x: Float[Array, "embed part"], rope: RopeTables, attend: Attend | None, routes: Integer[Array, "tokens chosen"] | None = None,
        inputs: Float[Array, "features part"] | None = None,
    ) -> tuple[Float[Array, "embed part"], Any, Int[Array, "tokens chosen"] | None]:  # fmt: skip
        """Returns the layer's output, the second result of `attend`, and the MLP's own choice of experts (None if there are no experts).

        `rope` contains the RoPE tables for the tokens' positions. A layer without a mixer has no `attend`. `routes` contains the experts to use, or `NO_ROUTE` for the router's own choice. `inputs` contains
        the layer's own embeddings of the tokens, if it has any.
        """
        (mixer, mlp), kept, own = (self.kind.mixer, self.kind.mlp), None, None
        if mixer is not None and attend is not None:
            normed = self.normed("attention_norm", x) if self.config.norm_place != "outputs" else x
            mixed, kept = mixer.mix(self, self.layout.inner(normed, dtype=self.compute_dtype), rope, attend)
            x = self.added(x, "output", "attention_out_norm", *self.project(("output",), mixed))
        if mlp is not None:
            x, own = mlp.add(self, x, routes, inputs)
        return x, kept, own

    def added(self, x: Array, name: str, norm: str, product: Array) -> Array:
        """Adds a product, with its bias and its norm, to the residual stream."""
        change = self.layout.outer(product, dtype=self.compute_dtype)
        if hasattr(self, f"{name}_bias"):
            change = change + self.bias(name)
        if self.config.norm_place != "inputs":
            change = self.normed(norm, change)
        return x + (change if self.config.residual_scale == 1.0 else change * self.config.residual_scale)


def end_parameters(config: DecoderConfig) -> dict[str, Parameter]:
    """Returns the parameters before and after the layers. The tables have padding rows, which files do not have."""
    table: dict[str, Any] = {
        "shape": (config.vocab_rows, config.embed_dim),
        "axes": ("vocab", "embed"),
        "fan_in": config.embed_dim,
    }
    found = {
        "embedding": Parameter(**table, tensor="model.embed_tokens.weight"),
        "final_norm": norm(config, config.embed_dim, tensor="model.norm.weight"),
        **({} if config.tied_embeddings else {"lm_head": Parameter(**table, tensor="lm_head.weight")}),
    }  # fmt: skip
    if dim := config.layer_embed_dim:
        wide = config.layers * dim
        table |= {"shape": (config.vocab_rows, wide), "axes": ("vocab", "layer_embed")}
        found |= {
            "layer_embedding": Parameter(**table, tensor="model.embed_tokens_per_layer.weight"),
            "layer_projection": Parameter(
                shape=(wide, config.embed_dim), axes=("features", "embed"), fan_in=config.embed_dim, tensor="model.per_layer_model_projection.weight"
            ),
            "layer_projection_norm": norm(config, dim, tensor="model.per_layer_projection_norm.weight"),
        }  # fmt: skip
    return found


def _table(rngs: nnx.Rngs, config: DecoderConfig, parameter: Parameter) -> nnx.Param[Array]:
    """Returns an embedding table with one row per vocabulary entry. The initial values do not depend on the number of padding rows."""
    table: Any = replace(parameter, shape=(config.vocab_size, parameter.shape[1])).variable(rngs)
    return table.replace(jnp.pad(table[...], ((0, config.vocab_rows - config.vocab_size), (0, 0))))


class EmbeddingAndHead(nnx.Module):
    """The layers before and after the blocks: embedding, final norm and unembedding."""

    embedding: nnx.Param[Array]
    final_norm: nnx.Param[Array]
    lm_head: nnx.Param[Array]
    layer_embedding: nnx.Param[Array]
    layer_projection: nnx.Param[Array]
    layer_projection_norm: nnx.Param[Array]

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        compute_dtype: str = "float32",
        layout: Layout = WHOLE,
    ) -> None:
        self.config, self.compute_dtype, self.layout = config, compute_dtype, layout
        for name, parameter in end_parameters(config).items():
            is_table = "vocab" in parameter.axes
            setattr(self, name, _table(rngs, config, parameter) if is_table else parameter.variable(rngs))

    def embed(self, tokens: Int[Array, " tokens"]) -> Float[Array, "embed part"]:
        """Returns the embeddings of `tokens`, which are the initial residual stream."""
        return self._looked_up(self.embedding[...], tokens, self.config.embed_scale)

    def layer_inputs(
        self, tokens: Int[Array, " tokens"], x: Float[Array, "embed part"]
    ) -> Float[Array, "layers dim part"] | None:
        """Returns the embeddings of `tokens` for each layer, to which a projection of the initial residual stream `x` is added, or None if the decoder has none."""
        if not (dim := self.config.layer_embed_dim):
            return None
        found = self._looked_up(self.layer_embedding[...], tokens, dim**0.5, "layer_embed")
        sharding = self.layout.weight_sharding(("features", "embed"))
        made = product("oi,it->ot", self.layer_projection[...], x, self.compute_dtype, sharding)
        made, found = (part.reshape(self.config.layers, dim, -1) for part in (made, found))
        weight = with_offset(self.config, self.layer_projection_norm[...])
        per_layer = jax.vmap(rms_norm, in_axes=(0, None, None))
        normed = per_layer(made * self.config.embed_dim**-0.5, weight, self.config.norm_eps)
        return (normed + found) * 0.5**0.5

    def _looked_up(
        self, table: Any, tokens: Int[Array, " tokens"], scale: float, columns: str = "embed"
    ) -> Array:
        """Returns the rows `tokens` of a table, multiplied by `scale`. `columns` is the logical axis of its columns."""
        if isinstance(table, Quantized):
            found = rounded(table.rows(tokens), self.compute_dtype).T
        else:
            found = self.layout.lookup(table, tokens, self.compute_dtype, columns)
        return found if scale == 1.0 else found * rounded(jnp.float32(scale), self.compute_dtype)

    def unembedding(self) -> Float[Array, "vocab embed"] | Quantized:
        """Returns the matrix that maps final hidden states to logits, with one row per vocabulary entry."""
        return (self.embedding if self.config.tied_embeddings else self.lm_head)[...]

    def normed(self, x: Float[Array, "embed tokens"]) -> Float[Array, "tokens embed"]:
        """Applies the final norm and the divisor of the logits, and transposes the result, so that it has one row per token."""
        normed = rms_norm(x, with_offset(self.config, self.final_norm[...]), self.config.norm_eps)
        if self.config.logit_divisor != 1.0:
            normed = normed / self.config.logit_divisor
        # Without the barrier, XLA fuses the transpose into the product with the unembedding, which is slower on CPU.
        return jax.lax.optimization_barrier(normed.T)

    def logits(self, hidden: Float[Array, "*tokens embed"]) -> Float[Array, "*tokens vocab"]:
        """Returns float32 logits for hidden states after the final norm. Logits of vocabulary padding are -inf."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        logits = product("ve,te->tv", self.unembedding(), flat, self.compute_dtype)
        logits = capped(logits, self.config.logit_cap)
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
        for stack, kind in config.stacks.items():
            block = partial(_block, config, kind, **how)
            setattr(self, stack, nnx.vmap(block)(rngs.split(len(config.layers_of(stack)))))

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        positions: Int[Array, "batch seq"],
        segment_ids: Int[Array, "batch seq"],
        prefix_ids: Int[Array, "batch seq"] | None = None,
        routes: Integer[Array, "batch seq layers chosen"] | None = None,
    ) -> Any:
        """Returns the final hidden states of whole rows, [batch, row, embed]. Column t depends on the tokens of its segment (and of its prompt) up to t.

        `routes` has the experts to use, in which `layers` are the layers with experts, or `NO_ROUTE`.

        With experts, it also returns a dictionary: `flipped` [batch, seq], the number of layers in which the router's own choice differs from the forced
        choice in `routes`, and `load` [layers, experts], the number of tokens that use each expert, without padding.
        """
        config, rows = (
            self.ends.config,
            TrainingRows(segment_ids, prefix_ids, positions, self.ends.layout, self.ends.compute_dtype),
        )
        tables = rope_tables(positions.reshape(-1), config)
        if config.rope_of_layer:
            tables = tuple(map(jnp.stack, zip(*tables, strict=True)))
        # With a single token axis, the backward pass on CPU is 1.6 times as fast as with two axes.
        x = self.ends.embed(tokens.reshape(-1))
        inputs = self.ends.layer_inputs(tokens.reshape(-1), x)
        if routes is not None:
            routes = routes.reshape(-1, *routes.shape[2:]).transpose(1, 0, 2)
        counts, handed = dict[str, dict[str, Array]](), dict[Any, Any]()
        for period, _ in config.periods:
            stacks = {
                name: self._scanned(name, rows, tables, routes, inputs, handed)
                for name in sorted(set(period))
            }
            x, of_stacks = _over_periods(x, period, stacks)
            for name, (kept, counted) in of_stacks.items():
                if kept is not None:
                    handed[config.stacks[name].mixer] = jax.tree.map(lambda leaf: leaf[-1], kept)
                if counted is not None:
                    counts[name] = counted
        hidden = self.ends.layout.rows(self.ends.normed(x), tokens.shape, self.ends.compute_dtype)
        if not counts:
            return hidden
        order = np.argsort([layer for stack in counts for layer in config.layers_of(stack)])
        of_layers = jax.tree.map(lambda *parts: jnp.concatenate(parts), *counts.values())
        flipped = of_layers["flipped"].sum(0, dtype=jnp.int32)
        return hidden, {"flipped": flipped.reshape(tokens.shape), "load": of_layers["load"][order]}

    def _scanned(
        self, stack: str, rows: TrainingRows, tables: tuple[Any, ...], routes: Array | None, inputs: Array | None, handed: Mapping[Any, Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:  # fmt: skip
        """Returns a function that applies a layer of this stack, and its arguments for each layer, to scan. The function returns the residual stream, and a pair: keys
        and values if later layers read them, and counts if there are experts. `handed` has the keys and values of earlier layers, by their mixer."""
        config = self.ends.config
        layers, mixer = config.layers_of(stack), config.stacks[stack].mixer
        graph, apart, stacked = nnx.split(
            getattr(self, stack), lambda _, leaf: _is_tuple(leaf.get_value()), ...
        )
        attend: Any = mixer and mixer.over_rows(config, rows)
        if mixer and mixer.source:
            attend = partial(attend, shared=handed[mixer.source])
        is_read = any(other and other.source == mixer for other in config.mixers if mixer)

        def chosen(at: int) -> nnx.State:
            return jax.tree.map(lambda arrays: as_stored(arrays[at]), apart, is_leaf=_is_tuple)

        def layer(x: Array, given: tuple[Any, ...]) -> tuple[Array, tuple[Any, dict[str, Array] | None]]:
            index, turn, data, weights, forced, own_inputs = given
            if apart:
                branches = [partial(chosen, at) for at in range(len(layers))]
                weights = nnx.merge_state(weights, jax.lax.switch(index, branches))
            rope = tables[0] if turn is None else tuple(table[turn] for table in tables)
            how = partial(attend, **data) if data else attend
            x, kept, own = nnx.merge(graph, weights)(x, rope, how, forced, own_inputs)
            counts = None if own is None else _counts(config, own, forced, rows.segment_ids)
            return x, (kept if is_read else None, counts)

        # Without `jax.checkpoint`, the scan would store a copy of each chosen layer's weights for the backward pass.
        if self.remat != "none" or apart:
            layer = jax.checkpoint(layer, policy=REMAT_POLICIES[self.remat])

        def of_layers(values: Sequence[int]) -> Array:
            return jnp.array([values[layer] for layer in layers], jnp.int32)

        index = jnp.arange(len(layers), dtype=jnp.int32) if apart else None
        turns = of_layers(config.rope_of_layer) if config.rope_of_layer else None
        data = {name: of_layers(values) for name, values in (mixer.data(config) if mixer else {}).items()}
        if routes is not None and layers[0] in config.routed:
            forced = [config.routed.index(at) for at in layers]
            routes = routes if len(forced) == len(routes) else routes[np.array(forced)]
        else:
            routes = None
        return layer, (
            index,
            turns,
            data,
            stacked,
            routes,
            None if inputs is None else inputs[np.array(layers)],
        )


def _counts(config: DecoderConfig, own: Array, forced: Array | None, segment_ids: Array) -> dict[str, Array]:
    """Returns what `Decoder` counts in one layer, from the router's own choices and the forced choices."""
    assert config.experts is not None
    used = own if forced is None else jnp.where(forced == NO_ROUTE, own, forced)
    kept = (own[:, :, None] == used[:, None]).any(2).all(1)
    real = (segment_ids.reshape(-1) > 0).astype(jnp.int32)
    hits = jax.nn.one_hot(used, config.experts.count, dtype=jnp.int32) * real[:, None, None]
    return {"flipped": (~kept).astype(jnp.int32), "load": hits.sum((0, 1), dtype=jnp.int32)}


def _over_periods(
    x: Array, period: tuple[str, ...], stacks: Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]]
) -> tuple[Array, dict[str, Any]]:  # fmt: skip
    """Applies the layers of one segment.

    Args:
        x: the residual stream.
        period: the stacks of the layers in one period (see `DecoderConfig.periods`).
        stacks: the function of each stack, and its arguments for each layer.

    Returns:
        The residual stream, and the second results of the functions by stack, with one entry per layer.
    """
    if len(stacks) == 1:
        x, made = jax.lax.scan(stacks[period[0]][0], x, stacks[period[0]][1])
        return x, {period[0]: made}

    def one_period(x: Array, given: dict[str, Any]) -> tuple[Array, dict[str, Any]]:
        taken, made = dict.fromkeys(given, 0), {name: [] for name in given}
        for name, run in groupby(period):
            first, taken[name] = taken[name], taken[name] + len(list(run))
            part = jax.tree.map(lambda leaf, cut=slice(first, taken[name]): leaf[cut], given[name])
            x, of_run = jax.lax.scan(stacks[name][0], x, part)
            made[name].append(of_run)
        return x, {
            name: jax.tree.map(lambda *parts: jnp.concatenate(parts), *parts) for name, parts in made.items()
        }

    def by_period(name: str, leaf: Array) -> Array:
        return leaf.reshape(-1, period.count(name), *leaf.shape[1:])

    given = {
        name: jax.tree.map(partial(by_period, name), arguments) for name, (_, arguments) in stacks.items()
    }
    x, made = jax.lax.scan(one_period, x, given)
    return x, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), made)


def _block(config: DecoderConfig, kind: LayerKind, rngs: nnx.Rngs, **how: Any) -> Block:
    return Block(config, kind, rngs=rngs, **how)


def graph_of(config: DecoderConfig, **how: Any) -> nnx.GraphDef[Any]:
    """Returns the graph definition of `Decoder(config, **how)`. `nnx.merge` combines a graph definition with parameters."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), **how)))[0]


def stacks_of(params: nnx.State) -> tuple[str, ...]:
    """Returns the names of the stacks of layers in parameters, which may consist of adapters only (see `DecoderConfig.places`)."""
    return tuple(sorted(str(name) for name in params if name != "ends"))


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
