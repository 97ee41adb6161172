"""What flows through the pipe: prompts become groups of rollouts, then microbatches.

`Prompt`, `Rollout` and `Group` live on the host and hold numpy and Python values of natural
length. `Microbatch` is padded to one static shape and is what crosses to the device. Its fields are annotated
`... | Any` because on the host they are numpy, and JAX rebuilds a registered dataclass around shapes and shardings too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

FinishReason = Literal["stop", "length"]
"""Why sampling ended: an end token, or the length limit."""


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


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Arrays for one forward and backward pass: rollouts packed into rows of one static length.

    A row may hold several rollouts, told apart by `segment_ids`, and several responses may follow one prompt. Column `t` of
    `old_logprobs`, `mask`, `advantages` and `weights` is about the token *at* `t`; its log-probability comes from
    the logits at `previous[t]`.
    """

    tokens: Int[Array, "rows seq"] | Any
    segment_ids: Int[Array, "rows seq"] | Any
    """1, 2, ... for the rollouts of a row; 0 is padding, which attends to nothing that counts. A prompt that several
    responses follow is a segment of its own."""
    prefix_ids: Int[Array, "rows seq"] | Any
    """The segment that a token sees beside its own: that of its prompt. Its own where prompt and response are one."""
    previous: Int[Array, "rows seq"] | Any
    """The column whose logits predict the token: the one before it, or the last of its prompt."""
    positions: Int[Array, "rows seq"] | Any
    """Position of each token inside its own rollout, from 0."""
    mask: Bool[Array, "rows seq"] | Any
    """True on response tokens that enter the loss."""
    advantages: Float[Array, "rows seq"] | Any
    weights: Float[Array, "rows seq"] | Any
    """Each token's weight in the loss, computed from the whole minibatch: microbatch losses add up to the minibatch's."""
    sampler_logprobs: Float[Array, "rows seq"] | Any
    """Log-probabilities recorded while sampling."""
    old_logprobs: Float[Array, "rows seq"] | Any
    """Log-probabilities that the importance ratio is taken to; zeros until they are scored."""
    ref_logprobs: Float[Array, "rows seq"] | Any
    """Log-probabilities under the reference policy; zeros when there is none."""
