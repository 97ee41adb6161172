"""One micro model and one micro configuration for all runs: they compile once for the session.

The eight virtual CPU devices of the test session are the mesh: weights over fsdp 8, one row and one slot each.
"""

import json
import math
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.config import (
    BatchConfig,
    DataConfig,
    DynamicSamplingConfig,
    EvalConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    OverlongConfig,
    RewardConfig,
    SamplingConfig,
    TrainConfig,
    to_yaml,
)
from dapo_jax.dapo.rollouts import Group, Prompt, Response, Rollout, Span, Verdict
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.models.presets import Experts
from dapo_jax.run import train
from dapo_jax.run.learner import optimizer_of
from dapo_jax.run.policy import Policy, load_policy
from dapo_jax.run.sources import lora_of
from dapo_jax.testing import tiny_decoder_config, tiny_params
from dapo_jax.text.huggingface import HuggingFaceTokenizer
from dapo_jax.text.tokenizers import CharTokenizer
from dapo_jax.trackers.progress import Progress
from dapo_jax.trackers.rollout_log import read_rollouts
from dapo_jax.training.state import TrainState
from tests.text.folders import files_of

TOKENIZER = CharTokenizer("0123456789+=:,?")
"""The quickstart's alphabet."""


def save_random(folder, decoder):
    """Writes a model folder with random weights and the quickstart's alphabet, and returns its path."""
    Policy(decoder=decoder, params=tiny_params(decoder, seed=5), tokenizer=TOKENIZER).save(folder)
    return str(folder)


def save_micro_model(folder, **changes):
    """Writes the folder of a model with one layer, 16 wide. Changes are fields of the decoder."""
    sizes = {"embed_dim": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp_dim": 16, "max_positions": 128}  # fmt: skip
    return save_random(folder, tiny_decoder_config(vocab_size=TOKENIZER.vocab_size, **sizes | changes))


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return save_micro_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def model_without_weights(model, tmp_path_factory):
    """A model folder whose weights cannot be loaded."""
    folder = tmp_path_factory.mktemp("no_weights") / "model"
    shutil.copytree(model, folder)
    (folder / "model.safetensors").write_bytes(b"damaged")
    return str(folder)


@pytest.fixture(scope="session")
def moe_model(tmp_path_factory):
    """A model like `model`, with two layers of eight experts. It is as wide as eight devices need."""
    experts = {"family": "qwen3_moe", "qk_norm": "head", "mlps": (Experts(8, 2, normalize=True),)}
    return save_micro_model(tmp_path_factory.mktemp("moe_model"), layers=2, **experts)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory):
    """A model folder with a Hugging Face tokenizer, whose vocabulary the model pads to 336."""
    tokenizer = HuggingFaceTokenizer(files_of())
    assert tokenizer.vocab_size < 336
    decoder = tiny_decoder_config(
        vocab_size=336, embed_dim=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp_dim=16, max_positions=128
    )
    folder = tmp_path_factory.mktemp("chat_model")
    Policy(decoder=decoder, params=tiny_params(decoder), tokenizer=tokenizer).save(folder)
    return str(folder)


ROWS = [{"prompt": f"{a}+{b}", "answer": str(a + b)} for a in range(3) for b in range(3)]


@pytest.fixture(scope="session")
def rows():
    return ROWS


