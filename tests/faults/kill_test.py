"""A run that is killed (-9) at random moments, and resumed each time, equals the uninterrupted one."""

import numpy as np
import pytest

from dapo_jax.trackers import read_metrics
from tests.faults.micro import assert_the_same_run, kill_often, make_run, weights_of

IN_FLIGHT = [
    "dynamic_sampling.surplus=discard",
    "rollout.in_flight=16",
    "rollout.round_tokens=2",
]
"""More responses than the eight slots, each of at most three rounds."""

ADAPTERS = ["lora.rank=2", "optimizer.learning_rate=1e-2"]

# Slow: each run starts several processes. tests/checkpoints/sealing_test.py kills a save at each of its moments, and
# tests/run/train_test.py interrupts a run after every step.
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("options", "kills", "steps"),
    [
        ([], 1, 30),
        ([], 200, 6000),
        ([*IN_FLIGHT, *ADAPTERS], 1, 30),
        (IN_FLIGHT, 30, 900),
        (ADAPTERS, 30, 900),
    ],
    ids=["waves", "waves, 200 kills", "in flight, with adapters", "in flight", "adapters"],
)
def test_a_killed_run_is_the_uninterrupted_one(options, kills, steps, tmp_path):
    """It has more steps than it finishes before its last kill: a life is shorter than 30 steps."""
    whole, killed = (make_run(tmp_path / name, steps=steps, eval_every=7) for name in ("whole", "killed"))
    rng = np.random.default_rng(0)
    kill_often(
        lambda: killed.start("--resume", *options), killed.run_dir, kills=kills, rng=rng, longest_s=0.5
    )
    reached = max(killed.steps()) + 3
    killed.finish("--resume", *options, f"steps={reached}", within_s=900)
    whole.finish(*options, f"steps={reached}", within_s=3600)
    assert_the_same_run(killed.run_dir, whole.run_dir)
    if "rollout.in_flight=16" in options:
        assert any(line.get("rollout/age_max") for line in read_metrics(whole.run_dir / "metrics.jsonl"))
    if "lora.rank=2" in options:
        assert max(abs(each).max() for each in weights_of(whole.run_dir)[1::2]) > 1e-3, "B has moved"


def test_a_second_start_is_refused_and_a_killed_first_one_is_taken_over(tmp_path):
    run = make_run(tmp_path, steps=300)
    first = run.start()
    try:
        run.wait_for(first, lambda: run.steps(), within_s=600)
        for options in ((), ("--resume",)):
            second = run.start(*options)
            output, _ = second.communicate(timeout=600)
            assert second.returncode == 2
            assert f"in use by process {first.pid} on" in output
            assert "Traceback" not in output
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()
    saved = max(run.steps())
    run.finish("--resume", f"steps={saved + 1}")
    assert max(run.steps()) == saved + 1
