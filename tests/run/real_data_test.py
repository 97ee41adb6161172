"""SmolLM2-135M on the published datasets: a few steps of training and an evaluation on each.

Only where DAPO_JAX_SMOLLM2 names a folder of the model, and DAPO_JAX_DATA one with the folders dapo_math_17k, aime_2024, gsm8k and
math_500. It is far too small to learn from them: what is seen here is that they go through the whole pipe.
"""

import os
from pathlib import Path

import jax
import pytest

from dapo_jax.config import (
    BatchConfig,
    DataConfig,
    DynamicSamplingConfig,
    EvalConfig,
    ModelConfig,
    OverlongConfig,
    RewardConfig,
    SamplingConfig,
    TrainConfig,
)
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.run import train
from dapo_jax.trackers.rollout_log import read_problems

SMOLLM2, DATA = os.environ.get("DAPO_JAX_SMOLLM2"), os.environ.get("DAPO_JAX_DATA")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (SMOLLM2 and DATA), reason="DAPO_JAX_SMOLLM2 or DAPO_JAX_DATA names no folder"),
]


@pytest.mark.parametrize(
    ("source", "split", "grader", "judge"),
    [
        ("dapo_math_17k", "train", "dapo", "aime_2024"),
        ("aime_2024", "test", "dapo_boxed", "aime_2024"),
        ("gsm8k", "train", "gsm8k", "gsm8k"),
        ("math_500", "test", "math", "math_500"),
    ],
)
def test_a_dataset_is_trained_and_evaluated_on(source, split, grader, judge, tmp_path, monkeypatch):
    one = make_mesh(devices=jax.devices()[:1])
    monkeypatch.setattr("dapo_jax.run.build.mesh_of", lambda axes, **how: one)
    config = TrainConfig(
        run_dir=str(tmp_path / "run"),
        steps=2,
        model=ModelConfig(source=str(SMOLLM2)),
        data=DataConfig(
            source=source, path=f"{DATA}/{source}", train_split=split, data_dir=str(tmp_path), prompt_template="dapo",
            chat=True, max_prompt_tokens=512,
        ),
        sampling=SamplingConfig(slots=16, max_response_tokens=32),
        reward=RewardConfig(grader=grader, overlong=OverlongConfig(buffer_tokens=16)),
        # Nearly all of its answers are wrong: there would be nothing to keep.
        dynamic_sampling=DynamicSamplingConfig(enabled=False),
        batch=BatchConfig(prompts_per_step=2, group_size=4, groups_per_update=1, rows_per_microbatch=1),
        eval=EvalConfig(
            every_steps=0, samples_per_prompt=2,
            datasets=[{"source": judge, "path": f"{DATA}/{judge}", "split": "test[:8]"}],
        ),
    )  # fmt: skip
    lines = train(config).metrics
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines[1:]:
        assert line["rollout/response_tokens"] > 16
        assert line["reward/lost"] == 0
    for step in (0, 2):
        problems = read_problems(Path(config.run_dir) / "evaluations" / f"step_{step:06d}" / f"{judge}.jsonl")
        assert len(problems) == 8
        assert all(problem["samples"] == 2 for problem in problems)
