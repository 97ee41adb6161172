"""A new run starts from a run: with the weights of its last or best checkpoint, and with its optimizer state on request."""

import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from dapo_jax.config import ConfigError, LoraConfig, ModelConfig, SftConfig, to_yaml
from dapo_jax.doctor.subject import Subject
from dapo_jax.plan.decoder import decoder_of
from dapo_jax.run.meshes import mesh_of
from dapo_jax.run.policy import find_policy, load_policy
from dapo_jax.run.resume_point import IDENTITY, check_identity, identity_of
from dapo_jax.run.sources import lora_of, source_of
from tests.run.conftest import assert_equal_weights, save_run

LORA = LoraConfig(rank=2, alpha=8.0, targets=["attention"])


@pytest.fixture(scope="module")
def source(micro, tmp_path_factory):
    """A run folder with three checkpoints, and the policy from which the run started. Checkpoint 2 is the best."""
    config = micro(tmp_path_factory.mktemp("source") / "run")
    return config.run_dir, save_run(config)


@pytest.fixture
def made(micro, tmp_path):
    """Writes a run folder that differs from `source` by some keys, and returns its path."""

    def make(name="run", scores=(None,), **changes):
        config = micro(tmp_path / name, **changes)
        save_run(config, scores)
        return config.run_dir

    return make


def times(policy, factor):
    return replace(policy, params=jax.tree.map(lambda leaf: leaf * factor, policy.params))


@pytest.mark.parametrize(("checkpoint", "step"), [("last", 3), ("best", 2)])
@pytest.mark.parametrize("spread", [False, True])
def test_a_run_is_the_source_of_weights_and_tokenizer(checkpoint, step, spread, source, micro):
    run, began = source
    mesh = mesh_of(micro().parallel) if spread else None
    found = load_policy(ModelConfig(source=f"{run}@{checkpoint}"), mesh=mesh)
    assert_equal_weights(found, times(began, step))
    assert (found.decoder, found.tokenizer, found.step) == (began.decoder, began.tokenizer, step)


def test_the_best_checkpoint_needs_a_score(made, model):
    with pytest.raises(ConfigError, match=r"no checkpoint with an evaluation score in .*checkpoints"):
        load_policy(ModelConfig(source=f"{made()}@best"))
    with pytest.raises(ConfigError, match=r"model\.source='.*model.*': @best needs a training"):
        load_policy(ModelConfig(source=f"{model}@best"))


def test_a_run_that_started_from_a_run_is_a_source(made, source):
    """Its own weights are 1 x 3 times the weights of the model."""
    run = made(model=ModelConfig(source=source[0]))
    assert_equal_weights(load_policy(ModelConfig(source=run)), times(source[1], 3))
    assert source_of(ModelConfig(source=run)).base == source_of(ModelConfig(source=source[0])).base


def test_runs_that_started_from_each_other_are_refused(made, tmp_path):
    first = Path(made("first"))
    second = Path(made("second", model=ModelConfig(source=str(first))))
    for run in (first, second):
        text = (second / "config.yaml").read_text().replace(str(first), str(second))
        (run / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match="started from itself"):
        load_policy(ModelConfig(source=str(first)))


def test_a_warm_start_is_a_source_by_its_model_folder(model, source, tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(SftConfig(run_dir=str(tmp_path), seed=3)))
    with pytest.raises(ConfigError, match="neither a checkpoint nor a model"):
        load_policy(ModelConfig(source=str(tmp_path)))
    shutil.copytree(model, tmp_path / "model")
    for found in (load_policy(ModelConfig(source=str(tmp_path))), find_policy(str(tmp_path))):
        assert_equal_weights(found, source[1])
        assert found.base == str(tmp_path / "model")


