"""The interface between the sampler and its engine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, UInt8

from dapo_jax.sampling.cache_sizes import PageSizes
from dapo_jax.sampling.decoding import Decoding
from dapo_jax.sampling.page_tables import Fill


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ResultTokens:
    """The result of one `generate` call. The valid tokens of a slot come first in its row. An engine that records a further value of `dapo.tokens.VALUES` adds a field for it."""

    tokens: Int[Array, "slots steps"] | Any
    logprobs: Float[Array, "slots steps"] | Any
    valid: Bool[Array, "slots steps"] | Any
    live: Bool[Array, " slots"] | Any
    """True if the slot's response has not ended. It may be paused."""
    routes: UInt8[Array, "slots steps layers chosen"] | Any = None
    """The experts chosen for the tokens that the slot processed, sampled and fed tokens alike, in order; then `NO_ROUTE`. None if the engine records nothing."""
    begins: Int[Array, " slots"] | Any = None
    """Index in the slot's context of the first token in `routes`."""
    head_ids: Int[Array, "slots steps heads"] | Any = None
    """The most probable tokens at the position of each sampled token, most probable first. None if the engine records nothing."""
    head_logprobs: Float[Array, "slots steps heads"] | Any = None
    """The log-probabilities of `head_ids` in nats, under the same distribution as `logprobs`."""


@dataclass(frozen=True, kw_only=True)
class Insertion:
    """Describes the responses to insert into slots, in host arrays with one entry per response."""

    slots: Int[np.ndarray, " responses"] | Any
    prompts: Int[np.ndarray, " responses"] | Any
    """Index of each response's prompt in the prefix."""
    ordinals: Int[np.ndarray, " responses"] | Any
    indices: Int[np.ndarray, " responses"] | Any
    limits: Int[np.ndarray, " responses"] | Any
    drawn: Int[np.ndarray, " responses"] | Any
    """Number of sampled tokens in the prefix, for example from before a preemption. Like `limits`, it counts only the current turn of an episode."""
    turns: Int[np.ndarray, " responses"] | Any
    """Index of each episode's current turn, from 0; 0 for responses without turns."""
    fills: Sequence[tuple[int, Fill]]
    """Pages to fill with prefilled tokens, each as a pair: the prompt's index in the prefix, and the page."""
    fed: Sequence[Int[np.ndarray, " _"]] = ()
    """Tokens to feed to each response, one per step, before it samples. If empty, the prefix already covers all tokens."""


@runtime_checkable
class Engine(Protocol):
    """The decoder operations that a sampler needs. `dapo_jax.testing` has an implementation without a model."""

    slots: int
    capacity: int
    """Maximum number of tokens in a slot, prompt and response together."""
    stop_ids: tuple[int, ...]
    """Tokens that end a response."""
    steps_per_call: int
    """Maximum number of tokens that one `generate` call samples for a slot."""
    page_sizes: PageSizes
    """The sizes of the KV cache. The caller assigns pages to responses."""
    feed_tokens: int
    """Maximum number of tokens to feed to a response that kept its pages and gets a slot again. If 0, such a response is re-prefilled instead."""

    parks_states: bool
    """Whether a response that keeps its pages outside the slots also needs its recurrent states, which `park` copies."""

    def init_decode_state(self) -> PyTree:
        """Returns a state in which every slot is free."""
        ...

    def prefill(
        self,
        params: PyTree,
        prompts: Sequence[Int[np.ndarray, " _"]],
        routes: Sequence[UInt8[np.ndarray, "_ layers chosen"] | None] = (),
    ) -> Iterator[list[tuple[int, PyTree, int]]]:
        """Prefills prompts in several calls. After each call, yields a list, possibly empty, of `(index in prompts, prefix, index in prefix)` for finished
        prompts. If the engine records the chosen experts, `prefix.routes` has one array [tokens, layers, chosen] per prompt. Such an engine uses
        the experts in `routes`, if it is given, where they are not `NO_ROUTE`."""
        ...

    def insert(self, prefix: PyTree, state: PyTree, insertion: Insertion, key: PRNGKeyArray) -> PyTree:
        """Inserts prefilled prompts into slots, replaces the slots' contents, and writes the pages in `insertion.fills`."""
        ...

    def generate(
        self,
        params: PyTree,
        state: PyTree,
        decoding: Decoding,
        min_live: int,
        tables: tuple[Int[np.ndarray, "slots table_pages"], ...],
        until: Int[np.ndarray, " slots"] | None = None,
    ) -> tuple[PyTree, ResultTokens]:
        """Runs up to `steps_per_call` decoding steps. Returns earlier if fewer than `min_live` slots are still sampling,
        except on a GPU, where leaving the loop early would cost more time than it saves.

        `tables` contains the rows of the slots in each page table (see `Pages.rows`). Each sampling slot must have pages for its tokens and for `steps_per_call`
        more tokens. A slot pauses when its response reaches the number of tokens in `until`. Without `until`, no slot pauses.
        """
        ...

    def park(self, state: PyTree, parked: PyTree | None, slots: Sequence[int], rows: Sequence[int]) -> PyTree:
        """Copies the logits and states of fixed size of `slots` to the places `rows` of the parked states, which have a place for each row of the page table. Returns
        the parked states. With them, `insert` can later put paused responses back into slots without writing pages.

        `parked` is the result of the previous call, which must not be used afterwards, or None in the first call."""
        ...

    def parked_prefix(self, lengths: Sequence[int], parked: PyTree | None, rows: Sequence[int]) -> PyTree:
        """Returns a prefix for responses whose pages already contain `lengths` tokens, so that `insert` puts them into slots without writing pages. Each
        response must then be fed at least one token. With `parks_states`, `parked` is the last result of `park`, and `rows` are the responses' places in it."""
        ...

    def release(self, state: PyTree, slots: Sequence[int]) -> PyTree:
        """Ends the responses in `slots`, so that these slots stop sampling."""
        ...
