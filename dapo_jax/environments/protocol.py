"""The environment interface. An environment creates an episode for each response, and the episode answers each turn of the policy.

Episodes receive and append tokens. The next turn's context consists of the old context, the sampled tokens of the turn and the tokens
that the episode appends. Sampled tokens are never tokenized again.
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from dapo_jax.dapo.rollouts import FinishReason

Message = Mapping[str, Any]
"""A message with `role`, `content` and other fields that the model's chat template uses."""

Appended = str | Sequence[Message] | Sequence[int] | Int[np.ndarray, " tokens"]
"""A value to append: a text, messages for the model's chat template, or token ids. In a text or
a message, the name of a special token is tokenized as plain text."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of the policy, which is passed to the episode."""

    tokens: Int[np.ndarray, " turn"]
    """The sampled token ids, including the end token if there is one."""
    logprobs: Float[np.ndarray, " turn"]
    """Log-probability of each token in nats, at the sampling temperature."""
    text: str
    """The decoded text without special tokens. If a stop string (`sampling.stop`) ended the turn, the text ends before this string."""
    finish_reason: FinishReason
    """The reason why the turn ended. `length` means that it was cut off at a token limit."""
    number: int
    """Index of the turn in its episode, starting at 0."""
    marked_text: str = ""
    """The text with the special tokens inside it, because some models mark tool calls with them. Without special tokens at the end, and after the `<think>`
    with which the chat template began the answer, if any."""
    stop_text: str = ""
    """The rest of the text: the stop string that ended the turn, with the characters after it in the last token. Empty if no stop string ended it."""
    context_tokens: int = 0
    """Number of tokens in the context in which the turn was sampled."""


@dataclass(frozen=True)
class Context:
    """A new context that replaces everything before it, for example a summary by an agent, or earlier turns rewritten by a chat template.

    In training, the turns that follow form a separate row, which begins with this context.
    """

    contents: Appended
    """A text, messages or token ids. Messages are rendered with a generation prompt for the assistant's next answer."""
    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of the tools, which are passed to the chat template."""
    after: int | None = None
    """Number of an earlier turn. The context then consists of the exact tokens of that turn's context, the turn, and `contents`. After the last turn, this is the
    same as `Step.append`. With -1, a context whose tokens equal the row's prompt is that prompt, so the group's episodes share it."""
    max_tokens: int = 0
    """Maximum number of tokens in the next turn, if it is lower than the limits of the run. 0 means that only these apply."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """An episode's answer to a turn."""

    reward: float | None = 0.0
    """Reward of the turn. The episode's reward is the sum over its turns. With None, the run's grader grades the text of the last turn (agents only)."""
    done: bool = False
    """Whether the episode is over."""
    append: Appended = ""
    """The value to append between this turn and the next. Ignored if the episode is over."""
    context: Context | None = None
    """A new context for the next turn, used instead of `append`."""
    correct: bool | None = None
    """Whether the episode is correct so far. None keeps the previous value. If every step returns None, a reward above 0 counts as correct."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that are logged as `reward/parts/NAME`. A later turn's number replaces an earlier number with the same name."""
    forget: bool = False
    """Whether the turn stays out of the loss, for example because no client received it."""


@runtime_checkable
class Episode(Protocol):
    """The conversation between the policy and its environment in one response."""

    async def step(self, turn: Turn) -> Step:
        """Returns the answer to a turn. A method without `async def` runs in a separate thread.

        If the method raises or takes longer than `workers.timeout_s`, only this episode is lost.
        """


@runtime_checkable
class Environment(Protocol):
    """Creates episodes. `environment.source` is the name of a class or function that is called without arguments and returns an environment."""

    def episode(self, row: Mapping[str, Any], seed: int) -> Episode | Awaitable[Episode]:
        """Creates an episode for a data row. `seed` is identical for all responses of a group, so they get the same task.

        An episode may also have a method `async start() -> Appended | Context`. It returns a value to append to the prompt, or a context
        that replaces the prompt. The episode's `close()` method, if there is one, is called after the reward is set, even if the episode was lost.

        The environment may have two more methods. `group_rewards(episodes)` returns the rewards of all episodes of a prompt. `finish(episode, reason)` is called if
        an episode is cut off: it has had all its turns (`max_turns`), or its context is full (`context_length_exceeded`). It returns a last Step, whose reward is added.
        """
