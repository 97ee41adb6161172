"""Traces of the steps that were asked for, and of no other."""

import jax
import jax.numpy as jnp

from dapo_jax.storage import path_of
from dapo_jax.trackers.profile import Profile


def traced(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.xplane.pb"))


def test_a_chosen_step_is_traced_whole_and_the_others_are_not(tmp_path):
    with Profile([2], path_of(tmp_path)) as profile:
        for step in (1, 2, 3):
            profile.begin(step)
            with jax.profiler.TraceAnnotation(f"work of step {step}"):
                jax.block_until_ready(jnp.arange(8) * step)
            profile.end(step)
    [trace] = traced(tmp_path)
    assert trace.startswith("step_000002/")
    content = (tmp_path / trace).read_bytes()
    assert b"work of step 2" in content
    assert b"work of step 3" not in content


def test_a_step_that_fails_leaves_no_trace_and_the_profiler_free(tmp_path):
    try:
        with Profile([1, 2], path_of(tmp_path)) as profile:
            profile.begin(1)
            raise KeyError
    except KeyError:
        pass
    assert traced(tmp_path) == []
    with Profile([2], path_of(tmp_path)) as profile:
        profile.begin(2)
        profile.end(2)
    assert len(traced(tmp_path)) == 1
