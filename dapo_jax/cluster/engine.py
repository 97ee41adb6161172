"""The connection to a Ray cluster. Only this module imports ray.

It uses actors, stored objects and the notice that an actor died, and no other part of Ray. An actor holds an object of a class of this package, and runs its
methods. Ray does not restart actors, and a running actor takes no CPU from the CPUs that a node offers.
"""

import hashlib
import importlib
import logging
import os
import platform
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from dapo_jax.hints import needing
from dapo_jax.text.http import is_loopback

START_S = 120.0
"""Maximum time in seconds for the start of an actor."""

_READ_S = 10.0
"""Time limit in seconds for reading the output of an actor that died."""

_PACKAGE = Path(__file__).parents[1]

_HIDDEN = ("node:", "memory", "object_store_memory", "accelerator_type:")
"""Beginnings of the names of resources that Ray adds to each node."""


class DiedError(RuntimeError):
    """Raised by calls to an actor whose process or node has died."""


class Node(NamedTuple):
    """A machine of the cluster."""

    id: str
    address: str
    resources: Mapping[str, int | float]
    """The amount of each resource that the node offers, for example {"CPU": 16.0}."""


class Actor:
    """A handle for an object on a node. Calls run in the order of their submission, unless the actor runs several calls at once."""

    def __init__(self, handle: Any, name: str) -> None:
        self._handle, self._lock = handle, threading.Lock()
        self.name = name
        """The class and the node's address, for messages."""
        self.facts: Mapping[str, str] = {}
        """The result of `hello`."""
        self._last_lines: str | None = None

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Calls a method and returns a future for its result. An argument that `put` returned arrives as the stored value.

        The future raises the error that the method raised, or DiedError if the actor has died. Use `concurrent.futures.wait` to wait for the first of several
        futures, or with a time limit.
        """
        import ray

        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()
        if ray.is_initialized():
            done = self._handle.call.remote(method, *arguments).future()
            done.add_done_callback(partial(self._forward, answer))
        else:
            answer.set_exception(DiedError(f"{self.name} died: the connection to the cluster was closed"))
        return answer

    def kill(self) -> None:
        """Ends the actor's process. Unfinished calls raise DiedError. If the node does not answer, the process ends when the node answers again."""
        import ray

        self._last_lines = ""
        if ray.is_initialized():
            with suppress(ray.exceptions.RayError, ValueError):
                ray.kill(self._handle)

    def _forward(self, answer: Future[Any], done: Future[Any]) -> None:
        """Gives the result of a call to `answer`. This runs in a thread of Ray, which must not wait for Ray."""
        import ray

        error = done.exception()
        if error is None:
            answer.set_result(done.result())
        elif isinstance(error, ray.exceptions.RayTaskError):
            answer.set_exception(error.cause)
        else:
            threading.Thread(target=self._fail, args=(answer, error), daemon=True).start()

    def _fail(self, answer: Future[Any], error: BaseException) -> None:
        """Gives a DiedError to `answer`, with the last lines of the process's output if its node still answers."""
        import ray

        with self._lock:
            if self._last_lines is None:
                self._last_lines = ""
                # Ray raises SystemExit in its calls while the connection is closed. It ends the process if a thread frees a reference of Ray then; `call` leaves none in
                # this thread.
                with suppress(
                    ray.exceptions.RayError, DiedError, KeyError, TimeoutError, ValueError, SystemExit
                ):
                    reader = Actor(_made(self.facts["node"], {}), "")
                    lines = reader.call("last_lines", self.facts["output"]).result(_READ_S)
                    self._last_lines = f". The end of its output: {lines}"
        reason = " ".join(str(error).split()).partition(" Some common causes include")[0]
        reason = reason.partition(" dead because ")[2] or reason
        answer.set_exception(DiedError(f"{self.name} died: {reason}{self._last_lines}"))


