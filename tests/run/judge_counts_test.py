"""The counts of a run's judges are metrics of a step."""

import yaml

from dapo_jax.dapo.dynamic_sampling import Collected
from dapo_jax.rewards.judge import Judge
from dapo_jax.rollout.collector import Position
from dapo_jax.run.loop import StepResult
from dapo_jax.run.observers import GraderCounts
from dapo_jax.training.state import TrainState


def test_the_counts_of_all_judges_since_the_last_step_become_metrics(tmp_path):
    path = tmp_path / "strict.yaml"
    path.write_text(yaml.safe_dump({"url": "http://127.0.0.1:1", "model": "any", "prompt": "{response}"}))
    judges = [Judge(str(path)) for _ in range(2)]
    observer, found = GraderCounts(judges), []
    for _ in range(2):
        judges[0].counts.update(calls=2, tokens=14)
        judges[1].counts.update(calls=1, cache_hits=3)
        step = StepResult(
            position=Position(), state=TrainState(None, None), metrics={"a": 1},
            collected=Collected(groups=[], carry=[], sampled=[], cursor=0, waves=0, surplus=0),
        )  # fmt: skip
        observer.after_step(step)
        found.append(step.metrics)
    metrics = {"reward/judge/calls": 3, "reward/judge/cache_hits": 3, "reward/judge/tokens": 14}
    assert found == [{"a": 1, **metrics}] * 2
    assert set(metrics) == {f"reward/judge/{name}" for name in judges[0].counts}
    GraderCounts([]).after_step(step)
    assert step.metrics == {"a": 1, **metrics}
