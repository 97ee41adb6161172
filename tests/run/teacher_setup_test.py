"""Runs with a teacher: without graders, resumed, and refused."""

import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dapo_jax.config import ConfigError, DynamicSamplingConfig, RolloutConfig, TeacherConfig
from dapo_jax.run.build import Run
from dapo_jax.run.meshes import mesh_of
from dapo_jax.run.policy import Policy, find_policy, load_policy
from dapo_jax.run.teacher_setup import load_teacher
from dapo_jax.testing import tiny_decoder_config, tiny_params
from dapo_jax.text.tokenizers import CharTokenizer
from dapo_jax.trackers.rollout_log import read_rollouts
from tests.run.conftest import assert_equal_weights, params_of


def save_teacher(folder, alphabet="0123456789+=:,?"):
    """Writes a model folder of two layers, 24 wide."""
    tokenizer = CharTokenizer(alphabet)
    decoder = tiny_decoder_config(
        vocab_size=tokenizer.vocab_size, embed_dim=24, layers=2, heads=2, kv_heads=1, head_dim=8, mlp_dim=16,
        max_positions=128,
    )  # fmt: skip
    Policy(decoder=decoder, params=tiny_params(decoder, seed=6), tokenizer=tokenizer).save(folder)
    return str(folder)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return save_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def distilling(micro, teacher):
    """Makes configurations of a run of two steps that learns from the teacher alone."""

    def make(run_dir=None, **changes):
        config = micro(run_dir, steps=2, dynamic_sampling__enabled=False, teacher__source=teacher)
        return replace(config, **changes)

    return make


def never(sample):
    raise AssertionError("a response was graded")


@pytest.fixture(scope="module")
def trained(distilling, run_micro):
    config = distilling()
    config = replace(
        config,
        log=replace(config.log, rollouts_every_steps=1),
        checkpoint=replace(config.checkpoint, every_steps=1),
    )
    return run_micro(config, reward=never)


def test_without_rewards_nothing_is_graded_and_every_group_is_trained_on(trained, model):
    for line in trained.metrics:
        assert line["rollout/trained_groups"] == line["rollout/prompts"] == 2
        assert np.isfinite(line["teacher/reverse_kl"])
        assert line["update/grad_norm"] > 0
        graded = ("reward/", "rollout/accuracy", "rollout/trained_accuracy", "rollout/mixed", "rollout/all_")
        assert not [name for name in line if name.startswith(graded)]
    for step in (1, 2):
        rows = read_rollouts(trained.run_dir / "rollouts" / f"step_{step:06d}.jsonl")
        assert {(row["reason"], row["reward"], row["advantage"]) for row in rows} == {
            ("not graded", 0.0, 0.0)
        }
    initial = params_of(find_policy(model))
    assert any((a != b).any() for a, b in zip(initial, params_of(trained), strict=True))


def test_evaluations_are_graded_and_change_no_weights(trained, distilling, run_micro, rows):
    """Half of the answers of a grader that asks whether an index is even are right."""
    graded = []

    def counted(sample):
        graded.append(sample)
        return len(graded) % 2 == 0

    result = run_micro(distilling(), reward=counted, eval_rows=rows)
    assert len(graded) == 2 * 2 * 4  # before and after, 2 prompts with 4 responses
    assert [line["eval/arithmetic/avg@4"] for line in (result.metrics[0], result.metrics[-1])] == [0.5, 0.5]
    assert_equal_weights(result, trained)


# Slow: another run. The tests above have runs in waves that are not graded, and tests/rollout/flight_test.py has runs in flight.
@pytest.mark.slow
def test_rollouts_in_flight_are_not_graded_either(distilling, run_micro):
    flight = RolloutConfig(in_flight=8, round_tokens=2)
    dynamic = DynamicSamplingConfig(enabled=False)
    result = run_micro(distilling(steps=1, rollout=flight, dynamic_sampling=dynamic), reward=never)
    assert np.isfinite(result.metrics[0]["teacher/reverse_kl"])


def test_with_rewards_responses_are_graded_and_advantages_are_added(distilling, run_micro, teacher, even_sum):
    config = distilling(steps=1, teacher=TeacherConfig(source=teacher, rewards=True))
    result = run_micro(replace(config, log=replace(config.log, rollouts_every_steps=1)), reward=even_sum)
    assert 0 < result.metrics[0]["rollout/accuracy"] < 1
    rows = read_rollouts(result.run_dir / "rollouts" / "step_000001.jsonl")
    assert any(row["advantage"] for row in rows)


