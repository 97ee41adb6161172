"""A supervised warm start: it learns, logs, and writes a model."""

import errno
import io
import json
import shutil
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
from rich.console import Console

from dapo_jax.commands import sft
from dapo_jax.config import (
    ConfigError,
    DataConfig,
    EvalConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    SamplingConfig,
    SftBatchConfig,
    SftConfig,
    WorkersConfig,
)
from dapo_jax.data import PairSource
from dapo_jax.run.policy import load_policy
from dapo_jax.run.prompt_sets import training_prompts
from dapo_jax.storage.locks import take
from dapo_jax.trackers import read_metrics
from dapo_jax.trackers.progress import Progress


@pytest.fixture(scope="module")
def config(model, tmp_path_factory):
    return SftConfig(
        run_dir=str(tmp_path_factory.mktemp("sft") / "run"),
        steps=3,
        max_response_tokens=88,
        model=ModelConfig(source=model),
        data=DataConfig(max_prompt_tokens=8, train_split="train[:64]", eval_split="train[:64]"),
        reward=RewardConfig(grader="tests/commands/own_graders.py:too_slow"),
        workers=WorkersConfig(count=0),
        batch=SftBatchConfig(pairs_per_step=16, row_tokens=96, rows_per_microbatch=8),
        optimizer=OptimizerConfig(learning_rate=0.05, warmup_steps=2),
        sampling=SamplingConfig(slots=8, max_response_tokens=6),
        eval=EvalConfig(every_steps=2, prompts=3, samples_per_prompt=4, top_p=1.0),
    )


def run(config, **console):
    shown = Console(**(console or {"quiet": True}))
    return sft(config, progress=Progress(config.steps, console=shown))


@pytest.fixture(scope="module")
def shown():
    return io.StringIO()


@pytest.fixture(scope="module")
def warmed(config, shown):
    return run(config, file=shown)


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("reward", {"grader": "exakt"}, "exakt"),
        ("data", {"train_split": "train[5:5]"}, r"'train\[5:5\]'.* 1,000 and 7,100 rows"),
        ("data", {"source": "jsonl", "path": "/missing.jsonl"}, r"/missing\.jsonl"),
    ],
)
def test_the_grader_and_the_data_are_checked_before_the_weights(
    section, change, message, config, model_without_weights, tmp_path
):
    changed = replace(config, run_dir=str(tmp_path / "run"), model=ModelConfig(source=model_without_weights))
    with pytest.raises(ConfigError, match=message):
        sft(replace(changed, **{section: replace(getattr(config, section), **change)}))


