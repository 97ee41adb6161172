"""Runs an environment in worker processes. If an episode blocks, exhausts memory or ends its process, only this episode is lost.

A worker runs many episodes concurrently, and the episodes of a prompt share a worker. A call that exceeds the time limit is abandoned
inside the worker. A worker that blocks or dies is replaced. At the next call to an episode, the new
worker recreates the episode by replaying its turns. Since it is unknown which call killed a worker, the calls in progress are retried one
at a time. A call that also kills the next worker is lost.
"""

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from dapo_jax.environments.calls import NOT_REPEATED, TOO_LATE, LostError
from dapo_jax.environments.protocol import Step, Turn
from dapo_jax.environments.turns_as_json import FIELDS, appended_of, step_of, turn_as_json
from dapo_jax.rewards.sample import plain_row
from dapo_jax.workers import EndedError, Worker

BLOCKED_S = 2.0
"""If a worker has not answered this many seconds after a call's time limit, the worker is considered blocked."""


class WorkerEnvironment:
    """An environment whose episodes run in worker processes. Each worker starts when it is first needed."""

    def __init__(
        self,
        source: str,
        *,
        workers: int,
        timeout_s: float,
        memory_mb: int,
        worker: Callable[..., Worker] = Worker,
        **options: Any,
    ) -> None:
        """Checks in a temporary worker that the environment can be loaded, and raises ValueError if not.

        A call lasts at most `timeout_s` seconds. Each of the `workers` processes may allocate `memory_mb` megabytes after loading. `worker` starts a worker, with the
        arguments of `Worker`. `options` are arguments of `load_environment`.
        """
        setup = {"source": source, "timeout_s": timeout_s, "options": options}
        load = "dapo_jax.environments.inside_worker:load"
        start = partial(worker, load, setup, memory_mb=memory_mb)
        first = start()
        try:
            methods = first.ready.result()["methods"]
        except EndedError as error:
            raise ValueError(f"{source}: {error}") from error
        finally:
            first.end(EndedError("died", "it was only a check"))
            first.join()
        for name in methods:
            setattr(self, name, getattr(self, f"_{name}"))
        self.workers = workers
        self._seats = [_Seat(start, timeout_s) for _ in range(workers)]
        seats = itertools.cycle(self._seats)
        self._seat_of = lru_cache(maxsize=4096)(lambda seed: next(seats))
        """Returns the worker slot for a prompt, assigned round-robin. All episodes of a prompt have the same seed, which identifies the prompt."""
        self._numbers = itertools.count()

    async def episode(self, row: Mapping[str, Any], seed: int) -> "WorkerEpisode":
        """Creates an episode in the same worker as the prompt's other episodes. Raises TypeError if JSON cannot represent a value of the row."""
        plain = plain_row(row, instead="use workers.count=0")
        return WorkerEpisode(self._seat_of(seed), next(self._numbers), plain, seed)

    async def _group_rewards(self, episodes: Sequence["WorkerEpisode"]) -> list[float]:
        """Returns the rewards of the episodes of one prompt, which all run in the same worker."""

        async def compare(worker: Worker) -> Any:
            for episode in episodes:
                await episode.replay(worker)
            numbers = [episode.number for episode in episodes]
            return await episodes[0].seat.ask(worker, {"do": "group_rewards", "episodes": numbers})

        return await episodes[0].seat.answer(compare) if episodes else []

    async def _finish(self, episode: "WorkerEpisode", reason: str) -> Step:
        """Ends an episode that was cut off, and returns its last step."""
        return await episode.finish(reason)

    def close(self) -> None:
        """Ends all worker processes."""
        for seat in self._seats:
            seat.close()


