"""What flows through the pipe on the host: prompts become groups of graded rollouts.

All hold numpy and Python values of natural length, and nothing here loads jax: grading workers import these types too.
What crosses to the device is a `dapo_jax.microbatch.Microbatch`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int

FinishReason = Literal["stop", "length"]
"""Why sampling ended: an end token, or the length limit."""


Lost = Literal["timeout", "memory", "died", "nonfinite"]
"""Why a grader gave no verdict: its time, its memory, its process, or a score that is NaN or infinite."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One question, ready for the sampler."""

    ordinal: int
    """The prompt's place in the run's prompt sequence: never repeats, though a question may."""
    tokens: Int[np.ndarray, " prompt"]
    text: str
    answer: str
    """The reference answer that a grader compares with."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The data row that the prompt was made from, for reward functions that need more than the answer."""


@dataclass(frozen=True, kw_only=True)
class Response:
    """What the sampler returns for one slot: not graded yet."""

    tokens: Int[np.ndarray, " response"]
    """The sampled tokens, the end token included when there is one."""
    logprobs: Float[np.ndarray, " response"]
    """Log-probability of each token in nats, at the sampling temperature, under the weights that sampled it."""
    finish_reason: FinishReason


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a grader says of one response, before any shaping."""

    correct: bool
    extracted: str | None = None
    """The answer found in the response; None if there was none."""
    reason: str = ""
    """Why the verdict is what it is, for a person who reads rollouts."""
    score: float | None = None
    """A graded score that replaces the +1 / -1 of the rule reward; None for a plain verdict."""
    lost: Lost | Literal[""] = ""
    """Why the grader gave no verdict, so that the response counts as wrong; empty if it gave one."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Of a sum of several graders: each one's reward before its weight. `correct` is then the first one's, `score` the sum."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One sampled and graded response."""

    response: Response
    text: str
    """The response decoded without special tokens: what the grader saw."""
    verdict: Verdict
    reward: float
    """What the advantage is computed from: the verdict's reward plus the overlong penalty."""
    overlong_penalty: float = 0.0
    """The part of `reward` that is length shaping (DAPO Eq. 13), in [-penalty_factor, 0]."""

    @property
    def correct(self) -> bool:
        """The grader's verdict, before any shaping."""
        return self.verdict.correct

    @property
    def truncated(self) -> bool:
        """True if sampling stopped at the length limit rather than at an end token."""
        return self.response.finish_reason == "length"

    @property
    def response_tokens(self) -> int:
        """Length of the response in tokens, the end token included."""
        return len(self.response.tokens)


@dataclass(frozen=True, kw_only=True)
class Group:
    """The graded responses to one prompt, in the order of their response index."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    @property
    def rewards(self) -> Float[np.ndarray, " group"]:
        """One shaped reward per rollout, in float64."""
        return np.array([rollout.reward for rollout in self.rollouts], dtype=np.float64)

    @property
    def accuracy(self) -> float:
        """The fraction of rollouts that are correct."""
        return sum(rollout.correct for rollout in self.rollouts) / len(self.rollouts)
