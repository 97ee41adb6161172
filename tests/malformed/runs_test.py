"""Runs that are damaged: what `train --resume`, `eval`, `sample`, `convert` and `score` say of them, and where they write.

Damage of checkpoints themselves is the matter of `tests/checkpoints/checkpointer_test.py`.
"""

import shutil

import numpy as np
import pytest

from tests.malformed import runs

SPARED = ("kept", "out", "run")
"""The run's own folder is among those that commands write to."""


@pytest.mark.parametrize(
    ("change", "command"), [pytest.param(*how, id=f"{name}, {how[1][0]}") for name, *how in runs.EARLY]
)
def test_a_run_that_cannot_be_read_is_said_in_a_few_lines(change, command, survives):
    def make(folder):
        runs.lay_out(folder)
        change(folder)

    survives(make, *command, may_write=SPARED)


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 24), pytest.param(1, 1000, marks=pytest.mark.slow, id="many")]
)
def test_damage_at_random_is_said_in_a_few_lines(seed, count, survives):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        survives.anew()
        change, command = runs.fuzzed(rng)

        def make(folder, change=change):
            runs.lay_out(folder)
            change(folder)

        survives(make, *command, may_write=SPARED)


@pytest.fixture(scope="module")
def trained(commands, tmp_path_factory):
    """A run of one step."""
    folder = tmp_path_factory.mktemp("trained") / "here"
    folder.mkdir()
    runs.lay_out(folder)
    shutil.rmtree(folder / "run")
    outcome = commands.run(folder, "train", "c.yaml", limit_s=300)
    assert outcome.status == 0, outcome
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "command"), [pytest.param(*how, id=f"{name}, {how[1][0]}") for name, *how in runs.LATE]
)
def test_a_trained_run_that_is_damaged_is_said_in_a_few_lines(change, command, survives, trained):
    def make(folder):
        shutil.copytree(trained, folder, dirs_exist_ok=True)
        (folder.parent / "xla").symlink_to(trained.parent / "xla")
        change(folder)

    survives(make, *command, may_write=SPARED)
