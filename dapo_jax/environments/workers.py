"""An environment in worker processes: one that blocks, takes all memory or ends its process costs its own episode, and no other.

Each worker is a process of its own (`dapo_jax.environments.worker`), in which many episodes are under way at a time; those of one prompt are in the same. A call that takes too
long is given up there. A worker that does not answer even that, or that died, is replaced: in the new one episodes are made anew, and told their turns again, when they
are next asked. Which call a worker died of it cannot say, so those that were under way are asked again one at a time; the one that the next worker dies of, too, is lost.
"""

import asyncio
import itertools
import json
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from dapo_jax.dapo.rollouts import Lost
from dapo_jax.environments.calls import LostError, too_late
from dapo_jax.environments.messages import MOST_BYTES, appended_of, step_of, turn_as_json
from dapo_jax.environments.protocol import Step, Turn
from dapo_jax.rewards.calls import plain_row
from dapo_jax.rewards.worker_process import WorkerProcess

START_S = 120.0
"""Seconds that a worker may take to load the environment."""

AT_ONCE_S = 2.0
"""Seconds in which a worker answers what concerns itself; one that does not is blocked, and is replaced."""

HELD_UP_S = 0.2
"""A worker that takes longer to answer what concerns itself was blocked by one of its calls, which held up the others."""

LEFT_BEHIND = 8
"""Calls of a worker that go on after they were given up, as a function that blocks does; a worker with so many is replaced."""

THREADS_LEFT = 64
"""Threads that closed episodes have left in a worker; a worker with so many is replaced, before it can start no further one."""

_ENDING_S = 2.0
_ARENAS = {"MALLOC_ARENA_MAX": "2"}
"""Each thread would else reserve address space of its own, which counts as memory that was taken."""


def worker_environment(source: str, *, workers: int, timeout_s: float, memory_mb: int) -> "WorkerEnvironment":
    """The environment that `environment.source` names, in workers, which start when they are first needed.

    Args:
        source: as of `load_environment`. A worker that ends again loads it here, to see whether it can be.
        workers: processes.
        timeout_s: seconds for one call, from when it is under way.
        memory_mb: megabytes that a worker may take beyond what it has once the environment is loaded.

    Raises:
        ValueError: it cannot be loaded, or the worker ends or hangs meanwhile.
    """
    setup = {"source": source, "memory_mb": memory_mb}
    first = _Worker(setup)
    try:
        ready = first.ready.result()
    except LostError as error:
        raise ValueError(f"{source}: {error}") from error
    finally:
        first.end(_EndedError("died", "it was looked at alone"))
        first.join()
    kind = ComparingWorkerEnvironment if ready["compares"] else WorkerEnvironment
    return kind(setup, workers=workers, timeout_s=timeout_s)


class WorkerEnvironment:
    """An environment whose episodes are in worker processes. `worker_environment` makes it; `close` ends the processes."""

    def __init__(self, setup: Mapping[str, Any], *, workers: int, timeout_s: float) -> None:
        self.workers, self.memory_mb = workers, setup["memory_mb"]
        self._seats = [_Seat(setup, timeout_s) for _ in range(workers)]
        self._groups: dict[int, _Group] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def episode(self, row: Mapping[str, Any], seed: int) -> "WorkerEpisode":
        """The episode of a response, in the worker that has those of its prompt, or the fewest prompts.

        Raises:
            TypeError: the row holds what JSON has no name for.
        """
        told = plain_row(row, instead="use environment.workers=0")
        with self._lock:
            if seed not in self._groups:
                seat = min(self._seats, key=lambda seat: seat.groups)
                seat.groups += 1
                self._groups[seed] = _Group(seat)
            group = self._groups[seed]
            group.episodes += 1
        return WorkerEpisode(self, group.seat, next(self._numbers), row=told, seed=seed)

    def release(self, seed: int) -> None:
        """Takes note that an episode with that seed was closed."""
        with self._lock:
            group = self._groups[seed]
            group.episodes -= 1
            if not group.episodes:
                group.seat.groups -= 1
                del self._groups[seed]

    def close(self) -> None:
        """Ends the processes."""
        for seat in self._seats:
            seat.close()


class ComparingWorkerEnvironment(WorkerEnvironment):
    """An environment in workers that has `group_rewards`."""

    async def group_rewards(self, episodes: Sequence["WorkerEpisode"]) -> list[float]:
        """The rewards of the episodes of one prompt, which are in one worker.

        Raises:
            LostError: there are none.
        """

        async def compared(worker: _Worker) -> Any:
            for each in episodes:
                await each.told(worker)
            return await seat.asked(
                worker, {"do": "group_rewards", "episodes": [each.number for each in episodes]}
            )

        if not episodes:
            return []
        [seat] = {each.seat for each in episodes}
        return await seat.answer(compared)


