"""The decoder engine as a `jetstream.engine.engine_api.Engine`, version 0.2.2.

Only this module and `jetstream_server` know JetStream. JetStream's interface lacks a few things, which are kept here: the length limit of each
response, clients that have left, and which weights are served. `bulk_insert` and `free_resource` are verbs of JetStream's unreleased main branch.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int, PRNGKeyArray, PyTree
from jetstream.engine import engine_api, tokenizer_api, tokenizer_pb2

from dapo_jax.sampling.decoding import Decoding
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.sampling.interface import Insertion
from dapo_jax.sampling.pages import Pages
from dapo_jax.serving.text import decoded
from dapo_jax.text.formatting import AS_IT_STANDS, PromptFormat
from dapo_jax.text.tokenizers import Tokenizer

PREFILL_LENGTHS = tuple(1 << power for power in range(4, 16))
"""Lengths that JetStream pads prompts to."""


@dataclass(frozen=True, kw_only=True)
class BoundedPrompt:
    """A padded prompt with the limit of its response. `prefill` accepts it in place of an array."""

    tokens: Int[np.ndarray, " padded"]
    max_response_tokens: int
    abandoned: Callable[[], bool] = bool
    """Returns True once the client has left."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ServedPrefix:
    """A prefilled prompt."""

    prefix: PyTree
    place: int = field(metadata={"static": True})
    """Index of the prompt in the prefix."""
    prompt_tokens: int = field(metadata={"static": True})
    max_response_tokens: int = field(metadata={"static": True})
    abandoned: Callable[[], bool] = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ServedState:
    """The engine's state, and the number of tokens that each slot has sampled."""

    slots: PyTree
    lengths: Int[Array, " slots"] | Any


class Weights:
    """A handle to the weights that are served now. JetStream loads parameters once and keeps them, so it gets this handle."""

    def __init__(self, current: PyTree) -> None:
        self.current = current


