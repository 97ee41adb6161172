"""Prefills several rows of prompts per call. Prompts that are longer than a row are prefilled in chunks.

Each program computes one layer and is called for every layer, so it compiles in seconds instead of minutes. There are three call shapes: all rows, one row,
and one chunk of a sequence that attends to the earlier chunks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Lowered
from jaxtyping import Array, Float, Int

from dapo_jax.models.decoder import Block, EmbeddingAndHead
from dapo_jax.models.experts import choices
from dapo_jax.models.layer_kinds import Fixed, Paged, PrefillPart
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.models.projections import rope_tables
from dapo_jax.models.rope import RopeTables
from dapo_jax.parallel.weights import SamplerWeights
from dapo_jax.sampling.cache import Cache
from dapo_jax.sampling.prompt_packing import PackedPrompts, PrefillShape, pack_prompts

_SCORED = 128
"""Number of tokens whose logits are in memory at the same time while prompts are scored."""


class PromptScores(NamedTuple):
    """The scores of a prompt, on the host. Entry t describes the token at t + 1: the log-probability in nats at temperature 1 of the prompt's token (without
    meaning in the last entry), the most likely token, and its log-probability. Log-probabilities of the same token are bitwise equal."""

    logprobs: Float[np.ndarray, " tokens"]
    top: Int[np.ndarray, " tokens"]
    top_logprobs: Float[np.ndarray, " tokens"]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["layers", "logits", "rows", "starts", "lengths", "states"],
    meta_fields=[],
    drop_fields=["routes", "scores"],
)
@dataclass(frozen=True, kw_only=True)
class Prefix:
    """Prefilled prompts. Insertion does not donate their buffers, so one prompt can be inserted into many slots."""

    layers: tuple[Any, ...]
    """Keys and values of each layer with pages, arranged in the rows of `PackedPrompts`."""
    logits: Float[Array, "prompts vocab"] | Any
    """Logits of each prompt's first response token."""
    rows: Int[Array, " prompts"] | Any
    starts: Int[Array, " prompts"] | Any
    lengths: Int[Array, " prompts"] | Any
    states: tuple[Any, ...] = ()
    """The state at the end of each prompt, of each layer whose state has a fixed size."""
    routes: Sequence[np.ndarray] | None = None
    """The experts chosen for each prompt's tokens, [tokens, layers, chosen], or None if they are not recorded. They stay on the host."""
    scores: Sequence[PromptScores] = ()
    """The scores of each prompt; empty if prompts are not scored."""


Known = Sequence[np.ndarray | None]
"""For each sequence, the recorded experts [tokens, layers, chosen] that its tokens must use, `NO_ROUTE` for the router's own choice, or None."""

Read = list[tuple[int, Prefix, int]]
"""The prompts that one prefill call finished, as tuples `(index in prompts, prefix, index in the prefix)`."""


