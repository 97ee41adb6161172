"""Evaluating and sampling without training, and the keys that keep the two apart from it."""

import pytest

from dapo_jax.config import ConfigError, ModelConfig, ParallelConfig, SamplingConfig
from dapo_jax.data.prompts import held_out
from dapo_jax.data.rows import checked_rows
from dapo_jax.run import evaluate, sample
from dapo_jax.run.policy import load_policy, mesh_of
from dapo_jax.run.rollout import EVALUATION, TRAINING, Rollouts
from dapo_jax.sampling.decoding import decoding
from dapo_jax.trackers.evaluation_log import read_problems
from dapo_jax.trackers.rollout_log import read_rollouts

SMALL = {"max_response_tokens": 6, "slots": 8}


def sample_small(model, compiled, prompts=("1+2", "2+2"), **how):
    return sample(model, prompts, **{"compilation_cache": compiled, "samples_per_prompt": 4, **SMALL, **how})


def tokens_of(groups):
    return [rollout.response.tokens.tolist() for group in groups for rollout in group.rollouts]


def test_prompts_are_answered_in_their_order(model, compiled):
    groups = sample_small(model, compiled, prompts=("2+2", "1+2", "0+1"))
    assert [group.prompt.text for group in groups] == ["2+2", "1+2", "0+1"]
    assert [len(group.rollouts) for group in groups] == [4, 4, 4]
    assert all(1 <= rollout.response_tokens <= 6 for group in groups for rollout in group.rollouts)


def test_the_seed_decides_the_responses(model, compiled):
    first, again, other = (tokens_of(sample_small(model, compiled, seed=seed)) for seed in (0, 0, 1))
    assert first == again != other


def test_greedy_responses_to_a_prompt_are_all_the_same(model, compiled):
    for group in sample_small(model, compiled, temperature=0.0):
        assert len({tuple(rollout.response.tokens) for rollout in group.rollouts}) == 1


@pytest.mark.parametrize(
    ("prompts", "how", "message"),
    [
        ((" ",), {}, "'prompt' is empty"),
        (("1+x",), {}, "character 'x' at position 2"),
        (("1" * 125,), {}, "125 tokens, not 1 to data.max_prompt_tokens=122"),
        (("1",), {"temperature": -1.0}, "temperature"),
    ],
)
def test_what_cannot_be_sampled_is_a_configuration_error(prompts, how, message, model, compiled):
    with pytest.raises(ConfigError, match=message):
        sample_small(model, compiled, prompts=prompts, **how)


def evaluate_small(source, compiled, data_dir, **how):
    defaults = {"compilation_cache": compiled, "data_dir": data_dir, "samples_per_prompt": 4, "prompts": 3,
                "max_prompt_tokens": 5}  # fmt: skip
    return evaluate(source, **{**defaults, **SMALL, **how})


def test_a_run_is_evaluated_on_the_held_out_prompts_and_its_rollouts_kept(
    finished, compiled, data_dir, tmp_path
):
    scores = evaluate_small(str(finished.run_dir), compiled, data_dir, keep=str(tmp_path / "kept"))
    rows = read_rollouts(tmp_path / "kept" / "step_000000.jsonl")
    assert [row["ordinal"] for row in rows] == [0] * 4 + [1] * 4 + [2] * 4
    assert scores["eval/arithmetic/avg@4"] == sum(row["correct"] for row in rows) / 12
    assert {"eval/arithmetic/pass@4", "eval/arithmetic/cons@4"} <= scores.keys()
    assert {row["reward"] for row in rows} <= {1.0, -1.0}  # no length shaping
    problems = read_problems(tmp_path / "kept" / "problems" / "arithmetic.jsonl")
    assert [problem["ordinal"] for problem in problems] == [0, 1, 2]
    assert sum(problem["correct"] for problem in problems) == sum(row["correct"] for row in rows)


def test_an_own_grader_is_loaded_from_a_file(model, compiled, data_dir, tmp_path):
    (tmp_path / "mine.py").write_text("def right(sample):\n    return True\n")
    grader = f"{tmp_path / 'mine.py'}:right"
    scores = evaluate_small(model, compiled, data_dir, grader=grader)
    assert scores["eval/arithmetic/avg@4"] == 1.0


def test_template_and_marker_decide_what_is_asked_and_what_is_read(model, compiled, data_dir, tmp_path):
    """The tokenizer's alphabet has no space, so the template's text is seen in the kept rollouts."""
    how = {"prompt_template": "1+1=2,{prompt}", "max_prompt_tokens": 11, "keep": str(tmp_path / "kept")}
    evaluate_small(model, compiled, data_dir, answer_marker="", **how)
    rows = read_rollouts(tmp_path / "kept" / "step_000000.jsonl")
    assert all(row["prompt"].startswith("1+1=2,") for row in rows)
    # Without a marker the whole response is the answer.
    assert all(row["extracted"] == (row["response"] or None) for row in rows)


def test_options_reach_the_source(model, compiled, data_dir):
    with pytest.raises(
        ConfigError, match=r"data\.source_options: found \{'min_words': 3\}, needs data\.source"
    ):
        evaluate_small(model, compiled, data_dir, source_options={"min_words": 3})


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"data": "arithmetik"}, "did you mean 'arithmetic'"),
        ({"split": "dev"}, "has no split 'dev'"),
        ({"grader": "exact_match"}, "did you mean 'exact'"),
        ({"max_prompt_tokens": 2}, "5 tokens, not 1 to data.max_prompt_tokens=2"),
        ({"slots": 12}, "slots=12"),
    ],
)
def test_what_cannot_be_evaluated_is_a_configuration_error(how, message, model, compiled, data_dir):
    with pytest.raises(ConfigError, match=message):
        evaluate_small(model, compiled, data_dir, **how)


def test_evaluation_never_draws_the_numbers_that_training_draws(model, rows):
    """The same prompts at the same ordinals, sampled in both key domains."""
    policy = load_policy(ModelConfig(source=model))
    sampling = SamplingConfig(max_response_tokens=6, slots=8, steps_per_call=3)
    mesh = mesh_of(ParallelConfig())
    rollouts = Rollouts(
        policy, mesh, sampling, seed=0, max_prompt_tokens=4, compute_dtype="float32", group_size=4
    )
    prompts = held_out(checked_rows(rows), policy.tokenizer, max_prompt_tokens=4, limit=2)
    weights = rollouts.transfer(policy.params)

    def drawn(domain):
        left = list(prompts)
        found = rollouts.sample(
            weights, lambda count: [left.pop(0) for _ in prompts if left], how=decoding(), samples=4, domain=domain
        )  # fmt: skip
        return {prompt.ordinal: [r.tokens.tolist() for r in responses] for prompt, responses in found}

    training, evaluation = drawn(TRAINING), drawn(EVALUATION)
    assert training[0] != evaluation[0]
    assert training[1] != evaluation[1]
