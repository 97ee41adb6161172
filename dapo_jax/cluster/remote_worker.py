"""Workers on the nodes of a cluster. The program, limits and rules are the same as in a worker of this machine: an actor runs `Worker` on its node."""

import ast
import contextlib
import json
import queue
import re
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

from dapo_jax.cluster.engine import Actor, Cluster, DiedError, Node
from dapo_jax.workers import EndedError, Worker

SILENT_S = 10.0
"""A node is lost if it does not answer for this time in seconds. Ray itself notices a frozen node or a cut network after about 64 s."""

_POLL_S = 1.0
"""An actor sends a sign of life at least after this time in seconds."""

_AVOIDED_S = 90.0
"""Time in seconds for which a lost node gets no workers. After this time, Ray has removed a dead or frozen node."""

_NODES_TRIED = 3
"""Number of nodes on which a worker is started, if nodes are lost before it starts."""

_ENDING_S = 4.0


class Places:
    """Chooses the nodes of workers. Each node has workers in proportion to the CPUs that it offers."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._lock = threading.Lock()
        self._workers: dict[str, int] = {}
        self._lost: dict[str, float] = {}

    def take(self) -> Node:
        """Returns the node for a further worker, and counts the worker. Raises ValueError if no node offers CPUs."""
        nodes = self.cluster.nodes()
        offering = [node for node in nodes if node.resources.get("CPU", 0) > 0]
        if not offering:
            raise ValueError(
                f"cluster.workers: none of the cluster's {len(nodes)} nodes offers CPUs for workers; start a node with `ray start --num-cpus=N`"
            )
        with self._lock:
            now = time.monotonic()
            heard = [node for node in offering if now - self._lost.get(node.id, -_AVOIDED_S) >= _AVOIDED_S]
            node = min(
                heard or offering,
                key=lambda one: (self._workers.get(one.id, 0) + 1) / one.resources["CPU"],
            )
            self._workers[node.id] = self._workers.get(node.id, 0) + 1
        return node

    def free(self, node: Node, *, lost: bool) -> None:
        """Forgets a worker that has ended. If its node is lost, the node gets no workers for some time."""
        with self._lock:
            self._workers[node.id] -= 1
            if lost:
                self._lost[node.id] = time.monotonic()


class RemoteWorker(Worker):
    """A handle for a worker process on a node of a cluster. If the node is lost, pending calls raise an EndedError whose `elsewhere` is true."""

    together = 16

    def __init__(self, places: Places, load: str, setup: Mapping[str, Any], *, memory_mb: int) -> None:
        """Starts the process without waiting for it, see `Worker`. Files that `setup` names must be equal on the node, at the same paths."""
        self._places = places
        self._heard = time.monotonic()
        super().__init__(load, setup, memory_mb=memory_mb)

    def end(self, why: EndedError) -> None:
        """Kills the process and all its children. If a call took too long and the node has been silent, the node counts as lost."""
        silent_s = time.monotonic() - self._heard
        if why.lost == "timeout" and silent_s > 3 * _POLL_S and self.ready.done():
            why = _lost_node(f"its node has not answered for {silent_s:.0f} s")
        super().end(why)

    def _run(self, arguments: Mapping[str, Any]) -> None:
        """Starts the actor, and receives its answers."""
        try:
            node, actor = self._start_actor(arguments)
        except Exception as error:
            own = isinstance(error, ValueError)
            why = EndedError("died", str(error) if own else f"cannot start a worker on a node: {error}")
            self._answer(0, error if own else why)
            return self.end(why)
        self._heard = time.monotonic()
        sending = threading.Thread(target=self._send_together, args=(actor,), daemon=True)
        sending.start()
        self.end(self._receive(actor))
        sending.join(_ENDING_S)
        assert self.ended is not None
        return self._places.free(node, lost=self.ended.elsewhere)

    def _start_actor(self, arguments: Mapping[str, Any], tries: int = _NODES_TRIED) -> tuple[Node, Actor]:
        """Returns a node, and the actor on it. Raises the errors of `Places.take` and `Cluster.start`."""
        places, files = self._places, user_files(arguments["setup"])
        node = places.take()
        load = f"{WorkerHost.__module__}:WorkerHost"
        try:
            return node, places.cluster.start(load, arguments, node=node, concurrency=3, files=files)
        except (DiedError, ValueError) as error:
            is_lost = isinstance(error, DiedError)
            places.free(node, lost=is_lost)
            if not is_lost or tries == 1 or self.ended is not None:
                raise
            return self._start_actor(arguments, tries - 1)

    def _receive(self, actor: Actor) -> EndedError:
        """Receives answers until the worker ends, and returns the reason."""
        while True:
            polled = actor.call("answers")
            try:
                answers = polled.result(SILENT_S)
            except TimeoutError:
                return _lost_node(f"{actor.name} has not answered for {SILENT_S:g} s")
            except DiedError as error:
                return _lost_node(str(error))
            self._heard = time.monotonic()
            for number, kind, content in answers:
                if kind == "ended":
                    error = EndedError(*content)
                    if number == 0:  # the reason says already that the worker did not start
                        self._answer(0, error)
                    return error  # `end` marks the worker as ended before it answers, so that no call is retried on it
                self._answer(number, ValueError(content) if kind == "failed" else content)

    def _answer(self, number: int, answer: Any) -> None:
        """Gives an answer or an error to the call with this number."""
        with self._lock:
            future = self._asked.pop(number, None)
        if future is None:
            return
        if isinstance(answer, Exception):
            future.set_exception(answer)
            return
        self.answered += future is not self.ready
        future.set_result(answer)

    def _send_together(self, actor: Actor) -> None:
        """Sends the calls that are waiting together, until the worker ends. Then it ends the actor."""
        while (line := self._lines.get()) is not None:
            lines = [line]
            with contextlib.suppress(queue.Empty):
                while (line := self._lines.get_nowait()) is not None:
                    lines.append(line)
            wait([actor.call("ask", lines)], SILENT_S)
            if line is None:
                break
        ended = actor.call("end")
        with contextlib.suppress(DiedError, TimeoutError):
            ended.result(_ENDING_S / 2)
        self._places.cluster.kill(actor)


class WorkerHost:
    """The object of an actor, which owns a worker of its node."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Starts the worker. `arguments` are the arguments of `Worker`."""
        self._answers: queue.SimpleQueue[tuple[int, str, Any]] = queue.SimpleQueue()
        self._worker = Worker(arguments["load"], arguments["setup"], memory_mb=arguments["memory_mb"])
        self._worker.ready.add_done_callback(partial(self._done, 0))

    def ask(self, lines: Sequence[bytes]) -> None:
        """Sends calls to the worker. Each is a JSON object with its number `id`."""
        for line in lines:
            call = json.loads(line)
            number = call.pop("id")
            self._worker.ask(call).add_done_callback(partial(self._done, number))

    def answers(self) -> list[tuple[int, str, Any]]:
        """Waits for an answer for at most a second, and returns all answers that have arrived. An answer has the number of its call, its kind, and its content:
        the answer itself, an error's message, or the arguments of an EndedError."""
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._answers.get(timeout=_POLL_S))
            while True:
                found.append(self._answers.get_nowait())
        return found

    def end(self) -> None:
        """Kills the worker and its children."""
        self._worker.end(EndedError("died", "its trainer ended it"))
        self._worker.join()

    def _done(self, number: int, answer: Future[dict[str, Any]]) -> None:
        error = answer.exception()
        if error is None:
            self._answers.put((number, "answer", answer.result()))
        elif isinstance(error, EndedError):
            self._answers.put((number, "ended", (error.lost, str(error))))
        else:
            self._answers.put((number, "failed", str(error)))