class WorkerEpisode:
    """An episode in a worker, and all that it was told, from which another worker can make it again."""

    def __init__(
        self, environment: WorkerEnvironment, seat: "_Seat", number: int, *, row: Mapping[str, Any], seed: int
    ) -> None:
        self.seat, self.number = seat, number
        self._environment, self._seed = environment, seed
        self._calls: list[dict[str, Any] | Turn] = [{"do": "episode", "row": row, "seed": seed}]
        self._worker: _Worker | None = None
        self._told = 0
        """Calls that `_worker` has answered."""

    async def start(self) -> Any:
        """The beginning of the episode, before the first turn."""
        self._calls.append({"do": "start"})
        return appended_of(await self.seat.answer(self.told))

    async def step(self, turn: Turn) -> Step:
        """The answer to a turn."""
        self._calls.append(turn)
        return step_of(await self.seat.answer(self.told))

    async def close(self) -> None:
        """Closes the episode where it is."""

        async def closed(worker: _Worker) -> None:
            if worker is not self._worker:
                return
            if await self.seat.asked(worker, {"do": "close", "episode": self.number}) >= THREADS_LEFT:
                worker.retire()

        try:
            if self._worker is not None and self._worker.ended is None:
                await self.seat.answer(closed)
        finally:
            self._environment.release(self._seed)

    async def told(self, worker: "_Worker") -> Any:
        """Tells the worker what it has not heard of this episode; the answer to the last."""
        if self._worker is not worker:
            self._worker, self._told = worker, 0
        answer = None
        while self._told < len(self._calls):
            said = self._calls[self._told]
            call = {"do": "step", "turn": turn_as_json(said)} if isinstance(said, Turn) else said
            answer = await self.seat.asked(worker, {**call, "episode": self.number})
            self._told += 1
        return answer


@dataclass
class _Group:
    """The open episodes of a seed, which is that of a prompt."""

    seat: "_Seat"
    episodes: int = 0


class _EndedError(Exception):
    """A worker has ended, with what that means for a call that it alone was asked."""

    def __init__(self, lost: Lost, reason: str) -> None:
        super().__init__(reason)
        self.lost: Lost = lost


class _Seat:
    """Where one worker works after another: the next starts when it is needed."""

    def __init__(self, setup: Mapping[str, Any], timeout_s: float) -> None:
        self.groups = 0
        self._setup, self._timeout_s = setup, timeout_s
        self._worker: _Worker | None = None
        self._closed = False
        self._suspects = 0
        """Calls that were under way when a worker ended, and that have had no answer since."""
        self._no_suspects, self._alone = asyncio.Event(), asyncio.Lock()
        self._no_suspects.set()

    async def answer(self, telling: Callable[["_Worker"], Awaitable[Any]]) -> Any:
        """The result of telling a worker that lives; if one ends meanwhile, of telling the next, with no other call beside it.

        Raises:
            LostError: the environment raised or took too long, or the second worker ended, too.
        """
        try:
            return await self._beside_others(telling)
        except _EndedError:
            self._suspects += 1
            self._no_suspects.clear()
        try:
            async with self._alone:
                return await telling(await self._live())
        except _EndedError as ended:
            raise LostError(ended.lost, str(ended)) from ended
        finally:
            self._suspects -= 1
            if not self._suspects:
                self._no_suspects.set()

    async def _beside_others(self, telling: Callable[["_Worker"], Awaitable[Any]]) -> Any:
        while True:
            await self._no_suspects.wait()
            worker = await self._live()
            if not self._no_suspects.is_set():
                continue
            try:
                return await telling(worker)
            except _EndedError:
                if not worker.retired:
                    raise

    async def _live(self) -> "_Worker":
        """A worker that has loaded the environment.

        Raises:
            LostError: it could not.
        """
        if self._closed:
            raise LostError("raised", "the environment was closed")
        if self._worker is None or self._worker.ended is not None:
            self._worker = _Worker(self._setup)
        worker = self._worker
        await asyncio.wrap_future(worker.ready)
        return worker

    async def asked(self, worker: "_Worker", call: Mapping[str, Any]) -> Any:
        """The worker's answer to one call, within the limit.

        Raises:
            LostError: the environment raised or took too long.
            _EndedError: the worker ended.
        """
        number, answer = worker.ask(call)
        late = too_late(self._timeout_s)
        for _ in range(2):
            try:
                return _answer_of(await _within(self._timeout_s, answer))
            except TimeoutError:
                began = time.monotonic()
                await _at_once(worker, {"do": "answer"}, late)
                if time.monotonic() - began < HELD_UP_S:
                    break  # else another call held this one up, which has its time once more
        if await _at_once(worker, {"do": "give up", "call": number}, late) >= LEFT_BEHIND:
            worker.retire()
        raise late

    def close(self) -> None:
        """Ends the worker, if there is one."""
        self._closed = True
        if self._worker is not None:
            self._worker.end(_EndedError("died", "the environment was closed"))
            self._worker.join()


