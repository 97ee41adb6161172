"""Grading in worker processes: a time limit for each call, bounded memory, and a dead or hung worker is replaced.

Each worker is a process of its own (`dapo_jax.rewards.worker`) that one thread here talks to. A call is
one response, or all responses to a prompt for a grader that takes a whole group. One that runs out of time or memory, or that
kills its worker, gets wrong verdicts which say so; the calls behind it go on with a fresh worker. A worker that dies after it has
answered other calls may have died of what one of them left behind: the call that it died on is asked once more of a fresh one. Where
workers go on dying, it is the grader that is wrong, and not a response: then a call raises.
"""

import contextlib
import json
import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, NoReturn

from dapo_jax.dapo.rollouts import Lost, Verdict
from dapo_jax.rewards.calls import MAX_ANSWER_BYTES, call_of, verdicts_of
from dapo_jax.rewards.functions import RewardError, calls_of
from dapo_jax.rewards.futures import each
from dapo_jax.rewards.sample import Sample
from dapo_jax.rewards.worker_process import WorkerProcess

START_S = 120.0
"""Seconds that a worker may take to load the grader; importing a symbolic package on a busy machine is slow."""

DEATHS_BORNE = 2
"""Workers may die this often, and for one in `CALLS_A_DEATH` calls beyond that, before it is called an error."""

CALLS_A_DEATH = 100
"""A grader that ends its process on one response in a hundred or more is broken; on fewer, those responses may be at fault."""


class GradingPool:
    """Worker processes that grade samples. A context manager: leaving it ends them."""

    def __init__(
        self,
        grader: str,
        *,
        workers: int,
        timeout_s: float,
        memory_mb: int,
        answer_marker: str = "=",
        whole_group: bool = False,
        on_nonfinite: str = "error",
    ) -> None:
        """Starts the workers; they load the grader while the caller goes on.

        Args:
            grader: a name in `GRADERS`, `module:function` or `path/to/file.py:function`.
            workers: processes.
            timeout_s: seconds that one call may take.
            memory_mb: megabytes a worker may take beyond what it has once the grader is loaded.
            answer_marker: of the grader `exact`.
            whole_group: one call takes all responses to a prompt, else one.
            on_nonfinite: as of `load_reward`.

        Raises:
            ValueError: no workers, or a limit that is not positive.
        """
        if workers < 1 or timeout_s <= 0 or memory_mb < 1:
            raise ValueError(
                f"a grading pool needs workers >= 1, timeout_s > 0 and memory_mb >= 1; got {workers=}, {timeout_s=}, "
                f"{memory_mb=}"
            )
        setup = {"grader": grader, "answer_marker": answer_marker, "memory_mb": memory_mb}
        self._setup = {**setup, "on_nonfinite": on_nonfinite}
        self._grader = grader
        self._lock = threading.Lock()
        self._asked = self._deaths = 0
        self._timeout_s = timeout_s
        self._whole_group = whole_group
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> "GradingPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, samples: Sequence[Sample]) -> list[Future[Verdict]]:
        """Queues the calls for the responses to one prompt; the verdicts are in their order.

        A result raises RewardError if the grader raised, its answer was no verdict, its workers do not start or it ends them again and
        again, ValueError if it cannot be loaded.

        Raises:
            RuntimeError: the pool was closed.
        """
        calls = [
            _Call(samples_of_call, Future())
            for samples_of_call in calls_of(samples, whole_group=self._whole_group)
        ]
        with self._lock:  # behind what ends the threads, a call would wait for ever
            if self._closing.is_set():
                raise RuntimeError(f"the grading pool of {self._grader} was closed; submit before that")
            for call in calls:
                self._calls.put(call)
        return [future for call in calls for future in each(call.answer, len(call.samples))]

    def grade(self, samples: Sequence[Sample]) -> list[Verdict]:
        """The verdicts on the responses to one prompt, in their order."""
        return [future.result() for future in self.submit(samples)]

    @property
    def waiting(self) -> int:
        """Calls that no worker has taken yet."""
        return self._calls.qsize()

    def close(self) -> None:
        """Ends the workers. Calls that wait in the queue are cancelled; those that are being graded are waited for."""
        with self._lock:
            self._closing.set()
            for _ in self._threads:
                self._calls.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        """One worker's thread: takes a call, has it graded, takes the next."""
        seat = _Seat(self._setup)
        while (call := self._calls.get()) is not None:
            if self._closing.is_set():
                call.answer.cancel()
                continue
            with self._lock:
                self._asked += 1
            try:
                call.answer.set_result(self._verdicts(seat, call))
            except _ProtocolError as error:
                call.answer.set_exception(RewardError(f"reward function {self._grader}: {error}"))
            except Exception as error:
                call.answer.set_exception(error)
        seat.end()

    def _verdicts(self, seat: "_Seat", call: "_Call", *, again: bool = False) -> list[Verdict]:
        """The verdicts on a call's responses, asked for once more (`again`) if a worker died that had answered earlier calls."""
        used = seat.used
        try:
            return seat.ask(call_of(call.samples), self._timeout_s)
        except _LostError as lost:
            once_more = used and lost.kind == "died"
            if lost.kind == "died":
                then = "a new one is asked" if once_more else "it counts as wrong"
                self._died(f"on {call.where}", f"{lost}", then, counts=not again)
            if once_more:
                return self._verdicts(seat, call, again=True)
            verdict = Verdict(correct=False, reason=str(lost), lost=lost.kind)
            return [verdict] * len(call.samples)

    def _died(self, where: str, how: str, then: str, *, counts: bool) -> None:
        """Counts the death of a worker, one for each call, and says the first of them.

        Raises:
            RewardError: it is one too many.
        """
        with self._lock:
            self._deaths += counts
            asked, deaths = self._asked, self._deaths
        if counts and deaths > DEATHS_BORNE and deaths * CALLS_A_DEATH >= asked:
            raise RewardError(
                f"reward function {self._grader}: its worker died {deaths} times in {asked} calls, the last time {where}: {how}; a "
                "function must return, or raise, and neither end its process nor leave behind what ends it: call it on that response "
                "by itself"
            ) from None
        if deaths <= DEATHS_BORNE:
            with contextlib.suppress(OSError, ValueError, AttributeError):  # no standard error to say it on
                print(f"reward function {self._grader}, {where}: {how}; {then}", file=sys.stderr)


