"""Adapts the decoder engine to `jetstream.engine.engine_api.Engine` (JetStream 0.2.2). `dapo-jax serve` does not use this adapter."""

import itertools
import os
import threading
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PRNGKeyArray, PyTree

# JetStream imports TensorFlow, which would otherwise log messages about GPU libraries.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
from jetstream.engine import engine_api, tokenizer_api, tokenizer_pb2

from dapo_jax.sampling.decoding import Decoding
from dapo_jax.sampling.engine import DecoderEngine, DecodeState
from dapo_jax.sampling.interface import Insertion
from dapo_jax.sampling.page_tables import Pages
from dapo_jax.serving.text import decoded
from dapo_jax.text.stop_strings import stop_ids
from dapo_jax.text.tokenizers import Tokenizer


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ServedPrefix:
    """A prefilled prompt, ready to be inserted into a slot."""

    prefix: PyTree
    row: int = field(metadata={"static": True})
    """Index of this prompt in `prefix`, which can contain several prompts."""
    prompt_tokens: int = field(metadata={"static": True})


class JetStreamEngine(engine_api.Engine):
    """Wraps a decoder engine in JetStream's engine interface.

    Args:
        engine, tokenizer, mesh: the decoder engine with the model's tokenizer and its mesh.
        weights: sampler weights, as returned by `dapo_jax.parallel.weights.WeightTransfer`.
        decoding: temperature, top-p and top-k for all requests, because JetStream requests have no sampling options.
        key: the PRNG key for sampling. Sampled tokens also depend on the order in which requests are assigned to slots.

    Raises:
        ValueError: the KV cache has fewer pages than all slots together may need.
    """

    def __init__(
        self, engine: DecoderEngine, weights: PyTree, tokenizer: Tokenizer, mesh: Mesh, *, decoding: Decoding, key: PRNGKeyArray
    ) -> None:  # fmt: skip
        sizes = engine.page_sizes
        if sizes.runs_out:
            pages, needed = sizes.pools * sizes.pool_pages, sizes.holders * sizes.holder_pages()
            raise ValueError(
                f"the KV cache has {pages} pages, but {sizes.holders} slots of {sizes.capacity} tokens may need {needed}; "
                "JetStream cannot preempt a response, so leave sampling.cache_tokens at 0 or use fewer slots"
            )
        self._engine, self._weights, self._mesh = engine, weights, mesh
        self._tokenizer, self._decoding, self._key = JetStreamTokenizer(tokenizer), decoding, key
        self._pages, self._ordinals = Pages(sizes), itertools.count()
        self._cached: dict[int, int] = {}
        """Number of tokens in each slot that was inserted. A slot whose response has ended has fewer."""
        self._lock = threading.Lock()
        """Serializes engine calls. JetStream calls the engine from two threads, but programs must be launched on all devices in the same order."""
        self._pack = jax.jit(
            lambda tokens, valid, lengths: jnp.concatenate([tokens, valid.astype(jnp.int32), lengths[:, None]], axis=1),
            out_shardings=self.get_prefix_destination_sharding(),
        )  # fmt: skip

    def load_params(self, *args: Any, **kwargs: Any) -> PyTree:
        """Returns the weights with which this object was created."""
        return self._weights

    def init_decode_state(self, *args: Any, **kwargs: Any) -> DecodeState:
        """Returns a decode state in which every slot is free."""
        self._pages, self._cached = Pages(self._engine.page_sizes), {}
        return self._engine.init_decode_state()

    def prefill(
        self, *, params: PyTree, existing_prefix: Any = None, padded_tokens: Any, true_length: int
    ) -> ServedPrefix:
        """Prefills one prompt, given by the first `true_length` ids of `padded_tokens`. Raises ValueError if `existing_prefix` is given, or the prompt is
        empty, leaves no room for a response in its slot, or is longer than `padded_tokens`. The last case occurs if JetStream's tokenizer truncates a prompt
        but reports its full length."""
        if existing_prefix is not None:
            raise ValueError("existing_prefix is given, but this engine prefills whole prompts only")
        tokens, capacity = np.asarray(padded_tokens, np.int32), self._engine.capacity
        if not 0 < true_length <= min(len(tokens), capacity - 1):
            raise ValueError(
                f"a prompt has {true_length} tokens (padded to {len(tokens)}), and a slot has room for {capacity} tokens "
                f"of prompt and response; the prompt needs 1 to {min(len(tokens), capacity - 1)} tokens"
            )
        with self._lock:
            chunks = self._engine.prefill(params, [tokens[:true_length]])
            ((_, prefix, row),) = [done for chunk in chunks for done in chunk]
        return ServedPrefix(prefix=prefix, row=row, prompt_tokens=true_length)

    def insert(self, prefix: ServedPrefix, decode_state: DecodeState, slot: int) -> DecodeState:
        """Inserts a prefilled prompt into a slot. The response may fill the rest of the slot. Donates `decode_state`, but not `prefix`."""
        capacity, length, zero = self._engine.capacity, prefix.prompt_tokens, np.zeros(1, np.int32)
        self._pages.release(slot)  # frees the pages of the slot's previous response
        fills = self._pages.start(slot, length, read=length) or ()
        self._cached[slot] = length
        insertion = Insertion(
            slots=zero + slot,
            prompts=zero + prefix.row,
            ordinals=zero + next(self._ordinals),
            indices=zero,
            limits=zero + capacity - length,
            drawn=zero,
            turns=zero,
            fills=[(prefix.row, fill) for fill in fills],
        )
        with self._lock:
            return self._engine.insert(prefix.prefix, decode_state, insertion, self._key)

    def generate(
        self, params: PyTree, decode_state: DecodeState
    ) -> tuple[DecodeState, engine_api.ResultTokens]:
        """Samples up to `steps_per_call` tokens in every active slot. Donates `decode_state`."""
        for slot, length in self._cached.items():
            self._cached[slot] = min(length + self._engine.steps_per_call, self._engine.capacity)
            self._pages.grow(slot, self._cached[slot], cached=length)
        with self._lock:
            tables = self._pages.rows(slice(None))
            state, result = self._engine.generate(params, decode_state, self._decoding, 1, tables)
            # JetStream expects one array that contains the tokens, their validity flags, and the current length of each response.
            data = self._pack(result.tokens, result.valid, state.generated)
        steps = result.tokens.shape[1]
        columns = (0, steps), (steps, 2 * steps), (2 * steps, 2 * steps + 1)
        return state, engine_api.ResultTokens(data, *columns, 1)

    def get_tokenizer(self) -> Any:
        """Returns placeholder parameters. JetStream passes them to `build_tokenizer`, which does not use them."""
        messages: Any = tokenizer_pb2  # a generated module without type annotations
        return messages.TokenizerParameters(path="dapo_jax", extra_ids=0)

    def build_tokenizer(self, metadata: Any) -> "JetStreamTokenizer":
        """Returns the model's tokenizer, wrapped in JetStream's interface. Ignores `metadata`."""
        return self._tokenizer

    def get_prefix_destination_sharding(self) -> NamedSharding:
        """Returns the sharding for prefixes that another engine has prefilled: replicated on all devices."""
        return NamedSharding(self._mesh, PartitionSpec())

    @property
    def max_concurrent_decodes(self) -> int:
        return self._engine.slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        """The maximum length to which JetStream pads a prompt. It is a power of two, at least 16."""
        return max(16, 1 << (self._engine.capacity - 1).bit_length())

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def colocated_cpus(self) -> None:
        return


class JetStreamTokenizer(tokenizer_api.Tokenizer):
    """Adapts a tokenizer of this library to JetStream's interface."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, s: str, **kwargs: Any) -> tuple[np.ndarray, int]:
        """Returns a prompt's token ids and their number. The ids are not padded, because the engine accepts any length."""
        ids = self._tokenizer.encode_prompt(s)
        return ids, len(ids)

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        return decoded(self._tokenizer, token_ids)

    @property
    def pad_id(self) -> int:
        return self._tokenizer.pad_id

    @property
    def eos_id(self) -> int:
        return self._tokenizer.eos_id

    @property
    def bos_id(self) -> int:
        """The id of the end token. JetStream prepends `bos_id` to the token ids of a request without a history; `encode` does not prepend it."""
        return self._tokenizer.eos_id

    @property
    def stop_tokens(self) -> set[int]:
        """All ids that end a response. The padding id is not one of them, because the model may sample it."""
        return set(stop_ids(self._tokenizer))