class Prefill:
    """Prefills prompts with jitted programs on one mesh."""

    def __init__(
        self, config: DecoderConfig, mesh: Mesh, cache: Cache, *, blocks: dict[str, nnx.GraphDef[Block]], ends: nnx.GraphDef[EmbeddingAndHead],
        shape: PrefillShape, capacity: int, cache_dtype: str, compute_dtype: str, routes: tuple[tuple[int, int], str] | None = None,
    ) -> None:  # fmt: skip
        """Builds the programs. `blocks` has the graph definition of the layers in each stack, and `ends` defines the embedding and head. `capacity` is the maximum sequence length.
        With `routes` (see `DecoderConfig.routes`), prefixes contain the chosen experts."""
        self._routes = routes
        self.shape, self._config, self._cache, self._blocks, self._ends = shape, config, cache, blocks, ends
        self._dtype, self._cache_dtype = compute_dtype, cache_dtype
        # Each program is awaited, because the CPU runtime may hang if many programs with collectives are queued.
        self._waits = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
        self._room = -(-capacity // shape.width) * shape.width
        whole, row, buffer = (
            NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), (None, "tensor"), ("tensor",))
        )

        def over_heads(state: Paged | Fixed | None, sharding: NamedSharding) -> NamedSharding:
            return whole if isinstance(state, Paged) and state.value_dim is not None else sharding

        self._embed = jax.jit(self._embed_program, out_shardings=whole)

        mixers: dict[str, Any] = {name: kind.mixer for name, kind in config.stacks.items()}
        self._source = {name: mixer and mixer.source for name, mixer in mixers.items()}
        """The mixer of each stack whose keys and values its layers read, or None."""
        self._handed = {
            name: mixer for name, mixer in mixers.items() if mixer and mixer in self._source.values()
        }
        """The mixer of each stack whose keys and values other layers read. For rows, the programs of these stacks also return keys and values as they are."""
        self._states = dict(zip((name for name, _ in config.places), config.states, strict=True))
        rows = {name: over_heads(state, row) for name, state in self._states.items()}
        sharded = {
            name: over_heads(state, buffer if isinstance(state, Paged) else row)
            for name, state in self._states.items()
        }

        def layer(stack: str, is_chunk: bool) -> Any:
            kept = sharded[stack] if is_chunk else rows[stack]
            kept = (kept, sharded[stack]) if stack in self._handed and not is_chunk else kept
            # Other layers may read the state of a source, too.
            owns = (1,) if self._source[stack] else (1, 2)
            program = partial(self._layer_program, stack, is_chunk)
            return jax.jit(program, donate_argnums=owns, out_shardings=(whole, kept, whole))

        self._layer, self._part = (
            {name: layer(name, is_chunk) for name in rows} for is_chunk in (False, True)
        )
        """The program of each stack for rows and for a chunk, and below, the programs for the state before the first chunk, and for the state after the last."""
        self._empty = {
            name: jax.jit(partial(self._empty_program, state), out_shardings=sharded[name])
            for name, state in self._states.items()
        }
        self._kept = {name: jax.jit(self._kept_program, out_shardings=kept) for name, kept in rows.items()}
        self._head = jax.jit(self._head_program, out_shardings=whole)
        self._scores = jax.jit(self._scores_program, out_shardings=whole)
        self._angles = jax.jit(rope_tables, static_argnums=1, out_shardings=whole)

    def __call__(
        self, params: SamplerWeights, prompts: Sequence[Int[np.ndarray, " _"]], routes: Known = (), *, score: bool = False
    ) -> Iterator[Read]:  # fmt: skip
        """Prefills prompts; prompts longer than a row come last. After each call, yields the list of finished prompts, possibly empty. `routes` has the experts to
        use for the tokens of each prompt, or None. With `score`, prefixes contain the scores of their prompts."""
        routes = routes or (None,) * len(prompts)
        short = [index for index, prompt in enumerate(prompts) if len(prompt) <= self.shape.width]
        for packed in pack_prompts(prompts, short, self.shape) if short else ():
            prefix = self._rows(params, packed, [routes[index] for index in packed.indices], score)
            yield [(index, prefix, position) for position, index in enumerate(packed.indices)]
        for index, prompt in enumerate(prompts):
            if len(prompt) > self.shape.width:
                for prefix in self._parts(params, prompt, routes[index], score):
                    yield [] if prefix is None else [(index, prefix, 0)]

    def programs(
        self, params: SamplerWeights, *, again: bool
    ) -> tuple[dict[str, Callable[[], Lowered]], dict[str, Prefix]]:
        """Returns functions that lower the programs in use, and, for each call shape in use, a prefix that consists of shape structs with shardings.

        `params` may be shape structs. With `again`, programs for re-prefilling are included, because a preempted response may be longer than any prompt.
        """
        lowered: dict[str, Callable[[], Lowered]] = {}
        prefixes, ends = dict[str, Prefix](), params["ends"]
        of_stack = dict(zip((name for name, _ in self._config.places), params["layers"], strict=True))
        row_prompts, width = self.shape.row_prompts, self.shape.width
        used = {"row": 1, "rows": self.shape.rows} if self.shape.rows > 1 else {"row": 1}
        if (self._room if again else self.shape.longest) > width:
            used["part"] = 1
        for name, rows in used.items():
            shapes = (rows * width,), (rows, width), (rows * row_prompts,)
            # These arguments are host arrays, so their structs have no sharding.
            tokens, segments, last = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)
            (x, inputs), ropes = (
                self._embed.eval_shape(ends, tokens),
                self._angles.eval_shape(tokens, self._config),
            )
            record, kept, handed = self._record(len(tokens)), {}, dict[Any, Any]()
            for stack, weights in of_stack.items():
                index, suffix = self._config.layers_of(stack)[0], program_suffix(stack)
                forced = jax.tree.map(
                    lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), self._forced(index, record)
                )
                rope, data = self._of_layer(index, ropes)
                before, layer, one = handed.get(self._source[stack]), self._layer[stack], last
                if name == "part":
                    before, layer = before or self._empty[stack].eval_shape(), self._part[stack]
                    lowered[f"prefill_empty{suffix}"] = self._empty[stack].lower
                    one = jax.ShapeDtypeStruct((1,), jnp.int32)
                number = jax.ShapeDtypeStruct((), jnp.int32)
                arguments = weights, x, before, rope, segments, number, data, segments, one, inputs[index]
                lowered[f"prefill_{name}{suffix}"] = partial(layer.lower, *arguments, **forced)
                _, kept[stack], _ = layer.eval_shape(*arguments, **forced)
                if name == "part":
                    handed |= {self._handed[stack]: kept[stack]} if stack in self._handed else {}
                    if isinstance(self._states[stack], Paged):
                        lowered[f"prefill_kept{suffix}"] = partial(self._kept[stack].lower, kept[stack])
                        kept[stack] = self._kept[stack].eval_shape(kept[stack])
                elif stack in self._handed:
                    kept[stack], handed[self._handed[stack]] = kept[stack]
            if name != "part":
                lowered[f"prefill_{name}_embed"] = partial(self._embed.lower, ends, tokens)
                lowered[f"prefill_{name}_head"] = partial(self._head.lower, ends, x, last)
            layers, fixed = self._by_state([kept[stack] for stack, _ in self._config.places])
            prefixes[name] = Prefix(
                layers=layers, logits=self._head.eval_shape(ends, x, last), rows=last, starts=last, lengths=last, states=fixed,
            )  # fmt: skip
        return lowered, prefixes

    def _rows(self, params: SamplerWeights, packed: PackedPrompts, known: Known, score: bool) -> Prefix:
        begins, lengths = packed.rows * self.shape.width + packed.starts, packed.lengths.tolist()
        record = self._record(packed.tokens.size, *zip(begins.tolist(), known, strict=False))
        last = (begins + packed.lengths - 1).astype(np.int32)
        part = packed.segment_ids, np.int32(0), packed.positions, last
        blank = [None] * self._config.layers
        x, kept, routes = self._through(self._layer, params, packed.tokens, part, record, blank)
        layers, states = self._by_state(kept)
        following = np.roll(packed.tokens.reshape(-1), -1)
        scores = [self._scores(params["ends"], x, following)] if score else []
        rows, starts, sizes = map(jnp.asarray, (packed.rows, packed.starts, packed.lengths))
        return Prefix(
            layers=layers, logits=self._head(params["ends"], x, last), rows=rows, starts=starts, lengths=sizes, states=states,
            routes=self._recorded([routes], begins.tolist(), lengths), scores=self._scored(scores, begins.tolist(), lengths),
        )  # fmt: skip

    def _through(
        self, programs: dict[str, Any], params: SamplerWeights, tokens: np.ndarray, part: tuple[Any, ...], record: np.ndarray | None, states: Sequence[Any],
    ) -> tuple[Array, list[Any], list[Array]]:  # fmt: skip
        """Embeds tokens and calls all layers. `part` has the segment ids, start, positions and last tokens as in `PrefillPart`, `record` the experts to use, and `states`
        each layer's state before the tokens. Returns the hidden states, the layers' states after the tokens, and the choices of the layers with experts."""
        x, inputs = self._embed(params["ends"], tokens.reshape(-1))
        segments, start, positions, last = part
        ropes, after = self._angles(positions.reshape(-1), self._config), list(states)
        handed, routes = dict[Any, Any](), []
        for index, weights in enumerate(params["layers"]):
            rope, data = self._of_layer(index, ropes)
            stack, forced = self._config.places[index][0], self._forced(index, record)
            before = handed.get(self._source[stack], after[index])
            arguments = weights, x, before, rope, segments, start, data, positions, last, inputs[index]
            x, state, own = programs[stack](*arguments, **forced)
            if self._waits:
                jax.block_until_ready((x, state, own))
            after[index] = state
            if mixer := self._handed.get(stack):
                after[index], handed[mixer] = state if programs is self._layer else (state, state)
            routes += [] if own is None else [own]
        return x, after, routes

    def _scored(
        self, calls: Sequence[Any], begins: Sequence[int], lengths: Sequence[int]
    ) -> list[PromptScores]:
        """Copies the scores of sequences to the host, from one call, or from one call per chunk."""
        whole = [np.concatenate(parts) for parts in zip(*jax.device_get(calls), strict=True)]
        places = zip(begins, lengths, strict=True) if whole else ()
        return [PromptScores(*(part[begin : begin + length] for part in whole)) for begin, length in places]

    def _recorded(
        self, calls: Sequence[Sequence[Array]], begins: Sequence[int], lengths: Sequence[int]
    ) -> list[np.ndarray] | None:
        """Copies the experts of sequences to the host, from the layers of one call, or of one call per chunk."""
        if self._routes is None:
            return None
        whole = np.concatenate([np.stack(layers, axis=1) for layers in jax.device_get(calls)])
        return [whole[begin : begin + length].copy() for begin, length in zip(begins, lengths, strict=True)]

    def _record(self, tokens: int, *known: tuple[int, np.ndarray | None]) -> np.ndarray | None:
        """Returns the experts to use for the tokens of a call, from pairs of a first token and a record, or None if experts are not recorded."""
        if self._routes is None:
            return None
        of_token, dtype = self._routes
        record = np.full((tokens, *of_token), np.iinfo(dtype).max, dtype)
        for begin, part in known:
            if part is not None:
                record[begin : begin + len(part)] = part
        return record

    def _forced(self, index: int, record: np.ndarray | None) -> dict[str, np.ndarray]:
        """Returns the argument of a layer's program that forces its experts, if the layer has experts."""
        if record is None or index not in self._config.routed:
            return {}
        return {"forced": np.ascontiguousarray(record[:, self._config.routed.index(index)])}

    def _parts(
        self, params: SamplerWeights, prompt: Int[np.ndarray, " _"], known: np.ndarray | None, score: bool
    ) -> Iterator[Prefix | None]:
        """Prefills one sequence in chunks as wide as a row. Yields None after each chunk except the last, and finally the prefix."""
        width, x = self.shape.width, None
        states: Sequence[Any] = [self._empty[stack]() for stack, _ in self._config.places]
        last, routes, scores = np.zeros(self.shape.row_prompts, np.int32), [], []
        padded = np.pad(prompt, (0, width)).astype(np.int32)
        for start in range(0, len(prompt), width):
            record = self._record(width, (0, None if known is None else known[start : start + width]))
            positions = np.arange(start, start + width, dtype=np.int32)[None]
            tokens, following = padded[start : start + width], padded[start + 1 : start + 1 + width]
            size = min(width, len(prompt) - start)
            real = (np.arange(width)[None] < size).astype(np.int32)
            last[0] = size - 1
            part = real, np.int32(start), positions, last[:1].copy()
            x, states, chosen = self._through(self._part, params, tokens, part, record, states)
            routes.append(chosen)
            if score:
                scores.append(self._scores(params["ends"], x, following))
            if start + width < len(prompt):
                yield None
        zero, length = jnp.zeros(len(last), jnp.int32), jnp.full(len(last), len(prompt), jnp.int32)
        kept = [
            self._kept[stack](state) if isinstance(self._states[stack], Paged) else state
            for (stack, _), state in zip(self._config.places, states, strict=True)
        ]
        layers, fixed = self._by_state(kept)
        yield Prefix(
            layers=layers, logits=self._head(params["ends"], x, last), rows=zero, starts=zero, lengths=length, states=fixed,
            routes=self._recorded(routes, [0], [len(prompt)]), scores=self._scored(scores, [0], [len(prompt)]),
        )  # fmt: skip

    def _by_state(self, kept: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Splits one value per layer into values of layers with pages, and of layers with a state of fixed size."""
        pairs = list(zip(self._config.states, kept, strict=True))
        pages = tuple(value for state, value in pairs if isinstance(state, Paged))
        return pages, tuple(value for state, value in pairs if isinstance(state, Fixed))

    def _of_layer(self, index: int, ropes: Sequence[Any]) -> tuple[Any, dict[str, np.int32]]:
        """Returns the tables of a layer's rotation, which may be shape structs, and its numbers (see `Mixer.data`)."""
        config = self._config
        data = {name: np.int32(value) for name, value in config.data(index).items()}
        return ropes[config.rope_of_layer[index] if config.rope_of_layer else 0], data

    # The programs below are pure functions of their arguments.

    def _embed_program(self, ends: nnx.State, tokens: Array) -> tuple[Array, tuple[Array | None, ...]]:
        """Returns the embeddings, and each layer's own (None if layers have no embeddings)."""
        outer = nnx.merge(self._ends, ends)
        inputs = outer.layer_inputs(tokens, x := outer.embed(tokens))
        return x, (None,) * self._config.layers if inputs is None else tuple(inputs)

    def _layer_program(
        self, stack: str, is_chunk: bool, weights: nnx.State, x: Array, before: Any, rope: RopeTables, segment_ids: Array, start: Array,
        data: dict[str, Array], positions: Array, last: Array, inputs: Array | None, forced: Array | None = None,
    ) -> tuple[Array, Any, Array | None]:  # fmt: skip
        """Calls a layer (see `PrefillPart` for the arguments). Returns its output, its new state, and the router's choice if it is recorded."""
        routes, mixer = None if forced is None else choices(forced), self._config.stacks[stack].mixer

        def store(keys: Array, values: Array | None, rows: int) -> Any:
            kept = self._cache.of_rows(keys, values, rows, self._cache_dtype)
            return (kept, (keys, values)) if stack in self._handed else kept

        part = PrefillPart(segment_ids, positions, last, before, start, store, self._dtype, is_chunk)
        attend: Any = mixer and mixer.prefill(self._config, part, **data)
        x, kept, own = nnx.merge(self._blocks[stack], weights)(x, rope, attend, routes, inputs)
        return x, kept, None if own is None or self._routes is None else own.astype(self._routes[1])

    def _kept_program(self, buffers: tuple[Array, Array | None]) -> Any:
        return self._cache.of_rows(*buffers, 1, self._cache_dtype)

    def _head_program(self, ends: nnx.State, x: Array, last: Array) -> Array:
        outer = nnx.merge(self._ends, ends)
        return outer.logits(outer.normed(x[:, last]))

    def _scores_program(self, ends: nnx.State, x: Array, following: Array) -> tuple[Array, Array, Array]:
        """Returns the fields of `PromptScores` for all tokens of a call, whose next tokens are `following`."""
        outer = nnx.merge(self._ends, ends)

        def block(part: tuple[Array, Array]) -> tuple[Array, Array, Array]:
            logprobs = jax.nn.log_softmax(outer.logits(part[0]))
            chosen = jnp.take_along_axis(logprobs, part[1][:, None], axis=1)[:, 0]
            return chosen, logprobs.argmax(1).astype(jnp.int32), logprobs.max(1)

        padding, tokens = -len(following) % _SCORED, len(following)
        hidden = jnp.pad(outer.normed(x), ((0, padding), (0, 0))).reshape(-1, _SCORED, len(x))
        scores = lax.map(block, (hidden, jnp.pad(following, (0, padding)).reshape(-1, _SCORED)))
        return tuple(part.reshape(-1)[:tokens] for part in scores)

    def _empty_program(self, state: Paged | Fixed | None) -> Any:
        """Returns the state of one sequence before its first chunk."""
        if isinstance(state, Fixed):
            return state.empty(1, self._dtype)
        if state is None:
            return None
        buffer = jnp.zeros((state.kv_heads, state.head_dim, self._room), self._dtype)
        return buffer, buffer if state.value_dim is None else None


def program_suffix(stack: str) -> str:
    """Returns the end of the names of programs for the layers of one stack: its name without `blocks`."""
    return "".join(f"_{part}" for part in stack.split("_") if part != "blocks")
