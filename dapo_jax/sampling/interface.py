"""The interface between sampler and engine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from dapo_jax.sampling.decoding import Decoding
from dapo_jax.sampling.pages import Fill, PageSizes


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ResultTokens:
    """The result of one `generate`. A slot's valid tokens come first in its row."""

    tokens: Int[Array, "slots steps"] | Any
    logprobs: Float[Array, "slots steps"] | Any
    valid: Bool[Array, "slots steps"] | Any
    live: Bool[Array, " slots"] | Any
    """True if the response continues, perhaps after a pause."""


@dataclass(frozen=True, kw_only=True)
class Insertion:
    """The prefilled prompt, slot and response of each insertion: host arrays of one length."""

    slots: Int[np.ndarray, " responses"] | Any
    prompts: Int[np.ndarray, " responses"] | Any
    """Places in the prefix."""
    ordinals: Int[np.ndarray, " responses"] | Any
    indices: Int[np.ndarray, " responses"] | Any
    limits: Int[np.ndarray, " responses"] | Any
    drawn: Int[np.ndarray, " responses"] | Any
    """Number of sampled tokens at the end of the prompt: 0, or the tokens sampled before a preemption. For an episode, of its present turn, as
    in `limits`.
    """
    turns: Int[np.ndarray, " responses"] | Any
    """The present turn of an episode, from 0; 0 where there are no turns."""
    fills: Sequence[tuple[int, Fill]]
    """(place of a prompt, a page to write with its tokens)."""
    fed: Sequence[Int[np.ndarray, " _"]] = ()
    """Tokens that each response is fed, one per step, before it samples; (): all tokens are in its prompt."""


@runtime_checkable
class Engine(Protocol):
    """The operations that a sampler needs of a decoder. `dapo_jax.testing` has one without a model."""

    slots: int
    capacity: int
    """Tokens that fit in a slot, prompt and response together."""
    stop_ids: tuple[int, ...]
    """Tokens that end a response."""
    steps_per_call: int
    """Most tokens that one `generate` samples for a slot."""
    page_sizes: PageSizes
    """The sizes of the KV cache. The caller assigns its pages."""
    feed_tokens: int
    """Most tokens that a response whose pages are kept may be fed when it gets a slot again; 0: it is re-prefilled."""

    def init_decode_state(self) -> PyTree:
        """Returns a state in which every slot is free."""
        ...

    def prefill(
        self, params: PyTree, prompts: Sequence[Int[np.ndarray, " _"]]
    ) -> Iterator[list[tuple[int, PyTree, int]]]:
        """Prefills prompts, some at a time. Yields the finished ones after each part, possibly none: (index of the prompt, its prefix, its
        place
        in the prefix).
        """
        ...

    def insert(self, prefix: PyTree, state: PyTree, insertion: Insertion, key: PRNGKeyArray) -> PyTree:
        """Inserts prefilled prompts into slots, replacing their content, and writes the pages that the insertion names."""
        ...

    def generate(
        self,
        params: PyTree,
        state: PyTree,
        decoding: Decoding,
        min_live: int,
        tables: Int[np.ndarray, "slots table_pages"],
        until: Int[np.ndarray, " slots"] | None = None,
    ) -> tuple[PyTree, ResultTokens]:
        """Decodes until `steps_per_call` tokens are sampled, or fewer than `min_live` slots sample.

        `tables` are rows of `Pages.tables`; each sampling slot has pages for its tokens and for `steps_per_call` more. A slot pauses
        when its response has the number of tokens in `until`; None: it never pauses.
        """
        ...

    def paused(self, state: PyTree) -> PyTree:
        """Returns a prefix from which `insert`, without pages to write, gives a paused response a slot again. Its place in the prefix is its
        slot's number.
        """
        ...

    def parked(self, lengths: Sequence[int]) -> PyTree:
        """Returns a prefix from which `insert`, without pages to write, gives a slot to responses whose pages hold so many tokens. Each is fed
        at least one token.
        """
        ...

    def release(self, state: PyTree, slots: Sequence[int]) -> PyTree:
        """Ends the responses in some slots."""
        ...
