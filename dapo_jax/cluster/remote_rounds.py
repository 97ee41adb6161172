"""The trainer's side of sample workers: sends them weights and rounds, and replaces workers that die.

A worker's result is a function of the calls that it got since its weights. With `sampling.batch_invariant`, a new worker gets the same calls again, and everything is equal bit for
bit. Otherwise, the other workers continue the responses of a dead worker from the tokens that the trainer has: the tokens are equal, and their log-probabilities up to rounding.
"""

import hashlib
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from dapo_jax.cluster.engine import Actor, Cluster
from dapo_jax.cluster.sample_worker import id_of, probe, sent
from dapo_jax.health.stalls import Watch
from dapo_jax.rollout.checkpoint_arrays import drawn_arrays
from dapo_jax.rollout.group_sampling import Assignment
from dapo_jax.rollout.response_sampler import ResponseSampler
from dapo_jax.rollout.virtual_clock import ResponseId
from dapo_jax.sampling.requests import Request
from dapo_jax.sampling.round_sampler import Drawn

FAILURES = 3
"""Number of failures in a row of rounds with the same response, after which the run ends."""

_SLOW = 10
"""A round may take this many times the median of the last rounds, if this is longer than `cluster.round_s`."""

_BEGIN_S = 1200.0
"""Time limit in seconds for the arrival of a version of the weights. Ray notices a lost node earlier."""

_LOOK_S = 1.0
"""Interval in seconds at which a thread looks whether the run has ended."""


class LostWorkerError(RuntimeError):
    """Raised by a call to a sample worker that died, failed or did not answer in time."""


