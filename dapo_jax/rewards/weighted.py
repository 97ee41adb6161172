"""Several reward functions for one response, summed by weight.

A file of its own: a sum of rewards knows nothing of who gives them.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from dapo_jax.dapo.rollouts import Verdict
from dapo_jax.rewards.functions import MAX_SCORE, RewardError
from dapo_jax.rewards.futures import each, joined
from dapo_jax.rewards.grading import Submit
from dapo_jax.rewards.sample import Sample
from dapo_jax.rewards.shaping import Shaping


@dataclass(frozen=True, kw_only=True)
class Part:
    """One of the reward functions whose sum is the reward."""

    name: str
    """The name of this part alone, in metrics and reasons."""
    weight: float
    submit: Submit


def weighted_sum(parts: Sequence[Part], shaping: Shaping) -> Submit:
    """Hands a group to all parts; the verdict is that of the first with the sum of weight x reward as its score.

    The first says whether the answer is correct; the others shape the reward. See `summed`.

    Args:
        parts: one or more, of different names.
        shaping: says what a part's verdicts are worth.
    """

    def submit(samples: Sequence[Sample]) -> list[Future[Verdict]]:
        asked = [future for part in parts for future in part.submit(samples)]
        count = len(samples)

        def join(verdicts: list[Verdict]) -> list[Verdict]:
            return summed(parts, [verdicts[i : i + count] for i in range(0, len(verdicts), count)], shaping)

        return each(joined(asked, join), count)

    return submit


def summed(parts: Sequence[Part], verdicts: Sequence[Sequence[Verdict]], shaping: Shaping) -> list[Verdict]:
    """The sums of the parts' verdicts on the responses to one prompt.

    `correct` and `extracted` are the first part's; `score` is the sum of weight x reward; `reason` is the first's with the terms
    of the sum; `lost` is the first that is not empty; `parts` holds each part's reward before its weight. A lost verdict is worth
    what `Shaping.rewards` says for the part's weight.

    Args:
        parts: one or more.
        verdicts: each part's, on all responses.
        shaping: says what verdicts are worth.

    Raises:
        RewardError: a sum is beyond `MAX_SCORE`, though each part's score is not; it names the terms.
    """
    rewards = [
        shaping.rewards(of_part, weight=part.weight) for part, of_part in zip(parts, verdicts, strict=True)
    ]
    responses = zip(zip(*verdicts, strict=True), zip(*rewards, strict=True), strict=True)
    return [_sum(parts, *of_response) for of_response in responses]


def _sum(parts: Sequence[Part], verdicts: Sequence[Verdict], rewards: Sequence[float]) -> Verdict:
    terms = [
        f"{part.name} {part.weight:g} x {value:g}{f' ({verdict.lost})' if verdict.lost else ''}"
        for part, value, verdict in zip(parts, rewards, verdicts, strict=True)
    ]
    first = verdicts[0]
    score = sum(part.weight * value for part, value in zip(parts, rewards, strict=True))
    if not abs(score) <= MAX_SCORE:
        raise RewardError(
            f"the sum of rewards {', '.join(terms)} is {score:g}; it is at most {MAX_SCORE:g} in size, or advantages would overflow: "
            "lower the weights or scale the scores down"
        )
    return Verdict(
        correct=first.correct,
        extracted=first.extracted,
        reason="; ".join(filter(None, [first.reason, f"sum of {', '.join(terms)}"])),
        score=score,
        lost=next((verdict.lost for verdict in verdicts if verdict.lost), ""),
        parts={part.name: value for part, value in zip(parts, rewards, strict=True)},
    )


def part_names(names: Sequence[str]) -> list[str]:
    """Short names, each once: the function's for one in a module or file; a second of one name gets a number.

    >>> part_names(["math", "rewards.py:brief", "trl:other.py:brief", "main.<locals>.judge"])
    ['math', 'brief', 'brief_2', 'judge']
    """
    short: list[str] = []
    for name in names:
        wanted = base = name.rpartition(":")[2].rpartition("<locals>.")[2]
        number = 2
        while wanted in short:
            wanted, number = f"{base}_{number}", number + 1
        short.append(wanted)
    return short
