"""A decoding engine with a fixed number of slots and the operations of JetStream's `Engine`: prefill, insert and generate.

Each call receives a decode state and returns the new state. Weights are an argument, so new weights trigger no recompilation. A step first samples and then
runs the forward pass, so each slot keeps the logits of its next token. Therefore, one prefill serves all responses to a prompt, and each response samples its
own first token.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Lowered
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from dapo_jax.dapo.tokens import HEADS, NO_ROUTE, head_shapes
from dapo_jax.models.decoder import Block, EmbeddingAndHead
from dapo_jax.models.layer_kinds import DecodingStep, Fixed, Paged
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.models.projections import rope_tables
from dapo_jax.models.rope import RopeTables
from dapo_jax.numerics.quantization import Quantized
from dapo_jax.parallel.gpu_settings import DECODING_OPTIONS
from dapo_jax.parallel.mesh import BATCH_AXES, batch_shards
from dapo_jax.parallel.training_layout import SamplerLayout
from dapo_jax.parallel.weights import SamplerWeights
from dapo_jax.sampling.caches import cache_for, token_bytes
from dapo_jax.sampling.decoding import Decoding, draw, response_keys
from dapo_jax.sampling.engine_spec import BLOCK_SLOTS, EngineSpec
from dapo_jax.sampling.interface import Insertion, ResultTokens
from dapo_jax.sampling.parked_states import ParkedStates, first, no_parked_states, park, rows_of
from dapo_jax.sampling.prefill import Known, Prefill, Prefix, Read


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DecodeState:
    """The state of all slots. `insert` and `generate` donate its buffers."""

    layers: tuple[Any, ...]
    """The KV cache of each layer with pages."""
    logits: Float[Array, "slots vocab"] | Any
    """Logits of each slot's next token."""
    lengths: Int[Array, " slots"] | Any
    """Number of tokens in each slot's KV cache, prompt and response together."""
    generated: Int[Array, " slots"] | Any
    limits: Int[Array, " slots"] | Any
    """Number of response tokens at which the slot stops."""
    live: Bool[Array, " slots"] | Any
    keys: Key[Array, " slots"] | Any
    """Random key of each slot's response."""
    states: tuple[Any, ...] = ()
    """The state of each slot in each layer whose state has a fixed size. A slot that is not live keeps its state."""
    fed: Int[Array, "slots feed_tokens"] | Any = ()
    """Tokens to feed to each slot before it samples, right-aligned; () if the engine does not feed tokens."""
    to_feed: Int[Array, " slots"] | Any = ()
    """Number of tokens that still have to be fed to each slot."""


FEED_TOKENS = 64
"""Maximum number of tokens to feed one at a time between turns. Each token costs a decoding step, so longer inputs are prefilled instead."""

_Carry = tuple[Array, DecodeState, dict[str, Array]]


class _Call(NamedTuple):
    """The arguments of `generate` that stay constant during a call."""

    params: SamplerWeights
    rope: tuple[RopeTables, ...]
    tables: tuple[Array, ...]
    until: Array