class _Worker:
    """One sample worker. Its calls run in a thread of its own, which starts a new process if the last one is lost."""

    def __init__(self, index: int, owner: "RemoteWorkers") -> None:
        self.index, self._owner = index, owner
        self._thread = ThreadPoolExecutor(1, f"sample_worker_{index}")
        self._actor: Actor | None = None
        self.calls: list[tuple[tuple[Any, ...], bytes]] = []
        """The calls that a new process must get, and the digest of each result."""
        self._closed = False
        self.lost = False
        """Whether the last process is lost, and no new process has started."""
        self.replaced = 0
        self.seconds: deque[float] = deque(maxlen=100)
        """The durations of the last rounds."""

    def send(self, *call: Any) -> Future[Any]:
        """Calls a method of the worker, after all earlier calls. The future raises LostWorkerError if the process is lost, and ValueError if the worker refuses the call."""
        return self._thread.submit(self._run, call)

    def ready(self) -> Future[Any]:
        """Starts a process, unless there is a live one."""
        return self._thread.submit(self._started)

    def close(self) -> None:
        """Ends the process, and fails all calls."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._actor is not None:
            self._owner.cluster.kill(self._actor)

    def _run(self, call: tuple[Any, ...]) -> Any:
        # Without a process, the next call starts one, which then gets the parts of the weights so far.
        later = call[0] == "take" and self._actor is None
        result = None if later else self._answer(self._started(), call)
        if call[0] in ("take", "begin") or (call[0] == "draw" and self._owner.replays):
            self.calls.append((call, digest_of(result)))
        return result

    def _answer(self, actor: Actor, call: tuple[Any, ...]) -> Any:
        """Returns the result of a call, except of `take`: if a part does not arrive, `begin` fails."""
        began, answer = time.monotonic(), actor.call(*call)
        if call[0] == "take":
            return None
        usual = statistics.median(self.seconds) if self.seconds else 0.0
        limit = max(self._owner.round_s, _SLOW * usual) if call[0] == "draw" else _BEGIN_S
        while not wait([answer], timeout=_LOOK_S).done and time.monotonic() < began + limit:
            if self._closed:
                raise RuntimeError("the run has ended")
        try:
            result = answer.result(0)
        except ValueError:
            raise
        except Exception as error:
            self._owner.cluster.kill(actor)
            self._actor, self.lost, self.replaced = None, True, self.replaced + 1
            late = f"did not answer within {limit:.0f} s" if isinstance(error, TimeoutError) else ""
            why = late or f"failed: {type(error).__name__}: {error}"
            raise LostWorkerError(f"sample worker {self.index} {why}") from error
        if call[0] == "draw":
            self.seconds.append(time.monotonic() - began)
            if result[0] != call[2]:
                raise ValueError(f"sample worker {self.index} answered round {result[0]}, asked {call[2]}")
        return result

    def _started(self) -> Actor:
        """Returns the process. After a loss, starts a new one and repeats the calls. Raises LostWorkerError if it is lost too, and RuntimeError if no process starts in time."""
        began = time.monotonic()
        while self._actor is None:
            if self._closed:
                raise RuntimeError("the run has ended")
            self._owner.watch.note("starting a sample worker")
            try:
                self._actor = self._owner.start(self.index)
            except ValueError:
                raise
            except Exception as error:
                if not self.lost:
                    raise  # the first process of the run
                waited = time.monotonic() - began
                if 0 < self._owner.replace_s < waited:
                    raise RuntimeError(
                        f"sample worker {self.index} was lost and not replaced within {waited:.0f} s: {error}"
                    ) from error
                time.sleep(_LOOK_S)
                continue
            for call, digest in self.calls:
                if digest_of(self._answer(self._actor, call)) != digest:
                    raise ValueError(
                        f"sample worker {self.index} was replaced, but the same calls had other results: its device computes differently"
                    )
            self.lost = False
        return self._actor


def digest_of(result: Any) -> bytes:
    """Returns a digest of the tokens of a round with all their recorded values. Empty for results of other calls."""
    if not isinstance(result, tuple):
        return b""
    digest = hashlib.sha256()
    for name, array in sorted(drawn_arrays(result[1]).items()):
        digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
    return digest.digest()


class RemoteWorkers:
    """The sample workers of a training process (see `rollout.group_sampling.SampleWorkers`)."""

    def __init__(
        self,
        cluster: Cluster,
        start: Callable[[int], Actor],
        *,
        count: int,
        sampler: ResponseSampler,
        temperature: float,
        in_flight: int,
        round_s: float,
        replace_s: float,
        batch_invariant: bool,
        watch: Watch,
    ) -> None:
        """Starts all workers at once, and waits for them.

        Args:
            cluster: stores weights and ends workers.
            start: starts the worker with an index, and compares its process with this one.
            count: number of workers.
            sampler: this process's sampler. It samples the probe.
            temperature: temperature of the probe.
            in_flight: maximum number of responses in flight in this process.
            round_s: `cluster.round_s`.
            replace_s: time in seconds in which a lost worker must be replaced. 0 means no limit.
            batch_invariant: whether a lost worker's calls are repeated in a new process.
            watch: is notified of progress.
        """
        self.cluster, self.start, self.watch = cluster, start, watch
        self.round_s, self.replace_s, self.replays = round_s, replace_s, batch_invariant
        self._sampler, self._temperature, self.in_flight = sampler, temperature, in_flight
        self._compared = not batch_invariant
        self.all = [_Worker(index, self) for index in range(count)]
        self.number = 0
        """The number of the last round."""
        self.slowest = 0.0, 0
        """The duration in seconds of the slowest round since the last `metrics`, and the worker's index."""
        try:
            for ready in [worker.ready() for worker in self.all]:
                ready.result()
        except BaseException:
            self.close()
            raise

    def begin(self, params: PyTree, version: int) -> "RemoteRounds":
        """Sends the weights of `params` to all workers, one layer at a time. Returns an object that samples with them.

        Raises ValueError if sampling is batch-invariant and a worker samples other values than this process. This is checked once.
        """
        transfer = self._sampler.transfer
        for worker in self.all:
            worker.calls = []
        # `map` drops a part before it asks for the next. A loop with `enumerate` over the parts would keep two in memory.
        for index, stored in enumerate(map(self._stored, transfer.parts(params))):
            for worker in self.all:
                worker.send("take", version, index, stored)
        rounds = RemoteRounds(self, version, transfer.checksums(params))
        if not self._compared:
            self._compared = True
            own = probe(self._sampler, transfer(params), self._temperature)
            rounds.join()
            for worker in self.all:
                found = worker.send("probe").result()
                if digest_of((0, [own])) != digest_of((0, [found])):
                    raise ValueError(
                        f"sampling.batch_invariant=true, but sample worker {worker.index} samples other values with the same weights: {_values(found)}, here {_values(own)}. Use "
                        "equal devices, programs and XLA_FLAGS for trainer and samplers, or set it to false"
                    )
        return rounds

    def _stored(self, part: PyTree) -> Any:
        self.watch.note("sending weights")
        return self.cluster.put([np.asarray(leaf) for leaf in jax.tree.leaves(part)])

    def metrics(self) -> dict[str, float | int]:
        """Returns the number of replaced processes in the run, and the slowest worker and its slowest round since the last call."""
        slowest_s, index = self.slowest
        self.slowest = 0.0, 0
        replaced = sum(worker.replaced for worker in self.all)
        return {"cluster/replaced": replaced, "cluster/slowest_s": slowest_s, "cluster/slowest": index}

    def close(self) -> None:
        """Ends all workers."""
        for worker in self.all:
            worker.close()


