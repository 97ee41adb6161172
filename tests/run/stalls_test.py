"""Runs that hang, on the command line: each ends with status 1 and names its wait."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import several

pytestmark = pytest.mark.slow  # each test waits for the time limit

ROOT = Path(__file__).parents[2]
LIMIT_S = 30
"""Longer than a compilation of the micro model on a busy machine."""

HANGS = """
import threading

def grader(sample):
    threading.Event().wait()
"""

READER = """
import os, threading
from dapo_jax.data import prompts

plain = prompts._prompt

def hangs(*arguments):
    if arguments[-2] >= 8 and os.environ.get("JAX_PROCESS_ID", "1") == "1":
        threading.Event().wait()
    return plain(*arguments)

prompts._prompt = hangs
"""


@pytest.fixture
def arguments(model, tmp_path):
    """The command line of a small run on the micro model."""
    data = tmp_path / "sums.jsonl"
    data.write_text(
        "".join(f'{{"prompt": "{a}+{b}", "answer": "{a + b}"}}\n' for a in range(9) for b in range(9))
    )
    config = tmp_path / "config.yaml"
    config.write_text("steps: 500\n")
    return [
        "train", config, f"run_dir={tmp_path}/run", f"model.source={model}", "data.source=jsonl", f"data.path={data}",
        "data.max_prompt_tokens=4", f"eval.datasets=[{{source: jsonl, path: {data}}}]",
        "eval.prompts=1", "eval.samples_per_prompt=1", "eval.every_steps=0",
        "sampling.slots=8", "sampling.max_response_tokens=6", "reward.overlong.enabled=false", "dynamic_sampling.enabled=false",
        "batch.prompts_per_step=2", "batch.groups_per_update=2", "batch.group_size=2", "batch.rows_per_microbatch=2",
        f"stall_timeout_s={LIMIT_S}",
    ]  # fmt: skip


def run(code, arguments):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


IN_FLIGHT = [
    "dynamic_sampling.enabled=true", "dynamic_sampling.prompts_per_wave=8", "rollout.in_flight=4", "rollout.round_tokens=2",
]  # fmt: skip


@pytest.mark.parametrize("keys", [["workers.count=0"], [*IN_FLIGHT, "workers.timeout_s=600"]])
def test_a_grader_that_hangs(keys, arguments, tmp_path):
    """In this process, which has no time limit for graders; in a worker with a long limit, with rollouts in flight."""
    grader = tmp_path / "hanging.py"
    grader.write_text(HANGS)
    done = run(several.COMMAND, [*arguments, *keys, f"reward.grader={grader}:grader"])
    assert done.returncode == 1, done.stderr
    assert "while grading the responses to a prompt" in done.stderr.splitlines()[-1]
    assert ("hanging.py:5 grader" in done.stderr) == (keys == ["workers.count=0"])


def test_a_hanging_process_ends_both_and_each_reports_both_waits(arguments):
    code = READER + several.COMMAND
    done = several.finish(
        several.start(code, *arguments, "parallel.fsdp=2", processes=2, devices=1), within_s=400
    )
    assert [status for status, _ in done] == [1, 1], done
    first, second = (output for _, output in done)
    assert "process 1: reading prompts" in first
    assert "process 0: waiting for the groups of the other processes" in second
    assert " hangs: " in second
    assert all("thread MainThread:" in output for output in (first, second))
    assert "while reading prompts" in second
