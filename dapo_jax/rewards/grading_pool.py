"""Grades in worker processes. Each call has a time limit and a memory limit, and a worker that dies or hangs is replaced.

If a call exceeds a limit or kills its worker, its verdicts are marked as lost. A thread or timer that an earlier call started may also
kill the worker, so a call is retried once if its worker had already answered other calls. If workers keep dying, calls raise RewardError.
"""

import contextlib
import math
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, NamedTuple

from dapo_jax.dapo.rollouts import Lost, Verdict
from dapo_jax.rewards.functions import GradeFunction, RewardError, grade_function, joined
from dapo_jax.rewards.sample import Sample, call_of, sample_of
from dapo_jax.workers import EndedError, Worker
from dapo_jax.workers.inside import Answer, Serve

DEATHS_BORNE = 2
"""Number of worker deaths that are always tolerated."""

CALLS_A_DEATH = 100
"""A grader is considered broken if its worker dies at least once per this many calls, on average."""


class GradingPool:
    """A pool of worker processes that grade samples. `close` stops the workers."""

    def __init__(
        self,
        grader: str,
        *,
        workers: int,
        timeout_s: float,
        memory_mb: int,
        answer_marker: str = "=",
        whole_group: bool = False,
        worker: Callable[..., Worker] = Worker,
    ) -> None:
        """Starts the workers without waiting for them to load the grader (see `load_reward` for its name and `answer_marker`).

        A call lasts at most `timeout_s` seconds. A worker may allocate `memory_mb` megabytes after loading. With `whole_group`, one
        call grades all responses to a prompt. `worker` starts a worker, with the arguments of `Worker`.
        """
        self._setup = {"grader": grader, "answer_marker": answer_marker}
        self._grader, self._timeout_s, self._memory_mb = grader, timeout_s, memory_mb
        self._whole_group, self._workers, self._start_worker = whole_group, workers, worker
        self._waiting = deque[_Queued]()
        self._lock = threading.Lock()
        self._asked = self._deaths = 0
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for _ in range(workers):
            self._idle.put(self._start())
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="grading")

    def submit(self, samples: Sequence[Sample]) -> Future[list[Verdict]]:
        """Queues calls that grade the responses to one prompt. The future returns the verdicts in the order of the responses.

        The future raises RewardError if the grader or its worker fails, and ValueError if the grader cannot be loaded.
        """
        calls = [samples] if self._whole_group else [[sample] for sample in samples]
        queued = [_Queued(call, Future()) for call in calls]
        self._waiting.extend(queued)
        for _ in calls:
            self._threads.submit(self._work)
        return joined([call.verdicts for call in queued])

    def grade(self, samples: Sequence[Sample]) -> list[Verdict]:
        """Returns the verdicts on the responses to one prompt, in the order of the responses."""
        return self.submit(samples).result()

    def close(self) -> None:
        """Cancels queued calls, waits for the calls in progress, and ends the workers."""
        for call in self._taken(len(self._waiting)):
            call.verdicts.cancel()
        self._threads.shutdown(wait=True, cancel_futures=True)
        while not self._idle.empty():
            worker = self._idle.get()
            worker.end(EndedError("died", "the grading pool was closed"))
            worker.join()

    def _start(self) -> Worker:
        load = "dapo_jax.rewards.grading_pool:load_grader"
        return self._start_worker(load, self._setup, memory_mb=self._memory_mb)

    def _taken(self, most: int) -> list["_Queued"]:
        """Removes up to `most` calls from the queue and returns them."""
        calls = []
        with contextlib.suppress(IndexError):
            while len(calls) < most:
                calls.append(self._waiting.popleft())
        return calls

    def _work(self) -> None:
        """Grades waiting calls on an idle worker. There are as many threads as workers, so each thread finds one.

        The worker gets its share of the waiting calls at once, but at most `Worker.together`. It grades them in their order, so the time of a call begins with
        the answer to the call before.
        """
        worker = self._idle.get()
        asked = deque[Future[dict[str, Any]]]()
        try:
            share = math.ceil(len(self._waiting) / self._workers)
            calls = self._taken(max(1, min(share, worker.together)))
            for place, call in enumerate(calls):
                if not asked:
                    worker = worker if worker.ended is None else self._start()
                    asked.extend(_ask(worker, each) for each in calls[place:])
                before, worker = worker, self._give_verdicts(worker, call, asked.popleft())
                # If this call was lost, it ended its worker. Otherwise the worker died later, and the next call counts its death.
                if worker is not before or (worker.ended is not None and _is_lost(call)):
                    asked.clear()
        finally:
            self._idle.put(worker if worker.ended is None else self._start())

    def _give_verdicts(self, worker: Worker, call: "_Queued", asked: Future[dict[str, Any]]) -> Worker:
        """Waits for the verdicts of a call that the worker was asked, and returns the worker, which is another one if it died."""
        with self._lock:
            self._asked += 1
        retries = False
        try:
            while True:
                try:
                    call.verdicts.set_result(self._answer_in_time(worker, call.samples, asked))
                    return worker
                except EndedError as death:
                    gives_up = retries or (worker.answered == 0 and not death.elsewhere)
                    counts = not retries and not death.elsewhere
                    self._count_death(call.samples, str(death), counts=counts, gives_up=gives_up)
                    if gives_up:
                        call.verdicts.set_result(_lost(call.samples, "died", str(death)))
                        return worker
                worker, retries = self._start(), True
                asked = _ask(worker, call)
        except Exception as error:
            call.verdicts.set_exception(error)
            return worker

    def _answer_in_time(
        self, worker: Worker, call: Sequence[Sample], asked: Future[dict[str, Any]]
    ) -> list[Verdict]:
        """Returns a worker's verdicts for a call that it was asked, which are lost if the call exceeds a limit. Raises EndedError if the worker dies."""
        try:
            worker.ready.result()
        except EndedError as error:
            if error.elsewhere:
                raise
            raise RewardError(f"reward function {self._grader}: {error}") from error
        try:
            answer = asked.result(self._timeout_s)
        except TimeoutError:
            worker.end(EndedError("timeout", "a call took too long"))
            if worker.ended is not None and worker.ended.elsewhere:
                raise worker.ended from None
            return _lost(call, "timeout", f"no verdict within {self._timeout_s:g} s")
        if "memory" in answer:
            worker.end(EndedError("died", "the grader ran out of memory"))
            return _lost(call, "memory", "the grader ran out of memory")
        if "failed" in answer:
            raise RewardError(answer["failed"])
        return [Verdict(**verdict) for verdict in answer["verdicts"]]

    def _count_death(self, call: Sequence[Sample], cause: str, *, counts: bool, gives_up: bool) -> None:
        """Counts a worker's death if `counts` is true. Prints a message for the first few deaths, and raises RewardError if there are too many."""
        with self._lock:
            self._deaths += counts
            asked, deaths = self._asked, self._deaths
        where = f"prompt {call[0].prompt.ordinal}, response {call[0].response[:60]!r}"
        if counts and deaths > DEATHS_BORNE and deaths * CALLS_A_DEATH >= asked:
            raise RewardError(
                f"reward function {self._grader}: its worker died {deaths} times in {asked} calls, the last time on {where}: {cause}. A "
                "reward function must return or raise. It must not end its process, or start a thread or timer that ends it later. To "
                "find the cause, call it on that response alone"
            ) from None
        if deaths <= DEATHS_BORNE:
            then = "the response counts as wrong" if gives_up else "retrying on a new worker"
            with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr may be closed or missing
                print(f"reward function {self._grader}, on {where}: {cause}; {then}", file=sys.stderr)


