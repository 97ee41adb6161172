"""Batch-invariant runs: bit-equal for any number of slots and processes, whatever each of them waits for."""

import json
from functools import partial

import numpy as np
import pytest

from dapo_jax.config import RolloutConfig
from dapo_jax.trackers import read_metrics
from tests import several
from tests.rollout.processes_test import DELAYED, GRADER, weights_of
from tests.run.conftest import learnt

pytestmark = pytest.mark.slow  # a run takes half a minute; tests/sampling has the same for an engine
IN_FLIGHT = {"dynamic_sampling__surplus": "discard", "rollout": RolloutConfig(in_flight=24, round_tokens=2)}


@pytest.fixture(scope="module")
def setting(on_disk, tmp_path_factory):
    """Makes the configuration of a run for the command line, and writes it: groups of four."""
    return partial(
        on_disk(tmp_path_factory.mktemp("invariant"), GRADER, "third"), sampling__batch_invariant=True
    )


@pytest.fixture(scope="module")
def trained(setting):
    """Trains once with these processes, devices and changes; returns the run folder."""
    done = {}

    def train(*, processes, devices, **changes):
        name = json.dumps([processes, devices, changes], default=str)
        if name not in done:
            _, path = setting(f"run_{len(done)}", **changes)
            many = {"processes": processes, "devices": devices // processes}
            several.run(DELAYED, "train", path, **many, within_s=900)
            done[name] = path.with_name(path.stem)
        return done[name]

    return train


def assert_the_same_bits(found, expected):
    """Two run folders have equal metrics (except times), rollouts and weights."""
    lines, wanted = (learnt(read_metrics(run / "metrics.jsonl")) for run in (found, expected))
    assert lines == wanted
    assert len(lines) == 5, "the evaluation before training and four steps"
    for step in (2, 4):
        read, like = ((run / "rollouts" / f"step_{step:06d}.jsonl").read_text() for run in (found, expected))
        assert read == like
    for a, b in zip(weights_of(found), weights_of(expected), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("slots", [8, 16])
@pytest.mark.parametrize("rollout", [IN_FLIGHT, {}])
def test_slots_change_no_bit(slots, rollout, trained):
    """24 responses in flight take turns in 8 or 16 slots, or have 32; and waves."""
    expected = trained(processes=1, devices=1, sampling__slots=32, **rollout)
    assert_the_same_bits(trained(processes=1, devices=1, sampling__slots=slots, **rollout), expected)
    if rollout:
        assert any(line["rollout/age_max"] for line in read_metrics(expected / "metrics.jsonl")[1:])


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("rollout", [IN_FLIGHT, {}])
def test_processes_change_no_bit(processes, rollout, trained):
    """Four devices with eight slots each, in one, two or four processes."""
    expected = trained(processes=1, devices=4, sampling__slots=32, **rollout)
    found = trained(processes=processes, devices=4, sampling__slots=32 // processes, **rollout)
    assert_the_same_bits(found, expected)
