"""The decoder engine as a `jetstream.engine.engine_api.Engine`, version 0.2.2.

The only place that knows both. What JetStream's interface does not carry is kept here: which request a slot serves, how
many tokens it has drawn, how long its response may get, which weights are served now. Members that JetStream's unreleased
main branch added (`bulk_insert`, `prefill_multisampling`, `free_resource`, `log_prob`, chunked prefill) are there too.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int, PRNGKeyArray, PyTree
from jetstream.engine import engine_api, tokenizer_pb2

from dapo_jax.sampling.decoding import Decoding
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.sampling.interface import Insertion
from dapo_jax.sampling.pages import Pages
from dapo_jax.serving.engine_types import BoundedPrompt, ServedPrefix, ServedState, ServedTokens, Weights
from dapo_jax.serving.tokenizer import PREFILL_LENGTHS, JetStreamTokenizer
from dapo_jax.text.formatting import AS_IT_STANDS, PromptFormat
from dapo_jax.text.tokenizers import Tokenizer


def _waited_for() -> bool:
    return False


class JetStreamEngine(engine_api.Engine):
    """A decoder engine in JetStream's verbs, for any driver of its 0.2.2 interface.

    Args:
        engine: what prefills and decodes.
        weights: sampler weights, as `dapo_jax.parallel.weights.weight_transfer` makes them.
        tokenizer: the model's.
        mesh: where `engine` runs.
        decoding: how tokens of every request are drawn; JetStream's requests say nothing about it.
        key: what is drawn follows from it and from the order in which requests get their slots.
        max_prefill_length: the longest padded prompt; one of `PREFILL_LENGTHS`.
        prompt_format: what is put around a request's text.

    Raises:
        ValueError: `max_prefill_length` is not one of them, or the engine's cache has fewer pages than all slots may need.
    """

    def __init__(
        self, engine: DecoderEngine, weights: PyTree, tokenizer: Tokenizer, mesh: Mesh, *, decoding: Decoding,
        key: PRNGKeyArray, max_prefill_length: int, prompt_format: PromptFormat = AS_IT_STANDS,
    ) -> None:  # fmt: skip
        if max_prefill_length not in PREFILL_LENGTHS:
            raise ValueError(
                f"max_prefill_length={max_prefill_length} must be a power of two from {PREFILL_LENGTHS[0]} to "
                f"{PREFILL_LENGTHS[-1]}, the lengths that JetStream pads prompts to"
            )
        sizes = engine.page_sizes
        needed = sizes.holders * sizes.table_pages
        if sizes.pools * sizes.pool_pages < needed:
            raise ValueError(
                f"the cache has {sizes.pools * sizes.pool_pages} pages, {sizes.holders} slots of {sizes.capacity} tokens may need {needed}; "
                "JetStream fills every slot and takes no response back, so leave sampling.cache_tokens at 0 or lower the slots"
            )
        self._engine, self._weights, self._tokenizer, self._mesh = engine, Weights(weights), tokenizer, mesh
        self._pages = Pages(sizes)
        self._decoding, self._key, self._max_prefill_length = decoding, key, max_prefill_length
        self._prompt_format = prompt_format
        self._ordinals = itertools.count()
        self._abandoned: dict[int, Callable[[], bool]] = {}
        self._freed: set[int] = set()
        self._dispatch = threading.RLock()
        whole = NamedSharding(mesh, PartitionSpec())
        self._none_drawn = jax.jit(lambda: jnp.zeros(engine.slots, jnp.int32), out_shardings=whole)
        self._restart = jax.jit(_restarted, donate_argnums=0, out_shardings=whole)
        self._pack = jax.jit(_packed, donate_argnums=2, out_shardings=whole)

    # Weights.

    def load_params(self, *args: Any, **kwargs: Any) -> Weights:
        """A handle to the weights that are served now."""
        return self._weights

    def swap(self, weights: PyTree) -> None:
        """Serves other weights from the next `prefill` and `generate` on; nothing compiles, nothing waits.

        Responses that are being decoded go on with the new weights over what the old ones have read.

        Raises:
            ValueError: their structure, shapes, dtypes or shardings are not those that are served.
        """
        old, new = (jax.tree.flatten_with_path(tree) for tree in (self._weights.current, weights))
        if old[1] != new[1]:
            raise ValueError(
                "the new weights have another structure than those that are served; "
                "they must be of the same decoder"
            )
        for (path, served), (_, leaf) in zip(old[0], new[0], strict=True):
            if (leaf.shape, leaf.dtype) != (served.shape, served.dtype) or not leaf.sharding.is_equivalent_to(
                served.sharding, served.ndim
            ):
                raise ValueError(
                    f"the new weights' {jax.tree_util.keystr(path)} is {leaf.dtype}{list(leaf.shape)} on {leaf.sharding}, "
                    f"the served one is {served.dtype}{list(served.shape)} on {served.sharding}"
                )
        self._weights.current = jax.block_until_ready(weights)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Nothing else is sent to the devices meanwhile.

        JetStream prefills and generates in two threads: programs over several devices must reach all of them in one order.
        """
        with self._dispatch:
            yield

    # The verbs.

    def init_decode_state(self, *args: Any, **kwargs: Any) -> ServedState:
        """A state in which every slot is free."""
        self._pages = Pages(self._engine.page_sizes)
        return ServedState(slots=self._engine.init_decode_state(), drawn=self._none_drawn())

    def prefill(
        self,
        *,
        params: Any,
        existing_prefix: Any = None,
        padded_tokens: Any,
        true_length: int,
    ) -> ServedPrefix:
        """Reads one prompt, [padded] token ids or a `BoundedPrompt`.

        Raises:
            ValueError: `existing_prefix` is given, or the prompt is empty, longer than its padding (JetStream's own
                tokenizers cut a prompt that is too long and still give the length it had), or fills the slot.
        """
        if existing_prefix is not None:
            raise ValueError("existing_prefix is given; this engine reads a prompt from its beginning")
        bounded = padded_tokens if isinstance(padded_tokens, BoundedPrompt) else None
        # A slot need not hold the padding, only the prompt.
        tokens = np.asarray(padded_tokens if bounded is None else bounded.tokens, np.int32)[
            : self._engine.capacity
        ]
        room = self._engine.capacity - true_length
        if not 0 < true_length <= len(tokens) or room < 1:
            raise ValueError(
                f"a prompt of {true_length} tokens is padded to {len(tokens)}, a slot holds {self._engine.capacity} tokens "
                f"of prompt and response; needs 1 to {min(self._max_prefill_length, self._engine.capacity - 1)}"
            )
        with self._dispatch:
            read = self._engine.prefill(_current(params), [tokens[:true_length]])
            ((_, prefix, place),) = [done for part in read for done in part]
        return ServedPrefix(
            prefix=prefix,
            place=place,
            prompt_tokens=true_length,
            max_response_tokens=room if bounded is None else min(room, bounded.max_response_tokens),
            abandoned=_waited_for if bounded is None else bounded.abandoned,
        )

    def prefill_multisampling(
        self, *, params: Any, existing_prefix: Any = None, padded_tokens: Any, true_length: int, num_samples: int = 1
    ) -> tuple[ServedPrefix, ServedTokens]:  # fmt: skip
        """Reads one prompt for several responses. No token is drawn yet: each draws its own first one in its slot."""
        prefix = self.prefill(
            params=params,
            existing_prefix=existing_prefix,
            padded_tokens=padded_tokens,
            true_length=true_length,
        )
        nothing = np.zeros((num_samples, 1), np.int32)
        return prefix, ServedTokens(nothing, (0, 0), (0, 0), (0, 1), num_samples, np.zeros((num_samples, 0)))

    def insert(self, prefix: ServedPrefix, decode_state: ServedState, slot: int) -> ServedState:
        """Puts a prompt into a slot; `decode_state` is consumed, `prefix` is not."""
        return self.bulk_insert(prefix, decode_state, [slot])

    def bulk_insert(
        self, prefix: ServedPrefix, decode_state: ServedState, slots: Sequence[int]
    ) -> ServedState:
        """Puts one prompt into several slots, each for a response of its own."""
        count, ordinal, length = len(slots), next(self._ordinals), prefix.prompt_tokens
        fills = []
        for slot in slots:
            self._pages.release(slot)  # of whom it served before
            tokens = length + prefix.max_response_tokens
            start = self._pages.start(slot, tokens, read=length, prompt=ordinal, prompt_tokens=length)
            fills += [(prefix.place, fill) for fill in start or ()]
        insertion = Insertion(
            slots=np.array(slots, np.int32),
            prompts=np.full(count, prefix.place, np.int32),
            ordinals=np.full(count, ordinal, np.int32),
            indices=np.arange(count, dtype=np.int32),
            limits=np.full(count, prefix.max_response_tokens, np.int32),
            drawn=np.zeros(count, np.int32),
            turns=np.zeros(count, np.int32),
            fills=fills,
        )
        for slot in slots:
            self._abandoned[slot] = prefix.abandoned
            self._freed.discard(slot)
        # Padded with an index outside: one program for any number of slots.
        at = np.full(self._engine.slots, self._engine.slots, np.int32)
        at[:count] = slots
        with self._dispatch:
            state = self._engine.insert(prefix.prefix, decode_state.slots, insertion, self._key)
            return ServedState(slots=state, drawn=self._restart(decode_state.drawn, at))

    def generate(self, params: Any, decode_state: ServedState) -> tuple[ServedState, ServedTokens]:
        """Draws up to `steps_per_call` tokens in every live slot; `decode_state` is consumed."""
        with self._dispatch:
            slots = self._release(decode_state.slots)
            slots, result = self._engine.generate(
                _current(params), slots, self._decoding, 1, self._pages.tables
            )
            data, drawn = self._pack(result.tokens, result.valid, decode_state.drawn)
        steps = result.tokens.shape[1]
        packed = ServedTokens(
            data, (0, steps), (steps, 2 * steps), (2 * steps, 2 * steps + 1), 1, result.logprobs
        )
        return replace(decode_state, slots=slots, drawn=drawn), packed

    def free_resource(self, slot: int) -> None:
        """Ends what the slot decodes, at the next `generate`; may be called from any thread."""
        self._freed.add(slot)

    def warm_up(self) -> None:
        """Compiles all that serving runs, for prompts of every padded length: no request has to wait for it."""
        state = self.init_decode_state()
        for length in (each for each in PREFILL_LENGTHS if each <= self._max_prefill_length):
            tokens = np.full(length, self._tokenizer.pad_id, np.int32)
            prompt = BoundedPrompt(tokens=tokens, max_response_tokens=1, abandoned=_waited_for)
            filled = min(length, self._engine.capacity - 1)
            prefix = self.prefill(params=self._weights, padded_tokens=prompt, true_length=filled)
            state, _ = self.generate(self._weights, self.insert(prefix, state, 0))
        self.free_resource(0)
        jax.block_until_ready(self.generate(self._weights, state))
        # The first request draws what it would have drawn without, and shares its pages with nobody of the same number.
        self._ordinals, self._pages = itertools.count(), Pages(self._engine.page_sizes)

    # What JetStream asks about an engine.

    def get_tokenizer(self) -> Any:
        """The argument of `build_tokenizer`; it says nothing, since the tokenizer is at hand."""
        messages: Any = tokenizer_pb2  # generated, without types
        return messages.TokenizerParameters(path="dapo_jax", extra_ids=0)

    def build_tokenizer(self, metadata: Any) -> JetStreamTokenizer:
        """The model's tokenizer as one of JetStream's."""
        return JetStreamTokenizer(self._tokenizer, self._max_prefill_length, self._prompt_format)

    def get_prefix_destination_sharding(self) -> NamedSharding:
        """Where a prefix of another engine is copied to: whole, onto every device."""
        return NamedSharding(self._mesh, PartitionSpec())

    @property
    def max_concurrent_decodes(self) -> int:
        """Slots."""
        return self._engine.slots

    @property
    def samples_per_slot(self) -> int:
        """One response in a slot."""
        return 1

    @property
    def max_prefill_length(self) -> int:
        """The longest padded prompt."""
        return self._max_prefill_length

    @property
    def mesh(self) -> Mesh:
        """Where the engine runs."""
        return self._mesh

    @property
    def colocated_cpus(self) -> None:
        """No use is made of them."""
        return

    @property
    def use_chunked_prefill(self) -> bool:
        """Prompts are read whole."""
        return False

    @property
    def prefill_chunk_size(self) -> int:
        """The whole prompt is the chunk."""
        return self._max_prefill_length

    def _release(self, state: PyTree) -> PyTree:
        """Ends the slots that nobody waits for."""
        gone = {slot for slot, abandoned in self._abandoned.items() if abandoned()} | self._freed
        if not gone:
            return state
        for slot in gone:
            self._abandoned.pop(slot, None)
            self._freed.discard(slot)
        return self._engine.release(state, sorted(gone))


def _current(params: Any) -> PyTree:
    return params.current if isinstance(params, Weights) else params


def _restarted(drawn: Int[Array, " slots"], at: Int[Array, " slots"]) -> Int[Array, " slots"]:
    return drawn.at[at].set(0, mode="drop")


def _packed(
    tokens: Int[Array, "slots steps"], valid: Bool[Array, "slots steps"], drawn: Int[Array, " slots"]
) -> tuple[Int[Array, "slots columns"], Int[Array, " slots"]]:
    """JetStream's one array: tokens, their validity, and the length of each response so far."""
    drawn = drawn + valid.sum(axis=1, dtype=jnp.int32)
    return jnp.concatenate([tokens, valid.astype(jnp.int32), drawn[:, None]], axis=1), drawn