class WorkerEpisode:
    """An episode in a worker. Its calls are stored, so that another worker can replay them to recreate the episode."""

    def __init__(self, seat: "_Seat", number: int, row: Mapping[str, Any], seed: int) -> None:
        self.seat, self.number = seat, number
        self._calls: list[dict[str, Any] | Turn] = [{"do": "episode", "row": row, "seed": seed}]
        self._worker: Worker | None = None
        self._answered = 0
        """Number of this episode's calls that `_worker` has answered."""
        self._known: list[int] = []
        """A hash of the appended value or new context in the first answer to each call."""

    async def start(self) -> Any:
        """Returns the text, messages or context to insert before the first turn."""
        self._calls.append({"do": "start"})
        return appended_of(await self.seat.answer(self.replay))

    async def step(self, turn: Turn) -> Step:
        """Returns the answer to a turn."""
        self._calls.append(turn)
        return step_of(await self.seat.answer(self.replay))

    async def finish(self, reason: str) -> Step:
        """Returns the last step of an episode that was cut off."""
        self._calls.append({"do": "finish", "reason": reason})
        return step_of(await self.seat.answer(self.replay))

    async def close(self) -> None:
        """Closes the episode if its worker is still running."""

        async def close(worker: Worker) -> None:
            if worker is self._worker:
                await self.seat.ask(worker, {"do": "close", "episode": self.number})

        if self._worker is not None and self._worker.ended is None:
            await self.seat.answer(close)

    async def replay(self, worker: Worker) -> Any:
        """Sends the episode's calls that this worker has not answered yet, and returns the answer to the last call."""
        if self._worker is not worker:
            self._worker, self._answered = worker, 0
        answer = None
        while self._answered < len(self._calls):
            call = self._calls[self._answered]
            call = {"do": "step", "turn": turn_as_json(call)} if isinstance(call, Turn) else call
            answer = await self.seat.ask(worker, {**call, "episode": self.number})
            follows = {name: value for name, value in (answer or {}).items() if name not in FIELDS}
            digest = hash(json.dumps(follows))
            if self._answered == len(self._known):
                self._known.append(digest)
            elif self._known[self._answered] != digest:
                raise LostError(NOT_REPEATED.format(self._answered - 1))
            self._answered += 1
        return answer


class _Seat:
    """A slot for one worker process. If the process has ended, a new worker starts when it is needed."""

    def __init__(self, start: Callable[[], Worker], timeout_s: float) -> None:
        self._start, self._timeout_s = start, timeout_s
        self._worker: Worker | None = None
        self._closed = False
        self._suspects = 0
        """Number of calls that were in progress when a worker ended and whose retry has not finished."""
        self._alone = asyncio.Lock()

    async def answer(self, use: Callable[[Worker], Awaitable[Any]]) -> Any:
        """Returns the result of `use(worker)`. If the worker ends during the call, the call is retried on a new worker while no other call runs there.

        Raises LostError if the environment raised or took too long, or if the second worker also ended.
        """
        worker = await self._running()
        while self._suspects:
            async with self._alone:
                worker = await self._running()
        try:
            return await use(worker)
        except EndedError:
            self._suspects += 1
        try:
            async with self._alone:
                return await use(await self._running())
        except EndedError as ended:
            raise LostError(str(ended), ended.lost) from ended
        finally:
            self._suspects -= 1

    async def _running(self) -> Worker:
        """Returns a worker that has loaded the environment. Raises LostError if it cannot load it."""
        if self._closed:
            raise LostError("the environment was closed")
        if self._worker is None or self._worker.ended is not None:
            self._worker = self._start()
        worker = self._worker
        try:
            await asyncio.wrap_future(worker.ready)
        except (EndedError, ValueError) as error:
            raise LostError(str(error)) from error
        return worker

    async def ask(self, worker: Worker, call: Mapping[str, Any]) -> Any:
        """Returns the worker's answer to one call. Raises LostError if the environment raised or took too long, and EndedError if the worker ended."""
        try:
            asked = asyncio.wrap_future(worker.ask(call))
            answer = await asyncio.wait_for(asked, self._timeout_s + BLOCKED_S)
        except TimeoutError:
            worker.end(EndedError("timeout", TOO_LATE.format(self._timeout_s)))
            answer = {}
        if "ended" in answer:
            worker.end(EndedError("died", answer["ended"]))
        if "answer" in answer:
            return answer["answer"]
        if "lost" in answer:
            raise LostError(answer["reason"], answer["lost"])
        assert worker.ended is not None
        raise worker.ended

    def close(self) -> None:
        """Ends the worker, if there is one."""
        self._closed = True
        if self._worker is not None:
            self._worker.end(EndedError("died", "the environment was closed"))
            self._worker.join()