async def _at_once(worker: "_Worker", call: Mapping[str, Any], late: LostError) -> Any:
    """A worker's answer to what concerns itself.

    Raises:
        _EndedError: there was none, so it is blocked, and is ended; which call blocks it, nobody knows.
    """
    _, answer = worker.ask(call)
    try:
        return _answer_of(await _within(AT_ONCE_S, answer))
    except TimeoutError:
        ended = _EndedError(late.lost, str(late))
        worker.end(ended)
        raise ended from None


async def _within(seconds: float, future: "Future[Any]") -> Any:
    return await asyncio.wait_for(asyncio.wrap_future(future), seconds)


def _answer_of(answer: Mapping[str, Any]) -> Any:
    if "lost" in answer:
        raise LostError(answer["lost"], answer["reason"])
    return answer["answer"]


class _Worker:
    """A process, with one thread that starts and hears it, and one that tells it."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._setup = setup
        self.ready: Future[dict[str, Any]] = _uncancelled()
        """Its first line, once it has loaded the environment; ValueError if that fails, LostError if it ends meanwhile."""
        self.ended: _EndedError | None = None
        self.retired = False
        """True if it was ended for what no call that is under way has done."""
        self._process: WorkerProcess | None = None
        self._numbers = itertools.count(1)
        self._asked: dict[int, Future[dict[str, Any]]] = {}
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._hear, daemon=True, name="environment worker")
        self._thread.start()

    def ask(self, call: Mapping[str, Any]) -> tuple[int, "Future[dict[str, Any]]"]:
        """The number of a call, and its answer; that raises _EndedError if the worker ends before."""
        answer: Future[dict[str, Any]] = _uncancelled()
        with self._lock:
            number, ended = next(self._numbers), self.ended
            if ended is None:
                self._asked[number] = answer
        if ended is None:
            self._lines.put(json.dumps({**call, "id": number}).encode() + b"\n")
        else:
            answer.set_exception(ended)
        return number, answer

    def retire(self) -> None:
        """Ends the process; the calls that are under way are asked of the next one."""
        self.retired = True
        self.end(_EndedError("died", "the worker of the environment was replaced"))

    def end(self, why: _EndedError) -> None:
        """Ends the process; who waits for an answer is told why, unless it had ended before."""
        with self._lock:
            if self.ended is not None:
                return
            self.ended = why
            asked, self._asked = self._asked, {}
            if self._process is not None:
                self._process.kill()
        self._lines.put(None)
        for answer in asked.values():
            answer.set_exception(why)

    def join(self) -> None:
        """Waits for the end of the process, as far as that comes soon."""
        self._thread.join(_ENDING_S)

    def _hear(self) -> None:
        """Starts the process, which ends with this thread, and takes its answers to the end."""
        try:
            process = WorkerProcess(
                "dapo_jax.environments.worker", self._setup, most_bytes=2 * MOST_BYTES, environment=_ARENAS
            )
        except OSError as error:
            self._over(f"it cannot be started: {error}")
            return
        with self._lock:
            self._process = process
            if self.ended is not None:
                process.kill()
        telling = threading.Thread(target=self._tell, args=(process,), daemon=True)
        telling.start()
        self._over(self._heard(process))
        telling.join(_ENDING_S)
        process.end()

    def _heard(self, process: WorkerProcess) -> str:
        """Takes answers; how it came that there are no more."""
        try:
            self._take_ready(json.loads(process.line(time.monotonic() + START_S)))
            while (ended := self._take(process.line())) is None:
                pass
            return ended
        except TimeoutError:
            return f"it was not ready within {START_S:g} s"
        except EOFError:
            return process.ending()
        except Exception as error:  # of what is no answer: something else writes to its pipe
            return f"what it sent is no answer: {error!s:.200}"

    def _take_ready(self, said: dict[str, Any]) -> None:
        if "failed" in said:
            self.ready.set_exception(ValueError(said["failed"]))
        else:
            self.ready.set_result(said)

    def _take(self, line: bytes) -> str | None:
        """Takes an answer; the reason for which the process can answer no further call, if it gives one."""
        answer = json.loads(line)
        if "ended" in answer:
            return str(answer["ended"])
        with self._lock:
            future = self._asked.pop(answer["id"], None)
        if future is not None:
            future.set_result(answer)
        return None

    def _over(self, how: str) -> None:
        self.end(_EndedError("died", f"the worker of the environment died ({how})"))
        if not self.ready.done():
            said = f"its worker did not start: {how}; a file or module must load in a process of its own, and neither wait nor end the process"
            self.ready.set_exception(LostError("raised", said))

    def _tell(self, process: WorkerProcess) -> None:
        while (line := self._lines.get()) is not None:
            try:
                process.send(line)
            except OSError:  # it has ended
                return


def _uncancelled() -> "Future[Any]":
    """A future that goes on if one of those who wait for it is cancelled."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
