"""A run that is killed (-9) at random moments, and resumed each time, is the run that was not."""

import numpy as np
import pytest

from dapo_jax.trackers import read_metrics
from tests.faults.micro import assert_the_same_run, kill_often, make_run, started, weights_of
from tests.several import ROOT


@pytest.mark.parametrize(
    ("kills", "steps"),
    [(1, 30), *(pytest.param(*long, marks=pytest.mark.slow) for long in ((2, 60), (200, 6000)))],
)
def test_a_killed_run_is_the_uninterrupted_one(kills, steps, tmp_path):
    """So many steps that none is finished before its last kill: a life is short of 30 steps."""
    whole = make_run(tmp_path / "whole", steps=steps, eval_every=7)
    killed = make_run(tmp_path / "killed", steps=steps, eval_every=7)
    kill_often(
        lambda: killed.start("--resume"),
        killed.run_dir,
        kills=kills,
        rng=np.random.default_rng(0),
        longest_s=0.5,
    )
    reached = max(killed.steps()) + 3
    killed.finish("--resume", f"steps={reached}", within_s=900)
    whole.finish(f"steps={reached}", within_s=3600)
    assert_the_same_run(killed.run_dir, whole.run_dir)


IN_FLIGHT = [
    "dynamic_sampling.surplus=discard",
    "rollout.in_flight=16",
    "rollout.round_tokens=2",
]
"""In turns of eight slots, with responses of at most three rounds."""

ADAPTERS = ["lora.rank=2", "optimizer.learning_rate=1e-2"]


@pytest.mark.parametrize(
    ("options", "kills", "steps"),
    [
        pytest.param([*IN_FLIGHT, *ADAPTERS], 1, 30, marks=pytest.mark.slow),
        pytest.param(IN_FLIGHT, 30, 900, marks=pytest.mark.slow),
        pytest.param(ADAPTERS, 30, 900, marks=pytest.mark.slow),
    ],
    ids=["in flight, with adapters", "in flight", "adapters"],
)
def test_a_killed_run_with_these_is_the_uninterrupted_one(options, kills, steps, tmp_path):
    whole = make_run(tmp_path / "whole", steps=steps, eval_every=7)
    killed = make_run(tmp_path / "killed", steps=steps, eval_every=7)
    kill_often(
        lambda: killed.start("--resume", *options),
        killed.run_dir,
        kills=kills,
        rng=np.random.default_rng(2),
        longest_s=0.5,
    )
    reached = max(killed.steps()) + 3
    killed.finish("--resume", *options, f"steps={reached}", within_s=900)
    whole.finish(*options, f"steps={reached}", within_s=3600)
    assert_the_same_run(killed.run_dir, whole.run_dir)
    if "rollout.in_flight=16" in options:
        assert any(line.get("rollout/age_max") for line in read_metrics(whole.run_dir / "metrics.jsonl"))
    if "lora.rank=2" in options:
        assert max(abs(each).max() for each in weights_of(whole.run_dir)[1::2]) > 1e-3, "B has moved"


@pytest.mark.slow
def test_the_quickstart_killed_ten_times_is_the_uninterrupted_one(tmp_path):
    settings = ["checkpoint.every_steps=3", "steps=60"]

    def command(folder, *options):
        return started(
            "train",
            ROOT / "configs" / "quickstart.yaml",
            f"run_dir={tmp_path}/{folder}/run",
            *settings,
            *options,
        )

    kill_often(
        lambda: command("killed", "--resume"),
        tmp_path / "killed" / "run",
        kills=10,
        rng=np.random.default_rng(1),
        longest_s=8.0,
    )
    for folder, *options in (("killed", "--resume"), ("whole",)):
        process = command(folder, *options)
        output, _ = process.communicate(timeout=1800)
        assert process.returncode == 0, output
    assert_the_same_run(tmp_path / "killed" / "run", tmp_path / "whole" / "run")