@pytest.fixture(scope="session")
def micro(model, tmp_path_factory):
    """Makes configurations of the micro run; `section__key=value` changes one."""

    def make(run_dir=None, **changes):
        config = TrainConfig(
            run_dir=str(run_dir or tmp_path_factory.mktemp("runs") / "run"),
            steps=4,
            model=ModelConfig(source=model),
            data=DataConfig(max_prompt_tokens=4),
            sampling=SamplingConfig(slots=8, max_response_tokens=6),
            reward=RewardConfig(overlong=OverlongConfig(buffer_tokens=2)),
            dynamic_sampling=DynamicSamplingConfig(prompts_per_wave=3, surplus="carry"),
            batch=BatchConfig(
                prompts_per_step=2, group_size=4, groups_per_update=1, row_tokens=12, rows_per_microbatch=8
            ),
            # Fast enough for the second update of a step to be clipped.
            optimizer=OptimizerConfig(learning_rate=0.05, warmup_steps=2),
            eval=EvalConfig(every_steps=0, prompts=2, samples_per_prompt=4, top_p=1.0),
            log=LogConfig(rollouts_every_steps=0),
        )
        for key, value in changes.items():
            config = changed(config, key.split("__"), value)
        return config

    return make


@pytest.fixture(scope="session")
def micro_of(micro, tmp_path_factory):
    """Makes configurations of a model with random weights, with prompts that responses share in packed rows, and a checkpoint at every step."""

    def of(decoder, steps):
        return partial(
            micro, model__source=save_random(tmp_path_factory.mktemp("model"), decoder), steps=steps, batch__row_tokens=24, optimizer__epsilon=0.1,
            optimizer__learning_rate=0.01, dynamic_sampling__surplus="discard", checkpoint__every_steps=1, checkpoint__keep=9, log__rollouts_every_steps=1,
        )  # fmt: skip

    return of


def changed(config, key, value):
    name, *rest = key
    return replace(config, **{name: changed(getattr(config, name), rest, value) if rest else value})


def save_run(config, scores=(None, 0.75, 0.25)):
    """Writes the run folder of `config` without training, with a checkpoint for each score.

    The weights of checkpoint k, counted from 1, are k times the initial weights, and all moments are k.
    """
    policy, optimizer = load_policy(config.model, lora=lora_of(config.lora)), optimizer_of(config.optimizer)
    moments = jax.eval_shape(optimizer.init, policy.params)
    folder = Path(config.run_dir)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    (folder / "checkpoints").mkdir()
    with Checkpointer(folder / "checkpoints") as checkpointer:
        for step, score in enumerate(scores, start=1):
            params = jax.tree.map(lambda leaf, step=step: leaf * step, policy.params)
            filled = jax.tree.map(lambda leaf, step=step: jnp.full(leaf.shape, step, leaf.dtype), moments)
            checkpointer.save(step, TrainState(params, filled), {"cursor": 0}, {}, score=score)
    return policy


@pytest.fixture(scope="session")
def on_disk(micro, rows):
    """(folder, source of a grader's module, its function) -> a function that writes a configuration of this name into the folder."""

    def at(folder, grader, function):
        (folder / "grader.py").write_text(grader)
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

        def make(name, **changes):
            config = micro(
                folder / name,
                data=DataConfig(
                    source="jsonl", path=str(folder / "rows.jsonl"), max_prompt_tokens=4,
                    eval_split="train",
                ),
                reward__grader=f"{folder}/grader.py:{function}",
                workers__count=0,
                optimizer__epsilon=0.1,
                checkpoint__every_steps=1,
                checkpoint__keep=9,
                log__rollouts_every_steps=2,
                **changes,
            )  # fmt: skip
            (folder / f"{name}.yaml").write_text(to_yaml(config))
            return config, folder / f"{name}.yaml"

        return make

    return at


def correct_by_even_sum(sample):
    """Correct if the tokens add up to an even number: true for about half of the responses of a random model."""
    return int(sample.tokens.sum()) % 2 == 0


@pytest.fixture(scope="session")
def even_sum():
    return correct_by_even_sum


@pytest.fixture(scope="session")
def run_micro(rows, even_sum):
    """Trains on the rows, silently."""

    def run(config, **how):
        quiet = Progress(config.steps, console=Console(quiet=True))
        return train(config, **{"reward": even_sum, "prompts": rows, "progress": quiet, **how})

    return run


@pytest.fixture(scope="session")
def steps_seen():
    """The arguments of `on_step` in the finished run."""
    return []


