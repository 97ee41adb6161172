"""Grades groups in parallel with sampling, and sums the rewards of several graders."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from dapo_jax.dapo.rollouts import Group, Prompt, Response, Verdict
from dapo_jax.rewards.adapters import NOT_APPLICABLE
from dapo_jax.rewards.functions import MAX_SCORE, GradeFunction, RewardError, Submit, joined
from dapo_jax.rewards.sample import Sample
from dapo_jax.rewards.shaping import Shaping, TextDecoder, samples_of, shaped_group


def immediately(grade: GradeFunction) -> Submit:
    """Returns a `Submit` that grades in this process before it returns. The grader's exceptions propagate to the caller."""

    def submit(samples: Sequence[Sample]) -> Future[list[Verdict]]:
        verdicts: Future[list[Verdict]] = Future()
        verdicts.set_result(grade(samples))
        return verdicts

    return submit


NOT_GRADED = Verdict(correct=False, reason="not graded", score=0.0)
"""The verdict on every training response of a run that does not learn from rewards."""


@dataclass(frozen=True, kw_only=True)
class Grading:
    """Turns sampled responses into graded groups, which contain text, verdicts and rewards."""

    submit: Submit
    tokenizer: TextDecoder
    shaping: Shaping
    on_submit: Callable[[], None] = lambda: None
    """Function that is called before the responses to a prompt are submitted."""
    on_close: Callable[[], None] = lambda: None

    def close(self) -> None:
        """Ends the grading workers and the event loop of async graders, if there are any."""
        self.on_close()

    def groups(self, sampled: Iterable[tuple[Prompt, tuple[Response, ...]]]) -> Iterator[Group]:
        """Yields the graded groups in sampling order. Raises RewardError if the grader raised or did not return a verdict.

        Submits the responses to the next prompt without waiting for the verdicts on earlier prompts.
        """
        pending: deque[Future[Group]] = deque()
        for prompt, responses in sampled:
            pending.append(self.begin(prompt, responses))
            while pending and pending[0].done():
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    def begin(self, prompt: Prompt, responses: Sequence[Response]) -> Future[Group]:
        """Submits the responses to a prompt for grading. The future returns the graded group, or raises RewardError if grading fails."""
        samples = samples_of(prompt, responses, tokenizer=self.tokenizer)
        self.on_submit()
        shaped = partial(shaped_group, prompt, responses, samples, shaping=self.shaping)
        return joined([self.submit(samples)], lambda verdicts: shaped(verdicts=verdicts[0]))


@dataclass(frozen=True, kw_only=True)
class Part:
    """One of several reward functions whose weighted rewards are summed."""

    name: str
    """Name of the function in metrics and in `Verdict.reason`."""
    weight: float
    submit: Submit
    only_correct: bool = False
    """Whether the reward is at most 0 for a response that the first part judges wrong."""


def weighted_sum(parts: Sequence[Part], shaping: Shaping) -> Submit:
    """Returns a `Submit` that grades with all parts and sums their weighted rewards, see `summed`. Part names must be unique."""

    def submit(samples: Sequence[Sample]) -> Future[list[Verdict]]:
        futures = [part.submit(samples) for part in parts]
        return joined(futures, lambda verdicts: summed(parts, verdicts, shaping))

    return submit


def summed(parts: Sequence[Part], verdicts: Sequence[Sequence[Verdict]], shaping: Shaping) -> list[Verdict]:
    """Combines the verdicts from all parts on the responses to one prompt, and returns one verdict per response.

    `correct` and `extracted` come from the first part. `score` is the weighted sum of the rewards. `reason` lists the terms of the sum,
    each with its part's reason. `lost` is the first non-empty `lost` of the parts. `parts` contains each part's reward before
    weighting. `Shaping.rewards` sets the reward for a lost verdict. If a sum exceeds `MAX_SCORE`, raises RewardError with the terms.
    """
    pairs = zip(parts, verdicts, strict=True)
    rewards = [shaping.rewards(of_part, weight=part.weight) for part, of_part in pairs]
    responses = zip(zip(*verdicts, strict=True), zip(*rewards, strict=True), strict=True)
    return [_sum(parts, *response) for response in responses]


def _sum(parts: Sequence[Part], verdicts: Sequence[Verdict], rewards: Sequence[float]) -> Verdict:
    first = verdicts[0]
    applies = [verdict.reason != NOT_APPLICABLE for verdict in verdicts]
    rewards = [
        min(value, 0.0) if part.only_correct and not first.correct else value * applied
        for part, value, applied in zip(parts, rewards, applies, strict=True)
    ]
    terms = ", ".join(
        f"{part.name} {part.weight:g} x {value:g}{f' ({why})' if (why := verdict.reason or verdict.lost) else ''}"
        for part, value, verdict in zip(parts, rewards, verdicts, strict=True)
    )
    score = sum(part.weight * value for part, value in zip(parts, rewards, strict=True))
    if not abs(score) <= MAX_SCORE:
        raise RewardError(
            f"the sum of rewards {terms:.1000} is {score:g}; its magnitude must be at most {MAX_SCORE:g}, because larger rewards overflow "
            "the advantages: lower the weights or scale the scores down"
        )
    return Verdict(
        correct=first.correct,
        extracted=first.extracted,
        reason=f"sum of {terms}" if any(applies) else NOT_APPLICABLE,
        score=score if any(applies) else None,
        lost=next((verdict.lost for verdict in verdicts if verdict.lost), ""),
        parts={name: value for verdict in verdicts for name, value in verdict.parts.items()}
        | {part.name: value for part, value in zip(parts, rewards, strict=True)},
    )


def part_names(names: Sequence[str]) -> list[str]:
    """Returns short, unique names: the function names without module or file, with a number appended to repeated names.

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
