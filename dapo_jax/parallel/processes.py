"""Several processes that are one run: how they start, and how one that fails ends the others.

Each runs the same command (multi-controller JAX). What one of them raises is told to the others through JAX's coordination
service, and a thread in each of them listens: a process that waits in a collective for one that is gone would wait forever.
One that dies without a word (SIGKILL, a stopped machine) is found by its missing signs of life, and the others say so and end before
JAX would abort them with a stack of C++ addresses. The end of the first process, through which all hear of each other, is seen by `last_words`.
"""

import json
import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn

from dapo_jax.config import ConfigError
from dapo_jax.config.values import without_secrets
from dapo_jax.health.stopping import Stop, StoppedError, first_reason
from dapo_jax.parallel.last_words import FIRST, LastWords, gone
from dapo_jax.terminal import visible

JAX_HEARTBEAT_S = 20
"""Seconds without a heartbeat after which JAX takes a process for dead and aborts the others. JAX sends heartbeats from C++, so that a process
which computes without letting other Python threads run still has them."""

SILENCE_S = 100
"""Seconds without a sign of life from a thread of Python after which a process is taken for dead: much longer, since such a thread may have to
wait for a regular expression or a library that is being loaded."""

GRACE_S = 3.0
"""Seconds that a process may take to leave by itself: after another has failed, and from its own error to its end."""

BEATS = 4
"""A process that has missed so many of its signs of life is named where another one ends."""

_POLL_S = 0.5
_LOST_CONNECTION = re.compile(r"Gloo|UNAVAILABLE|closed by peer|reset by peer")
"""Words of an error that may be the consequence of another process's end."""
_FAILED = "dapo_jax/failed/"
_LEFT = "dapo_jax/left/"
_STOP = "dapo_jax/stop/"
_DOING = "dapo_jax/doing/"
_ALIVE = "dapo_jax/alive/"
_SAID = "dapo_jax/said/"


def wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """True if the environment says that this process is one of several.

    `JAX_COORDINATOR_ADDRESS` (with `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`) says so, or `DAPO_JAX_DISTRIBUTED=1`, with
    which JAX asks Cloud TPU, Slurm, GKE or MPI for the others; `DAPO_JAX_DISTRIBUTED=0` says that it is alone.

    Raises:
        ConfigError: `DAPO_JAX_DISTRIBUTED` is something else.
    """
    said = environment.get("DAPO_JAX_DISTRIBUTED", "")
    if said not in ("", "0", "1"):
        raise ConfigError(f"DAPO_JAX_DISTRIBUTED={said!r} must be 1 (one of several processes), 0 or not set")
    return said == "1" or (said == "" and bool(environment.get("JAX_COORDINATOR_ADDRESS")))


def is_first() -> bool:
    """True in the process that writes and prints for all."""
    import jax

    return jax.process_index() == 0


def start(environment: Mapping[str, str] = os.environ, *, stop: Stop | None = None) -> None:
    """Joins the run's other processes; to be called before anything else of JAX, and answered by `fail` or `leave`.

    Once one of them is told to stop, so are the others, through their `stop`.

    Raises:
        ConfigError: the environment does not say which of how many processes this is, or they do not meet.
    """
    global _member
    import jax

    # JAX would take SIGTERM as news of a preemption, and the process would go on.
    jax.config.update("jax_enable_preemption_service", False)
    address, count, index = (
        environment.get("JAX_COORDINATOR_ADDRESS"),
        _number(environment, "JAX_NUM_PROCESSES"),
        _number(environment, "JAX_PROCESS_ID"),
    )
    try:
        jax.distributed.initialize(address, count, index, heartbeat_timeout_seconds=JAX_HEARTBEAT_S)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the processes of the run do not meet: {error} Found JAX_COORDINATOR_ADDRESS={address}, "
            f"JAX_NUM_PROCESSES={count}, JAX_PROCESS_ID={index}; set all three, or start by Slurm, GKE or Cloud TPU, "
            "which JAX asks"
        ) from error
    _member = _Member(stop or Stop())


def leave() -> None:
    """Waits for the others to be done too, and takes leave of them."""
    if _member is not None:
        _member.leave()


