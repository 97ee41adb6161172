"""Async reward functions, which wait for something else, such as the API of a judge: many at a time on one event loop.

The loop runs in a thread of this process, in parallel with sampling. A function must `await` while it waits: a function that blocks
holds up all others, and no time limit reaches it.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from dapo_jax.dapo.rollouts import Verdict
from dapo_jax.rewards.functions import LoadedReward, joined
from dapo_jax.rewards.sample import Sample

_Value = TypeVar("_Value")

ENDING_S = 5.0
"""Seconds that closing waits for functions that continue after they were cancelled."""

LATE_S = 0.1
"""A time limit that is noticed later than this was held up by a task that blocked the loop, which is not the waiting call's fault."""


class EventLoop:
    """An event loop in a thread of its own, for code of users; each blocking job has another thread."""

    def __init__(self, message: str) -> None:
        """Starts the thread. `message` is logged when a task ends the loop, which then continues."""
        self.closing = threading.Event()
        self._message, self.loop = message, new_loop()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def submit(self, work: Coroutine[Any, Any, _Value]) -> Future[_Value]:
        """Begins work on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self, wait_s: float) -> None:
        """Cancels all tasks and waits at most `wait_s` seconds for the end of the thread."""
        if not self.closing.is_set():
            self.closing.set()
            self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(wait_s)

    def _serve(self) -> None:
        """Runs the loop until it is closed, then cancels all tasks and runs it until they have ended."""
        run_until(self.loop, self.closing.is_set, message=self._message)
        while tasks := asyncio.all_tasks(self.loop):
            for task in tasks:
                task.cancel()
            with contextlib.suppress(BaseException):
                self.loop.run_until_complete(asyncio.wait(tasks))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


class AsyncCalls:
    """One thread with an event loop for all async reward functions of a run; `close` ends it."""

    def __init__(self, *, at_once: int, timeout_s: float) -> None:
        """Starts the thread.

        Args:
            at_once: number of calls that may be under way at a time; the others wait.
            timeout_s: seconds per call, from when it is under way.
        """
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(at_once)
        self._given_up: set[asyncio.Task[list[Verdict]]] = set()
        """Tasks that continue after they were cancelled at their limit. The event loop itself holds no reference to them."""
        self._loop = EventLoop("a task or callback of an async reward function raised")

    def submit(self, reward: LoadedReward, samples: Sequence[Sample]) -> Future[list[Verdict]]:
        """Queues the calls for the responses to one prompt; the future returns their verdicts in the same order.

        It raises RewardError if the function raised or returned no verdict.
        """
        return joined([self._loop.submit(self._answer(reward, call)) for call in reward.calls(samples)])

    def close(self) -> None:
        """Cancels all calls and ends the thread. It does not wait for functions that continue after their time limit."""
        self._loop.close(0.0 if self._given_up else ENDING_S)

    async def _answer(self, reward: LoadedReward, call: Sequence[Sample]) -> list[Verdict]:
        async with self._places:
            task = asyncio.ensure_future(reward.graded(call))
            if await ends_in_time(task, self._timeout_s):
                return task.result()
            self._given_up.add(task)
            task.add_done_callback(self._given_up.discard)
            task.cancel()
        return [
            Verdict(correct=False, reason=f"no verdict within {self._timeout_s:g} s", lost="timeout")
        ] * len(call)


async def ends_in_time(task: "asyncio.Task[Any]", timeout_s: float) -> bool:
    """Waits `timeout_s` seconds for a task, and once more as long as another task has blocked the loop. Returns whether it ended."""
    loop = asyncio.get_running_loop()
    due = loop.time() + timeout_s
    await asyncio.wait([task], timeout=timeout_s)
    if not task.done() and (late := loop.time() - due) > LATE_S:
        await asyncio.wait([task], timeout=late)
    if task.done():
        return True
    # asyncio logs exceptions that nothing retrieves, and the caller gives this task up.
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    return False


def new_loop() -> asyncio.AbstractEventLoop:
    """Returns an event loop that runs each blocking job, such as of `asyncio.to_thread`, in a daemon thread."""
    loop = asyncio.new_event_loop()
    loop.set_default_executor(DaemonThreads())
    return loop


def run_until(loop: asyncio.AbstractEventLoop, ended: Callable[[], bool], *, message: str) -> None:
    """Runs a loop until it was stopped and `ended()`.

    The user's tasks may raise SystemExit or KeyboardInterrupt, which ends `run_forever`. They are logged with `message`.
    """
    while not ended():
        try:
            loop.run_forever()
        except BaseException as error:
            loop.call_exception_handler({"message": message, "exception": error})


class DaemonThreads(ThreadPoolExecutor):
    """Runs each job in a thread of its own, such as a job of `asyncio.to_thread`. The end of the process waits for no thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Starts the thread."""
        future: Future[Any] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:  # SystemExit, too: the function that waits for the job gets it
                    future.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return future
