"""Stops and failures while a process samples and grades: alone they are raised at once, with other processes at the next exchange."""

import pytest

from dapo_jax.health.stalls import Watch
from dapo_jax.health.stopping import Stop, StoppedError
from dapo_jax.parallel.mesh import make_mesh, make_meshes
from dapo_jax.rewards.functions import RewardError
from dapo_jax.rollout.exchange import Exchange, PhaseTimes


def test_time_counts_for_the_innermost_phase(monkeypatch):
    """The clock advances by 1 s at each work. Grading takes 3 s in total, without 2 s of sampling, and without 1 s of waiting inside it."""
    now = 0.0

    def work():
        nonlocal now
        now += 1.0
        return now

    monkeypatch.setattr("dapo_jax.rollout.exchange.time.perf_counter", lambda: now)
    phases = PhaseTimes()

    def graded(sampled):
        for one in sampled:
            work()
            yield one
        with phases.phase("wait"):
            work()
        work()

    assert len(list(phases.each("grade", graded(phases.each("sample", (work() for _ in range(2))))))) == 2
    assert phases.taken() == {"sample": 2.0, "grade": 3.0, "wait": 1.0}
    with pytest.raises(ZeroDivisionError), phases.phase("grade"):
        work() / 0
    work()
    assert phases.taken() == {"sample": 1.0, "grade": 1.0}


@pytest.fixture
def stop():
    return Stop()


@pytest.fixture
def exchange(stop):
    """Returns a function that makes the exchange of one process, or of a process that believes that there are others."""

    def make(*, alone, shared=False):
        watch = Watch(0.0, end=lambda *_: None, broadcast=lambda _: None, received=dict)
        found = Exchange(make_meshes(make_mesh()), stop, watch, in_flight=4, round_tokens=2)
        found.alone, found._shared = alone, shared
        return found

    return make


def asked(stop):
    """Asks for a stop in the way of a signal handler."""
    stop.note("SIGTERM")
    return "not interrupted"


def failing():
    raise RewardError("no verdict today")


@pytest.mark.parametrize("before", [True, False])
def test_a_stop_ends_work_at_once_or_with_the_next_exchange(before, stop, exchange):
    """Also a stop that was asked for before the work began."""
    done = []
    with stop.held():
        if before:
            asked(stop)
        assert exchange(alone=False).attempt(lambda: done.append(asked(stop))) is None
        with pytest.raises(StoppedError):
            exchange(alone=True).attempt(lambda: done.append(asked(stop)))
    assert not done


def test_a_process_that_shares_its_sampler_finishes_its_work(stop, exchange):
    assert exchange(alone=False, shared=True).attempt(lambda: asked(stop)) == "not interrupted"


def test_a_failure_is_raised_at_once_or_kept_for_the_next_exchange(exchange):
    several = exchange(alone=False)
    assert several.attempt(failing) is None
    assert several._failed == "no verdict today (process 0)"
    with pytest.raises(RewardError, match="no verdict today"):
        exchange(alone=True).attempt(failing)