def end(status: int, message: str) -> NoReturn:
    """Ends this process at once, whatever it does, one of several or not; the others hear of it."""
    if _member is None:
        print(message, file=sys.stderr, flush=True)
        os._exit(status)
    _member.end(status, message)


def broadcast(text: str) -> None:
    """Says to the other processes what this one does; what it said before is forgotten."""
    if _member is not None:
        _member.broadcast(text)


def received() -> dict[int, str]:
    """Process -> what each of the others has broadcast last."""
    return {} if _member is None else _member.received()


def go_on_by(way_on: str) -> None:
    """Says from where the run can go on, and how: for the words that are said if this process or another one dies."""
    if _member is not None:
        _member.way_on = way_on


def fail(status: int, message: str, *, shown: str | None = None, by_all: bool = False) -> NoReturn:
    """Says why this process ends, tells the others, and exits with `status` at once.

    Neither JAX's exit handlers nor threads are waited for: they would wait for the other processes.

    Args:
        status: the exit status, which the others take too.
        message: what the others are told.
        shown: what a person reads here, such as a traceback; None is the message.
        by_all: every process is likely to find the same; then only the first shows it.
    """
    assert _member is not None
    _member.fail(status, message, shown=shown or message, by_all=by_all)


def all_say(text: str) -> bool:
    """True if every process says this within the time of grace: they have come to the same, and may do something together."""
    return _member is None or _member.all_say(text)