class Cluster:
    """A connection to a Ray cluster. `close` ends all actors."""

    def __init__(self, address: str) -> None:
        """Connects to the cluster at `address`, which is `HOST:PORT`, or `auto` for the cluster that was started on this machine.

        Raises ValueError if ray is not installed, this process is connected already, there is no cluster, or the cluster accepts programs of other machines without a token.
        """
        # No advice about automatic scaling on the terminal, and no new cluster if a call comes after `close`.
        os.environ |= {"RAY_SCHEDULER_EVENTS": "0", "RAY_ENABLE_AUTO_CONNECT": "0"}
        check_address(address)
        import ray

        if ray.is_initialized():
            remedy = "end the other run, or call ray.shutdown()"
            raise ValueError(
                f"cluster.address={address}: this process is connected to a Ray cluster already; {remedy}"
            )
        stop = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address, logging_level=logging.ERROR, namespace="dapo_jax")
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            remedy = "start it with `ray start --head`, write the address that this command prints, and set its RAY_AUTH_TOKEN"
            why = f"cluster.address={address}: there is no Ray cluster with this token ({error}); {remedy}"
            raise ValueError(why) from error
        finally:  # ray replaces the handler, but a signal to stop must save a checkpoint
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, stop)
        self._actors: list[Actor] = []
        self._closed = False
        try:
            _check_token(address, [node.address for node in self.nodes()])
        except ValueError:
            self.close()
            raise

    def nodes(self) -> list[Node]:
        """Returns the nodes that are alive, in the order of their addresses."""
        import ray

        found = [] if self._closed else ray.nodes()
        nodes = [
            Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"])
            for node in found
            if node["Alive"]
        ]
        return sorted(nodes, key=lambda node: (node.address, node.id))

    def start(
        self,
        load: str,
        setup: Any,
        *,
        node: Node | None = None,
        resources: Mapping[str, int | float] | None = None,
        concurrency: int = 1,
        packages: Sequence[str] = ("numpy",),
        files: Sequence[str] = (),
    ) -> Actor:
        """Starts an actor, waits until its object is ready, and returns it.

        Args:
            load: class of the object, as `module:Class`.
            setup: the argument of the class.
            node: where the actor runs. If None, Ray chooses a node.
            resources: what the actor takes from its node, for example {"TPU": 4}. It takes no CPU unless it is named here.
            concurrency: number of calls that run at once, in threads.
            packages: packages that must have the same version on both sides. Python and the source code of dapo_jax must always be equal.
            files: absolute paths of files that must be equal on both sides.

        The actor works in the current folder of this process, if its node has this folder.

        Raises:
            ValueError: a version or a file differs. The message has both values.
            DiedError: the actor did not start within 120 s, or died. The message has the free resources.
            Exception: any error that the class raised.
        """
        import ray

        if self._closed:  # ray would start a cluster
            raise DiedError(f"{load} cannot start: the connection to the cluster was closed")
        own = facts(packages, files)
        at = node.address if node else "a node that Ray chooses"
        handle = _made(node.id if node else "", resources or {}, concurrency)
        actor = Actor(handle, f"{load.rpartition(':')[2]} on {at}")
        self._actors.append(actor)
        try:
            found = actor.facts = actor.call("hello", os.getcwd(), packages, files).result(START_S)
            actor.name = f"{load.rpartition(':')[2]} on {found['address']}"
            check_facts(own, found, actor.name)
            actor.call("load", load, setup).result(START_S)
        except BaseException as error:
            self.kill(actor)
            if isinstance(error, TimeoutError):
                free = _shown(ray.available_resources())
                raise DiedError(
                    f"{actor.name} did not start within {START_S:g} s. It needs {_shown(resources or {})}; the cluster has these free resources: {free}"
                ) from None
            raise
        return actor

    def kill(self, actor: Actor) -> None:
        """Ends an actor. See `Actor.kill`."""
        actor.kill()
        self._actors = [other for other in self._actors if other is not actor]

    def put(self, value: Any) -> Any:
        """Stores a value in the memory that the processes of this machine share, and returns a reference. Each node that needs the value copies it once. It is
        freed when no reference is left."""
        import ray

        return ray.put(value)

    def close(self) -> None:
        """Ends all actors and the connection."""
        import ray

        self._closed = True
        for actor in list(self._actors):
            self.kill(actor)
        ray.shutdown()


