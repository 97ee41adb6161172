"""Several processes: all of them stop or none, all correct or none; one says why, and one writes."""

import json

import pytest

from dapo_jax.config import DataConfig, to_yaml
from dapo_jax.trackers import read_metrics
from dapo_jax.trackers.post_mortem import read_post_mortem
from tests import several

pytestmark = pytest.mark.slow

NAN_LOSS = (
    several.CHECKED
    + """
import dapo_jax.run.programs as assembly
honest = assembly.dapo_loss

def nan_loss(*of, **how):
    loss, metrics = honest(*of, **how)
    return loss * float("nan"), metrics

assembly.dapo_loss = nan_loss
from dapo_jax.cli import main
sys.exit(main(sys.argv[1:]))
"""
)

DRIFTING = (
    several.CHECKED
    + """
from dataclasses import replace
from dapo_jax.rollout.response_sampler import ResponseSampler
honest = ResponseSampler.sample

def sample(self, *of, **how):
    for prompt, responses in honest(self, *of, **how):
        yield prompt, tuple(replace(one, logprobs=one.logprobs - one.logprobs.dtype.type(0.5)) for one in responses)

ResponseSampler.sample = sample
from dapo_jax.cli import main
sys.exit(main(sys.argv[1:]))
"""
)


@pytest.fixture
def written(micro, rows, tmp_path):
    """The configuration of a run for the command line, for two processes of four devices; each holds half of a microbatch's rows."""

    def write(**changes):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "grader.py").write_text(
            "def even(sample):\n    return int(sample.tokens.sum()) % 2 == 0\n"
        )
        data = DataConfig(
            source="jsonl", path=str(tmp_path / "rows.jsonl"), data_dir=str(tmp_path / "data"), max_prompt_tokens=4,
            eval_split="train",
        )  # fmt: skip
        config = micro(
            tmp_path / "run", data=data, reward__grader=f"{tmp_path}/grader.py:even", reward__workers=0,
            sampling__slots=4, checkpoint__every_steps=1, **changes,
        )  # fmt: skip
        (tmp_path / "run.yaml").write_text(to_yaml(config))
        return tmp_path / "run.yaml", tmp_path / "run"

    return write


def test_all_stop_and_the_first_writes_what_was_in_the_update(written):
    """Two updates a step, so that the second step has the fourth skipped one in a row."""
    config, run = written()
    done = several.finish(several.start(NAN_LOSS, "train", config, processes=2, devices=4), within_s=600)
    assert [status for status, _ in done] == [1, 1], done
    message = "dapo-jax train: 4 updates in a row were skipped up to step 2, guard.max_skipped_updates=3"
    assert [output.count(message) for _, output in done] == [1, 0]
    assert "the last good checkpoint is that of step 2" in done[0][1]
    lines = read_metrics(run / "metrics.jsonl")
    assert [line.get("update/skipped_frac") for line in lines] == [None, 1.0, 1.0]
    kept = sorted((run / "post_mortem").iterdir())
    assert len(kept) == 4
    for folder in kept:
        found = read_post_mortem(folder)
        [stack] = found.stacks
        assert stack["tokens"].shape[1:] == (8, 12)
        assert stack["mask"].sum() == sum(row["response_tokens"] for row in found.rollouts)


def test_all_correct(written):
    """As tests/faults/mismatch_test.py has it: every token is off by 0.5 nats."""
    limit = {"guard__max_mismatch_kl": 0.1, "guard__on_mismatch": "correct", "guard__mismatch_cap": 1.5}
    config, run = written(steps=2, dynamic_sampling__surplus="discard", **limit)
    outputs = several.run(DRIFTING, "train", config, processes=2, devices=4, within_s=600)
    assert ["It is corrected by weights of at most 1.5" in output for output in outputs] == [True, False]
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["step"]]
    assert [line["sync/corrected"] for line in lines] == [1, 1]
    assert [line["sync/sampler_trainer_kl"] for line in lines] == pytest.approx([0.1487] * 2, rel=1e-3)
