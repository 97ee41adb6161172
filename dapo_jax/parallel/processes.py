"""The processes of a run: how they start, and how the failure of one process ends all others.

Each process runs the same command (multi-controller JAX). A process that raises an error stores it in JAX's coordination service, and
a thread in each process polls for errors from other processes. Without this thread, the main thread could wait forever in a collective for
a process that has ended. If a process dies without an error (SIGKILL, a lost machine), its heartbeats stop, and JAX ends the others.
"""

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from dapo_jax.config import ConfigError
from dapo_jax.config.keys import without_secrets
from dapo_jax.health.stopping import Stop, StoppedError, first_reason
from dapo_jax.terminal import visible

JAX_HEARTBEAT_S = 20
"""Seconds without a heartbeat from a process after which JAX ends the other processes. C++ code sends them, so they continue while Python is blocked."""

GRACE_S = 3.0
"""Maximum time in seconds for a process to exit on its own, after it or another process has failed."""

_POLL_S = 0.5
_LOST_CONNECTION = re.compile(r"Gloo|UNAVAILABLE|closed by peer|reset by peer")
"""Matches error messages that may be caused by the exit of another process."""


def wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether environment variables declare that this process is one of several.

    This is the case if `JAX_COORDINATOR_ADDRESS` is set (with `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`), or if `DAPO_JAX_DISTRIBUTED=1`. In the
    second case, JAX gets these three values from Cloud TPU, Slurm, GKE or MPI. With `DAPO_JAX_DISTRIBUTED=0`, this process is always the only one. Raises
    ConfigError if `DAPO_JAX_DISTRIBUTED` has another value.
    """
    value = environment.get("DAPO_JAX_DISTRIBUTED", "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"DAPO_JAX_DISTRIBUTED={value!r} must be 1 (several processes), 0 or not set")
    return value == "1" or (value == "" and bool(environment.get("JAX_COORDINATOR_ADDRESS")))


def is_first() -> bool:
    """Returns whether this is the first process, which writes files and prints for all processes."""
    import jax

    return jax.process_index() == 0


def described(error: BaseException) -> str:
    """Returns the type and message of an error, without tokens, passwords and control characters."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return visible(without_secrets(text))


