"""Groups graded while sampling goes on: in this process, or by the workers of a pool."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from dapo_jax.rewards.functions import GradeFunction
from dapo_jax.rewards.sample import Sample
from dapo_jax.rewards.shaping import Decoder, Shaping, samples_of, shaped_group
from dapo_jax.rollouts import Group, Prompt, Response, Verdict

Submit = Callable[[Sample], Future[Verdict]]
"""Hands over a sample; `GradingPool.submit`, or `immediately(grade)`."""


def immediately(grade: GradeFunction) -> Submit:
    """Grading in this process: the verdict is there when the call returns, and the grader's exception is the caller's."""

    def submit(sample: Sample) -> Future[Verdict]:
        future: Future[Verdict] = Future()
        future.set_result(grade(sample))
        return future

    return submit


@dataclass(frozen=True, kw_only=True)
class Grading:
    """What becomes of sampled responses: text, verdicts, rewards."""

    submit: Submit
    tokenizer: Decoder
    shaping: Shaping
    on_close: Callable[[], None] | None = None

    def close(self) -> None:
        """Ends the workers, if there are any."""
        if self.on_close is not None:
            self.on_close()

    def groups(self, sampled: Iterable[tuple[Prompt, tuple[Response, ...]]]) -> Iterator[Group]:
        """The graded groups in the order in which they were sampled.

        Takes the next responses from `sampled` without waiting for verdicts that are still on their way.

        Raises:
            RuntimeError, ValueError: the grader raised, or returned no verdict.
        """
        pending: deque[_Pending] = deque()
        for prompt, responses in sampled:
            samples = samples_of(prompt, responses, tokenizer=self.tokenizer)
            verdicts = [self.submit(sample) for sample in samples]
            pending.append(_Pending(prompt, responses, samples, verdicts))
            while pending and pending[0].done():
                yield pending.popleft().graded(self.shaping)
        while pending:
            yield pending.popleft().graded(self.shaping)


@dataclass(frozen=True)
class _Pending:
    """A sampled group, some of whose verdicts may still be on their way."""

    prompt: Prompt
    responses: Sequence[Response]
    samples: Sequence[Sample]
    verdicts: Sequence[Future[Verdict]]

    def done(self) -> bool:
        return all(verdict.done() for verdict in self.verdicts)

    def graded(self, shaping: Shaping) -> Group:
        verdicts = [verdict.result() for verdict in self.verdicts]
        return shaped_group(self.prompt, self.responses, self.samples, verdicts, shaping)
