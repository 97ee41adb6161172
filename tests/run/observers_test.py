"""Traces of the steps that were asked for, and of no other."""

import jax
import jax.numpy as jnp

from dapo_jax.dapo.dynamic_sampling import Collected
from dapo_jax.rollout.collector import Collector, Position
from dapo_jax.rollout.virtual_clock import ClockSizes
from dapo_jax.run.loop import StepResult
from dapo_jax.run.observers import Profile
from dapo_jax.storage import path_of
from dapo_jax.training.state import TrainState

NOTHING = Collected(groups=[], carry=[], sampled=[], cursor=0, waves=0, surplus=0)


def begin(profile, step):
    sizes = ClockSizes(in_flight=1, samples_per_prompt=1, needed=1)
    profile.before_sampling(Position(step=step - 1), Collector.after(Position(), sizes))


def end(profile, step):
    state = TrainState(None, None)
    profile.after_step(StepResult(position=Position(step=step), state=state, collected=NOTHING, metrics={}))


def traced(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.xplane.pb"))


def test_a_chosen_step_is_traced_whole_and_the_others_are_not(tmp_path):
    with Profile([2], path_of(tmp_path)) as profile:
        for step in (1, 2, 3):
            begin(profile, step)
            with jax.profiler.TraceAnnotation(f"work of step {step}"):
                jax.block_until_ready(jnp.arange(8) * step)
            end(profile, step)
    [trace] = traced(tmp_path)
    assert trace.startswith("step_000002/")
    content = (tmp_path / trace).read_bytes()
    assert b"work of step 2" in content
    assert b"work of step 3" not in content


def test_a_step_that_fails_leaves_no_trace_and_the_profiler_free(tmp_path):
    try:
        with Profile([1, 2], path_of(tmp_path)) as profile:
            begin(profile, 1)
            raise KeyError
    except KeyError:
        pass
    assert traced(tmp_path) == []
    with Profile([2], path_of(tmp_path)) as profile:
        begin(profile, 2)
        end(profile, 2)
    assert len(traced(tmp_path)) == 1
