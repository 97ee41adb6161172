"""Reward functions that wait for something else, such as a judge behind an API: many at a time on one event loop.

The loop runs in a thread of this process while sampling goes on. A function must give way while it waits (`await`): one that
blocks holds up all others, and no time limit reaches it.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from dapo_jax.dapo.rollouts import Verdict
from dapo_jax.rewards.functions import LoadedReward, RewardError
from dapo_jax.rewards.futures import each
from dapo_jax.rewards.sample import Sample

ENDING_S = 5.0
"""Seconds for which closing waits for functions that go on after they were cancelled."""

LATE_S = 0.1
"""A limit that comes later than this was held up by a function that blocked the loop: it is not the waiting call's fault."""


class AsyncCalls:
    """One thread with an event loop, for all async reward functions of a run. A context manager: leaving it ends the thread."""

    def __init__(self, *, at_once: int, timeout_s: float) -> None:
        """Starts the thread.

        Args:
            at_once: calls that may be under way at one time; the others wait.
            timeout_s: seconds for one call, from when it is under way.

        Raises:
            ValueError: no calls at once, or no time.
        """
        if at_once < 1 or timeout_s <= 0:
            raise ValueError(f"async calls need at_once >= 1 and timeout_s > 0; got {at_once=}, {timeout_s=}")
        self._at_once, self._timeout_s = at_once, timeout_s
        self._waiting: deque[_Call] = deque()
        self._under_way: dict[asyncio.Task[list[Verdict]], _Call] = {}
        # Nothing else holds a task that goes on after it was cancelled at its limit.
        self._abandoned: set[asyncio.Task[list[Verdict]]] = set()
        self._closing, self._all_answered = threading.Event(), threading.Event()
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(DaemonThreads())
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> "AsyncCalls":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, reward: LoadedReward, samples: Sequence[Sample]) -> list[Future[Verdict]]:
        """Queues the calls for the responses to one prompt; the verdicts are in their order.

        A result raises RewardError if the function raised or returned no verdict.

        Raises:
            RuntimeError: it was closed.
        """
        if self._closing.is_set():
            raise RuntimeError("the event loop of the async reward functions was closed; submit before that")
        futures = []
        for samples_of_call in reward.calls(samples):
            call = _Call(reward, samples_of_call, Future())
            self._loop.call_soon_threadsafe(self._queue, call)
            futures += each(call.answer, len(samples_of_call))
        return futures

    def close(self) -> None:
        """Cancels the calls that wait or are under way, and ends the thread.

        The thread stays, and nobody waits for it, where a function goes on that was cancelled at its time limit.
        """
        if not self._closing.is_set():
            self._closing.set()
            self._loop.call_soon_threadsafe(self._cancel_all)
        self._all_answered.wait(ENDING_S)
        if not self._abandoned:
            self._thread.join(ENDING_S)

    def _serve(self) -> None:
        """Runs the loop until it is closed and no task is left, whatever ends it in between."""

        def ended() -> bool:
            return self._closing.is_set() and self._all_answered.is_set() and not self._tasks()

        said = "a task or callback of an async reward function raised; the other calls go on"
        run_until(self._loop, ended, said=said)
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _tasks(self) -> set[asyncio.Task[Any]]:
        return asyncio.all_tasks(self._loop)

    def _cancel_all(self) -> None:
        while self._waiting:
            self._waiting.popleft().answer.cancel()
        for task in self._tasks():
            task.cancel()
        self._look_whether_all_ended()

    def _look_whether_all_ended(self) -> None:
        if not self._under_way:
            self._all_answered.set()
        if self._under_way or self._tasks():
            self._loop.call_later(0.01, self._look_whether_all_ended)
        else:
            self._loop.stop()

    def _queue(self, call: "_Call") -> None:
        if self._closing.is_set():
            call.answer.cancel()
        else:
            self._waiting.append(call)
            self._begin()

    def _begin(self) -> None:
        while self._waiting and len(self._under_way) < self._at_once:
            call = self._waiting.popleft()
            task = self._loop.create_task(call.reward.graded(call.samples))
            self._under_way[task] = call
            due = self._loop.time() + self._timeout_s
            limit = self._loop.call_at(due, self._at_limit, task, due)
            task.add_done_callback(partial(self._ended, limit))

    def _at_limit(self, task: "asyncio.Task[list[Verdict]]", due: float) -> None:
        """Loses the call, or gives it once the time for which the loop was blocked."""
        late = self._loop.time() - due
        if late > LATE_S:
            self._loop.call_later(late, self._lose, task)
        else:
            self._lose(task)

    def _lose(self, task: "asyncio.Task[list[Verdict]]") -> None:
        """Answers at once: a function may catch the cancellation, and go on."""
        if task.done():
            return
        call = self._under_way.pop(task)
        self._abandoned.add(task)
        task.cancel()
        reason = f"no verdict within {self._timeout_s:g} s"
        lost = Verdict(correct=False, reason=reason, lost="timeout")
        call.answer.set_result([lost] * len(call.samples))
        self._begin()

    def _ended(self, limit: asyncio.TimerHandle, task: "asyncio.Task[list[Verdict]]") -> None:
        limit.cancel()
        error = None if task.cancelled() else task.exception()  # asked for, or asyncio logs it
        self._abandoned.discard(task)
        call = self._under_way.pop(task, None)
        if call is None:
            return  # it was lost before
        if not task.cancelled():
            if error is None:
                call.answer.set_result(task.result())
            else:
                call.answer.set_exception(error)
        elif self._closing.is_set():
            call.answer.cancel()
        else:
            cancelled = (
                f"reward function {call.reward.name}: a call was cancelled, and neither by its time limit nor by the end of the run; "
                "catch CancelledError inside the function, and cancel only tasks that it made"
            )
            call.answer.set_exception(RewardError(cancelled))
        self._begin()


class _Call(NamedTuple):
    """The responses that a function is asked about at once, and where its verdicts go."""

    reward: LoadedReward
    samples: Sequence[Sample]
    answer: Future[list[Verdict]]


def run_until(loop: asyncio.AbstractEventLoop, ended: Callable[[], bool], *, said: str) -> None:
    """Runs a loop until it was stopped and has `ended`. What ends it before, SystemExit or KeyboardInterrupt of a task that somebody else's code made, is `said` and no more."""
    while not ended():
        try:
            loop.run_forever()
        except BaseException as error:
            loop.call_exception_handler({"message": said, "exception": error})


class DaemonThreads(ThreadPoolExecutor):
    """A thread for each job, such as that of `asyncio.to_thread`; the end of the process waits for none."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        threading.Thread(target=_work, args=(future, partial(fn, *args, **kwargs)), daemon=True).start()
        return future


def _work(future: Future[Any], job: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = job()
    except BaseException as error:  # SystemExit among them: the function that waits for the job gets it
        future.set_exception(error)
    else:
        future.set_result(result)
