"""The interface of an environment: it makes an episode for each response, and an episode answers turn by turn.

Tokens go in and tokens come out. The next turn's context is the old context, the sampled tokens of the turn, and the tokens that the
episode appends. Sampled tokens are never tokenized again.
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from dapo_jax.dapo.rollouts import FinishReason

Message = Mapping[str, Any]
"""`role`, `content`, and other fields of the model's chat template."""

Appended = str | Sequence[Message] | Sequence[int] | Int[np.ndarray, " tokens"]
"""Values to append: a text, messages for the model's chat template, or token ids. Text that looks like a special token does not become
one, in a text or in a message."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of the policy, as an episode receives it."""

    tokens: Int[np.ndarray, " turn"]
    """The sampled tokens, with the end token if there is one."""
    logprobs: Float[np.ndarray, " turn"]
    """Log-probability of each token in nats, at the sampling temperature."""
    text: str
    """The text of the tokens without special tokens, up to the stop string if one of `sampling.stop` ended the turn."""
    finish_reason: FinishReason
    """`length` if the turn was cut off."""
    number: int
    """Number of the turn, from 0."""


@dataclass(frozen=True)
class Context:
    """A new context that replaces everything before it, such as an agent's summary, or earlier turns that a chat template rewrites.

    The turns after it are trained on after this context, in a row of their own.
    """

    contents: Appended
    """A text, messages or token ids. Messages are rendered up to the beginning of the assistant's next answer."""
    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of tools, for the chat template."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """An episode's answer to a turn."""

    reward: float = 0.0
    """Reward of the turn. The reward of the episode is the sum."""
    done: bool = False
    """Whether the episode is over."""
    append: Appended = ""
    """Appended between this turn and the next; ignored if the episode is over."""
    context: Context | None = None
    """The context of the next turn, instead of `append`."""
    correct: bool | None = None
    """Whether the episode is correct so far. None keeps the previous value; without any, an episode with a reward above 0 is correct."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that are logged as `reward/parts/NAME`; a later turn's number replaces an earlier one."""


@runtime_checkable
class Episode(Protocol):
    """The conversation of one response with its environment."""

    async def step(self, turn: Turn) -> Step:
        """Returns the answer to a turn. A method without `async def` runs in a thread of its own.

        An exception, or taking longer than `environment.timeout_s`, ends only this episode, as lost.
        """
        ...


@runtime_checkable
class Environment(Protocol):
    """Makes episodes. `environment.source` names a class or function that is called without arguments and returns an environment."""

    def episode(self, row: Mapping[str, Any], seed: int) -> Episode | Awaitable[Episode]:
        """Returns an episode for a row of the data. `seed` is the same for all responses of a group, so they get the same task.

        An episode may also have `async start() -> Appended | Context`, which returns a beginning after the prompt, or a context that
        replaces the prompt. If it has `close()`, this is called after the episode has its reward, whatever ended it.
        """
        ...
