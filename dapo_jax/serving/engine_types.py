"""Types that the adapter passes to JetStream and gets back from it: results, prefixes, state, weights."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from flax import struct
from jaxtyping import Array, Int, PyTree
from jetstream.engine import engine_api


@struct.dataclass
class ServedTokens(engine_api.ResultTokens):
    """JetStream's result, and log-probabilities in the field that its main branch has for them."""

    log_prob: Any = None
    """float32 [slots, steps]: of each token, in nats."""

    def copy_to_host_async(self) -> None:
        """Starts copying to the host."""
        for leaf in (self.data, self.log_prob):
            if isinstance(leaf, jax.Array):
                leaf.copy_to_host_async()

    def convert_to_numpy(self) -> "ServedTokens":
        """The same on the host."""
        logprobs = None if self.log_prob is None else np.asarray(self.log_prob)
        return replace(self, data=np.asarray(self.data), log_prob=logprobs)


@dataclass(frozen=True, kw_only=True)
class BoundedPrompt:
    """A padded prompt whose response's length is known: `prefill` takes it in place of an array."""

    tokens: Int[np.ndarray, " padded"]
    max_response_tokens: int
    abandoned: Callable[[], bool]
    """Says whether nobody waits for the response any more."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ServedPrefix:
    """One prefilled prompt."""

    prefix: PyTree
    place: int = field(metadata={"static": True})
    """Place of the prompt in the prefix."""
    prompt_tokens: int = field(metadata={"static": True})
    max_response_tokens: int = field(metadata={"static": True})
    abandoned: Callable[[], bool] = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ServedState:
    """The engine's state, and how many tokens each slot has drawn."""

    slots: PyTree
    drawn: Int[Array, " slots"] | Any


class Weights:
    """The weights that are served now; JetStream reads parameters once and keeps them, so it is given this handle."""

    def __init__(self, current: PyTree) -> None:
        self.current = current