class JetStreamEngine(engine_api.Engine):
    """A decoder engine behind JetStream's 0.2.2 interface.

    Args:
        engine: prefills and decodes.
        weights: sampler weights, as `dapo_jax.parallel.weights.weight_transfer` makes them.
        tokenizer: the model's tokenizer.
        mesh: the mesh of `engine`.
        decoding: temperature, top-p and top-k of all requests; JetStream's requests have no sampling options.
        key: sampled tokens depend on it and on the order in which requests get their slots.
        max_prefill_length: length of the longest padded prompt; one of `PREFILL_LENGTHS`.
        prompt_format: template around the text of a request.

    Raises:
        ValueError: `max_prefill_length` is not one of `PREFILL_LENGTHS`, or the cache has fewer pages than all slots may need.
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
        pages, needed = sizes.pools * sizes.pool_pages, sizes.holders * sizes.table_pages
        if pages < needed:
            raise ValueError(
                f"the cache has {pages} pages, {sizes.holders} slots of {sizes.capacity} tokens may need {needed}; "
                "JetStream cannot preempt a response, so leave sampling.cache_tokens at 0 or lower the slots"
            )
        self._engine, self._weights, self._mesh = engine, Weights(weights), mesh
        self._tokenizer = JetStreamTokenizer(tokenizer, max_prefill_length, prompt_format)
        self._decoding, self._key, self._max_prefill_length = decoding, key, max_prefill_length
        self._pages, self._ordinals = Pages(sizes), itertools.count()
        self._abandoned: dict[int, Callable[[], bool]] = {}
        self._dispatch = threading.Lock()
        """JetStream has two threads, but programs over several devices must reach all of them in one order."""
        whole = NamedSharding(mesh, PartitionSpec())
        self._no_lengths = jax.jit(lambda: jnp.zeros(engine.slots, jnp.int32), out_shardings=whole)
        self._restart = jax.jit(_restarted, donate_argnums=0, out_shardings=whole)
        self._pack = jax.jit(_packed, donate_argnums=2, out_shardings=whole)

    def load_params(self, *args: Any, **kwargs: Any) -> Weights:
        """Returns a handle to the weights that are served now."""
        return self._weights

    def swap(self, weights: Callable[[], PyTree]) -> None:
        """Serves the weights that `weights` returns from the next `prefill` and `generate` on, without compiling.

        Running responses continue with them over the KV cache of the old weights.
        """
        with self._dispatch:
            made = weights()
        self._weights.current = jax.block_until_ready(made)

    def init_decode_state(self, *args: Any, **kwargs: Any) -> ServedState:
        """Returns a state in which every slot is free."""
        self._pages = Pages(self._engine.page_sizes)
        return ServedState(slots=self._engine.init_decode_state(), lengths=self._no_lengths())

    def prefill(
        self, *, params: Any, existing_prefix: Any = None, padded_tokens: Any, true_length: int
    ) -> ServedPrefix:
        """Prefills one prompt: [padded] token ids, or a `BoundedPrompt`.

        Raises:
            ValueError: `existing_prefix` is given, or the prompt is empty, fills the slot, or is longer than its padding.
                JetStream's own tokenizers cut long prompts and still report the full length.
        """
        if existing_prefix is not None:
            raise ValueError("existing_prefix is given; this engine prefills whole prompts only")
        capacity = self._engine.capacity
        room = capacity - true_length
        if not isinstance(padded_tokens, BoundedPrompt):
            padded_tokens = BoundedPrompt(
                tokens=np.asarray(padded_tokens, np.int32), max_response_tokens=room
            )
        tokens = padded_tokens.tokens[:capacity]  # the padding may be longer than a slot
        if not 0 < true_length <= len(tokens) or room < 1:
            raise ValueError(
                f"a prompt of {true_length} tokens is padded to {len(tokens)}, a slot holds {capacity} tokens "
                f"of prompt and response; needs 1 to {min(self._max_prefill_length, capacity - 1)}"
            )
        with self._dispatch:
            chunks = self._engine.prefill(_current(params), [tokens[:true_length]])
            ((_, prefix, place),) = [done for chunk in chunks for done in chunk]
        return ServedPrefix(
            prefix=prefix,
            place=place,
            prompt_tokens=true_length,
            max_response_tokens=min(room, padded_tokens.max_response_tokens),
            abandoned=padded_tokens.abandoned,
        )

    def insert(self, prefix: ServedPrefix, decode_state: ServedState, slot: int) -> ServedState:
        """Inserts a prompt into a slot. Consumes `decode_state`, but not `prefix`."""
        return self.bulk_insert(prefix, decode_state, [slot])

    def bulk_insert(
        self, prefix: ServedPrefix, decode_state: ServedState, slots: Sequence[int]
    ) -> ServedState:
        """Inserts one prompt into several slots; each samples its own response."""
        count, ordinal, length = len(slots), next(self._ordinals), prefix.prompt_tokens
        fills = []
        for slot in slots:
            self._pages.release(slot)  # held by the slot's previous response
            start = self._pages.start(
                slot, length + prefix.max_response_tokens, read=length, prompt=ordinal, prompt_tokens=length
            )
            fills += [(prefix.place, fill) for fill in start or ()]
            self._abandoned[slot] = prefix.abandoned
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
        # Padded with an index out of range, so that one program serves any number of slots.
        at = np.full(self._engine.slots, self._engine.slots, np.int32)
        at[:count] = slots
        with self._dispatch:
            state = self._engine.insert(prefix.prefix, decode_state.slots, insertion, self._key)
            return ServedState(slots=state, lengths=self._restart(decode_state.lengths, at))

    def generate(self, params: Any, decode_state: ServedState) -> tuple[ServedState, engine_api.ResultTokens]:
        """Samples up to `steps_per_call` tokens in every live slot. Consumes `decode_state`."""
        with self._dispatch:
            slots = decode_state.slots
            if gone := sorted(slot for slot, abandoned in list(self._abandoned.items()) if abandoned()):
                for slot in gone:
                    self._abandoned.pop(slot, None)
                slots = self._engine.release(slots, gone)
            slots, result = self._engine.generate(
                _current(params), slots, self._decoding, 1, self._pages.tables
            )
            data, lengths = self._pack(result.tokens, result.valid, decode_state.lengths)
        steps = result.tokens.shape[1]
        packed = engine_api.ResultTokens(data, (0, steps), (steps, 2 * steps), (2 * steps, 2 * steps + 1), 1)
        return replace(decode_state, slots=slots, lengths=lengths), packed

    def free_resource(self, slot: int) -> None:
        """Ends the slot's response at the next `generate`. May be called from any thread."""
        self._abandoned[slot] = lambda: True

    def warm_up(self) -> None:
        """Compiles all programs, for prompts of every padded length, so that no request waits for a compilation."""
        state = self.init_decode_state()
        for length in (each for each in PREFILL_LENGTHS if each <= self._max_prefill_length):
            prompt = BoundedPrompt(tokens=np.zeros(length, np.int32), max_response_tokens=1)
            filled = min(length, self._engine.capacity - 1)
            prefix = self.prefill(params=self._weights, padded_tokens=prompt, true_length=filled)
            state, _ = self.generate(self._weights, self.insert(prefix, state, 0))
        self.free_resource(0)
        jax.block_until_ready(self.generate(self._weights, state))
        # The first request gets the tokens that it gets without a warm-up.
        self._ordinals, self._pages = itertools.count(), Pages(self._engine.page_sizes)

    def get_tokenizer(self) -> Any:
        """Returns the argument of `build_tokenizer`, which ignores it."""
        messages: Any = tokenizer_pb2  # generated, without types
        return messages.TokenizerParameters(path="dapo_jax", extra_ids=0)

    def build_tokenizer(self, metadata: Any) -> "JetStreamTokenizer":
        """Returns the model's tokenizer behind JetStream's interface."""
        return self._tokenizer

    def get_prefix_destination_sharding(self) -> NamedSharding:
        """Returns the sharding of a prefix from another engine: replicated."""
        return NamedSharding(self._mesh, PartitionSpec())

    @property
    def max_concurrent_decodes(self) -> int:
        return self._engine.slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        return self._max_prefill_length

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def colocated_cpus(self) -> None:
        return