def test_adapters_of_a_run_continue_on_their_base(made, source):
    run = made(lora=LORA, scores=(None, None))
    found = load_policy(ModelConfig(source=run), lora=lora_of(LORA))
    again = load_policy(
        ModelConfig(source=source_of(ModelConfig(source=run)).base.source), lora=lora_of(LORA)
    )
    assert_equal_weights(found, times(again, 2))
    for a, b in zip(jax.tree.leaves(found.frozen), jax.tree.leaves(again.frozen), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ConfigError, match=r"lora\.rank is 3, but the adapter's is 2"):
        load_policy(ModelConfig(source=run), lora=lora_of(replace(LORA, rank=3)))
    with pytest.raises(ConfigError, match=r"lora\.rank=2 .*/run/model .*dapo-jax convert"):
        load_policy(ModelConfig(source=source[0]), lora=lora_of(LORA))


def test_random_base_weights_keep_the_seed_of_their_run(made, micro):
    preset = ModelConfig(source="preset:tiny")
    run = made(lora=LORA, model=preset)
    found = load_policy(ModelConfig(source=run), lora=lora_of(LORA), seed=7)
    expected = load_policy(preset, lora=lora_of(LORA), seed=micro().seed)
    for a, b in zip(jax.tree.leaves(found.frozen), jax.tree.leaves(expected.frozen), strict=True):
        np.testing.assert_array_equal(a, b)


def test_plan_and_doctor_know_the_model_of_a_run(source, made, micro):
    run, began = source
    for place, checkpoint in ((run, "best"), (made(lora=LORA), "last")):
        model = ModelConfig(source=f"{place}@{checkpoint}")
        assert decoder_of(model).base == began.decoder
        subject = Subject(micro(model=model))
        decoder, tokenizer, _, size, _ = subject.described
        assert (decoder.base, tokenizer) == (began.decoder, began.tokenizer)
        assert size > 0
        assert subject.planned.decoder.embed_dim == 16


def test_an_identity_has_the_checkpoint_of_the_initial_weights(source, micro):
    """The weights are compared if the run still needs them, as for a reference policy."""
    run, _ = source
    config = micro(model=ModelConfig(source=run))
    last, best = (
        load_policy(ModelConfig(source=f"{run}@{name}")).files(weights=True) for name in ("last", "best")
    )
    assert not [name for name in last if name.endswith(".safetensors")]
    kept = identity_of(config, prompts=[], model=last)
    check_identity("checkpoint 1", {IDENTITY: kept}, identity_of(config, prompts=None, model={}))
    with pytest.raises(ConfigError, match=r"the model's checkpoint has changed .* step 3 .* step 2 "):
        check_identity("checkpoint 1", {IDENTITY: kept}, identity_of(config, prompts=None, model=best))


def test_a_key_that_is_newer_than_a_checkpoint_had_its_default(micro):
    kept, now = (identity_of(micro("run"), prompts=[], model={}) for _ in range(2))
    del kept["config"]["loss.kl_coef"]
    check_identity("checkpoint 1", {IDENTITY: kept}, now)
    now["config"]["loss.kl_coef"] = 0.1
    with pytest.raises(ConfigError, match=r"loss\.kl_coef was 0\.0, is 0\.1"):
        check_identity("checkpoint 1", {IDENTITY: kept}, now)


@pytest.mark.slow  # the identity and the initial state have tests of their own above
def test_a_run_from_a_run_resumes_bit_for_bit_without_its_source(
    source, micro, run_micro, same_run, tmp_path
):
    """The source has moved on when the run resumes."""
    run = shutil.copytree(source[0], tmp_path / "source")
    model = ModelConfig(source=f"{run}@best")
    changes = {"model": model, "checkpoint__every_steps": 1}
    whole = run_micro(micro(tmp_path / "whole", steps=2, **changes))
    run_micro(micro(tmp_path / "parts", steps=1, **changes))
    shutil.rmtree(run / "checkpoints" / "2")
    same_run(run_micro(micro(tmp_path / "parts", steps=2, **changes), resume=True), whole)
