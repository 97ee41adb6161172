"""The trainer's side of sample workers, with an engine without a model in threads: every response is known, and workers die, freeze and fail as a test asks."""

import itertools
import random
import re
import threading
from collections import Counter
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dapo_jax.cluster.engine import DiedError
from dapo_jax.cluster.remote_rounds import RemoteWorkers
from dapo_jax.cluster.sample_worker import SampleWorker, id_of
from dapo_jax.health.stalls import Watch
from dapo_jax.parallel.weights import WeightTransfer, held_checksums
from dapo_jax.rollout.response_sampler import ResponseSampler
from dapo_jax.sampling.requests import Request
from tests.cluster.threads import ThreadCluster
from tests.sampling.continuous_batching_schedule_test import LIMIT, prompt, response, scripted

ROUND, GROUP, IN_FLIGHT = 3, 2, 8


class Transfer(WeightTransfer):
    """Two layers and the ends, of one array each."""

    def __init__(self):
        pass

    def __call__(self, params):
        return self.whole([*self.parts(params)])

    def parts(self, params):
        return (nnx.State({"w": layer}) for layer in params)

    def placed(self, index, leaves):
        return nnx.State({"w": jnp.asarray(leaves[0])})

    def whole(self, parts):
        return {"layers": tuple(parts[:-1]), "ends": parts[-1]}

    def checksums(self, params):
        return held_checksums(self.whole([*self.parts(params)]))


def sampler_of(length_of, slots=4):
    return ResponseSampler(
        scripted(length_of, slots=slots), Transfer(), seed=0, max_response_tokens=LIMIT, prompts_at_once=2, stop=None,
        compile_for=lambda decodings: None,
    )  # fmt: skip


def length_of(ordinal, index):
    return 3 + (7 * ordinal + 5 * index) % 11


class Fleet:
    """Sample workers in threads, one on each node, and a trainer that keeps responses in flight. `calls` counts the rounds of each process; `faults` is called before
    each, with the worker's index and the number of the process and of the round, and may raise or freeze."""

    def __init__(
        self,
        count=2,
        *,
        faults=lambda *_: None,
        spare=1,
        round_s=20.0,
        replace_s=20.0,
        length_of=length_of,
        **options,
    ):
        self.cluster = ThreadCluster(nodes=count + spare, resources={"CPU": 1.0})
        self.faults, self.length_of, self.processes = faults, length_of, Counter()
        self.sampled, self.one_at_a_time = [], threading.Lock()
        self.params = [jnp.full(3, value, jnp.float32) for value in (1.0, 2.0, 3.0)]
        self.workers = RemoteWorkers(
            self.cluster, self.start, count=count, sampler=sampler_of(length_of), temperature=1.0, in_flight=IN_FLIGHT,
            round_s=round_s, replace_s=replace_s, watch=Watch(0, end=print), **{"batch_invariant": True} | options,
        )  # fmt: skip

    def start(self, index):
        with self.one_at_a_time:  # so that each gets a node of its own
            made = "tests.cluster.remote_rounds_test:made"
            actor = self.cluster.start(made, (self, index), resources={"CPU": 1})
        actor.call("prepare").result()
        return actor

    def fly(self, versions=2, groups=12):
        """Samples `groups` groups in several versions of the weights. Returns the tokens of each response."""
        left = [Request(prompt(ordinal), index, 0) for ordinal in range(groups) for index in range(GROUP)]
        going, tokens = [], {}
        for version in range(versions):
            rounds = self.workers.begin(self.params, version)
            going = [request.rest() for request in going]
            for number in itertools.count():
                if not (left or going) or (number == 4 and version < versions - 1):
                    break
                while left and len(going) < IN_FLIGHT:
                    going.append(left.pop(0))
                self.sampled.append([])
                drawn = rounds.draw(going, ROUND)
                for request, new in zip(going, drawn, strict=True):
                    assert new.new == len(new.record) <= ROUND
                    tokens[id_of(request)] = request.record.ids.tolist()
                    request.finish_reason = new.finish_reason
                going = [request for request in going if request.finish_reason is None]
            rounds.close()
        return tokens

    def check(self, **options):
        """All responses have their tokens, and no response was sampled twice in a round whose answer counts."""
        found, metrics = self.fly(**options), self.workers.metrics()
        self.workers.close()
        assert found == {
            (ordinal, index): response(ordinal, index, self.length_of(ordinal, index))
            for ordinal in range(12) for index in range(GROUP)
        }  # fmt: skip
        return metrics["cluster/replaced"]


