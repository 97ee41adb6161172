"""Groups graded while sampling goes on: in this process, by the workers of a pool, or on an event loop."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from dapo_jax.dapo.rollouts import Group, Prompt, Response, Verdict
from dapo_jax.rewards.functions import GradeFunction
from dapo_jax.rewards.futures import each
from dapo_jax.rewards.sample import Sample
from dapo_jax.rewards.shaping import Shaping, TextDecoder, samples_of, shaped_group

Submit = Callable[[Sequence[Sample]], list[Future[Verdict]]]
"""Hands over the responses to one prompt; the verdicts are in their order. `GradingPool.submit`, or `immediately(grade)`."""


def immediately(grade: GradeFunction) -> Submit:
    """Grading in this process: the verdicts are there when the call returns, and the grader's exception is the caller's."""

    def submit(samples: Sequence[Sample]) -> list[Future[Verdict]]:
        whole: Future[list[Verdict]] = Future()
        whole.set_result(grade(samples))
        return each(whole, len(samples))

    return submit


@dataclass(frozen=True, kw_only=True)
class Grading:
    """Turns sampled responses into groups: text, verdicts, rewards."""

    submit: Submit
    tokenizer: TextDecoder
    shaping: Shaping
    on_submit: Callable[[], None] = lambda: None
    """Called before the responses to a prompt are handed over."""
    on_close: Callable[[], None] | None = None

    def close(self) -> None:
        """Ends the workers and the event loop, if there are any."""
        if self.on_close is not None:
            self.on_close()

    def groups(self, sampled: Iterable[tuple[Prompt, tuple[Response, ...]]]) -> Iterator[Group]:
        """The graded groups in the order in which they were sampled.

        Takes the next responses from `sampled` without waiting for verdicts that are still on their way.

        Raises:
            RewardError: the grader raised, or returned no verdict.
        """
        pending: deque[Pending] = deque()
        for prompt, responses in sampled:
            pending.append(self.begin(prompt, responses))
            while pending and pending[0].done():
                yield pending.popleft().graded()
        while pending:
            yield pending.popleft().graded()

    def begin(self, prompt: Prompt, responses: Sequence[Response]) -> "Pending":
        """Hands over the responses to a prompt."""
        samples = samples_of(prompt, responses, tokenizer=self.tokenizer)
        self.on_submit()
        return Pending(prompt, responses, samples, self.submit(samples), self.shaping)


@dataclass(frozen=True)
class Pending:
    """A sampled group, some of whose verdicts may still be on their way."""

    prompt: Prompt
    responses: Sequence[Response]
    samples: Sequence[Sample]
    verdicts: Sequence[Future[Verdict]]
    shaping: Shaping

    def done(self) -> bool:
        """Whether all verdicts are there."""
        return all(verdict.done() for verdict in self.verdicts)

    def graded(self) -> Group:
        """The graded group; waits for its verdicts.

        Raises:
            RewardError: the grader raised, or returned no verdict.
        """
        verdicts = [verdict.result() for verdict in self.verdicts]
        return shaped_group(self.prompt, self.responses, self.samples, verdicts, self.shaping)