class _Call(NamedTuple):
    """The responses that a worker is asked about at once, and where its answer goes."""

    samples: Sequence[Sample]
    answer: Future[list[Verdict]]

    @property
    def where(self) -> str:
        """Which call this is, for messages."""
        return f"prompt {self.samples[0].prompt.ordinal}, response {self.samples[0].response[:60]!r}"


class _LostError(Exception):
    """A call whose worker is gone."""

    def __init__(self, kind: Lost, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class _ProtocolError(Exception):
    """A worker's pipe held something else than the answer to the call; the worker is gone."""


class _Seat:
    """Where one worker works after another: the next starts when it is asked."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._setup = setup
        self._worker: _Worker | None = None

    @property
    def used(self) -> bool:
        """True if the worker that would be asked has answered a call before."""
        return self._worker is not None and not self._worker.gone

    def ask(self, call: Sequence[Mapping[str, Any]], timeout_s: float) -> list[Verdict]:
        """The worker's verdicts; `_Worker` says what is raised."""
        if self._worker is None or self._worker.gone:
            self._worker = _Worker(self._setup)
        return self._worker.ask(call, timeout_s)

    def end(self) -> None:
        """Ends the worker, if there is one."""
        if self._worker is not None and not self._worker.gone:
            self._worker.end()


class _Worker:
    """A process and its two pipes; one question at a time."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        """Starts the process, and waits till it has loaded the grader.

        Raises:
            ValueError: the grader cannot be loaded there.
            RewardError: the process ended or hung before it was ready.
        """
        self._process = WorkerProcess("dapo_jax.rewards.worker", setup, most_bytes=2 * MAX_ANSWER_BYTES)
        self._number = 0
        self.gone = False
        try:
            answer = self._answer(time.monotonic() + START_S, START_S)
        except (_LostError, _ProtocolError) as lost:
            hung = isinstance(lost, _LostError) and lost.kind == "timeout"
            raise RewardError(
                f"reward function {setup['grader']}: its worker did not start: "
                f"{f'it was not ready within {START_S:g} s' if hung else lost}; a file or module must load in a process of its own, and "
                "neither wait nor end the process meanwhile; the worker's standard error may say more"
            ) from lost
        if "failed" in answer:
            self.end()
            raise ValueError(answer["failed"])

    def ask(self, call: Sequence[Mapping[str, Any]], timeout_s: float) -> list[Verdict]:
        """The worker's verdicts.

        Raises:
            _LostError: none came; the process has ended.
            _ProtocolError: what came is no answer to this call; the process has ended.
            RewardError: the grader raised.
        """
        if self._process.has_ended:
            self._lose("died", f"the worker had ended ({self._process.ending()})")
        deadline = time.monotonic() + timeout_s
        self._number += 1
        self._send(json.dumps({"id": self._number, "samples": call}).encode() + b"\n", deadline, timeout_s)
        answer = self._answer(deadline, timeout_s)
        if "memory" in answer:
            self._lose("memory", "the grader ran out of memory")
        if "failed" in answer:
            raise RewardError(answer["failed"])
        try:
            return verdicts_of(answer)
        except (KeyError, TypeError, ValueError):
            self._break(
                f"its worker sent {f'{answer}':.200}, which holds no verdicts; something else writes to its pipe"
            )

    def end(self) -> None:
        """Ends the process and all that it started, and closes the pipes."""
        self.gone = True
        self._process.end()

    def _send(self, message: bytes, deadline: float, timeout_s: float) -> None:
        try:
            self._process.send(message, deadline)
        except TimeoutError:
            self._lose("timeout", f"the worker did not take the call within {timeout_s:g} s")
        except BrokenPipeError:
            self._lose("died", f"the worker had ended ({self._process.ending()})")

    def _answer(self, deadline: float, timeout_s: float) -> dict[str, Any]:
        """The answer to the last call; the time holds while data arrive, too."""
        try:
            line = self._process.line(deadline)
        except TimeoutError:
            self._lose("timeout", f"no verdict within {timeout_s:g} s")
        except EOFError:
            self._lose("died", f"the grader ended its process ({self._process.ending()})")
        except ValueError:
            self._break(f"its worker sent more than {MAX_ANSWER_BYTES:,} bytes without an end")
        try:
            answer = json.loads(line)
            number = answer["id"]
            if type(number) is not int:  # True equals 1
                raise TypeError
        except (ValueError, TypeError, KeyError, RecursionError):
            self._break(
                f"its worker sent {line[:200]!r}, which is no answer; something else writes to its pipe"
            )
        if "forked" in answer:
            self._break(answer["forked"])
        if number != self._number:
            self._break(
                f"its worker sent a surplus answer, to call {number} when it was asked call {self._number}: {line[:200]!r}"
            )
        return answer

    def _lose(self, kind: Lost, reason: str) -> NoReturn:
        self.end()
        raise _LostError(kind, reason)

    def _break(self, reason: str) -> NoReturn:
        self.end()
        raise _ProtocolError(reason)
