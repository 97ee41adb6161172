"""Evaluation and sampling without training."""

import json
import shutil
from dataclasses import replace

import pytest

from dapo_jax.commands import evaluate, inference, sample
from dapo_jax.config import (
    ConfigError,
    DataConfig,
    EvalConfig,
    EvaluateConfig,
    SamplingConfig,
    to_yaml,
)
from dapo_jax.trackers.rollout_log import read_problems, read_rollouts

SMALL = {"max_response_tokens": 6, "slots": 8}


def sample_small(model, prompts=("1+2", "2+2"), **how):
    return sample(model, prompts, **{"samples_per_prompt": 4, **SMALL, **how})


def tokens_of(groups):
    return [rollout.response.tokens.tolist() for group in groups for rollout in group.rollouts]


def test_the_seed_decides_the_responses_unless_they_are_greedy(model):
    first, again, other = (tokens_of(sample_small(model, seed=seed)) for seed in (0, 0, 1))
    assert first == again != other
    for group in sample_small(model, temperature=0.0):
        assert len({tuple(rollout.response.tokens) for rollout in group.rollouts}) == 1


@pytest.fixture
def run_of(chat_model, micro, tmp_path):
    """Returns a function that makes the folder of a run with a chat model and the given keys."""

    def make(**changes):
        shutil.copytree(chat_model, tmp_path / "run" / "model")
        (tmp_path / "run" / "config.yaml").write_text(to_yaml(micro(**changes)))
        return str(tmp_path / "run")

    return make


def texts_of(groups):
    return [group.prompt.text for group in groups]


def test_the_prompts_of_a_run_have_the_format_of_its_data(run_of):
    shown = [{"prompt": "1+1", "response": "2"}]
    keys = {"chat": True, "system_prompt": "S", "few_shot": shown, "prompt_template": "Q {prompt}"}
    run = run_of(**{f"data__{name}": value for name, value in keys.items()})
    turns = "user\nQ 1+1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\nQ 3"
    for system, given in (("S", {}), ("T", {"system_prompt": "T"})):
        [text] = texts_of(sample_small(run, ["3"], samples_per_prompt=1, **given))
        assert text == (
            f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>{turns}<|im_end|>\n<|im_start|>assistant\n"
        )


def test_a_run_on_conversations_is_asked_in_a_conversation(run_of, tmp_path):
    row = {"prompt": [{"role": "user", "content": "1"}], "answer": "1"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    data = {"source": "jsonl", "path": str(tmp_path / "rows.jsonl")}
    run = run_of(**{f"data__{name}": value for name, value in data.items()})
    [text] = texts_of(sample_small(run, ["3"], samples_per_prompt=1))
    assert text == "<|im_start|>user\n3<|im_end|>\n<|im_start|>assistant\n"
    (tmp_path / "rows.jsonl").unlink()
    assert texts_of(sample_small(run, ["3"], samples_per_prompt=1)) == ["3"]


def test_the_responses_of_a_run_end_where_they_ended_in_training(run_of):
    """Every id of the tokenizer ends a response, and the model's further ids do not, unless the caller names one id."""
    run = run_of(sampling__stop_token_ids=list(range(320)))

    def inner(**how):
        return [token for tokens in tokens_of(sample_small(run, **how)) for token in tokens[:-1]]

    assert min(inner(), default=320) >= 320
    assert min(inner(stop_token_ids=[319])) < 320


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ((" ",), {}, "'prompt' is empty"),
        (("1+x",), {}, "character 'x' at position 2"),
        (("1" * 125,), {}, r"125 tokens.*data\.max_prompt_tokens=122"),
        (("1",), {"temperature": 1e-9}, "temperature: found 1e-09"),
        (("1",), {"seed": 2**70}, "seed"),
        (("1",), {"max_response_tokens": 128}, "max_response_tokens=128 .* at most 127.* 128 positions"),
    ],
)
def test_invalid_prompts_and_settings_are_configuration_errors(prompts, options, message, model):
    with pytest.raises(ConfigError, match=message):
        sample_small(model, prompts=prompts, **options)


@pytest.fixture
def small():
    """Makes evaluations of the micro model; `section__key=value` changes one key."""

    def make(**changes):
        config = EvaluateConfig(
            data=DataConfig(max_prompt_tokens=5),
            sampling=SamplingConfig(max_response_tokens=6, slots=8),
            eval=EvalConfig(prompts=3, samples_per_prompt=4, top_p=1.0),
        )
        for key, value in changes.items():
            section, _, name = key.partition("__")
            config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
        return config

    return make