class Faulty(SampleWorker):
    """A sample worker that notes who samples what, and has the faults of its fleet."""

    def __init__(self, fleet, index):
        super().__init__(
            lambda: (sampler_of(fleet.length_of, slots=2 + index), {}), temperature=1.0, limits=None
        )
        self.fleet, self.index, self.draws = fleet, index, itertools.count()
        self.process = fleet.processes[index]
        fleet.processes[index] += 1

    def draw(self, version, number, new, over, asked, tokens):
        self.fleet.faults(self.index, self.process, next(self.draws))
        answer = super().draw(version, number, new, over, asked, tokens)
        self.fleet.sampled[-1].extend((self.index, one) for one in asked)
        return answer


def made(setup):
    return Faulty(*setup)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_workers_sample_what_one_process_samples_and_responses_stay(count):
    fleet = Fleet(count)
    assert fleet.check() == 0
    at = [{one: worker for worker, one in of_round} for of_round in fleet.sampled]
    moved = [
        one
        for before, after in itertools.pairwise(at[:4])
        for one in before.keys() & after
        if before[one] != after[one]
    ]
    assert not moved, "within a version, a response stays with its pages"
    assert {worker for of_round in at for worker in of_round.values()} == set(range(count))


class Dies:
    """Ends the first process of a worker in a round."""

    def __init__(self, worker, draws):
        self.worker, self.draws, self.fleet = worker, draws, None

    def __call__(self, index, process, draws):
        if (index, process, draws) == (self.worker, 0, self.draws):
            is_it = lambda actor: (actor.object.index, actor.object.process) == (index, process)  # noqa: E731
            next(filter(is_it, self.fleet.cluster._actors)).kill()
            raise DiedError("a dead worker samples nothing")


@pytest.mark.parametrize("replays", [True, False])
@pytest.mark.parametrize("draws", [0, 2, 5])
def test_a_worker_that_dies_in_a_round_is_replaced(replays, draws):
    """In the first and in the third round of the first weights, and in the second of the second weights. With `batch_invariant`, the new process gets the same calls again."""
    fault, seen = Dies(1, draws), []
    fleet = Fleet(2, faults=lambda *call: (seen.append(call), fault(*call)), batch_invariant=replays)
    fault.fleet = fleet
    assert fleet.check() == 1
    again = [draw for worker, process, draw in seen if (worker, process) == (1, 1)]
    before = draws - 4 if draws > 3 else draws
    if replays:
        assert again[: before + 1] == list(range(before + 1)), "the rounds since the weights, and this one"
        return
    lost = {one for worker, one in fleet.sampled[draws - 1] if worker == 1} if before else set()
    asked = {one: worker for worker, one in fleet.sampled[draws]}
    assert {asked[one] for one in lost & asked.keys()} <= {0}, "the other worker continues them at once"


@pytest.mark.parametrize("replays", [True, False])
def test_processes_that_die_at_random_change_no_token(replays):
    """About fifteen processes in five flights, at most two in a round, because three failures in a row end a run."""
    dice, died = random.Random(0), 0
    for flight in range(5):
        fleet, rounds, killed = Fleet(3, batch_invariant=replays), Counter(), []

        def faults(index, process, draws, fleet=fleet, rounds=rounds, killed=killed):
            if rounds[len(fleet.sampled)] < 2 and dice.random() < 0.15:
                rounds[len(fleet.sampled)] += 1
                killed.append((index, process))
                is_it = lambda actor: (actor.object.index, actor.object.process) == (index, process)  # noqa: E731
                next(filter(is_it, fleet.cluster._actors)).kill()

        fleet.faults = faults
        found = fleet.check()
        assert found == len(killed), (flight, killed)
        died += found
    assert died > 8