class _Processes:
    """Connects this process to the other processes of the run, if there are any, and runs a thread that polls for their messages."""

    def __init__(self) -> None:
        self._client: Any = None
        """Client of JAX's coordination service. None if this is the only process."""
        self._index, self._count = 0, 1
        self._leaving, self._told = threading.Event(), threading.Event()
        self._limit: threading.Timer | None = None
        self._stop, self._cause = Stop(), ""
        self._remedy = "Start all processes again, with --resume"
        self._listener = threading.Thread(target=self._listen, name="other processes", daemon=True)

    def start(self, *, stop: Stop | None = None) -> None:
        """Connects to the other processes of the run. Call this before any other use of JAX, and finish with `fail` or `leave`.

        A request to stop one process is passed on to all others, through their own `stop`.

        Raises:
            ConfigError: environment variables do not provide the process id and the number of processes, or the processes cannot connect.
        """
        import jax

        from dapo_jax.parallel.together import coordination_service

        # If this service were enabled, JAX would treat SIGTERM as a preemption notice, and the process would continue.
        jax.config.update("jax_enable_preemption_service", False)
        names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
        address, *given = (os.environ.get(name) or None for name in names)
        try:
            count, index = (None if text is None else int(text) for text in given)
            jax.distributed.initialize(address, count, index, heartbeat_timeout_seconds=JAX_HEARTBEAT_S)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"the processes of the run cannot connect: {error} Found JAX_COORDINATOR_ADDRESS={address}, JAX_NUM_PROCESSES={given[0]}, "
                f"JAX_PROCESS_ID={given[1]}; set all three, or start with Slurm, GKE or Cloud TPU, where JAX finds them"
            ) from error
        service = coordination_service()
        self._client, self._stop = service.client, stop or self._stop
        self._index, self._count = int(service.process_id), int(service.num_processes or 1)
        self._listener.start()

    def leave(self) -> None:
        """Waits until the other processes have finished too, and disconnects from them."""
        if self._client is None:
            return
        import jax

        jax.distributed.shutdown()  # a barrier, during which the listener still notices errors
        self._leaving.set()
        # If this thread were still in C++ when the interpreter exits, it would abort the process.
        self._listener.join()

    def broadcast(self, text: str) -> None:
        """Publishes a text to the other processes, where `received` returns it. It replaces this process's previous text."""
        self._put("doing", text)

    def received(self) -> dict[int, str]:
        """Returns the latest text that each other process has published with `broadcast`, by process index."""
        return self._others("doing")

    def resume_by(self, remedy: str) -> None:
        """Sets the advice on how to resume the run. It is printed if another process dies."""
        self._remedy = remedy

    def fail(self, status: int, message: str, *, shown: str | None = None, by_all: bool = False) -> NoReturn:
        """Prints why this process ends, notifies the other processes, and exits with `status` immediately.

        JAX's exit handlers and threads are skipped, because they would wait for the other processes.

        `message` is the text for the other processes, and `shown` the text for the user of this process, for example a traceback (None: `message`). If every process
        is likely to raise the same error (`by_all`), only the first process prints it.
        """
        self._tell(status, message)
        self._leaving.set()
        if self._limit is not None:
            self._limit.cancel()
        failures = self._failures()
        if self._cause:
            self._exit(1, self._cause)
        if by_all and self._index and self._wait_for_failure(of=0).get(0, (0, ""))[1] == message:
            shown = ""
        elif failures and message not in [known for _, known in failures.values()]:
            status, shown = self._because(failures)
        self._exit(status, message if shown is None else shown)

    def end(self, status: int, message: str) -> NoReturn:
        """Ends this process immediately, and notifies the other processes if there are any."""
        self._leaving.set()
        self._exit(*self._tell(status, message))

    def all_say(self, text: str) -> bool:
        """Returns whether every process has called this method with the same text within `GRACE_S`, so that all processes can act together."""
        if self._client is None:
            return True
        self._put("ready", text)
        _wait_until(lambda: len(self._all("ready")) == self._count)
        return list(self._all("ready").values()) == [text] * self._count

    def tell_others(self, _: object, error: BaseException | None, __: object) -> None:
        """Notifies the other processes of an error, unless it is a stop request. Push this onto an `ExitStack` last, so that it runs before slow exits."""
        if error is not None and not isinstance(error, StoppedError):
            self._tell(2 if isinstance(error, ConfigError) else 1, described(error))

    def _put(self, subject: str, text: str) -> None:
        with suppress(Exception):  # raised if this is the only process, or if the service has ended
            self._client.key_value_set(f"dapo_jax/{subject}/{self._index}", text, allow_overwrite=True)

    def _others(self, subject: str) -> dict[int, str]:
        return {index: text for index, text in self._all(subject).items() if index != self._index}

    def _all(self, subject: str) -> dict[int, str]:
        try:
            found = self._client.key_value_dir_get(f"dapo_jax/{subject}/")
        except Exception:  # as in `_put`; if the service has ended, JAX will abort this process
            return {}
        return {int(key.rpartition("/")[2]): value for key, value in found}

    def _tell(self, status: int, message: str) -> tuple[int, str]:
        """Notifies the other processes of an error, but only once, and limits the time in which this process can clean up.

        If another process has already failed with a different message, this error is only a consequence. The other processes are not notified
        of it, because they would report it as the cause.
        """
        if self._client is not None and not self._told.is_set():
            self._told.set()
            if _LOST_CONNECTION.search(message) and not self._wait_for_failure():
                self._cause = message = (
                    f"process {self._index} of {self._count} ends: another process is gone: it was killed, or its machine is lost "
                    f"(found as {message.splitlines()[0]}). {self._remedy}"
                )
            if all(known == message for _, known in self._failures().values()):
                self._put("failed", json.dumps([status, message]))
            self._limit = threading.Timer(2 * GRACE_S, self._exit, (status, message))
            self._limit.daemon = True
            self._limit.start()
        return status, message

    def _listen(self) -> None:
        while not self._leaving.wait(_POLL_S):
            self._pass_on_stop()
            if self._told.is_set() or not (failures := self._failures()):
                continue
            if self._leaving.wait(GRACE_S):
                return  # this process raised the same error, or noticed the failure and exits on its own
            status, message = self._because(failures)
            self._stop.fail(message)  # interrupts the main thread, if it is running Python code
            if not self._leaving.wait(GRACE_S):
                self._exit(status, message)

    def _pass_on_stop(self) -> None:
        """Passes this process's stop request on to the others, or another process's stop request on to this process."""
        if self._stop.reason:
            self._put("stop", self._stop.reason)
        elif reason := first_reason(self._all("stop"), self._index):
            self._stop.tell(reason)

    def _failures(self) -> dict[int, tuple[int, str]]:
        """Returns the exit status and the message of each other process that has failed, by process index."""
        return {index: tuple(json.loads(record)) for index, record in self._others("failed").items()}

    def _wait_for_failure(self, *, of: int | None = None) -> dict[int, tuple[int, str]]:
        """Waits up to `GRACE_S` until another process fails, and returns `_failures`. If `of` is given, waits until process `of` fails."""
        _wait_until(lambda: self._failures() if of is None else of in self._failures())
        return self._failures()

    def _because(self, failures: Mapping[int, tuple[int, str]]) -> tuple[int, str]:
        index = min(failures)
        status, message = failures[index]
        why = f"because process {index} failed (see its output): {message}"
        return status, f"process {self._index} of {self._count} ends {why}"

    def _exit(self, status: int, shown: str) -> NoReturn:
        if shown:
            print(shown, file=sys.stderr)
        with suppress(OSError):  # standard output or error may be closed
            sys.stdout.flush()
            sys.stderr.flush()
        self._put("left", "")
        # The service ends with the first process. The first process therefore waits until the other live processes have read their messages.
        if self._client is not None and self._index == 0:
            alive = self._count - bool(self._cause)
            _wait_until(lambda: len(self._all("left")) >= alive, 4 * GRACE_S)
        os._exit(status)


def _wait_until(done: Callable[[], Any], seconds: float = GRACE_S) -> None:
    """Waits until `done` returns a true value, but at most for a time in seconds."""
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(_POLL_S / 5)


_here = _Processes()
start, leave, fail, end = _here.start, _here.leave, _here.fail, _here.end
broadcast, received, all_say = _here.broadcast, _here.received, _here.all_say
resume_by, tell_others = _here.resume_by, _here.tell_others
