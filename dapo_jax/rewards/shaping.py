"""From the responses to one prompt to a group with verdicts and shaped rewards."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from dapo_jax.dapo.overlong import overlong_penalty
from dapo_jax.dapo.rollouts import Group, Prompt, Response, Rollout, Verdict
from dapo_jax.rewards.functions import GradeFunction
from dapo_jax.rewards.sample import Sample


@runtime_checkable
class TextDecoder(Protocol):
    """The half of a tokenizer that grading needs."""

    def decode(self, ids: Int[np.ndarray, " tokens"]) -> str:
        """The text of `ids`, special tokens left out."""
        ...


def samples_of(prompt: Prompt, responses: Sequence[Response], *, tokenizer: TextDecoder) -> list[Sample]:
    """The samples that a grader is handed: the responses as text, special tokens left out."""
    return [
        Sample(
            prompt=prompt,
            response=tokenizer.decode(response.tokens),
            tokens=response.tokens,
            finish_reason=response.finish_reason,
        )
        for response in responses
    ]


@dataclass(frozen=True, kw_only=True)
class Shaping:
    """The rules by which a verdict becomes a reward."""

    correct: float = 1.0
    """Reward of a correct verdict without a score."""
    incorrect: float = -1.0
    lost: float | None = None
    """The most that a lost verdict of a grader with scores is worth; None: the worse of `correct` and `incorrect`."""
    overlong: bool = False
    """Add the overlong penalty; the fields below are used only then."""
    max_response_tokens: int = 0
    """The length, end token included, at which the penalty is whole."""
    buffer_tokens: int = 0
    """The stretch before it in which the penalty grows."""
    penalty_factor: float = 1.0
    """The whole penalty."""

    def penalty(self, response_tokens: int) -> float:
        """The overlong penalty (DAPO Eq. 13) of a response, 0 if it is off.

        Raises:
            ValueError: the lengths do not fit together.
        """
        if not self.overlong:
            return 0.0
        punishment = overlong_penalty(
            response_tokens,
            max_response_tokens=self.max_response_tokens,
            buffer_tokens=self.buffer_tokens,
            penalty_factor=self.penalty_factor,
        )
        return float(punishment)

    def rewards(self, verdicts: Sequence[Verdict], *, weight: float = 1.0) -> list[float]:
        """One grader's rewards of the responses to a prompt: the verdict's score, or else the rule reward.

        A lost verdict is worth the worst that this grader paid in the group, or `lost`, or without it the rule reward, whichever
        is worst: a response gains nothing by hanging its grader. Where the grader gives no scores, the rule reward is always one of
        these. Only the group is looked at, so the reward does not depend on what was graded before.

        Args:
            verdicts: of one grader, on all responses to a prompt.
            weight: what these rewards will be multiplied by; below 0 the highest is the worst. They are returned before it.
        """
        known = [
            self._rule(verdict) if verdict.score is None else verdict.score
            for verdict in verdicts
            if not _is_unknown(verdict)
        ]
        scored = any(verdict.score is not None for verdict in verdicts)
        bounds = [] if self.lost is None else [self.lost]
        if self.lost is None or not scored:
            bounds += [self.correct, self.incorrect]
        worst = (min if weight > 0 else max)([*known, *bounds])
        paid = iter(known)
        return [worst if _is_unknown(verdict) else next(paid) for verdict in verdicts]

    def _rule(self, verdict: Verdict) -> float:
        return self.correct if verdict.correct else self.incorrect


def _is_unknown(verdict: Verdict) -> bool:
    """True if the grader gave neither verdict nor score; a sum of several has a score even if one of its parts was lost."""
    return bool(verdict.lost) and verdict.score is None


RULE_REWARD = Shaping()
"""+1 for a correct response, else -1 (Section 2.4)."""


def shaped_group(
    prompt: Prompt,
    responses: Sequence[Response],
    samples: Sequence[Sample],
    verdicts: Sequence[Verdict],
    shaping: Shaping,
) -> Group:
    """The group of a prompt's graded responses, the overlong penalty added to their rewards.

    The verdict is taken before shaping: an answer stays correct however long it is. With the defaults and `overlong`, a wrong
    answer at the length cap has the reward -1 - 1 = -2. Where the others have scores, a lost verdict gets its worth as one.
    """
    scored = any(verdict.score is not None for verdict in verdicts)

    def rollout(response: Response, sample: Sample, verdict: Verdict, reward: float) -> Rollout:
        penalty = shaping.penalty(response.sampled_tokens)
        return Rollout(
            response=response,
            text=sample.response,
            verdict=replace(verdict, score=reward) if scored and _is_unknown(verdict) else verdict,
            reward=reward + penalty,
            overlong_penalty=penalty,
        )

    graded = zip(responses, samples, verdicts, shaping.rewards(verdicts), strict=True)
    return Group(prompt=prompt, rollouts=tuple(rollout(*parts) for parts in graded))


def grade_group(
    prompt: Prompt,
    responses: Sequence[Response],
    *,
    tokenizer: TextDecoder,
    grade: GradeFunction,
    shaping: Shaping = RULE_REWARD,
) -> Group:
    """Grades the responses to a prompt in this process and shapes the rewards.

    Args:
        prompt: what was asked.
        responses: what was sampled, in the order of their response index.
        tokenizer: decodes the sampled tokens, special ones left out.
        grade: from `grade_function`.
        shaping: how a verdict becomes a reward.

    Raises:
        ValueError: the penalty's lengths do not fit together.
        RewardError: the reward function raised, or returned no verdict.
    """
    samples = samples_of(prompt, responses, tokenizer=tokenizer)
    return shaped_group(prompt, responses, samples, grade(samples), shaping)
