"""A double of the engine. Its nodes are in this process, and its actors are threads, so a test starts them at once, and can lose or freeze a node."""

import importlib
import os
import queue
import sys
import threading
from concurrent.futures import Future
from weakref import WeakSet

from dapo_jax.cluster.engine import Actor, Cluster, DiedError, Node, check_facts, facts


class Stored:
    """A stored value."""

    def __init__(self, value):
        self.value = value


class ThreadActor(Actor):
    def __init__(self, engine, node, resources, concurrency, load, setup):
        self.engine, self.node, self.resources, self.name = (
            engine, node, resources, f"{load.rpartition(':')[2]} on {node.address}",
        )  # fmt: skip
        self.died, self.calls, self._waiting, self._lock = "", queue.SimpleQueue(), set(), threading.Lock()
        module, _, name = load.partition(":")
        self.object = getattr(importlib.import_module(module), name)(setup)
        for _ in range(concurrency):
            threading.Thread(target=self._run, daemon=True).start()

    def call(self, method, *arguments):
        answer = Future()
        answer.set_running_or_notify_cancel()
        with self._lock:
            if not self.died:
                self._waiting.add(answer)
        if self.died:
            answer.set_exception(DiedError(self.died))
        self.calls.put((answer, method, arguments))
        return answer

    def kill(self):
        self.die("it was killed")

    def die(self, why):
        with self._lock:
            self.died = self.died or f"{self.name} died: {why}"
            waiting, self._waiting = self._waiting, set()
        for answer in waiting:
            answer.set_exception(DiedError(self.died))

    def _run(self):
        while not self.died:
            answer, method, arguments = self.calls.get()
            self.engine.moving[self.node.id].wait()
            try:
                if self.died:
                    return
                result, error = (
                    getattr(self.object, method)(
                        *(one.value if isinstance(one, Stored) else one for one in arguments)
                    ),
                    None,
                )
            except BaseException as raised:
                result, error = None, raised
            self.engine.moving[self.node.id].wait()
            with self._lock:
                mine = answer in self._waiting
                self._waiting.discard(answer)
            if mine and error is not None:
                answer.set_exception(error)
            elif mine:
                answer.set_result(result)


class ThreadCluster(Cluster):
    """An engine whose nodes offer `resources` each. `facts` are what the nodes say of themselves in addition to the true facts."""

    def __init__(self, *, nodes=2, resources=None, facts=None):
        self.all = [
            Node(f"n{number}", f"10.0.0.{number}", resources or {"CPU": 2.0})
            for number in range(1, nodes + 1)
        ]
        self.moving = {node.id: threading.Event() for node in self.all}
        for event in self.moving.values():
            event.set()
        self.facts, self._actors, self.stored, self.started = facts or {}, [], WeakSet(), []

    def nodes(self):
        return list(self.all)

    def start(self, load, setup, *, node=None, resources=None, concurrency=1, packages=("numpy",), files=()):
        fits = [one for one in ([node] if node else self.all) if self._fits(one, resources or {})]
        if not fits or fits[0] not in self.all:
            raise DiedError(f"{load} did not start: it needs {resources} on {node or self.all}")
        check_facts(facts(packages, files), facts(packages, files) | self.facts, f"a node of {load}")
        actor = ThreadActor(self, fits[0], resources or {}, concurrency, load, setup)
        self._actors.append(actor)
        self.started.append(actor)
        return actor

    def _fits(self, node, resources):
        taken = [actor.resources for actor in self._actors if actor.node == node]
        return all(
            sum(one.get(name, 0) for one in taken) + count <= node.resources.get(name, 0)
            for name, count in resources.items()
        )

    def put(self, value):
        stored = Stored(value)
        self.stored.add(stored)
        return stored

    def lose(self, node):
        """Ends a node and its actors."""
        self.all.remove(node)
        for actor in self._actors:
            if actor.node == node:
                actor.die("its node died")

    def freeze(self, node):
        """Stops the answers of a node, until `moving[node.id].set()`."""
        self.moving[node.id].clear()

    def close(self):
        for actor in list(self._actors):
            self.kill(actor)


class Counter:
    """An object for actors in tests."""

    def __init__(self, first):
        self.sum = first

    def add(self, value):
        self.sum += value
        return self.sum

    def fail(self):
        raise ValueError(f"the sum is {self.sum}")

    def crash(self):
        print("the last words", file=sys.stderr, flush=True)
        os.abort()

    def process(self):
        return os.getpid(), os.getcwd()

    def sleep(self, event_file):
        while not os.path.exists(event_file):
            threading.Event().wait(0.01)