class DecoderEngine:
    """The engine (`interface.Engine`) for `dapo_jax.models.decoder`, on one mesh."""

    def __init__(self, config: DecoderConfig, mesh: Mesh, spec: EngineSpec) -> None:
        """Builds the programs for one mesh. Raises ValueError if the slots cannot be split evenly over the mesh, sequences are longer than the model's maximum
        position, or the cache cannot hold one sequence (with `batch_invariant`: all sequences)."""
        spec.check(config, mesh)
        config = replace(config.for_length(spec.capacity), head_shards=mesh.shape["tensor"])
        self._spread = spread = batch_shards(mesh.shape)
        self._blocks = spec.slots // (spread * BLOCK_SLOTS) if spec.batch_invariant else 0
        self.slots, self.capacity, self.stop_ids = spec.slots, spec.capacity, tuple(spec.stop_ids)
        self.steps_per_call = spec.steps_per_call
        self._config, self._dtype, self._cache_dtype = config, spec.compute_dtype, spec.stored_dtype
        # On a GPU, a call always runs all steps: the host would have to read each data-dependent condition, and a branch would copy the cache.
        self._fixed_steps = mesh.devices.flat[0].platform == "gpu"
        holders = max(spec.slots * (1 + spec.parks), -(-spec.in_flight // spread) * spread)
        self.parks_states: bool = spec.parks and bool(config.fixed)
        self._routes = config.routes if spec.records_routes else None
        self._heads = spec.heads
        self._takes_turns = spec.in_flight > spec.slots
        self._reads_again = spec.in_flight > 0 or spec.has_turns
        self.feed_tokens: int = FEED_TOKENS if spec.parks else 0
        kind = spec.cache_kind(mesh, config)
        self.token_bytes: dict[int, int] = token_bytes(config, mesh, dtype=spec.stored_dtype, kind=kind)
        """Size in bytes, per device, of one token in the KV cache of the layers with each table, with the heads sharded over the devices."""
        added = spec.steps_per_call + self.feed_tokens
        self.page_sizes = spec.page_sizes(config, mesh, holders=holders, call_tokens=added)
        self._tables = tuple(self.page_sizes.table_of(state.tokens) for state in config.paged)
        if spec.batch_invariant and self.page_sizes.runs_out:
            raise ValueError(
                "sampling.batch_invariant=true needs a cache that holds every response to its end, because re-prefilling a preempted response rounds differently: "
                f"leave out sampling.cache_tokens, or lower sampling.slots, rollout.in_flight or sampling.max_response_tokens; {holders} sequences of up to {spec.capacity} tokens "
                f"do not fit in {self.page_sizes.pools * self.page_sizes.pool_pages} pages of {self.page_sizes.page_tokens} tokens"
            )

        def blocks(layout: SamplerLayout) -> dict[str, nnx.GraphDef[Block]]:
            options: Any = {"compute_dtype": spec.compute_dtype, "layout": layout}
            shapes = nnx.eval_shape(
                lambda: {
                    stack: Block(config, kind, rngs=nnx.Rngs(0), **options)
                    for stack, kind in config.stacks.items()
                }
            )
            return {name: nnx.split(block)[0] for name, block in shapes.items()}

        self._graphs = blocks(SamplerLayout(mesh, by_slot=True))
        ends = partial(EmbeddingAndHead, config, compute_dtype=spec.compute_dtype)
        self._ends, _ = nnx.split(nnx.eval_shape(lambda: ends(rngs=nnx.Rngs(0))))
        dtypes = {"cache_dtype": spec.stored_dtype, "compute_dtype": spec.compute_dtype}
        self._cache = cache_for(kind, mesh, self.page_sizes, config, **dtypes)
        self._read = Prefill(
            config, mesh, self._cache, blocks=blocks(SamplerLayout(mesh)), ends=self._ends, capacity=spec.capacity, **dtypes, routes=self._routes,
            shape=spec.prefill_shape,
        )  # fmt: skip
        self._jit_programs(mesh)

    def _jit_programs(self, mesh: Mesh) -> None:
        # Each device samples for its share of the slots, from complete rows of logits. So only the logits are transferred between devices, and only once.
        devices = self._spread * mesh.shape["tensor"]
        share = BATCH_AXES if self.slots % devices else (*BATCH_AXES, "tensor")
        self._whole, self._rows, self._shares, self._columns, self._halves = (
            NamedSharding(mesh, PartitionSpec(*axes))
            for axes in ((), (BATCH_AXES,), (share,), (None, BATCH_AXES), (BATCH_AXES, "tensor"))
        )
        # The shardings are fixed, because `insert` and `generate` would be recompiled for a state with other shardings.
        shapes, whole = jax.eval_shape(self._init_program), self._whole
        self._angles = jax.jit(rope_tables, static_argnums=1, out_shardings=whole)
        layers, states = jax.tree.map(lambda _: self._halves, (shapes.layers, shapes.states))
        layers = tuple(
            own if state.value_dim is None else jax.tree.map(lambda _: self._rows, own)
            for own, state in zip(layers, self._config.paged, strict=True)
        )
        rows = jax.tree.map(lambda _: self._rows, shapes)
        state = replace(rows, layers=layers, logits=self._shares, states=states)
        self._init = jax.jit(self._init_program, out_shardings=state)
        self.state_structs = self._init.eval_shape()
        self._fill = jax.jit(self._fill_program, donate_argnums=1, out_shardings=state.layers)
        self._insert = jax.jit(self._insert_program, donate_argnums=1, out_shardings=state)
        parked = ParkedStates(logits=whole, lengths=whole, states=states)
        sizes = self._config, self.page_sizes.holders, self._dtype
        none_parked = partial(no_parked_states, *sizes, with_logits=self._takes_turns)
        self._none_parked = jax.jit(none_parked, out_shardings=parked)
        self._parked_rows = jax.jit(rows_of, out_shardings=states)
        self._park = jax.jit(park, donate_argnums=0, out_shardings=parked)
        self._release = jax.jit(self._release_program, donate_argnums=0, out_shardings=state)
        generate = partial(jax.jit, self._generate_program, donate_argnums=1, out_shardings=(state, whole))
        options = DECODING_OPTIONS if self._fixed_steps else (None, None)
        self._generate = [generate(compiler_options=settings) for settings in options]

    def init_decode_state(self) -> DecodeState:
        return self._init()

    def prefill(
        self, params: SamplerWeights, prompts: Sequence[Int[np.ndarray, " _"]], routes: Known = (), *, score: bool = False
    ) -> Iterator[Read]:  # fmt: skip
        """Prefills prompts of 1 to `capacity` tokens; see `Prefill`. With `score`, the first call for each call shape compiles a program."""
        return self._read(params, prompts, routes, score=score)

    def insert(
        self, prefix: Prefix | ParkedStates, state: DecodeState, insertion: Insertion, key: PRNGKeyArray
    ) -> DecodeState:
        """Inserts prefilled prompts into slots. One program inserts all responses and writes up to `slots` pages. Another program writes any further pages."""
        fills = [(fill.table, prompt, fill.first, fill.page) for prompt, fill in insertion.fills]
        columns = np.array(fills, np.int32).reshape(-1, 4).T
        by_table = [columns[1:, columns[0] == table] for table in range(self.page_sizes.tables)]
        for start in range(self.slots, max(pages.shape[1] for pages in by_table), self.slots):
            state = replace(state, layers=self._fill(prefix, state.layers, self._pages(by_table, start)))
        responses = (
            insertion.slots, insertion.prompts, insertion.ordinals, insertion.indices, insertion.limits, insertion.drawn, insertion.turns,
        )  # fmt: skip
        count = np.int32(len(insertion.slots))
        pages, rows = self._pages(by_table, 0), self._padded(np.stack(responses))
        return self._insert(prefix, state, pages, (rows, *self._feeding(insertion.fed)), count, key)

    def _pages(self, by_table: Sequence[np.ndarray], start: int) -> tuple[tuple[np.ndarray, np.int32], ...]:
        """Pads up to `slots` columns of each page table, from index `start` on. A column is (prompt, first token, page). Also returns the numbers of columns."""
        by_table = [columns[:, start : start + self.slots] for columns in by_table]
        return tuple((self._padded(of_table), np.int32(of_table.shape[1])) for of_table in by_table)

    def _feeding(self, fed: Sequence[Int[np.ndarray, " _"]]) -> tuple[np.ndarray, ...]:
        """Returns the tokens to feed, right-aligned, and their counts, or () if the engine does not feed tokens."""
        if not self.feed_tokens:
            return ()
        tokens, counts = np.zeros((self.slots, self.feed_tokens), np.int32), np.zeros(self.slots, np.int32)
        for row, new in enumerate(fed):
            tokens[row, self.feed_tokens - len(new) :], counts[row] = new, len(new)
        return tokens, counts

    def release(self, state: DecodeState, slots: Sequence[int]) -> DecodeState:
        return self._release(state, self._padded(np.array(slots, np.int32)), np.int32(len(slots)))

    def park(
        self, state: DecodeState, parked: ParkedStates | None, slots: Sequence[int], rows: Sequence[int]
    ) -> ParkedStates:
        parked = self._none_parked() if parked is None else parked
        places = self._padded(np.array([slots, rows], np.int32)), np.int32(len(slots))
        return self._park(parked, self._of_slots(state), *places)

    def _of_slots(self, state: DecodeState) -> ParkedStates:
        """Returns the arrays that `park` copies. Responses that are fed before they sample need no logits."""
        logits = state.logits if self._takes_turns else ()
        return ParkedStates(logits=logits, lengths=state.lengths, states=state.states)

    @property
    def parked_structs(self) -> ParkedStates | None:
        """The shapes of the parked states, or None if each response outside the slots needs only its pages."""
        return self._none_parked.eval_shape() if self._takes_turns or self.parks_states else None

    def parked_prefix(
        self, lengths: Sequence[int], parked: ParkedStates | None, rows: Sequence[int]
    ) -> ParkedStates:
        """Implements `Engine.parked_prefix`. The logits are placeholders, because feeding tokens computes new logits."""
        states = () if parked is None else self._parked_rows(parked.states, self._padded(np.array(rows)))
        return ParkedStates(logits=self._no_logits, lengths=self._padded(np.array(lengths)), states=states)

    @cached_property
    def _no_logits(self) -> Array:
        """Placeholder logits: one row of zeros, which all prompts share."""
        logits = self.state_structs.logits
        return jax.device_put(np.zeros((1, *logits.shape[1:]), logits.dtype), self._whole)

    def generate(
        self, params: SamplerWeights, state: DecodeState, decoding: Decoding, min_live: int,
        tables: tuple[Int[np.ndarray, "slots table_pages"], ...], until: Int[np.ndarray, " slots"] | None = None,
    ) -> tuple[DecodeState, ResultTokens]:  # fmt: skip
        until = np.full(self.slots, np.iinfo(np.int32).max, np.int32) if until is None else until
        # The arrays are copied, because the caller changes them while the device may still be reading.
        return self._generate_with(params)(
            params, state, self._rope, decoding, np.int32(min_live), tuple(map(np.copy, tables)), until.copy()
        )

    def _generate_with(self, params: SamplerWeights) -> Any:
        """Returns the compiled function for these weights, which may be 8-bit."""
        return self._generate[isinstance(params["ends"]["embedding"].get_value(), Quantized)]

    def programs(self, params: SamplerWeights, decoding: Decoding) -> dict[str, Callable[[], Lowered]]:
        """Maps the name of each sampling program to a function that lowers the program. `params` and `decoding` may be shape structs."""
        again, slots = self.page_sizes.runs_out or self._reads_again, self.slots
        shapes = (), (slots,), (3, slots), (7, slots), (slots, self.page_sizes.table_pages)
        # These arguments are host arrays, so their structs have no sharding.
        number, column, fills, rows, table = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)
        count = self.page_sizes.tables
        pages, tables = ((fills, number),) * count, (table,) * count
        key, state = jax.eval_shape(lambda: jax.random.key(0)), self.state_structs
        positions = jax.ShapeDtypeStruct((self.capacity,), jnp.int32)
        rope = self._angles.eval_shape(positions, self._config)
        prefill, of_prompts = self._read.programs(params, again=again)
        decode, prefixes = self._generate_with(params), dict[str, Any](of_prompts)
        lowered = {
            "init": self._init.lower,
            "generate": partial(decode.lower, params, state, rope, decoding, number, tables, column),
            "release": partial(self._release.lower, state, column, number),
            **prefill,
        }
        if parked := self.parked_structs:
            places = jax.ShapeDtypeStruct((2, slots), jnp.int32)
            lowered["none_paused"] = self._none_parked.lower
            lowered["paused"] = partial(self._park.lower, parked, self._of_slots(state), places, number)
        if self._takes_turns:
            prefixes["paused"] = parked
        if self.feed_tokens:
            row = jax.ShapeDtypeStruct((1, *state.logits.shape[1:]), state.logits.dtype, sharding=self._whole)
            states: tuple[Any, ...] = ()
            if parked and self.parks_states:
                lowered["parked"] = partial(self._parked_rows.lower, parked.states, column)
                states = self._parked_rows.eval_shape(parked.states, column)
            prefixes["parked"] = ParkedStates(logits=row, lengths=column, states=states)
        fed = jax.ShapeDtypeStruct((self.slots, self.feed_tokens), jnp.int32)
        arrays = (rows, fed, column) if self.feed_tokens else (rows,)
        for name, prefix in prefixes.items():
            if prefix.layers and self.page_sizes.table_pages > 1:
                lowered[f"fill_{name}"] = partial(self._fill.lower, prefix, state.layers, pages)
            lowered[f"insert_{name}"] = partial(self._insert.lower, prefix, state, pages, arrays, number, key)
        return lowered

    @cached_property
    def _rope(self) -> tuple[RopeTables, ...]:
        """The rotary embedding tables. They are an argument of the programs; if a program computed them, XLA would recompute the cosines in every layer and
        for every head. They are computed at first use, so an engine that is only compiled allocates no array."""
        positions = jnp.arange(self.capacity, dtype=jnp.int32)
        return self._angles(positions, self._config)

    def _padded(self, values: np.ndarray) -> np.ndarray:
        padded = np.zeros((*values.shape[:-1], self.slots), np.int32)
        padded[..., : values.shape[-1]] = values
        return padded

    # The programs below are pure functions of their arguments. The methods above only convert the arguments.

    def _init_program(self) -> DecodeState:
        config, slots, sizes = self._config, self.slots, self.page_sizes
        counts = [sizes.pools * sizes.pages_of(table) for table in self._tables]
        zeros = jnp.zeros(slots, jnp.int32)
        feeds = self.feed_tokens > 0
        return DecodeState(
            layers=tuple(
                self._cache.empty(count, state.kv_heads, sizes.page_tokens, state.head_dim, self._cache_dtype, **state.options)
                for count, state in zip(counts, config.paged, strict=True)
            ),
            logits=jnp.zeros((slots, config.vocab_rows), jnp.float32),
            lengths=zeros, generated=zeros, limits=zeros, live=jnp.zeros(slots, bool),
            keys=jax.random.split(jax.random.key(0), slots),
            states=tuple(state.empty(slots, self._dtype) for state in config.fixed),
            fed=jnp.zeros((slots, self.feed_tokens), jnp.int32) if feeds else (), to_feed=zeros if feeds else (),
        )  # fmt: skip

    def _fill_program(
        self, prefix: Prefix, layers: tuple[Any, ...], fills: tuple[tuple[Int[Array, "3 slots"], Array], ...]
    ) -> tuple[Any, ...]:
        filled = dict(enumerate(layers))
        for table, ((prompts, firsts, pages), count) in enumerate(fills):
            columns = pages, prefix.rows[prompts], prefix.starts[prompts] + firsts

            def fill(
                i: Array, caches: dict[int, Any], columns: tuple[Array, ...] = columns
            ) -> dict[int, Any]:
                pairs = ((layer, cache, prefix.layers[layer]) for layer, cache in caches.items())
                return {
                    layer: self._cache.fill(*pair, *(column[i] for column in columns))
                    for layer, *pair in pairs
                }

            caches = {layer: cache for layer, cache in filled.items() if self._tables[layer] == table}
            # A loop of in-place slice updates, because a scatter of whole prompts is several times slower on CPU.
            filled |= lax.fori_loop(0, count, fill, caches)
        return tuple(filled.values())

    def _insert_program(
        self,
        prefix: Any,
        state: DecodeState,
        pages: tuple[tuple[Int[Array, "3 slots"], Array], ...],
        arrays: tuple[Array, ...],
        count: Array,
        key: PRNGKeyArray,
    ) -> DecodeState:
        """Puts responses into slots. `prefix` is a `Prefix` or `ParkedStates`."""
        (slots, prompts, ordinals, indices, limits, drawn, turns), *feeding = arrays
        at = first(slots, count, self.slots)

        def put(name: str, new: Array) -> Array:
            return getattr(state, name).at[at].set(new, mode="drop", unique_indices=True)

        def put_state(into: Array, new: Array) -> Array:
            return into.at[at].set(new[prompts], mode="drop", unique_indices=True)

        return replace(
            state,
            states=jax.tree.map(put_state, state.states, prefix.states),
            layers=self._fill_program(prefix, state.layers, pages) if prefix.layers else state.layers,
            logits=put("logits", prefix.logits[jnp.minimum(prompts, len(prefix.logits) - 1)]),
            lengths=put("lengths", prefix.lengths[prompts]),
            generated=put("generated", drawn),
            limits=put("limits", limits),
            live=put("live", jnp.ones_like(slots, bool)),
            keys=put("keys", response_keys(key, ordinals, indices, turns)),
            **{name: put(name, new) for name, new in zip(("fed", "to_feed"), feeding, strict=False)},
        )

    def _release_program(self, state: DecodeState, slots: Array, count: Array) -> DecodeState:
        at = first(slots, count, self.slots)
        return replace(state, live=state.live.at[at].set(False, mode="drop", unique_indices=True))

    def _generate_program(
        self, params: SamplerWeights, state: DecodeState, rope: tuple[RopeTables, ...], decoding: Decoding, min_live: Array, tables: tuple[Array, ...], until: Array
    ) -> tuple[DecodeState, ResultTokens]:  # fmt: skip
        call = _Call(params, rope, tables, until)
        begins = None if self._routes is None else state.lengths
        if not self._blocks:
            state, drawn = self._generated(call, state, decoding, min_live)
            return state, ResultTokens(**drawn, live=state.live, begins=begins)
        drawing = self._drawing(state, until)
        total = jnp.maximum(drawing.sum(dtype=jnp.int32), 1)
        # The number of blocks is traced. If it were static, XLA would compile one block differently from several, and results could differ.
        used = drawing.reshape(self._spread, self._blocks, -1).any((0, 2))
        count = jnp.where(used, jnp.arange(1, self._blocks + 1, dtype=jnp.int32), 0).max()

        def block(
            index: Array, carry: tuple[DecodeState, dict[str, Array]]
        ) -> tuple[DecodeState, dict[str, Array]]:
            state, drawn = carry
            mine = partial(self._of_block, index=index)
            slots = replace(jax.tree.map(mine, replace(state, layers=())), layers=state.layers)
            options = jax.tree.map(lambda leaf: mine(leaf) if jnp.ndim(leaf) else leaf, decoding)
            share = self._drawing(slots, mine(until)).sum(dtype=jnp.int32)
            # A block returns once its fraction of free slots reaches the fraction that `min_live` requires over all slots.
            least = (share * min_live + total - 1) // total
            of_block = call._replace(tables=tuple(map(mine, tables)), until=mine(until))
            slots, new = self._generated(of_block, slots, options, least)
            put = partial(self._with_block, index=index)
            rest = jax.tree.map(put, replace(state, layers=()), replace(slots, layers=()))
            return replace(rest, layers=slots.layers), {name: put(drawn[name], new[name]) for name in drawn}

        state, drawn = lax.fori_loop(0, count, block, (state, self._blank(self.slots)))
        return state, ResultTokens(**drawn, live=state.live, begins=begins)

    def _of_block(self, slots: Array, index: Array) -> Array:
        """Selects the entries of one block from an array over all slots. On each device, a block is a range of adjacent slots."""
        devices = slots.reshape(self._spread, -1, *slots.shape[1:])
        block = lax.dynamic_slice_in_dim(devices, index * BLOCK_SLOTS, BLOCK_SLOTS, axis=1)
        return block.reshape(-1, *slots.shape[1:])

    def _with_block(self, slots: Array, new: Array, index: Array) -> Array:
        """Returns an array over all slots in which `new` replaces the entries of one block."""
        devices, block = (whole.reshape(self._spread, -1, *whole.shape[1:]) for whole in (slots, new))
        whole = lax.dynamic_update_slice_in_dim(devices, block, index * BLOCK_SLOTS, axis=1)
        return whole.reshape(slots.shape)

    def _blank(self, slots: int) -> dict[str, Array]:
        kinds = {"tokens": jnp.int32, "logprobs": jnp.float32, "valid": jnp.bool_}
        blank = {name: jnp.zeros((slots, self.steps_per_call), kind) for name, kind in kinds.items()}
        for name, of_token, dtype in head_shapes(self._heads):
            blank[name] = jnp.zeros((slots, self.steps_per_call, *of_token), dtype)
        if self._routes is not None:
            blank["routes"] = self._no_routes(slots, self.steps_per_call)
        return blank

    def _no_routes(self, *shape: int) -> Array:
        assert self._routes is not None
        of_token, dtype = self._routes
        return jnp.full((*shape, *of_token), jnp.iinfo(dtype).max, dtype)

    def _generated(
        self, call: _Call, state: DecodeState, decoding: Decoding, min_live: Array
    ) -> tuple[DecodeState, dict[str, Array]]:
        """Runs the decoding steps of one call for the slots in `state`. Returns the new state and the sampled tokens."""

        def continues(carry: _Carry) -> Array:
            step, state, _ = carry
            if self._fixed_steps:
                return step < self.steps_per_call
            live = self._drawing(state, call.until).sum(dtype=jnp.int32)
            return (step < self.steps_per_call) & (live > 0) & ((step == 0) | (live >= min_live))

        def advance(carry: _Carry) -> _Carry:
            step, state, so_far = carry
            drawn = draw(state.logits, state.keys, state.generated, decoding, heads=self._heads)
            tokens, logprobs, *heads = lax.with_sharding_constraint(drawn, self._rows)
            new = {"tokens": tokens, "logprobs": logprobs, "valid": self._drawing(state, call.until)}
            new |= zip(HEADS, heads, strict=False)

            def written(name: str, column: Array) -> Array:
                if self.feed_tokens:
                    return self._after(so_far[name], column, so_far["valid"], state)
                return lax.dynamic_update_slice_in_dim(so_far[name], column[:, None], step, axis=1)

            written_so_far = {name: written(name, column) for name, column in new.items()}
            following, (state, routes) = step + 1, self._take(call, state, tokens)
            if routes is not None:
                record = so_far["routes"]
                written_so_far["routes"] = lax.dynamic_update_slice_in_dim(record, routes[:, None], step, 1)
            return following, state, written_so_far

        start = (jnp.zeros((), jnp.int32), state, self._blank(len(state.live)))
        _, state, drawn = lax.while_loop(continues, advance, start)
        return state, drawn

    def _after(self, buffer: Array, column: Array, valid: Array, state: DecodeState) -> Array:
        """Writes one token per slot into `buffer`, after the tokens that the slot sampled in this call. Slots that are being fed write nothing."""
        count = jnp.where(state.to_feed > 0, buffer.shape[1], valid.sum(1, dtype=jnp.int32))
        return buffer.at[jnp.arange(len(buffer)), count].set(column, mode="drop", unique_indices=True)

    def _drawing(self, state: DecodeState, until: Array) -> Bool[Array, " slots"]:
        """Returns a mask of the slots that sample or are fed: live slots that are not paused."""
        return state.live & (state.generated < until)

    def _take(self, call: _Call, state: DecodeState, tokens: Array) -> tuple[DecodeState, Array | None]:
        """Processes the sampled or fed token of each slot. In the returned state, each of these slots has either stopped or has new logits. Also returns the experts
        chosen for the tokens, [slots, layers, chosen], if they are recorded."""
        drawing, fed = self._drawing(state, call.until), {}
        taken = drawing.astype(jnp.int32)
        stopped = drawing & (tokens[:, None] == jnp.asarray(self.stop_ids, jnp.int32)[None]).any(-1)
        if self.feed_tokens:
            feeds = drawing & (state.to_feed > 0)
            column = self.feed_tokens - state.to_feed[:, None]
            next_fed = jnp.take_along_axis(state.fed, column, axis=1, mode="clip")
            tokens, stopped = jnp.where(feeds, next_fed[:, 0], tokens), stopped & ~feeds
            fed = {"to_feed": state.to_feed - feeds.astype(jnp.int32)}
            generated = state.generated + (drawing & ~feeds).astype(jnp.int32)
        else:
            generated = state.generated + taken
        live = state.live & ~stopped & (generated < state.limits)
        # The forward pass is skipped once all responses have ended. If a slot only pauses, it still needs logits for its next token.
        # The last token of a turn is fed before the next turn, so the state of a parked response must not contain it.
        processing = drawing & live if self.parks_states else drawing
        arguments = call.params, state, call.rope, call.tables, processing, tokens
        if self._fixed_steps:
            state, routes = self._forward(*arguments)
        else:
            nothing = None if self._routes is None else self._no_routes(len(tokens))
            state, routes = lax.cond(
                (live & drawing).any(), self._forward, lambda _, state, *__: (state, nothing), *arguments
            )
        counts = {"lengths": state.lengths + taken, "generated": generated, "live": live, **fed}
        return replace(state, **lax.with_sharding_constraint(counts, self._rows)), routes

    def _forward(
        self, params: SamplerWeights, state: DecodeState, rope: tuple[RopeTables, ...], tables: tuple[Array, ...], drawing: Array, tokens: Array
    ) -> tuple[DecodeState, Array | None]:  # fmt: skip
        """Appends one token to the KV cache of each slot in `drawing`. Returns the state with the logits of the next tokens, and the record of the tokens' experts."""
        outer = nnx.merge(self._ends, params["ends"])
        config = self._config
        ropes = jax.tree.map(lambda table: table[:, state.lengths], rope)
        x, chosen, news = outer.embed(tokens), [], dict[int, tuple[Array | None, ...]]()
        inputs = outer.layer_inputs(tokens, x)
        steps = [self._cache.reading(table, state.lengths, drawing) for table in tables]

        def extend(
            index: int, layer: Any, query: Array, *heads: Array | None, **data: int
        ) -> tuple[Array, Any]:
            # Kernels attend to the new token before it is in the cache. So a layer that reads the cache of an earlier layer gets that layer's new keys and
            # values, but does not write them again.
            news[index] = heads or news[index]
            now = steps[tables_of[index]]
            return self._cache.extend(layer, now, query, *news[index], **data, appends=bool(heads))

        paged, fixed = map(config.layers_with, (Paged, Fixed))
        states = dict(zip((*paged, *fixed), (*state.layers, *state.states), strict=True))
        tables_of = dict(zip(paged, self._tables, strict=True))
        for index, weights in enumerate(params["layers"]):
            (stack, _), source = config.places[index], config.sources[index]
            mixer, form = config.stacks[stack].mixer, config.states[source]
            options = form.options if isinstance(form, Paged) else {}
            step = DecodingStep(states.get(source), drawing, partial(extend, source, **options))
            attend: Any = mixer and mixer.step(config, step, **config.data(index))
            rope_index = config.rope_of_layer[index] if config.rope_of_layer else 0
            given = ropes[rope_index], attend, None, None if inputs is None else inputs[index]
            x, after, choice = nnx.merge(self._graphs[stack], weights)(x, *given)
            x = lax.with_sharding_constraint(x, self._columns)
            if form is not None:
                states[source] = after
            chosen += [] if choice is None else [choice]
        # Both constraints are needed. With only the second, XLA would transfer the weights instead of the logits.
        logits = lax.with_sharding_constraint(outer.logits(outer.normed(x)), self._halves)
        logits = lax.with_sharding_constraint(logits, self._shares)
        logits = jnp.where(drawing[:, None], logits, state.logits)
        layers, fixed_states = (tuple(states[layer] for layer in of_kind) for of_kind in (paged, fixed))
        state = replace(state, layers=layers, logits=logits, states=fixed_states)
        if self._routes is None:
            return state, None
        routes = jnp.where(drawing[:, None, None], jnp.stack(chosen, axis=1), NO_ROUTE)
        return state, lax.with_sharding_constraint(routes.astype(self._routes[1]), self._rows)