# Slow: compiles another update. tests/training/teacher_test.py compares its gradient with the formula.
@pytest.mark.slow
def test_the_divergence_over_the_vocabulary_is_learnt_without_advantages(distilling, run_micro, teacher):
    full = TeacherConfig(source=teacher, kl="full")
    lines = run_micro(distilling(teacher=full), reward=never).metrics
    assert all(line["teacher/reverse_kl"] > 0 and line["update/grad_norm"] > 0 for line in lines)


@pytest.mark.parametrize("kl", ["sampled", "full"])
def test_a_teacher_needs_a_probability_for_each_entry_that_the_student_can_sample(kl, distilling, tmp_path):
    """Models may have more entries than their tokenizer: here the student."""
    config = distilling(teacher=TeacherConfig(source=save_teacher(tmp_path / "teacher"), kl=kl))
    student, mesh = load_policy(config.model, weights=False), mesh_of(config.parallel)
    load_teacher(config, student, mesh)
    size = student.decoder.vocab_size
    more = replace(student, decoder=replace(student.decoder, vocab_size=size + 1))
    with pytest.raises(ConfigError, match=rf"teacher\.source=.* has {size} .* {size + 1} .*model\.source="):
        load_teacher(config, more, mesh)


def test_a_resumed_run_continues_with_the_same_teacher(trained, distilling, run_micro, tmp_path):
    run_dir = shutil.copytree(trained.run_dir, tmp_path / "run")
    shutil.rmtree(run_dir / "checkpoints" / "2")
    assert_equal_weights(run_micro(distilling(run_dir), resume=True, reward=never), trained)


def test_a_teacher_that_has_changed_is_refused_on_resume(distilling, run_micro, teacher, tmp_path):
    """The run can still be read, for which no teacher is needed."""
    copied = shutil.copytree(teacher, tmp_path / "teacher")
    config = distilling(tmp_path / "run", steps=1, teacher=TeacherConfig(source=str(copied)))
    run_micro(config, reward=never)
    weights = load_file(copied / "model.safetensors")
    save_file({name: value + 1 for name, value in weights.items()}, copied / "model.safetensors")
    with pytest.raises(ConfigError, match=r"teacher \(model\.safetensors\) has changed"):
        run_micro(config, resume=True, reward=never)
    assert find_policy(config.run_dir).step == 1
    other = replace(config, teacher=TeacherConfig(source=teacher))
    with pytest.raises(ConfigError, match=r"teacher\.source"):
        run_micro(other, resume=True, reward=never)


def test_a_teacher_with_another_tokenizer_is_refused(distilling, rows, tmp_path):
    other = save_teacher(tmp_path / "other", alphabet="9876543210+=:,?")
    config = distilling(teacher=TeacherConfig(source=other))
    with pytest.raises(ConfigError, match=r"teacher\.source=.*tokenizer\.json [0-9a-f]{64} and [0-9a-f]{64}"):
        Run(config, prompts=rows, reward=never)


def test_a_teacher_that_does_not_exist_is_named(distilling, rows):
    config = distilling(teacher=TeacherConfig(source="no/such/teacher"))
    with pytest.raises(ConfigError, match=r"teacher\.source='no/such/teacher'"):
        Run(config, prompts=rows, reward=never)


def test_the_weights_of_a_teacher_are_rounded_and_tokenizers_of_presets_are_compared(distilling):
    config = distilling(model=replace(distilling().model, compute_dtype="bfloat16"))
    student, mesh = load_policy(config.model, weights=False), mesh_of(config.parallel)
    dtypes = [leaf.dtype.name for leaf in jax.tree.leaves(load_teacher(config, student, mesh).params)]
    assert dtypes.count("float32") == 3  # the norms
    assert dtypes.count("bfloat16") == len(dtypes) - 3 > 0
    alphabet = "char:0123456789+=:,?"  # the alphabet of the micro model
    preset, byte = (
        replace(config.model, source="preset:tiny", tokenizer=name) for name in (alphabet, "byte")
    )
    load_teacher(replace(config, model=preset), load_policy(preset, weights=False), mesh)
    with pytest.raises(ConfigError, match=r"\(no file\)"):
        load_teacher(replace(config, model=byte), load_policy(byte, weights=False), mesh)
