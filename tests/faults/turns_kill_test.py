"""A run that is killed (-9) while an environment works, and resumed, equals the uninterrupted one."""

import pytest

from dapo_jax.trackers import read_metrics
from tests.faults.kill_test import IN_FLIGHT
from tests.faults.micro import assert_the_same_run, make_run

ENVIRONMENT = '''
import time
from pathlib import Path

from dapo_jax.environments import Step

WAITING = Path(__file__).with_name("tool_waits")

class Sums:
    """A turn is right if three divides the sum of its digits; the last digit of the sum is appended. Waits if there is a file tool_waits."""

    def episode(self, row, seed):
        return Episode()

class Episode:
    def __init__(self):
        self.total = 0

    def step(self, turn):
        if WAITING.exists():
            WAITING.with_name("tool_works_now").touch()
            time.sleep(600)
        digits = sum(int(c) for c in turn.text if c.isdigit())
        self.total += digits
        return Step(reward=float(digits % 3 == 0), append=f"{self.total % 10}=", correct=self.total % 3 == 0)
'''

TURNS = [
    "environment.max_turns=3",
    "environment.turn_tokens=2",
    "workers.timeout_s=600",
    "sampling.max_response_tokens=10",
    "batch.row_tokens=16",
    "reward.grader=exact",
]
HOW = {"waves": ["sampling.batch_invariant=true"], "in flight": IN_FLIGHT}
"""In waves the contexts of one prefill depend on when environments answer, so equal bits need batch-invariant sampling."""


def a_run(folder, *, steps):
    run = make_run(folder, steps=steps)
    (folder / "tool.py").write_text(ENVIRONMENT)
    return run


def options(run, how):
    return [*TURNS, *HOW[how], f"environment.source={run.folder}/tool.py:Sums"]


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
def test_a_run_killed_in_the_middle_of_a_tool_call_is_the_uninterrupted_one(how, tmp_path):
    """Twice: in the first step, before there is a checkpoint, and in a later step."""
    whole, killed = a_run(tmp_path / "whole", steps=6), a_run(tmp_path / "killed", steps=6)
    waits, works = (killed.folder / name for name in ("tool_waits", "tool_works_now"))
    for saved in (0, 2):
        if not saved:
            waits.touch()
        process = killed.start("--resume", *options(killed, how))
        try:
            killed.wait_for(
                process, lambda saved=saved: max(killed.steps(), default=0) >= saved, within_s=300
            )
            waits.touch()
            killed.wait_for(process, works.exists, within_s=300)
        finally:
            process.kill()
            process.communicate()
        waits.unlink()
        works.unlink()
    assert max(killed.steps()) < 6, "it was killed before its end"
    killed.finish("--resume", *options(killed, how))
    whole.finish(*options(whole, how))
    assert_the_same_run(killed.run_dir, whole.run_dir)
    lines = read_metrics(whole.run_dir / "metrics.jsonl")[1:]
    assert any(line.get("rollout/turns", 0) > 1 for line in lines)
    assert not any(line.get("reward/lost") for line in lines)
