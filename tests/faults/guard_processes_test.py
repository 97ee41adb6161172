"""The guard of several processes stops all of them together; the first prints the reason and writes."""

import pytest

from dapo_jax.trackers import read_metrics
from dapo_jax.trackers.rollout_log import read_post_mortem
from tests import several

pytestmark = pytest.mark.slow

NAN_LOSS = (
    several.CHECKED
    + """
from dapo_jax.dapo import objectives
honest = objectives.OBJECTIVES["clip"]

def nan_loss(*of, **how):
    loss, metrics = honest(*of, **how)
    return loss * float("nan"), metrics

objectives.OBJECTIVES["clip"] = nan_loss
from dapo_jax.cli import main
sys.exit(main(sys.argv[1:]))
"""
)


EVEN = "def even(sample):\n    return int(sample.tokens.sum()) % 2 == 0\n"


def test_all_stop_and_the_first_writes_the_skipped_updates(on_disk, tmp_path):
    """Two updates per step: the fourth skipped update in a row is in the second step. Each process has half of a microbatch's rows."""
    run, (_, config) = tmp_path / "run", on_disk(tmp_path, EVEN, "even")("run", sampling__slots=4)
    done = several.finish(several.start(NAN_LOSS, "train", config, processes=2, devices=4), within_s=600)
    assert [status for status, _ in done] == [1, 1], done
    message = "dapo-jax train: 4 updates in a row were skipped up to step 2"
    assert [output.count(message) for _, output in done] == [1, 0]
    assert "the last good checkpoint is from step 2" in done[0][1]
    lines = read_metrics(run / "metrics.jsonl")
    assert [line.get("update/skipped_frac") for line in lines] == [None, 1.0, 1.0]
    kept = sorted((run / "post_mortem").iterdir())
    assert len(kept) == 4
    for folder in kept:
        found = read_post_mortem(folder)
        [stack] = found.stacks
        assert stack["tokens"].shape[1:] == (8, 12)
        assert stack["mask"].sum() == sum(row["response_tokens"] for row in found.rollouts)
