"""Turns the responses to one prompt into a group with verdicts and shaped rewards."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from dapo_jax.dapo.overlong import overlong_penalty
from dapo_jax.dapo.rollouts import Group, Prompt, Response, Rollout, Verdict
from dapo_jax.rewards.adapters import NOT_APPLICABLE
from dapo_jax.rewards.functions import GradeFunction
from dapo_jax.rewards.sample import Sample


@runtime_checkable
class TextDecoder(Protocol):
    """The part of the tokenizer interface that grading needs."""

    def decode(self, ids: Int[np.ndarray, " tokens"], after: Int[np.ndarray, " before"] | None = None) -> str:
        """Returns the text of `ids` without special tokens. They follow the tokens `after`, or begin a text without `after`."""


def samples_of(prompt: Prompt, responses: Sequence[Response], *, tokenizer: TextDecoder) -> list[Sample]:
    """Returns a grader's arguments, one `Sample` per response. Responses are decoded to text without special tokens."""
    after = {"after": prompt.tokens} if prompt.is_plain else {}
    return [
        Sample(
            prompt=prompt,
            response=tokenizer.decode(response.tokens, **after),
            tokens=response.tokens,
            finish_reason=response.finish_reason,
            step=response.spans[0].version,
        )
        for response in responses
    ]


@dataclass(frozen=True, kw_only=True)
class Shaping:
    """The rules for converting a verdict to a reward."""

    correct: float = 1.0
    """Reward of a correct verdict without a score."""
    incorrect: float = -1.0
    overlong: bool = False
    """Whether to add the overlong penalty. If not, the fields below have no effect."""
    max_response_tokens: int = 0
    """Response length in tokens, including the end token, at which the penalty reaches its full magnitude."""
    buffer_tokens: int = 0
    """Number of tokens before `max_response_tokens` over which the penalty grows linearly."""
    penalty_factor: float = 1.0
    """Magnitude of the full penalty."""

    def penalty(self, response_tokens: int) -> float:
        """Returns the overlong penalty (DAPO Eq. 13) of a response, or 0 if the penalty is disabled. Raises ValueError if the limits are inconsistent."""
        if not self.overlong:
            return 0.0
        limits = {"max_response_tokens": self.max_response_tokens, "buffer_tokens": self.buffer_tokens}
        return float(overlong_penalty(response_tokens, **limits, penalty_factor=self.penalty_factor))

    def rewards(self, verdicts: Sequence[Verdict], *, weight: float = 1.0) -> list[float]:
        """Returns one grader's rewards for the responses to a prompt: each verdict's score, or `correct` or `incorrect` if it has no score.

        A response must not profit from making its grader hang. So the reward for a lost verdict is the worst of `correct`,
        `incorrect` and this grader's other rewards in the group. If no reward function applies to a response, its reward is their mean.

        Args:
            verdicts: one grader's verdicts on all responses to a prompt.
            weight: the factor that the caller applies to the rewards. If it is negative, the highest reward is the worst.
        """
        rule = {True: self.correct, False: self.incorrect}
        rewards = [
            None
            if _is_missing(verdict)
            else rule[verdict.correct]
            if verdict.score is None
            else verdict.score
            for verdict in verdicts
        ]
        known = [reward for reward in rewards if reward is not None]
        worst, mean = (min if weight > 0 else max)(*known, *rule.values()), sum(known) / max(len(known), 1)
        missing = [worst if verdict.lost else mean for verdict in verdicts]
        pairs = zip(rewards, missing, strict=True)
        return [instead if reward is None else reward for reward, instead in pairs]


def _is_missing(verdict: Verdict) -> bool:
    """Returns whether a verdict has no reward. If several graders are summed, there is a score even if one verdict is lost."""
    return verdict.score is None and (verdict.lost != "" or verdict.reason == NOT_APPLICABLE)


def shaped_group(
    prompt: Prompt,
    responses: Sequence[Response],
    samples: Sequence[Sample],
    verdicts: Sequence[Verdict],
    shaping: Shaping,
) -> Group:
    """Builds a group from a prompt's graded responses, and adds the overlong penalty to their rewards.

    Shaping does not change the verdict, so a correct answer stays correct at any length. With `overlong=True` and the default
    rewards, a wrong answer at the length limit gets -1 - 1 = -2. If other verdicts have scores, a lost verdict's score is set to its reward.
    """
    scored = any(verdict.score is not None for verdict in verdicts)
    rewards, rollouts = shaping.rewards(verdicts), []
    for response, sample, verdict, reward in zip(responses, samples, verdicts, rewards, strict=True):
        if verdict.reason == NOT_APPLICABLE:
            warnings.warn(f"{NOT_APPLICABLE}; its reward is the group's mean", stacklevel=2)
        if scored and _is_missing(verdict):
            verdict = replace(verdict, score=reward)
        penalty = shaping.penalty(response.sampled_tokens)
        graded = {"verdict": verdict, "reward": reward + penalty, "overlong_penalty": penalty}
        rollouts.append(Rollout(response=response, text=sample.response, **graded))
    return Group(prompt=prompt, rollouts=tuple(rollouts))


def grade_group(
    prompt: Prompt,
    responses: Sequence[Response],
    *,
    tokenizer: TextDecoder,
    grade: GradeFunction,
    shaping: Shaping = Shaping(),
) -> Group:
    """Grades the responses to a prompt in this process and shapes the rewards.

    Args:
        prompt: the prompt.
        responses: the sampled responses, in the order of their response index.
        tokenizer: decodes token ids to text without special tokens.
        grade: a function from `grade_function`.
        shaping: turns verdicts into rewards, by default +1 for a correct response and -1 otherwise (Section 2.4 of the DAPO paper).

    Raises:
        ValueError: the token numbers in `shaping` are inconsistent.
        RewardError: the reward function raised or did not return a verdict.
    """
    samples = samples_of(prompt, responses, tokenizer=tokenizer)
    return shaped_group(prompt, responses, samples, grade(samples), shaping)
