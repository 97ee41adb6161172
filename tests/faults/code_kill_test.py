"""A run whose programs run in the sandbox is killed (-9) and resumed: it equals the uninterrupted one, and no server is left."""

import time
from pathlib import Path

import pytest

from dapo_jax.rewards.code_grader import VERDICTS
from dapo_jax.trackers import read_metrics
from tests.faults.micro import assert_the_same_run, make_run
from tests.sandbox.running import run as sandboxed

OPTIONS = [
    "model.source=shipped:code_quickstart",
    "data.source=one_line_programs",
    "data.path=",
    "data.eval_split=test",
    "data.max_prompt_tokens=8",
    "sampling.max_response_tokens=24",
    "batch.row_tokens=64",
    "reward.grader=code",
    "reward.overlong.enabled=false",
]


def servers_of(pid):
    """The processes that a process has started from any of its threads."""
    children = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for each in children for child in each]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow  # starts three processes that train
def test_a_killed_run_with_programs_is_the_uninterrupted_one(tmp_path):
    """It is killed while servers are up: in the first step, before there is a checkpoint, and in a later step."""
    sandboxed("pass")  # skips without bubblewrap
    whole, killed = (make_run(tmp_path / name, steps=6) for name in ("whole", "killed"))
    for saved in (0, 2):
        process = killed.start("--resume", *OPTIONS)
        try:
            killed.wait_for(
                process,
                lambda saved=saved, pid=process.pid: (
                    max(killed.steps(), default=0) >= saved and servers_of(pid)
                ),
                within_s=300,
            )
            servers = servers_of(process.pid)
        finally:
            process.kill()
            process.communicate()
        end = time.monotonic() + 10
        while any(map(alive, servers)) and time.monotonic() < end:
            time.sleep(0.1)
        assert not any(map(alive, servers))
    assert max(killed.steps()) < 6, "it was killed before its end"
    killed.finish("--resume", *OPTIONS)
    whole.finish(*OPTIONS)
    assert_the_same_run(killed.run_dir, whole.run_dir)
    lines = read_metrics(whole.run_dir / "metrics.jsonl")
    counts = {name: sum(line.get(f"reward/code/{name}", 0) for line in lines) for name in VERDICTS}
    assert counts["passed"] > 0
    assert counts["wrong_answer"] > 0
