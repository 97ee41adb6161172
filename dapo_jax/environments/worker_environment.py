"""An environment in worker processes. If it blocks, takes all memory or ends its process, only the episode at fault is lost.

Many episodes are under way in one worker at a time, and the episodes of a prompt share one. A call that exceeds the time limit is given
up inside the worker (`dapo_jax.environments.inside_worker`). A worker that blocks or dies is replaced, and the new one makes the episodes
again from their turns when they are next asked. It is unknown which call a worker died of. So the calls that were under way are sent
again one at a time; the call that ends the next worker as well is lost.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet, WeakValueDictionary

from dapo_jax.environments.calls import LostError, too_late
from dapo_jax.environments.protocol import Step, Turn
from dapo_jax.environments.turns_as_json import appended_of, step_of, turn_as_json
from dapo_jax.rewards.sample import plain_row
from dapo_jax.workers import EndedError, Worker

BLOCKED_S = 2.0
"""Seconds after the time limit within which a worker that is not blocked answers a call."""

_Use = Callable[[Worker], Awaitable[Any]]


class _ReplacedError(EndedError):
    """The worker was ended for something that no call under way has done."""


def worker_environment(source: str, *, workers: int, timeout_s: float, memory_mb: int) -> "WorkerEnvironment":
    """Returns the environment that `environment.source` names, in workers, which start when they are first needed.

    Args:
        source: see `load_environment`. One worker loads it now, as a check, and ends.
        workers: number of processes.
        timeout_s: seconds per call.
        memory_mb: megabytes that a worker may allocate after it has loaded the environment.

    Raises:
        ValueError: it cannot be loaded, or the worker ends or hangs meanwhile.
    """
    setup = {"source": source, "timeout_s": timeout_s}
    first = _started(setup, memory_mb)
    try:
        ready = first.ready.result()
    except EndedError as error:
        raise ValueError(f"{source}: {error}") from error
    finally:
        first.end(EndedError("died", "it was only a check"))
        first.join()
    return WorkerEnvironment(setup, workers=workers, memory_mb=memory_mb, compares=ready["compares"])


def _started(setup: Mapping[str, Any], memory_mb: int) -> Worker:
    return Worker("dapo_jax.environments.inside_worker:load", setup, memory_mb=memory_mb)


class WorkerEnvironment:
    """An environment whose episodes are in worker processes; `worker_environment` makes it."""

    def __init__(self, setup: Mapping[str, Any], *, workers: int, memory_mb: int, compares: bool) -> None:
        """Starts nothing yet.

        Args:
            setup: `source` and `timeout_s`, as arguments of `worker_environment`.
            workers: number of processes.
            memory_mb: megabytes that a worker may allocate after it has loaded the environment.
            compares: whether the environment has `group_rewards`.
        """
        self.workers, self.memory_mb = workers, memory_mb
        self._seats = [_Seat(setup, memory_mb) for _ in range(workers)]
        self._groups: WeakValueDictionary[int, _PromptEpisodes] = WeakValueDictionary()
        self._numbers = itertools.count()
        if compares:
            self.group_rewards = self._group_rewards

    async def episode(self, row: Mapping[str, Any], seed: int) -> "WorkerEpisode":
        """Returns an episode in the worker of its prompt's other episodes, or in the worker with the fewest prompts.

        Raises:
            TypeError: the row holds a value that JSON cannot represent.
        """
        plain = plain_row(row, instead="use environment.workers=0")
        group = self._groups.get(seed)
        if group is None:
            seat = min(self._seats, key=lambda seat: len(seat.groups))
            group = self._groups[seed] = _PromptEpisodes(seat)
        return WorkerEpisode(group, next(self._numbers), {"do": "episode", "row": plain, "seed": seed})

    async def _group_rewards(self, episodes: Sequence["WorkerEpisode"]) -> list[float]:
        """Returns the rewards of the episodes of one prompt, which are in one worker.

        Raises:
            LostError: the environment raised or took too long, or the worker ended twice.
        """

        async def compare(worker: Worker) -> Any:
            for each in episodes:
                await each.replay(worker)
            return await seat.ask(
                worker, {"do": "group_rewards", "episodes": [each.number for each in episodes]}
            )

        if not episodes:
            return []
        [seat] = {each.group.seat for each in episodes}
        return await seat.answer(compare)

    def close(self) -> None:
        """Ends the processes."""
        for seat in self._seats:
            seat.close()


class WorkerEpisode:
    """An episode in a worker. It keeps its calls, from which another worker can make it again."""

    def __init__(self, group: "_PromptEpisodes", number: int, first: dict[str, Any]) -> None:
        self.group, self.number = group, number
        self._calls: list[dict[str, Any] | Turn] = [first]
        self._worker: Worker | None = None
        self._answered = 0
        """Number of calls that `_worker` has answered."""

    async def start(self) -> Any:
        """Returns the beginning of the episode, before the first turn."""
        self._calls.append({"do": "start"})
        return appended_of(await self.group.seat.answer(self.replay))

    async def step(self, turn: Turn) -> Step:
        """Returns the answer to a turn."""
        self._calls.append(turn)
        return step_of(await self.group.seat.answer(self.replay))

    async def close(self) -> None:
        """Closes the episode if its worker still runs."""

        async def close(worker: Worker) -> None:
            if worker is self._worker:
                await self.group.seat.ask(worker, {"do": "close", "episode": self.number})

        if self._worker is not None and self._worker.ended is None:
            await self.group.seat.answer(close)

    async def replay(self, worker: Worker) -> Any:
        """Sends the calls that the worker has not answered yet; returns the answer to the last one."""
        if self._worker is not worker:
            self._worker, self._answered = worker, 0
        answer = None
        while self._answered < len(self._calls):
            one = self._calls[self._answered]
            call = {"do": "step", "turn": turn_as_json(one)} if isinstance(one, Turn) else one
            answer = await self.group.seat.ask(worker, {**call, "episode": self.number})
            self._answered += 1
        return answer


class _PromptEpisodes:
    """The open episodes of one prompt: each of them refers to it."""

    def __init__(self, seat: "_Seat") -> None:
        self.seat = seat
        seat.groups.add(self)


class _Seat:
    """The place of one worker. The next worker starts when it is needed."""

    def __init__(self, setup: Mapping[str, Any], memory_mb: int) -> None:
        self.groups: WeakSet[_PromptEpisodes] = WeakSet()
        self._setup, self._memory_mb = setup, memory_mb
        self._worker: Worker | None = None
        self._closed = False
        self._suspects = 0
        """Number of calls that were under way when a worker ended and have had no answer since."""
        self._alone = asyncio.Lock()

    async def answer(self, use: _Use) -> Any:
        """Returns the result of `use(worker)`. If the worker ends meanwhile, calls it with the next worker, with no other call under way.

        Raises:
            LostError: the environment raised or took too long, or the second worker ended, too.
        """
        while True:
            worker = await self._running()
            if self._suspects:
                async with self._alone:
                    continue
            try:
                return await use(worker)
            except _ReplacedError:
                continue
            except EndedError:
                break
        self._suspects += 1
        try:
            async with self._alone:
                return await use(await self._running())
        except EndedError as ended:
            raise LostError(ended.lost, str(ended)) from ended
        finally:
            self._suspects -= 1

    async def _running(self) -> Worker:
        """Returns a worker that has loaded the environment.

        Raises:
            LostError: it could not load it.
        """
        if self._closed:
            raise LostError("raised", "the environment was closed")
        if self._worker is None or self._worker.ended is not None:
            self._worker = _started(self._setup, self._memory_mb)
        worker = self._worker
        try:
            await asyncio.wrap_future(worker.ready)
        except (EndedError, ValueError) as error:
            raise LostError("raised", str(error)) from error
        return worker

    async def ask(self, worker: Worker, call: Mapping[str, Any]) -> Any:
        """Returns the worker's answer to one call.

        Raises:
            LostError: the environment raised or took too long.
            EndedError: the worker ended.
        """
        waiting, timeout_s = asyncio.wrap_future(worker.ask(call)), self._setup["timeout_s"]
        try:
            answer = await asyncio.wait_for(waiting, timeout_s + BLOCKED_S)
        except TimeoutError:
            worker.end(EndedError("timeout", str(too_late(timeout_s))))
            answer = {}
        if "ended" in answer:
            worker.end(EndedError("died", answer["ended"]))
        if "answer" not in answer and "lost" not in answer:
            assert worker.ended is not None
            raise worker.ended
        if answer.get("worn_out"):
            worker.end(_ReplacedError("died", "the worker of the environment was replaced"))
        if "lost" in answer:
            raise LostError(answer["lost"], answer["reason"])
        return answer["answer"]

    def close(self) -> None:
        """Ends the worker, if there is one."""
        self._closed = True
        if self._worker is not None:
            self._worker.end(EndedError("died", "the environment was closed"))
            self._worker.join()
