"""The interface of an environment: it makes an episode for each response, and an episode answers turn by turn.

Tokens go in and tokens come out. What an episode appends follows the turn's own tokens as they were sampled, so the next turn's context is the old
context, the turn and what was appended, word for word; nothing that was sampled is tokenized a second time.
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from dapo_jax.dapo.rollouts import FinishReason

Message = Mapping[str, Any]
"""`role` and `content`, and whatever else the model's chat template knows."""

Appended = str | Sequence[Message] | Sequence[int] | Int[np.ndarray, " tokens"]
"""The ways to append: a text as it stands, messages for the model's chat template, or ids. Nothing that is written like a special token in a text, or in the
content of a message, becomes one."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of the policy, as its environment hears it."""

    tokens: Int[np.ndarray, " turn"]
    """The end token included, if there is one."""
    logprobs: Float[np.ndarray, " turn"]
    """In nats, at the sampling temperature."""
    text: str
    """The tokens as text, special tokens left out; up to the stop string, if one of `sampling.stop` ended the turn."""
    finish_reason: FinishReason
    """length: the turn was cut off."""
    number: int
    """From 0."""


@dataclass(frozen=True)
class Context:
    """A whole context, in place of all that was before it: what a chat template rewrites, or what an agent sums up, begins anew.

    The turns behind it are trained on behind it, as a row of their own.
    """

    contents: Appended
    """A text, messages or ids. Messages are rendered up to where the assistant's next answer begins."""
    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of the tools that the chat template is to tell of."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """An episode's answer to a turn."""

    reward: float = 0.0
    """The worth of the turn. The episode is worth the sum."""
    done: bool = False
    """The episode is over."""
    append: Appended = ""
    """The tokens between this turn and the next; no matter when the episode is over."""
    context: Context | None = None
    """In place of `append`: the next turn begins behind this instead."""
    correct: bool | None = None
    """Whether the episode as a whole is right, as far as is known; None leaves it as it was, or to the rewards: a sum above 0 is right."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers to be logged as `reward/parts/NAME`; a later turn's replaces that of an earlier one."""


@runtime_checkable
class Episode(Protocol):
    """One response's conversation with its environment: made for it, and used once."""

    async def step(self, turn: Turn) -> Step:
        """The answer to a turn. One that is no `async def` runs in a thread of its own.

        What it raises, or if it takes longer than `environment.timeout_s`, ends the episode as lost; no other suffers from it.
        """
        ...


@runtime_checkable
class Environment(Protocol):
    """Makes episodes. A class of which `environment.source` names the constructor, called without arguments, or a function that returns one."""

    def episode(self, row: Mapping[str, Any], seed: int) -> Episode | Awaitable[Episode]:
        """An episode for a row of the data; `seed` is the same for all responses to its prompt, which so have the same task.

        An episode may have `async start() -> Appended | Context`, too: what follows the prompt before the first turn, or what is there in the prompt's place.
        If it has `close()`, that is called once it has its reward, whatever ended it.
        """
        ...