class _Inside:
    """The object of every actor. It runs the methods of an object of a given class."""

    _object: Any = None

    def call(self, method: str, *arguments: Any) -> Any:
        """Runs a method of this object (`hello` and `load`) or of the object that `load` created."""
        return getattr(self if self._object is None else self._object, method)(*arguments)

    def hello(self, folder: str, packages: Sequence[str], files: Sequence[str]) -> dict[str, str]:
        """Goes to a folder if it exists. Returns the versions and digests of this process, its node's id and address, and the file with its standard error."""
        import ray

        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
        if os.path.isdir(folder):
            os.chdir(folder)
        own = {"node": ray.get_runtime_context().get_node_id(), "address": ray.util.get_node_ip_address()}
        return facts(packages, files) | own | {"output": os.path.realpath("/proc/self/fd/2")}

    def last_lines(self, path: str) -> str:
        """Returns the last 20 lines of a file, each with at most 200 characters."""
        lines = [line[:200] for line in Path(path).read_text(errors="replace").split("\n") if line.strip()]
        return " | ".join(lines[-20:])

    def load(self, load: str, setup: Any) -> None:
        """Creates the object."""
        module, _, name = load.partition(":")
        self._object = getattr(importlib.import_module(module), name)(setup)


def _made(node: str, needs: Mapping[str, int | float], concurrency: int = 1) -> Any:
    """Creates an actor that takes `needs` from the node with this id, or from a node that Ray chooses."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options = {
        "num_cpus": needs.get("CPU", 0),
        "num_gpus": needs.get("GPU", 0),
        "resources": {name: count for name, count in needs.items() if name not in ("CPU", "GPU")} or None,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False) if node else "DEFAULT",
    }
    return ray.remote(_Inside).options(max_restarts=0, max_concurrency=concurrency, **options).remote()


def _end_with(parent: int) -> None:
    """Ends this process when its parent, the process of its node, has ended. Ray leaves some actors if the head of the cluster has died."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def facts(packages: Sequence[str] = (), files: Sequence[str] = ()) -> dict[str, str]:
    """Returns the versions and digests of this process that must be equal in another process: Python, the source code of dapo_jax, packages and files."""
    sources = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        sources.update(path.read_bytes())
    found = {
        "Python": platform.python_version(),
        "dapo_jax": f"the source code with the digest {sources.hexdigest()[:12]}",
    }
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "no version"
    for path in files:
        try:
            found[path] = f"the digest {hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]}"
        except OSError:
            found[path] = "no such file"
    return found


def check_facts(own: Mapping[str, str], found: Mapping[str, str], who: str) -> None:
    """Raises ValueError if the process `who` has other versions or files than this process."""
    different = [
        f"{name} is {value} here, but {found.get(name, 'missing')} there"
        for name, value in own.items()
        if found.get(name) != value
    ]
    if different:
        raise ValueError(
            f"{who} differs from this process: {'; '.join(different)}. Install the same versions on all machines, and put the same files at the same paths"
        )


def check_address(address: str) -> None:
    """Raises ValueError if ray is not installed, or if `address` is on another machine and RAY_AUTH_MODE is not token."""
    with needing("cluster", f"cluster.address={address} needs ray"):
        import ray  # noqa: F401
    host = address.rpartition(":")[0]
    _check_token(address, [host] if host else [])


def _check_token(address: str, hosts: Sequence[str]) -> None:
    """Raises ValueError if a host is not on the loopback interface and programs need no token."""
    off = [host for host in hosts if not is_loopback(host)]
    if off and os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        raise ValueError(
            f"cluster.address={address}: any program that reaches {off[0]} could run code there. Set RAY_AUTH_MODE=token on all machines and give them the same "
            "RAY_AUTH_TOKEN, for example from `openssl rand -hex 32`"
        )


def _shown(resources: Mapping[str, int | float]) -> str:
    shown = [f"{name} {count:g}" for name, count in sorted(resources.items()) if not name.startswith(_HIDDEN)]
    return ", ".join(shown) or "nothing"