class RemoteRounds:
    """Samples rounds in the sample workers with one version of the weights (see `rollout.group_sampling.Rounds`). A response stays in its worker."""

    def __init__(self, workers: RemoteWorkers, version: int, checksums: np.ndarray) -> None:
        self._workers, self._version, self._begin = workers, version, ("begin", version, checksums)
        self._joining = {worker: worker.send(*self._begin) for worker in workers.all}
        """Workers that do not sample yet, each with the future of its start."""
        self._live: dict[int, _Worker] = {}
        self._assignment: Assignment | None = None
        self._requests: dict[ResponseId, Request] = {}
        """The trainer's requests that were sampled with these weights and have not ended."""
        self._has: dict[int, dict[ResponseId, tuple[int, int]]] = {worker.index: {} for worker in workers.all}
        """The responses of each worker, with their numbers of tokens and turns."""
        self._failures = Counter[str]()
        """The successive failures with each response."""

    def draw(self, requests: Sequence[Request], tokens: int) -> list[Drawn]:
        """Samples one round (see `RoundSampler.draw`).

        Raises RuntimeError if three rounds in a row fail with the same response, or a lost worker cannot be replaced.
        """
        asked = {id_of(request): request for request in requests}
        self.join()
        self._assign(asked)
        self._workers.number += 1
        waiting, answers = dict[Future[Any], tuple[_Worker, list[ResponseId]]](), dict[ResponseId, Drawn]()

        def ask(workers: Collection[_Worker], responses: Collection[ResponseId]) -> None:
            for worker in workers:
                if of_worker := [each for each in self._of(worker) if each in responses]:
                    waiting[self._ask(worker, of_worker, tokens)] = worker, of_worker

        ask(self._live.values(), asked.keys())
        while waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                worker, of_worker = waiting.pop(future)
                try:
                    _, drawn = future.result()
                except LostWorkerError as error:
                    self._fail(map(_name, of_worker), error)
                    if not self._workers.replays:
                        self._leave(worker)
                    ask([worker] if self._workers.replays else [*self._live.values()], of_worker)
                    continue
                self._workers.watch.note("sampling tokens")
                self._workers.slowest = max(self._workers.slowest, (worker.seconds[-1], worker.index))
                self._receive(worker, of_worker, drawn)
                answers.update(zip(of_worker, drawn, strict=True))
        return [answers[response] for response in asked]

    def close(self) -> None:
        """Does nothing. Workers free the weights and the cache when the next version arrives, because their devices have no other use."""

    def join(self) -> None:
        """Waits until workers have the weights: all of them, except processes that are still being replaced if there are others."""
        while self._joining:
            if needed := [
                f for worker, f in self._joining.items() if self._workers.replays or not worker.lost
            ]:
                wait(needed)
            elif not self._live:
                wait(self._joining.values(), return_when=FIRST_COMPLETED)
            if not (done := [worker for worker, future in self._joining.items() if future.done()]):
                return
            for worker in done:
                try:
                    self._joining.pop(worker).result()
                except LostWorkerError as error:
                    self._fail([f"the weights for sample worker {worker.index}"], error)
                    self._joining[worker] = worker.send(*self._begin)
                else:
                    self._live[worker.index] = worker
            if self._assignment is not None and self._live:
                self._assignment.use(self._live)

    def _assign(self, asked: Mapping[ResponseId, Request]) -> None:
        """Assigns new responses to workers, and frees the places of responses that have ended."""
        over = [each for each, request in self._requests.items() if request.finish_reason is not None]
        self._requests = {name: self._requests[name] for name in self._requests.keys() - over}
        new = sorted(asked.keys() - self._requests.keys())
        self._requests.update(asked)
        if self._assignment is None:
            lengths = {response: asked[response].drawn for response in new if asked[response].drawn}
            self._assignment = Assignment(self._workers.in_flight, len(self._workers.all), lengths)
            self._assignment.use(self._live)
            new = [response for response in new if response not in lengths]
        self._assignment.leave(over)
        self._assignment.give(new)

    def _of(self, worker: _Worker) -> list[ResponseId]:
        assert self._assignment is not None
        return self._assignment.of(worker.index)

    def _ask(self, worker: _Worker, responses: Sequence[ResponseId], tokens: int) -> Future[Any]:
        """Asks a worker for a round of these responses. Requests that it does not have, or that an environment has changed, are sent whole."""
        has, requests = self._has[worker.index], self._requests
        new = [sent(requests[each]) for each in responses if has.get(each) != _state(requests[each])]
        over = [response for response in has if response not in requests]
        return worker.send("draw", self._version, self._workers.number, new, over, responses, tokens)

    def _receive(self, worker: _Worker, responses: Sequence[ResponseId], drawn: Sequence[Drawn]) -> None:
        """Appends the new tokens of a worker to the trainer's requests."""
        has = self._has[worker.index]
        has = self._has[worker.index] = {each: has[each] for each in has if each in self._requests}
        for response, sampled in zip(responses, drawn, strict=True):
            request = self._requests[response]
            sampled.append_to(request)
            has[response] = _state(request)
            self._failures.pop(_name(response), None)

    def _leave(self, worker: _Worker) -> None:
        """Moves the responses of a lost worker to the others. A new process joins later."""
        assert self._assignment is not None
        self._live.pop(worker.index, None)
        self._has[worker.index] = {}
        self._joining.setdefault(worker, worker.ready())
        if self._live:
            self._assignment.use(self._live)
        else:
            self.join()

    def _fail(self, names: Iterable[str], error: LostWorkerError) -> None:
        """Counts a failure. Raises RuntimeError after three failures in a row."""
        for name in names:
            self._failures[name] += 1
            if self._failures[name] == FAILURES:
                raise RuntimeError(
                    f"{FAILURES} failures in a row with {name}. The last one: {error}"
                ) from error


def _values(drawn: Drawn) -> str:
    return f"tokens {drawn.record.ids.tolist()} with {drawn.record.logprobs.tolist()}"


def _name(response: ResponseId) -> str:
    return f"response {response.index} to prompt {response.ordinal}"


def _state(request: Request) -> tuple[int, int]:
    """Returns numbers that change when the trainer's request changes: its tokens and its turns."""
    return request.drawn, len(request.turns)
