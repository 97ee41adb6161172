"""Reward functions that wait for something else, such as a judge behind an API: many at a time on one event loop.

The loop runs in a thread of this process while sampling goes on. A function must give way while it waits (`await`): one that
blocks holds up all others, and no time limit reaches it.
"""

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future

from dapo_jax.rewards.functions import LoadedReward, RewardError
from dapo_jax.rewards.futures import each
from dapo_jax.rewards.sample import Sample
from dapo_jax.rollouts import Verdict

ENDING_S = 5.0
"""How long closing waits for functions that go on after they were cancelled."""


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
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(at_once)
        self._closing = asyncio.Event()
        # With a factory of its own the runner leaves the calling thread's event loop alone.
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> "AsyncCalls":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, reward: LoadedReward, samples: Sequence[Sample]) -> list[Future[Verdict]]:
        """Queues the calls for the responses to one prompt; the verdicts are in their order.

        A result raises RewardError if the function raised or returned no verdict.
        """
        futures = []
        for call in reward.calls(samples):
            answer = asyncio.run_coroutine_threadsafe(self._graded(reward, call), self._loop)
            futures += each(answer, len(call))
        return futures

    def close(self) -> None:
        """Cancels the calls that wait or are under way, and ends the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(ENDING_S)

    def _serve(self) -> None:
        with self._runner as runner:  # which cancels what is left, and waits for it
            while not self._closing.is_set():
                # A function that stops the loop, or cancels what is not its own, ends no other call.
                with contextlib.suppress(RuntimeError, asyncio.CancelledError):
                    runner.run(self._until_closing())

    async def _until_closing(self) -> None:
        await self._closing.wait()

    async def _graded(self, reward: LoadedReward, call: Sequence[Sample]) -> list[Verdict]:
        try:
            return await self._in_time(reward, call)
        except asyncio.CancelledError:
            if self._closing.is_set():
                raise
            raise RewardError(
                f"reward function {reward.name}: a call was cancelled, and neither by its time limit nor by the end of the run; "
                "catch CancelledError inside the function, and cancel only tasks that it made"
            ) from None

    async def _in_time(self, reward: LoadedReward, call: Sequence[Sample]) -> list[Verdict]:
        async with self._slots:
            limit = asyncio.timeout(self._timeout_s)
            try:
                async with limit:
                    return await reward.graded(call)
            except (TimeoutError, RuntimeError):
                if not limit.expired():
                    raise  # what the function raised by itself, and not because it was cancelled
                reason = f"no verdict within {self._timeout_s:g} s"
                return [Verdict(correct=False, reason=reason, lost="timeout")] * len(call)