@pytest.mark.parametrize("replays", [True, False])
def test_a_frozen_node_is_noticed_by_our_own_limit_and_its_late_answer_is_dropped(replays):
    fleet = Fleet(2, round_s=1.0, batch_invariant=replays)

    def freeze(index, process, draws):
        if (index, process, draws) == (0, 0, 2):
            node = next(a.node for a in fleet.cluster._actors if a.object.index == 0)
            fleet.cluster.freeze(node)
            threading.Timer(1.5, fleet.cluster.moving[node.id].set).start()

    fleet.faults = freeze
    assert fleet.check() == 1


@pytest.mark.parametrize("replays", [True, False])
def test_three_failures_with_the_same_response_end_the_run_with_the_reason(replays):
    def broken(index, process, draws):
        if draws or process:
            raise ZeroDivisionError("a broken kernel")

    fleet = Fleet(2, faults=broken, batch_invariant=replays)
    with pytest.raises(
        RuntimeError,
        match=r"3 failures in a row with response \d to prompt \d.*ZeroDivisionError: a broken kernel",
    ):
        fleet.fly()
    fleet.workers.close()


def test_a_worker_that_cannot_be_replaced_ends_the_run():
    fault = Dies(1, 1)
    fleet = fault.fleet = Fleet(2, faults=fault, spare=0, replace_s=0.2)

    def start(index):
        raise DiedError("the cluster has no free CPU")

    fleet.workers.start = start
    with pytest.raises(RuntimeError, match=r"sample worker 1 was lost and not replaced within .*no free CPU"):
        fleet.fly()
    fleet.workers.close()


def test_a_replacement_that_computes_differently_is_refused():
    """The new process has other responses."""
    fault = Dies(0, 2)
    fleet = fault.fleet = Fleet(2, faults=fault)

    def start(index):
        fleet.length_of = lambda ordinal, index: 2
        return Fleet.start(fleet, index)

    fleet.workers.start = start
    with pytest.raises(ValueError, match="the same calls had other results"):
        fleet.fly()
    fleet.workers.close()


def test_a_worker_whose_probe_differs_is_refused():
    fleet = Fleet(1)
    fleet.workers._sampler = sampler_of(lambda ordinal, index: 5)
    with pytest.raises(
        ValueError,
        match=r"batch_invariant=true, but sample worker 0 samples other values with the same weights: tokens",
    ):
        fleet.fly()
    fleet.workers.close()


def worker(**options):
    found = SampleWorker(lambda: (sampler_of(length_of), {}), temperature=1.0, limits=None)
    found.prepare()
    return found


def test_weights_that_did_not_arrive_whole_are_never_sampled_from():
    """A missing part, a part with other values, and another version, each with both values in the message."""
    params = [np.full(3, value, np.float32) for value in (1, 2, 3)]
    sums, one = Transfer().checksums([jnp.asarray(part) for part in params]), worker()
    draw = partial(one.draw, new=[], over=[], asked=[], tokens=1, number=1)
    with pytest.raises(ValueError, match="has no whole weights, asked 0"):
        draw(0)
    for index in (0, 2):
        one.take(12, index, [params[index]])
    with pytest.raises(
        ValueError, match=r"version 12 have not arrived whole: this sample worker lacks the parts \[1\]"
    ):
        one.begin(12, sums)
    with pytest.raises(ValueError, match="has the weights of version 12, asked 12"):
        draw(12)
    one.take(12, 1, [params[1] + np.float32(1)])
    expected = (
        rf"the parts \[1\] have the checksums \[\d+\] in this sample worker, but \[{sums[1]}\] in the trainer"
    )
    with pytest.raises(ValueError, match=expected):
        one.begin(12, sums)
    one.take(12, 1, [params[1]])
    assert one.begin(12, sums) == 12
    assert draw(12) == (1, [])
    with pytest.raises(
        ValueError, match=re.escape("this sample worker has the weights of version 12, asked 13")
    ):
        draw(13)
    one.take(13, 0, [params[0]])
    with pytest.raises(ValueError, match="has the weights of version 13, asked 12"):
        draw(12)


def test_a_first_process_that_cannot_start_ends_the_run_at_once():
    with pytest.raises(DiedError, match="did not start"):
        Fleet(3, spare=-1)