def user_files(setup: Mapping[str, Any]) -> list[str]:
    """Returns the absolute paths of the user's files that a setup names (in `path/to/file.py:name`, in a command, or as a module), and of the modules that they import.

    Modules are the user's if they are next to such a file, or in a folder of the import path outside of Python's installation.
    """
    words = [
        word for value in setup.values() if isinstance(value, str) for word in re.split(r"[:+\s]", value)
    ]
    named = [path.absolute() for word in words if (path := Path(word).expanduser()).is_file()]
    installed = re.compile(rf"{re.escape(sysconfig.get_path('stdlib'))}|.*/(site|dist)-packages")
    on_path = [Path(folder).absolute() for folder in sys.path if not installed.match(folder)]
    folders = [*(path.parent for path in named), *on_path]
    waiting, found = [*named, *(path for word in words for path in _module(word, folders))], set[Path]()
    while waiting:
        path = waiting.pop()
        if path.suffix == ".py" and path not in found:
            waiting += _imported(path, folders)
        found.add(path)
    return sorted(map(str, found))


def _imported(path: Path, folders: Sequence[Path]) -> Iterator[Path]:
    """Returns the files of the modules that a file imports anywhere, if they are in these folders."""
    with contextlib.suppress(SyntaxError, ValueError, IndexError):  # it is not a program of this Python
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                level, module = getattr(node, "level", 0), getattr(node, "module", None)
                for one in node.names:
                    name = f"{module}.{one.name}" if module else one.name
                    yield from _module(name, [path.parents[level - 1]] if level else folders)


def _module(name: str, folders: Sequence[Path]) -> list[Path]:
    """Returns the files of a module and its packages, or of the module that has `name` as an attribute. Empty if none of the folders has it."""
    parts = name.split(".")
    for folder in folders if parts[0].isidentifier() and parts[0] != "dapo_jax" else ():
        paths = [folder.joinpath(*parts[:count]) for count in range(1, len(parts) + 1)]
        both = [file for path in paths for file in (path / "__init__.py", path.with_suffix(".py"))]
        if files := [file for file in both if file.is_file()]:
            return files
    return []


def _lost_node(reason: str) -> EndedError:
    return EndedError("died", reason, elsewhere=True)