class _Queued(NamedTuple):
    """A call that waits for a worker, and the future of its verdicts."""

    samples: Sequence[Sample]
    verdicts: Future[list[Verdict]]


def _ask(worker: Worker, call: _Queued) -> Future[dict[str, Any]]:
    """Asks a worker. If JSON cannot represent a sample, the future raises this error."""
    try:
        return worker.ask({"samples": call_of(call.samples)})
    except (TypeError, ValueError) as error:
        answer: Future[dict[str, Any]] = Future()
        answer.set_exception(error)
        return answer


def _is_lost(call: _Queued) -> bool:
    return call.verdicts.exception() is None and any(verdict.lost for verdict in call.verdicts.result())


def _lost(call: Sequence[Sample], lost: Lost, reason: str) -> list[Verdict]:
    return [Verdict(correct=False, reason=reason, lost=lost)] * len(call)


def load_grader(setup: Mapping[str, Any]) -> tuple[dict[str, Any], Serve]:
    """Loads the grader in a worker. The grader runs in the worker's main thread, so reward functions may use signals."""
    grader = setup["grader"]
    grade = grade_function(grader, answer_marker=setup["answer_marker"])

    def serve(calls: Iterable[dict[str, Any]], answer: Answer) -> None:
        for call in calls:
            answer(call["id"], _graded(grade, call["samples"], grader))

    return {}, serve


def _graded(grade: GradeFunction, call: list[Any], grader: str) -> dict[str, Any]:
    try:
        return {"verdicts": [asdict(verdict) for verdict in grade([*map(sample_of, call)])]}
    except MemoryError:
        return {"memory": True}
    except RewardError as error:  # its message already contains the prompt
        return {"failed": f"{error}"[:10_000]}
    except BaseException as error:
        return {"failed": f"reward function {grader}: {type(error).__name__}: {error}"[:10_000]}
