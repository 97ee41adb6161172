"""From the responses to one prompt to a group with verdicts and shaped rewards."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from dapo_jax.rewards.functions import GradeFunction, Sample
from dapo_jax.rewards.overlong import overlong_penalty
from dapo_jax.rollouts import Group, Prompt, Response, Rollout, Verdict


@runtime_checkable
class Decoder(Protocol):
    """The half of a tokenizer that grading needs."""

    def decode(self, ids: Int[np.ndarray, " tokens"]) -> str:
        """The text of `ids`, special tokens left out."""
        ...


def grade_group(
    prompt: Prompt,
    responses: Sequence[Response],
    *,
    tokenizer: Decoder,
    grade: GradeFunction,
    correct: float = 1.0,
    incorrect: float = -1.0,
    overlong: bool = False,
    max_response_tokens: int = 0,
    buffer_tokens: int = 0,
    penalty_factor: float = 1.0,
) -> Group:
    """Grades every response and adds the overlong penalty (DAPO Eq. 13) to its reward.

    The verdict is taken before shaping: an answer stays correct however long it is. With the defaults and
    `overlong`, a wrong answer at the length cap has the reward -1 - 1 = -2.

    Args:
        prompt: what was asked.
        responses: what was sampled, in the order of their response index.
        tokenizer: decodes the sampled tokens, special ones left out.
        grade: from `grade_function`.
        correct: reward of a correct verdict without a score.
        incorrect: reward of an incorrect verdict without a score.
        overlong: add the penalty; `max_response_tokens`, `buffer_tokens` and `penalty_factor` are used only then.
        max_response_tokens: the length, end token included, at which the penalty is whole.
        buffer_tokens: the stretch before it in which the penalty grows.
        penalty_factor: the whole penalty.

    Raises:
        ValueError: the penalty's lengths do not fit together, or the reward function returned no verdict.
    """

    def rollout(response: Response) -> Rollout:
        text = tokenizer.decode(response.tokens)
        verdict = grade(
            Sample(prompt=prompt, response=text, tokens=response.tokens, finish_reason=response.finish_reason)
        )
        penalty = 0.0
        if overlong:
            punishment = overlong_penalty(
                len(response.tokens),
                max_response_tokens=max_response_tokens,
                buffer_tokens=buffer_tokens,
                penalty_factor=penalty_factor,
            )
            penalty = float(punishment)
        return Rollout(
            response=response,
            text=text,
            verdict=verdict,
            reward=_rule_reward(verdict, correct, incorrect) + penalty,
            overlong_penalty=penalty,
        )

    return Group(prompt=prompt, rollouts=tuple(rollout(response) for response in responses))


def _rule_reward(verdict: Verdict, correct: float, incorrect: float) -> float:
    if verdict.score is not None:
        return verdict.score
    return correct if verdict.correct else incorrect
