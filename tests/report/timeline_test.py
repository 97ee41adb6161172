"""The time of each phase of a step, from the metrics of a run, on the page and in the trace."""

import json

import pytest

from dapo_jax.report import report
from dapo_jax.report.timeline import PHASES, timeline_of
from tests.report.made import write_metrics

FIRST = {
    "step": 1, "time/sample_s": 8.0, "time/grade_s": 1.5, "time/wait_s": 0.5, "time/update_s": 12.0, "time/logprobs_s": 3.0,
    "time/step_s": 20.0, "time/eval_s": 4.0, "time/between_s": 0.0, "time/checkpoint_s": 0.0,
}  # fmt: skip
ROWS = [
    {"step": 0, "time/eval_s": 5.0},
    FIRST,
    # 7 s after the first step: 4 s of evaluation, 2 s of a checkpoint, and 1 s of other work.
    {"step": 2, "time/sample_s": 2.0, "time/update_s": 1.0, "time/between_s": 7.0, "time/checkpoint_s": 2.0},
    {"step": 3, "time/sample_s": None, "time/update_s": 1.0, "time/between_s": 0.0, "time/checkpoint_s": 0.0},
]  # fmt: skip


def spent(**seconds):
    return dict.fromkeys(PHASES, 0.0) | seconds


def test_each_second_of_a_step_is_in_one_phase():
    assert timeline_of(ROWS) == [
        (0, spent(eval=5.0)),
        (
            1,
            spent(
                sample=6.0, grade=1.5, wait=0.5, logprobs=3.0, update=9.0, eval=4.0, checkpoint=2.0, rest=1.0
            ),
        ),
        (2, spent(sample=2.0, update=1.0)),  # the run was resumed after it
        (3, spent(update=1.0)),
    ]


def test_a_run_without_the_new_times_has_sampling_updates_and_evaluation():
    old = {"step": 1, "time/sample_s": 8.0, "time/update_s": 12.0, "time/step_s": 20.5, "time/eval_s": 30.0}
    assert timeline_of([]) == []
    assert timeline_of([old]) == [(1, spent(sample=8.0, update=12.0, eval=30.0))]


@pytest.fixture
def made(tmp_path):
    return report(write_metrics(tmp_path / "run", *ROWS), write_metrics(tmp_path / "other", {"step": 1}))


def test_the_trace_has_the_phases_inside_their_steps(made):
    events = json.loads(json.dumps(made.trace, allow_nan=False))["traceEvents"]
    names = {each["pid"]: each["args"]["name"] for each in events if each["ph"] == "M"}
    assert names == {0: "run", 1: "other"}
    own = [each for each in events if each["ph"] == "X" and each["pid"] == 0]
    steps = [each for each in own if each["name"].startswith("step")]
    # In microseconds, one after the other: 5, 27, 3 and 1 s.
    assert [(each["ts"], each["dur"]) for each in steps] == [(0, 5e6), (5e6, 27e6), (32e6, 3e6), (35e6, 1e6)]
    inside = [each for each in own if 5e6 <= each["ts"] < 32e6 and each not in steps]
    assert [each["name"] for each in inside] == list(PHASES.values())
    assert [each["ts"] for each in inside] == [5e6, 11e6, 12.5e6, 13e6, 16e6, 25e6, 29e6, 31e6]
    assert inside[-1]["ts"] + inside[-1]["dur"] == 32e6
