"""Runs with a teacher: without graders, resumed, and refused."""

import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from dapo_jax.config import ConfigError, DynamicSamplingConfig, RolloutConfig, TeacherConfig
from dapo_jax.rollout.response_sampler import ResponseSampler
from dapo_jax.run.build import Run
from dapo_jax.run.meshes import mesh_of
from dapo_jax.run.policy import Policy, find_policy, load_policy
from dapo_jax.run.teacher_setup import load_teacher
from dapo_jax.testing import tiny_decoder_config, tiny_params
from dapo_jax.text.tokenizers import CharTokenizer
from dapo_jax.trackers.rollout_log import read_rollouts
from tests.run.conftest import assert_equal_weights, params_of
from tests.training.correction_test import logprobs_of


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


def never(*arguments, **options):
    raise AssertionError("a response was graded or sampled")


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


@pytest.fixture(scope="module")
def saved(trained):
    """The eight responses that the first step of `trained` sampled, as rows."""
    return read_rollouts(trained.run_dir / "rollouts" / "step_000001.jsonl")


@pytest.fixture
def reading(distilling, monkeypatch):
    """Makes configurations that train on four saved responses per step. The sampler fails."""
    monkeypatch.setattr(ResponseSampler, "sample", never)

    def make(run_dir=None, **changes):
        config = distilling(run_dir, **changes)
        return replace(
            config,
            batch=replace(config.batch, group_size=1, prompts_per_step=4, groups_per_update=4),
            advantage=replace(config.advantage, baseline="none"),
            data=replace(config.data, shuffle=False, deduplicate=False),
            log=replace(config.log, rollouts_every_steps=1),
            checkpoint=replace(config.checkpoint, every_steps=1),
            rollout=RolloutConfig(saved=True),
        )

    return make


def test_saved_responses_are_trained_on_in_the_order_of_the_file(saved, reading, run_micro):
    """Neither the sampler nor a grader is called. A run in two parts is equal bit for bit."""
    found = run_micro(reading(), prompts=saved, reward=never)
    for step in (1, 2):
        logged = read_rollouts(found.run_dir / "rollouts" / f"step_{step:06d}.jsonl")
        for row, expected in zip(logged, saved[4 * step - 4 : 4 * step], strict=True):
            for name in ("prompt_token_ids", "response_token_ids", "logprobs", "finish_reason"):
                assert row[name] == expected[name]
            assert row["spans"] == [[0, 0]]
    assert [line["rollout/age_max"] for line in found.metrics] == [0, 1]
    assert [line["speed/sampled_tokens_per_s"] for line in found.metrics] == [0.0, 0.0]
    part = reading(steps=1)
    run_micro(part, prompts=saved, reward=never)
    again = run_micro(reading(part.run_dir), prompts=saved, reward=never, resume=True)
    assert_equal_weights(again, found)


# Slow: two more runs. The test above compares the tokens and log-probabilities that the update gets.
@pytest.mark.slow
def test_the_divergence_at_saved_responses_is_that_of_the_run_that_sampled_them(
    trained, saved, reading, run_micro
):
    """Two runs train on four responses each. Both divergences are means over tokens at the same weights."""
    halves = [run_micro(reading(steps=1), prompts=half, reward=never) for half in (saved[:4], saved[4:])]
    counts = [sum(row["response_tokens"] for row in half) for half in (saved[:4], saved[4:])]
    mean = np.average([half.metrics[0]["teacher/reverse_kl"] for half in halves], weights=counts)
    # The sampling run has two updates, and the second compares with the policy before the first: the same weights. Its means are in float32.
    assert mean == pytest.approx(trained.metrics[0]["teacher/reverse_kl"], rel=1e-5)


def test_a_row_that_was_saved_with_other_tokens_is_refused(saved, reading, run_micro):
    wrong = [{**saved[0], "prompt_token_ids": [1]}, *saved[1:]]
    with pytest.raises(
        ConfigError, match=r"rollout\.saved: row 0 has prompt_token_ids=\[1\], needs.*eval --keep"
    ):
        run_micro(reading(steps=1), prompts=wrong, reward=never)


@pytest.mark.parametrize("cut", [{"logprobs": []}, {"response_token_ids": [1] * 99, "logprobs": [-1.0] * 99}])
def test_a_saved_response_of_another_length_is_refused(cut, saved, reading, run_micro):
    wrong = [{**saved[0], **cut}, *saved[1:]]
    with pytest.raises(
        ConfigError, match=r"rollout\.saved: row 0 has \d+ response_token_ids.*max_response_tokens"
    ):
        run_micro(reading(steps=1), prompts=wrong, reward=never)


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


def own_teacher(distilling, prompt, **changes):
    """A run whose policy is its own teacher with the question `prompt`, in one update per step."""
    config = distilling(steps=1, teacher=TeacherConfig(source="self", prompt=prompt), **changes)
    longer = replace(config.data, max_prompt_tokens=9)
    return replace(
        config,
        batch=replace(config.batch, groups_per_update=2, row_tokens=16),
        data=longer,
        log=replace(config.log, rollouts_every_steps=1),
    )


def test_a_policy_that_teaches_itself_with_the_same_prompt_learns_nothing(distilling, run_micro):
    """The policy and the teacher are the same function of the same rows, so all advantages are 0, bit for bit."""
    [line] = run_micro(own_teacher(distilling, "{prompt}"), reward=never).metrics
    assert line["teacher/reverse_kl"] == line["update/grad_norm"] == 0


# Slow: another run. tests/run/training_pass_test.py finds each token after the teacher's prompt again.
@pytest.mark.slow
def test_the_advantages_of_a_privileged_prompt(distilling, run_micro, model):
    """The mean of log pi(y | x) - log pi(y | x') is computed from the saved responses and the weights before the update, in rows of a single response.
    2e-6: log-probabilities near 2.4 have float32 values that are 2.4e-7 apart, and a sum of 16 x 8 numbers in another order."""
    result = run_micro(own_teacher(distilling, "{answer}:{prompt}"), reward=never)
    policy = find_policy(model)
    params = {**nnx.to_pure_dict(policy.params)["blocks"], **nnx.to_pure_dict(policy.params)["ends"]}
    differences = []
    for row in read_rollouts(result.run_dir / "rollouts" / "step_000001.jsonl"):
        question, answer = row["prompt"], row["answer"]
        ids = row["response_token_ids"]
        scores = [
            np.asarray(
                logprobs_of(params, np.array([[*policy.tokenizer.encode(text), *ids]]), policy.decoder)
            )[0]
            for text in (question, f"{answer}:{question}")
        ]
        own, privileged = (score[-len(ids) :] for score in scores)
        differences += (own - privileged).tolist()
    assert abs(np.mean(differences)) > 1e-3
    [line] = result.metrics
    assert line["teacher/reverse_kl"] == pytest.approx(np.mean(differences), abs=2e-6)
    assert line["update/grad_norm"] > 0


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            "{prompt} {hint}",
            r"teacher\.prompt: .*names the column 'hint', but a row has \['answer', 'prompt'\]",
        ),
        ("{prompt}:::::::::", r"teacher\.prompt: .*12 tokens.* data\.max_prompt_tokens=9: raise"),
    ],
)
def test_a_prompt_of_the_teacher_that_does_not_fit_the_rows_is_refused(prompt, message, distilling, rows):
    with pytest.raises(ConfigError, match=message):
        Run(own_teacher(distilling, prompt), prompts=rows, reward=never)


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