def test_the_loss_goes_down_and_is_logged_each_step(config, warmed):
    """A uniform guess over 17 tokens costs log 17 = 2.83 nats."""
    lines = read_metrics(f"{config.run_dir}/metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    losses = [line["sft/token_loss"] for line in lines]
    assert losses[2] < losses[0]
    for line in lines:
        assert line["update/loss"] == pytest.approx(
            line["sft/token_loss"], rel=1e-5
        )  # the token mean is the loss
        assert {"update/grad_norm", "update/skipped_frac", "policy/entropy", "time/step_s"} <= line.keys()
        assert not [name for name in line if name.startswith("sync/")]
    assert [line["update/learning_rate"] for line in lines] == [0.025, 0.05, 0.05]


def test_an_evaluation_is_logged_at_its_steps_and_after_the_last(config, warmed):
    lines = read_metrics(f"{config.run_dir}/metrics.jsonl")
    assert [line["step"] for line in lines if "eval/arithmetic/avg@4" in line] == [2, 3]
    assert "eval/arithmetic/avg@4" in warmed.metrics


def test_notes_about_prompts_and_lost_verdicts_are_shown(warmed, shown):
    """Two evaluations of 3 problems with 4 responses."""
    text = shown.getvalue()
    assert text.count("3 of 3 prompts are also trained on") == 1
    assert text.count("12 of 12 responses got no verdict") == 2


# Slow: another training. tests/run/keys/commands_test.py sees the rank of the adapters, and tests/run/lora_test.py trains them.
@pytest.mark.slow
def test_adapters_alone_are_trained_if_they_are_asked_for(config, tmp_path, model):
    lora = LoraConfig(rank=2, targets=["attention"])
    found = run(replace(config, run_dir=str(tmp_path / "run"), lora=lora))
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert lines[2]["sft/token_loss"] < lines[0]["sft/token_loss"]
    again = load_policy(ModelConfig(source=f"{tmp_path}/run/model"))
    assert again.decoder.lora.targets == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert (again.base, again.decoder.lora.rank) == (model, 2)
    for a, b in zip(jax.tree.leaves(found.policy.params), jax.tree.leaves(again.params), strict=True):
        np.testing.assert_array_equal(a, b)
    assert max(float(abs(leaf).max()) for leaf in jax.tree.leaves(again.params)) > 0


def test_the_model_is_written_as_a_folder_that_is_read_back(config, warmed):
    policy = load_policy(ModelConfig(source=f"{config.run_dir}/model"))
    assert policy.tokenizer == warmed.policy.tokenizer
    for a, b in zip(jax.tree.leaves(policy.params), jax.tree.leaves(warmed.policy.params), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_pairs_are_asked_through_the_chat_template_and_end_the_assistant_s_turn(config, chat_model):
    data = replace(config.data, chat=True, system_prompt="Add.", max_prompt_tokens=64)
    policy = load_policy(ModelConfig(source=chat_model))
    prompts = training_prompts(data, policy.tokenizer, seed=0).training
    prompt, response = PairSource(prompts, policy.tokenizer, seed=0, max_response_tokens=64)[0]
    question = policy.tokenizer.decode(prompt).split("user\n")[1].split("\n")[0]
    text = (
        f"<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )
    np.testing.assert_array_equal(prompt, policy.tokenizer.encode(text))
    assert response[-1] == policy.tokenizer.eos_id == policy.tokenizer.encode("<|im_end|>")[0]


def test_a_conversation_without_a_chat_template_is_refused_before_the_first_step(config, tmp_path):
    data = replace(config.data, chat=True)
    with pytest.raises(ConfigError, match="no chat template"):
        run(replace(config, run_dir=str(tmp_path / "run"), data=data))


def test_a_disk_without_room_for_the_model_is_refused_before_the_first_step(config, tmp_path, monkeypatch):
    """A parameter has 4 bytes in the model. Here it has 4,096, because the test's model is small."""
    free = 2**21
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10 * free, 9 * free, free))
    monkeypatch.setattr(sys.modules[sft.__module__], "EXPORT_BYTES", 2**12)
    with pytest.raises(
        ConfigError, match=r"the disk has too little room .* 2 MiB free for run_dir, .* needed"
    ):
        run(replace(config, run_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_an_error_while_the_model_is_written_says_that_it_is_not_complete(config, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dapo_jax.run.policy.save_tokenizer", full)
    with pytest.raises(OSError, match="No space left") as caught:
        run(replace(config, run_dir=str(tmp_path / "run"), steps=1))
    assert f"remove run_dir={tmp_path / 'run'}" in caught.value.__notes__[0]


def test_a_run_is_not_written_over(config, warmed):
    with pytest.raises(ConfigError, match="already contains a run"):
        run(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": SamplingConfig(slots=8)}, "20488 positions, .* has 128"),
        ({"data": DataConfig(source="arithmetc", max_prompt_tokens=8)}, "did you mean 'arithmetic'"),
        ({"batch": SftBatchConfig()}, "rows_per_microbatch=1 must be a multiple"),
    ],
)
def test_lengths_that_do_not_fit_are_refused_before_the_first_step(changes, message, config, tmp_path):
    """An evaluation that cannot be sampled would otherwise be found out after the last step, and the model be lost."""
    with pytest.raises(ConfigError, match=message):
        run(replace(config, run_dir=str(tmp_path / "run"), **changes))
    assert not (tmp_path / "run").exists()


def test_a_pair_of_a_later_step_is_checked_before_the_weights(config, model_without_weights, tmp_path):
    """Row 41 is used in step 3, which has the pairs 33 to 48. The response has 90 + 1 characters and the end token."""
    rows = [{"prompt": f"{n}+1", "answer": str(n + 1), "response": f"={n + 1}"} for n in range(10, 60)]
    rows[40]["response"] = "=" + 90 * "1"
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = DataConfig(source="jsonl", path=str(path), eval_split="train", shuffle=False, max_prompt_tokens=8)
    changed = replace(config, run_dir=str(tmp_path / "run"), data=data)
    with pytest.raises(ConfigError, match=r"line 41: .* 92 tokens, more than max_response_tokens=88"):
        run(replace(changed, model=ModelConfig(source=model_without_weights)))


def test_a_folder_in_which_another_process_is_at_work_is_refused(config, tmp_path):
    """Before the model, which does not exist, is looked for."""
    config = replace(config, run_dir=str(tmp_path), model=replace(config.model, source="shipped:nothing"))
    with (
        take(tmp_path, lost=lambda status, why: None),
        pytest.raises(ConfigError, match=r"run_dir=.*: in use by"),
    ):
        run(config)
    with pytest.raises(ConfigError, match="no shipped model 'nothing'"):
        run(config)
