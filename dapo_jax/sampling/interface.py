"""The interface of sampler and engine: the verbs, what goes in and what comes out."""

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
    """The result of one `generate`; the valid tokens of a slot come first in its row."""

    tokens: Int[Array, "slots steps"] | Any
    logprobs: Float[Array, "slots steps"] | Any
    valid: Bool[Array, "slots steps"] | Any
    live: Bool[Array, " slots"] | Any
    """True where the slot goes on, perhaps after a pause."""


@dataclass(frozen=True, kw_only=True)
class Insertion:
    """Which prefilled prompt goes into which slot, for which response. Host arrays of one length."""

    slots: Int[np.ndarray, " responses"] | Any
    prompts: Int[np.ndarray, " responses"] | Any
    """Places in the prefix."""
    ordinals: Int[np.ndarray, " responses"] | Any
    indices: Int[np.ndarray, " responses"] | Any
    limits: Int[np.ndarray, " responses"] | Any
    drawn: Int[np.ndarray, " responses"] | Any
    """Tokens of the response with which the prompt ends: 0, or those drawn before it lost its pages. Of an episode those of its present turn, as `limits` are."""
    turns: Int[np.ndarray, " responses"] | Any
    """The present turn of an episode, from 0; 0 where there are no turns."""
    fills: Sequence[tuple[int, Fill]]
    """(place of a prompt, a page to be written with tokens of it)."""
    fed: Sequence[Int[np.ndarray, " _"]] = ()
    """Tokens that each response takes, one at a step, before it draws; none: all are in its prompt."""


@runtime_checkable
class Engine(Protocol):
    """The operations that the sampler needs of a decoder. `dapo_jax.testing` has one without a model."""

    slots: int
    capacity: int
    """Tokens that fit in a slot, prompt and response together."""
    stop_ids: tuple[int, ...]
    """Tokens that end a response."""
    steps_per_call: int
    """The most tokens that one `generate` draws for a slot."""
    page_sizes: PageSizes
    """The sizes of its cache, whose pages the caller hands out."""
    feed_tokens: int
    """The most tokens that a response may be fed when it is given a slot again, its pages being there; 0: it is read again."""

    def init_decode_state(self) -> PyTree:
        """A state in which every slot is free."""
        ...

    def prefill(
        self, params: PyTree, prompts: Sequence[Int[np.ndarray, " _"]]
    ) -> Iterator[list[tuple[int, PyTree, int]]]:
        """Reads prompts, some at a time: gives after each part of the work what it has finished, which may be nothing: (which prompt, the
        prefix that has it, its place there)."""
        ...

    def insert(self, prefix: PyTree, state: PyTree, insertion: Insertion, key: PRNGKeyArray) -> PyTree:
        """Puts prefilled prompts into slots, dropping whatever was there, and writes the pages that the insertion names."""
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
        """Decodes until `steps_per_call` tokens are drawn or fewer than `min_live` slots draw.

        `tables` are rows of those of `Pages`, in which each slot that draws has pages for what it holds and so many tokens more. A slot pauses
        when its response has come to the number of tokens in `until`; None: it goes on.
        """
        ...

    def paused(self, state: PyTree) -> PyTree:
        """A prefix from which `insert`, with no page to write, gives a response of any slot a slot again; its place there is the number of the
        slot."""
        ...

    def parked(self, lengths: Sequence[int]) -> PyTree:
        """A prefix from which `insert`, with no page to write, gives responses a slot whose pages hold so many tokens, each of which is fed at least one."""
        ...

    def release(self, state: PyTree, slots: Sequence[int]) -> PyTree:
        """Ends the responses in some slots where they are."""
        ...