def tell_others(
    kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
    """The last thing to be pushed on an `ExitStack`: what is unwound may have to wait for the others, who wait for this one.

    Nothing is said of a stop: all of them stop together.
    """
    if _member is not None and error is not None and not isinstance(error, StoppedError):
        _member.tell(2 if isinstance(error, ConfigError) else 1, described(error))


def described(error: BaseException) -> str:
    """The error in one line or a few, as a traceback ends, without tokens and passwords, and without what a terminal would obey."""
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return visible(without_secrets(said))


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    if text and not text.isdecimal():
        raise ConfigError(f"{name}={text!r} must be a number from 0 on")
    return int(text) if text else None


class _Member:
    """This process as one of several, and the thread that listens to the others."""

    def __init__(self, stop: Stop) -> None:
        from jax._src import distributed  # JAX has no public name for its coordination service

        self._state = distributed.global_state
        self._client: Any = distributed.global_state.client
        self._index, self._count = int(self._state.process_id), int(self._state.num_processes or 1)
        self._leaving, self._told = threading.Event(), threading.Event()
        self._limit: threading.Timer | None = None
        self._stop, self._stop_said = stop, False
        self._cause = ""
        self.way_on = "Start all processes again, with --resume"
        self._alive = _Alive(self._index, self._count)
        self._words = LastWords(
            index=self._index,
            count=self._count,
            address=str(self._state.coordinator_address or ""),
            first_gone=self._first_gone,
        )
        self._words.tell(silent={}, way_on=self.way_on)
        self._listener = threading.Thread(target=self._listen, name="other processes", daemon=True)
        self._listener.start()
        if self._index:
            threading.Thread(target=self._watch_first, name="first process", daemon=True).start()

    def leave(self) -> None:
        import jax

        self._words.others_leave()
        jax.distributed.shutdown()  # a barrier, in which an error of another process is still heard of
        self._leaving.set()
        self._words.farewell()
        # A thread that is in C++ when the interpreter goes away aborts the process.
        self._listener.join()

    def tell(self, status: int, message: str) -> tuple[int, str]:
        """Only the first call counts. What is unwound from here on has a limited time.

        Nothing is said once another has failed of something else: this end may be a consequence of that, and a third would take
        it for the cause.
        """
        if not self._told.is_set():
            self._told.set()
            self._cause = self._cause or self._gone(message)
            message = self._cause or message
            if all(told == message for _, told in self._failures().values()):
                self._client.key_value_set(f"{_FAILED}{self._index}", json.dumps([status, message]))
            self._limit = threading.Timer(2 * GRACE_S, self._exit, (status, message))
            self._limit.daemon = True
            self._limit.start()
        return status, message

    def fail(self, status: int, message: str, *, shown: str, by_all: bool) -> NoReturn:
        self.tell(status, message)
        self._leaving.set()
        before = self._failures()
        if self._limit is not None:
            self._limit.cancel()
        if self._cause:
            self._exit(1, self._cause)
        if by_all and self._index and self._others_say(message):
            shown = ""
        elif before and message not in [told for _, told in before.values()]:
            # Its end is what this process fell over: a closed connection, an interrupt from the listener.
            status, shown = self._because(before)
        self._exit(status, shown)

    def _listen(self) -> None:
        heard = 0.0
        while not self._leaving.wait(_POLL_S):
            self._pass_on_stop()
            if time.monotonic() - heard >= self._alive.beat_s:
                heard = time.monotonic()
                self._receive()
            if self._told.is_set():
                continue
            if lost := self._alive.lost():
                self._end_without(gone(lost))
            if not (failures := self._failures()):
                continue
            self._words.others_leave()
            if self._leaving.wait(GRACE_S):
                return  # this process found the same, or fell over the other's end
            # So that what was opened is closed, if the main thread still gets to it.
            self._stop.fail(self._because(failures)[1])
            if not self._leaving.wait(GRACE_S):
                self._exit(*self._because(failures))

    def _end_without(self, which: str, *, answered: bool = True) -> None:
        """Ends this process because another one is gone, by its main thread if that gets to it."""
        self._cause = self._for_want(which)
        self._stop.fail(self._cause)
        if not self._leaving.wait(GRACE_S):
            self._exit(1, self._cause, answered=answered)

    def _first_gone(self) -> None:
        """The first process is gone, which was said. JAX would abort this one within a second."""
        self._leaving.set()
        with suppress(Exception):  # nobody may read it any more
            sys.stdout.flush()
        self._words.farewell(wait=False)
        os._exit(1)

    def _watch_first(self) -> None:
        """Ends this process if the first one, stopped or its machine gone, does not answer any more: the listener waits for its answer.

        Counted are looks at it, not seconds: where this process does not get to run, nobody has been silent.
        """
        looks, heard = 0, self._alive.heard_at
        while not self._leaving.wait(_POLL_S):
            looks = looks + 1 if self._alive.heard_at == heard else 0
            heard = self._alive.heard_at
            if looks * _POLL_S > self._alive.limit_s and not self._told.is_set():
                self._end_without(f"{FIRST} did not answer for {looks * _POLL_S:.0f} s", answered=False)

    def _for_want(self, which: str, found: str = "") -> str:
        """Says that this process ends because another one is gone, and how to go on."""
        found = f" (found as {found.splitlines()[0]})" if found else ""
        return f"process {self._index} of {self._count} ends: {which}: it was killed, or its machine is gone{found}. {self.way_on}"

    def _receive(self) -> None:
        """Says that this process is alive, and hears of the others."""
        with suppress(Exception):  # the service is gone
            self._client.key_value_set(f"{_ALIVE}{self._index}", self._alive.said(), allow_overwrite=True)
            self._alive.heard(dict(self._client.key_value_dir_get(_ALIVE)))
            self._words.tell(silent=self._alive.silent(), way_on=self.way_on)

    def _pass_on_stop(self) -> None:
        """From this process to the others, or the other way round."""
        if self._stop_said:
            return
        if self._stop.reason:
            self._client.key_value_set(f"{_STOP}{self._index}", self._stop.reason)
        elif told := first_reason(self._found(_STOP), self._index):
            self._stop.tell(told)
        self._stop_said = bool(self._stop.reason)

    def broadcast(self, text: str) -> None:
        with suppress(Exception):  # the service is gone
            self._client.key_value_set(f"{_DOING}{self._index}", text, allow_overwrite=True)

    def received(self) -> dict[int, str]:
        return {index: text for index, text in self._found(_DOING).items() if index != self._index}

    def all_say(self, text: str) -> bool:
        self._client.key_value_set(f"{_SAID}{self._index}", text, allow_overwrite=True)
        end = time.monotonic() + GRACE_S
        while len(found := self._found(_SAID)) < self._count and time.monotonic() < end:
            time.sleep(_POLL_S / 5)
        return len(found) == self._count and set(found.values()) == {text}

    def end(self, status: int, message: str) -> NoReturn:
        self._leaving.set()
        self._exit(*self.tell(status, message))

    def _failures(self) -> dict[int, tuple[int, str]]:
        """Process -> (exit status, message) of each other one that has failed."""
        records = {index: json.loads(value) for index, value in self._found(_FAILED).items()}
        return {index: (record[0], record[1]) for index, record in records.items() if index != self._index}

    def _found(self, folder: str) -> dict[int, str]:
        """Process -> what it has said there."""
        try:
            found = self._client.key_value_dir_get(folder)
        except Exception:  # the service is gone, of which JAX makes an abort
            return {}
        return {int(key.rpartition("/")[2]): value for key, value in found}

    def _others_say(self, message: str) -> bool:
        """True if the first process says the same within the time of grace."""
        end = time.monotonic() + GRACE_S
        while 0 not in self._failures() and time.monotonic() < end:
            time.sleep(_POLL_S)
        return self._failures().get(0, (0, ""))[1] == message

    def _because(self, failures: Mapping[int, tuple[int, str]]) -> tuple[int, str]:
        index = min(failures)
        status, message = failures[index]
        return status, (
            f"process {self._index} of {self._count} ends because process {index} failed, whose output says more: {message}"
        )

    def _gone(self, message: str) -> str:
        """Says which process's end is the cause of that error, if the error is of a kind to have one, and another is not heard of any more."""
        end = time.monotonic() + BEATS * self._alive.beat_s + GRACE_S
        while _LOST_CONNECTION.search(message) and not self._failures() and time.monotonic() < end:
            if silent := self._alive.silent():
                return self._for_want(gone(silent), message)
            time.sleep(_POLL_S)
        return ""

    def _exit(self, status: int, shown: str, *, answered: bool = True) -> NoReturn:
        """Ends this process; the first one, if it answers, is told that nobody need wait for this one."""
        if shown:
            print(shown, file=sys.stderr)
        self._words.farewell()
        sys.stdout.flush()
        sys.stderr.flush()
        with suppress(Exception):  # the service is gone
            if self._index == 0:
                self._outlive()
            elif answered:
                self._client.key_value_set(f"{_LEFT}{self._index}", "")
        os._exit(status)

    def _outlive(self) -> None:
        """The others hear of it from a service that ends with the first process, so that one is the last to go, but for those that
        are gone without having taken leave."""
        end = time.monotonic() + 4 * GRACE_S
        while time.monotonic() < end:
            left = self._found(_LEFT).keys() | self._alive.silent().keys()
            if len(left) >= self._count - 1:
                return
            time.sleep(_POLL_S / 5)


class _Alive:
    """Signs of life of the other processes. Times are this process's: the clocks of hosts differ."""

    def __init__(self, index: int, count: int) -> None:
        now = time.monotonic()
        self._index, self._number = index, 0
        self._last = {process: ("", now) for process in range(count) if process != index}
        self.heard_at = now
        """When the others were heard last, or rather what the first process knows of them."""
        self.beat_s = max(1.0, count / 64)
        """Between two signs of life: each process reads those of all others, so with many of them there are fewer."""
        self.limit_s = max(SILENCE_S, 1.25 * BEATS * self.beat_s)
        """A process that is silent for longer is taken for dead."""

    def said(self) -> str:
        """Something that was not said before."""
        self._number += 1
        return str(self._number)

    def heard(self, found: Mapping[str, str]) -> None:
        """Takes what all have said, by key."""
        self.heard_at = time.monotonic()
        for key, text in found.items():
            process = int(key.rpartition("/")[2])
            if process != self._index and self._last[process][0] != text:
                self._last[process] = (text, self.heard_at)

    def silent(self) -> dict[int, float]:
        """Other process -> seconds since it has said something new, of those that were silent when the others were heard last."""
        return {
            process: time.monotonic() - since
            for process, (_, since) in self._last.items()
            if self.heard_at - since > BEATS * self.beat_s
        }

    def lost(self) -> dict[int, float]:
        """The same of those that are taken for dead."""
        return {
            process: seconds
            for process, seconds in self.silent().items()
            if self.heard_at - self._last[process][1] > self.limit_s
        }


_member: _Member | None = None
