"""Runs async reward functions, for example functions that call a judge's API. Many calls run concurrently on one event loop.

The loop runs in a thread of this process. A function that blocks this thread delays all other calls, and its time limit cannot interrupt it.
"""

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from dapo_jax.dapo.rollouts import Verdict
from dapo_jax.rewards.functions import LoadedReward, RewardError, joined
from dapo_jax.rewards.sample import Sample

_Value = TypeVar("_Value")

ENDING_S = 5.0
"""Number of seconds that `close` waits for functions that keep running after they were cancelled."""

LATE_S = 0.1
"""If a timeout fires more than this many seconds late, another task has blocked the loop, so the call gets more time."""


class EventLoop:
    """An event loop that runs user code in its own thread. Each blocking job, for example from `asyncio.to_thread`, runs in a separate thread."""

    def __init__(self, message: str) -> None:
        """Starts the thread. If an exception from a task stops the loop, `message` is logged and the loop resumes."""
        self.closing = threading.Event()
        self._message, self.loop = message, asyncio.new_event_loop()
        self.loop.set_default_executor(DaemonThreads())
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def submit(self, work: Coroutine[Any, Any, _Value]) -> Future[_Value]:
        """Schedules a coroutine on the loop and returns a future of its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self, wait_s: float) -> None:
        """Cancels all tasks and waits at most `wait_s` seconds for the thread to end."""
        if not self.closing.is_set():
            self.closing.set()
            self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(wait_s)

    def _serve(self) -> None:
        """Runs the loop until `close` is called, then cancels all tasks and keeps running until they have ended."""
        while not self.closing.is_set():
            try:
                self.loop.run_forever()
            except BaseException as error:  # user code raised SystemExit, for example
                self.loop.call_exception_handler({"message": self._message, "exception": error})
        while tasks := asyncio.all_tasks(self.loop):
            for task in tasks:
                task.cancel()
            with contextlib.suppress(BaseException):
                self.loop.run_until_complete(asyncio.wait(tasks))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


class AsyncCalls:
    """One thread with an event loop, shared by all async reward functions of a run. `close` ends the thread."""

    def __init__(self, *, at_once: int, timeout_s: float) -> None:
        """Starts the thread. A call waits while `at_once` others run, and then lasts at most `timeout_s` seconds."""
        self._timeout_s = timeout_s
        self._running = asyncio.Semaphore(at_once)
        self._loop = EventLoop("a task or callback of an async reward function raised")

    def submit(self, reward: LoadedReward, samples: Sequence[Sample]) -> Future[list[Verdict]]:
        """Queues calls that grade the responses to one prompt. The future returns their verdicts, or raises RewardError if the function fails."""
        return joined([self._loop.submit(self._answer(reward, call)) for call in reward.calls(samples)])

    def close(self) -> None:
        """Cancels all calls and ends the thread."""
        self._loop.close(ENDING_S)

    async def _answer(self, reward: LoadedReward, call: Sequence[Sample]) -> list[Verdict]:
        async with self._running:
            task = asyncio.ensure_future(reward.graded(call))
            limits_itself = getattr(reward.function, "limits_itself", False)
            if await ends_in_time(task, math.inf if limits_itself else self._timeout_s):
                if task.cancelled() and not self._loop.closing.is_set():
                    raise RewardError(
                        f"reward function {reward.name}: its own code cancelled a call; catch CancelledError inside the function, and cancel only "
                        "tasks that it created"
                    )
                return task.result()
            task.cancel()
        late = f"no verdict within {self._timeout_s:g} s"
        return [Verdict(correct=False, reason=late, lost="timeout")] * len(call)


async def ends_in_time(task: "asyncio.Task[Any]", timeout_s: float) -> bool:
    """Returns whether a task ends within `timeout_s` seconds. If another task blocks the loop, the limit is extended once by the time lost."""
    loop = asyncio.get_running_loop()
    due = loop.time() + timeout_s
    await asyncio.wait([task], timeout=timeout_s)
    if not task.done() and (late := loop.time() - due) > LATE_S:
        await asyncio.wait([task], timeout=late)
    if task.done():
        return True
    # asyncio logs exceptions that are never retrieved. The caller abandons this task, so its exception is retrieved here.
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    return False


async def once(
    pending: dict[str, "asyncio.Future[_Value]"],
    request: str,
    start: Callable[[], Coroutine[Any, Any, _Value]],
) -> _Value:
    """Returns the result of `start`. Equal requests that are pending share the result or the error of the first of them, even if that call is cancelled."""
    if request not in pending:
        pending[request] = asyncio.ensure_future(start())
        pending[request].add_done_callback(lambda _: pending.pop(request))
    return await asyncio.shield(pending[request])


class DaemonThreads(ThreadPoolExecutor):
    """Runs each job in its own daemon thread, so that the process can exit while jobs are still running."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Starts a thread for the job."""
        future: Future[Any] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:  # including SystemExit, so that the caller gets it
                    future.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return future