class JetStreamTokenizer(tokenizer_api.Tokenizer):
    """A tokenizer of `dapo_jax.text.tokenizers` behind JetStream's interface."""

    def __init__(
        self, tokenizer: Tokenizer, max_prefill_length: int, prompt_format: PromptFormat = AS_IT_STANDS
    ) -> None:
        self.tokenizer, self._longest, self._format = tokenizer, max_prefill_length, prompt_format

    def encode(self, s: str, **kwargs: Any) -> tuple[np.ndarray, int]:
        """Returns the padded ids and the prompt's length. JetStream's options are ignored."""
        return self.pad(self.prompt(s))

    def prompt(self, content: str | list[int]) -> np.ndarray:
        """Returns the ids of a prompt. The prompt format is applied to a text, not to ids.

        Raises:
            ValueError: the tokenizer cannot encode the text, or an id is outside the vocabulary.
        """
        if isinstance(content, str):
            return self._format.encode(content, self.tokenizer)[1]
        size = self.tokenizer.vocab_size
        if outside := [token for token in content if not 0 <= token < size]:
            raise ValueError(f"token id {outside[0]} is not in the vocabulary of {size} ids, 0 to {size - 1}")
        return np.array(content, np.int32)

    def pad(self, ids: np.ndarray) -> tuple[np.ndarray, int]:
        """Pads `ids` to one of `PREFILL_LENGTHS`, and returns them with their number before padding.

        Raises:
            ValueError: there are more ids than the longest prompt may have.
        """
        lengths = [length for length in PREFILL_LENGTHS if len(ids) <= length <= self._longest]
        if not lengths:
            raise ValueError(f"the prompt has {len(ids)} tokens, the longest may have {self._longest}")
        return np.pad(ids, (0, lengths[0] - len(ids)), constant_values=self.pad_id), len(ids)

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        return decoded(self.tokenizer, token_ids)

    @property
    def pad_id(self) -> int:
        return self.tokenizer.pad_id

    @property
    def eos_id(self) -> int:
        return self.tokenizer.eos_id

    @property
    def bos_id(self) -> int:
        """Required by JetStream, and not used: `encode` adds a start token where the model has one."""
        return self.tokenizer.eos_id

    @property
    def stop_tokens(self) -> set[int]:
        """All ids that end a response. The padding's id is not one: the model may sample it."""
        return set(self.tokenizer.stop_ids)


def _current(params: Any) -> PyTree:
    return params.current if isinstance(params, Weights) else params


def _restarted(lengths: Int[Array, " slots"], at: Int[Array, " slots"]) -> Int[Array, " slots"]:
    return lengths.at[at].set(0, mode="drop")


def _packed(
    tokens: Int[Array, "slots steps"], valid: Bool[Array, "slots steps"], lengths: Int[Array, " slots"]
) -> tuple[Int[Array, "slots columns"], Int[Array, " slots"]]:
    """Returns JetStream's single array: tokens, their validity, and the length of each response so far."""
    lengths = lengths + valid.sum(axis=1, dtype=jnp.int32)
    return jnp.concatenate([tokens, valid.astype(jnp.int32), lengths[:, None]], axis=1), lengths