def test_a_run_is_evaluated_on_held_out_prompts_and_its_responses_are_kept(finished, small, tmp_path):
    found = evaluate(str(finished.run_dir), small(), keep=tmp_path / "kept")
    rows = read_rollouts(tmp_path / "kept" / "arithmetic" / "step_000000.jsonl")
    assert [row["ordinal"] for row in rows] == [0] * 4 + [1] * 4 + [2] * 4
    assert found.scores["eval/arithmetic/avg@4"] == sum(row["correct"] for row in rows) / 12
    assert "eval/arithmetic/pass@4" in found.scores
    # There is a consensus if a response has an answer.
    voted = any(row["extracted"] is not None for row in rows)
    assert ("eval/arithmetic/cons@4" in found.scores) is voted
    assert {row["reward"] for row in rows} <= {1.0, -1.0}  # no length shaping
    problems = read_problems(tmp_path / "kept" / "problems" / "arithmetic.jsonl")
    assert [problem["ordinal"] for problem in problems] == [0, 1, 2]
    assert sum(problem["correct"] for problem in problems) == sum(row["correct"] for row in rows)
    assert [group.prompt.ordinal for group in found.groups["arithmetic"]] == [0, 1, 2]


def test_a_run_is_evaluated_as_it_was_while_it_trained(finished, rows, even_sum):
    found = evaluate(str(finished.run_dir), rows=rows, reward=even_sum)
    last = finished.metrics[-1]
    assert found.scores == {key: last[key] for key in found.scores}


def brief(sample):
    """A number of 0 or less, so no response is correct."""
    return -float(len(sample.tokens))


def test_an_evaluation_reports_whether_scores_or_verdicts_count(
    finished, micro, run_micro, rows, even_sum, tmp_path
):
    by_score = micro(steps=1, dynamic_sampling__metric="score", dynamic_sampling__on_shortfall="train_fewer")
    scored = str(run_micro(by_score, reward=brief).run_dir)
    judged = str(finished.run_dir)

    def metric(model, config=None, *overrides):
        return inference._configured(model, config, overrides)[1]

    assert metric(scored) == "score"
    assert metric(judged) == "correct"
    by_override = "dynamic_sampling.metric=score"
    assert metric(judged, None, by_override, "compute_dtype=float32", "reward.incorrect=-2") == "score"
    assert metric(judged, f"{scored}/config.yaml") == "score"
    assert metric(scored, f"{judged}/config.yaml") == "correct"
    assert evaluate(scored, rows=rows, reward=even_sum).metric == "correct"  # the grader returns no scores
    file = tmp_path / "evaluation.yaml"
    file.write_text("{data: {max_prompt_tokens: 4}, sampling: {slots: 8, max_response_tokens: 6}}")
    assert evaluate(scored, file, rows=rows, reward=brief).metric == "score"


def test_several_datasets_are_evaluated_one_after_the_other(model, small, tmp_path):
    (tmp_path / "own.jsonl").write_text('{"q": "3+3", "a": "6"}\n')
    options = {"prompt": "q", "answer": "a"}
    own = {"source": "jsonl", "path": str(tmp_path / "own.jsonl"), "source_options": options}
    found = evaluate(model, small(eval__datasets=[{"source": "arithmetic"}, own]))
    assert [group.prompt.text for group in found.groups["own"]] == ["3+3"]
    assert len(found.groups["arithmetic"]) == 3
    alone = evaluate(model, small(eval__datasets=[own]))
    assert alone.scores["eval/own/response_tokens"] == found.scores["eval/own/response_tokens"]


@pytest.mark.parametrize(
    ("change", "overrides", "message"),
    [
        ({"data__max_prompt_tokens": 2}, (), r"5 tokens.*data\.max_prompt_tokens=2"),
        ({"sampling__slots": 12}, (), "slots=12"),
        ({}, ["seed=1"], "seed=1"),
    ],
)
def test_invalid_evaluations_are_configuration_errors(change, overrides, message, model, small):
    with pytest.raises(ConfigError, match=message):
        evaluate(model, small(**change), overrides=overrides)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward__grader": "exakt"}, "exakt"),
        ({"data__eval_split": "test[5:5]"}, r"'test\[5:5\]'.* 1,000 and 7,100 rows"),
        ({"eval__datasets": [{"source": "jsonl", "path": "/held_out.jsonl"}]}, r"/held_out\.jsonl"),
    ],
)
def test_the_grader_and_the_data_are_checked_before_the_weights(
    change, message, small, model_without_weights
):
    with pytest.raises(ConfigError, match=message):
        evaluate(model_without_weights, small(**change))
