"""Post-mortems: what is written is read, from a disk and from a bucket; half of one is refused."""

import json
import os

import numpy as np
import pytest

from dapo_jax.dapo.rollouts import Group, Prompt, Response, Rollout, Verdict
from dapo_jax.storage import path_of
from dapo_jax.trackers.rollout_log import read_post_mortem, write_post_mortem

STACKS = [
    {"mask": np.array([[[True, False]]]), "advantages": np.array([[[np.nan, 0.0]]], np.float32)},
    {"tokens": np.arange(6, dtype=np.int32).reshape(3, 2, 1)[:2]},
]


def group():
    response = Response(
        tokens=np.array([3, 1], np.int32),
        logprobs=np.array([-np.inf, -0.5], np.float32),
        finish_reason="stop",
    )
    rollout = Rollout(response=response, text="=2", verdict=Verdict(correct=True), reward=1.0)
    prompt = Prompt(ordinal=7, tokens=np.array([2], np.int32), text="1+1", answer="2")
    return Group(prompt=prompt, rollouts=(rollout,))


def written(folder):
    report = {"step": 3, "update": 2, "nonfinite": {"loss": {"microbatches": [[0, 1]]}}}
    write_post_mortem(folder, report=report, stacks=STACKS, groups=[group()], config="run_dir: x\n")
    return report


def check(folder):
    report = written(folder)
    found = read_post_mortem(folder)
    assert found.report == {"schema_version": 1, **report}
    for stack, expected in zip(found.stacks, STACKS, strict=True):
        assert stack.keys() == expected.keys()
        for name, array in expected.items():
            assert stack[name].dtype == array.dtype
            np.testing.assert_array_equal(stack[name], array)
    [row] = found.rollouts
    assert (row["prompt"], row["response"], row["logprobs"]) == ("1+1", "=2", [None, -0.5])
    assert (folder / "config.yaml").read_text() == "run_dir: x\n"


def test_what_is_written_is_read(tmp_path):
    check(tmp_path / "run" / "post_mortem" / "step_000003_update_2")


def test_it_may_lie_in_a_bucket(bucket):
    check(path_of("gs://bucket/run/post_mortem/step_000003_update_2"))


def test_one_that_was_cut_short_is_refused(tmp_path):
    """The report is written last."""
    written(tmp_path)
    (tmp_path / "report.json").unlink()
    with pytest.raises(
        ValueError, match=r"no report\.json: it is no post-mortem, or writing it was cut short"
    ):
        read_post_mortem(tmp_path)


def test_one_of_a_newer_version_is_refused(tmp_path):
    report = written(tmp_path)
    (tmp_path / "report.json").write_text(json.dumps({"schema_version": 2, **report}))
    with pytest.raises(ValueError, match=r"has schema_version 2; .* upgrade dapo_jax"):
        read_post_mortem(tmp_path)


@pytest.mark.parametrize("name", ["report.json", "arrays.safetensors"])
def test_a_pipe_is_refused_and_not_waited_for(name, tmp_path):
    written(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(OSError, match="it is no file"):
        read_post_mortem(tmp_path)