@pytest.fixture(scope="session")
def finished(micro, run_micro, rows, steps_seen):
    """The uninterrupted run: four steps with carried groups, evaluated before and after, a checkpoint at every step."""
    config = micro(checkpoint__every_steps=1, log__rollouts_every_steps=2)
    return run_micro(
        config, eval_rows=rows, on_step=lambda step, metrics: steps_seen.append((step, dict(metrics)))
    )


def make_group(ordinal, verdicts, lengths=None, *, truncated=(), version=0, text="1+2", answer="3"):
    """A graded group. Each of `verdicts` is a `Verdict`, or `x` for a correct response; response i has 2 + i tokens by default."""
    rollouts = []
    for index, verdict in enumerate(verdicts):
        graded = verdict if isinstance(verdict, Verdict) else Verdict(correct=verdict == "x")
        length = lengths[index] if lengths else 2 + index
        response = Response(
            record=Tokens(np.full(length, 5, np.int32), logprobs=np.full(length, -1.0, np.float32)),
            finish_reason="length" if index in truncated else "stop",
            spans=(Span(0, version),),
        )
        reward = 1.0 if graded.correct else -1.0
        rollouts.append(Rollout(response=response, text=f"it is {index}", verdict=graded, reward=reward))
    prompt = Prompt(ordinal=ordinal, tokens=np.array([3, 12, 4], np.int32), text=text, answer=answer)
    return Group(prompt=prompt, rollouts=tuple(rollouts))


def params_of(result):
    """The weights of a result of `train`, or of a policy, as arrays of numpy."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(getattr(result, "policy", result).params)]


def assert_equal_weights(found, expected):
    """Bit for bit."""
    for a, b in zip(params_of(found), params_of(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def without_evaluations(metrics):
    """Metrics whose lines between the first and the last have no evaluation, as a run in parts has one at each of its ends."""
    between = [{name: value for name, value in line.items() if "eval" not in name} for line in metrics[1:-1]]
    return [metrics[0], *between, metrics[-1]]


def learnt(metrics):
    """Metrics without the clock's and the cluster's, and with nan comparable."""
    return [
        {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in line.items()
            # An equal program that is still running depends on the time.
            if not name.startswith(("time/", "speed/", "memory/", "cluster/", "reward/code/cache_hits"))
        }
        for line in metrics
    ]


@pytest.fixture(scope="session")
def same_run():
    """Asserts that two results are of the same run: weights bit for bit, and every metric but the clock's."""

    def check(found, expected):
        assert_equal_weights(found, expected)
        assert learnt(found.metrics) == learnt(expected.metrics)

    return check


def assert_synchronous(lines):
    """The trainer computes the sampler's log-probabilities, and each step has a gradient."""
    for line in lines:
        assert line["sync/logprob_diff_max"] <= 2e-5
        assert line["update/grad_norm"] > 0


def assert_same_responses(result, expected):
    """Log-probabilities are equal up to 2e-5, and ratios are not compared."""
    paths = sorted((expected.run_dir / "rollouts").glob("*.jsonl"))
    for path in paths:
        rows = map(read_rollouts, (result.run_dir / "rollouts" / path.name, path))
        for row, other in zip(*rows, strict=True):
            np.testing.assert_allclose(row.pop("logprobs"), other.pop("logprobs"), rtol=0, atol=2e-5)
            assert row | {"ratios": None} == other | {"ratios": None}
    assert paths


@pytest.fixture
def resumed_at_each_step(run_micro, rows):
    """Runs a configuration step by step, and removes the evaluations that an uninterrupted run does not have."""

    def run(make, steps, **changes):
        folder = make().run_dir
        for last in range(1, steps + 1):
            result = run_micro(make(folder, steps=last, **changes), resume=last > 1, eval_rows=rows)
        return replace(result, metrics=without_evaluations(result.metrics))

    return run
