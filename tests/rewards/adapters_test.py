"""Reward functions of other trainers: called as there, and their results read as there."""

import asyncio
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from dapo_jax.dapo.rollouts import Prompt, Verdict
from dapo_jax.rewards import Sample, grade_function
from dapo_jax.rewards.adapters import trl_reward, verl_reward
from dapo_jax.rewards.async_calls import AsyncCalls
from dapo_jax.rewards.functions import load_reward

HERE = Path(__file__)


def sample(response, *, row=None, text="6*7"):
    row = {"prompt": text, "answer": "42", **(row or {})}
    prompt = Prompt(ordinal=3, tokens=np.array([1], np.int32), text=text, answer="42", row=row)
    return Sample(prompt=prompt, response=response, tokens=np.array([3, 4], np.int32), finish_reason="stop")


def length_reward(completions, **kwargs):
    """As in TRL's documentation: reads nothing but the completions."""
    return [float(len(completion)) for completion in completions]


def column_reward(prompts, completions, answer, level):
    return [
        float(wanted in completion) * depth + len(prompt) / 100
        for prompt, completion, wanted, depth in zip(prompts, completions, answer, level, strict=True)
    ]


def conversational_reward(prompts, completions, completion_ids, **kwargs):
    [[message]], [ids] = completions, completion_ids
    assert prompts[0][-1]["role"] == "user"
    assert message["role"] == "assistant"
    return [1.0 if message["content"] == "42" and ids == [3, 4] else -1.0]


def against_the_group(prompts, completions, answer, completion_ids, level, **kwargs):
    """Compares the responses with each other, which lists of one would not allow."""
    assert prompts == ["6*7"] * 3
    assert (answer, level) == (["42"] * 3, [5] * 3)
    assert completion_ids == [[3, 4]] * 3
    mean = sum(len(completion) for completion in completions) / len(completions)
    return [mean - len(completion) for completion in completions]


async def awaited_lengths(completions, **kwargs):
    await asyncio.sleep(0)
    return [float(len(completion)) for completion in completions]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """As verl's own: a mapping with score, acc and pred."""
    assert (data_source, extra_info) == ("math_dapo", {"index": 5})
    right = solution_str == ground_truth
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": solution_str}


async def compute_awaited(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    return {"score": 0.5, "acc": solution_str == ground_truth}


def compute_number(data_source, solution_str, ground_truth, extra_info=None):
    return 0.5 if solution_str == ground_truth else 0


def graded(kind, name, given):
    [verdict] = grade_function(f"{kind}:{HERE}:{name}")([given])
    return verdict


def test_a_trl_function_scores():
    assert graded("trl", "length_reward", sample("four")) == Verdict(correct=True, score=4.0)
    assert graded("trl", "length_reward", sample("")) == Verdict(correct=False, score=0.0)


def test_a_trl_function_gets_the_rows_fields_that_it_names():
    """1.0 x level 3 + 3 / 100 for the prompt of three characters."""
    verdict = graded("trl", "column_reward", sample("it is 42", row={"level": 3, "more": "unused"}))
    assert verdict.score == pytest.approx(3.03)


def test_a_trl_function_is_called_once_with_the_whole_group():
    """Lengths 2, 4 and 6: the mean is 4."""
    group = [sample(text, row={"level": 5}) for text in ("42", "4242", "424242")]
    verdicts = grade_function(f"trl:{HERE}:against_the_group")(group)
    assert [verdict.score for verdict in verdicts] == [2.0, 0.0, -2.0]


def test_async_functions_of_other_trainers_are_awaited():
    with closing(AsyncCalls(at_once=2, timeout_s=20.0)) as loop:

        def graded_there(spec):
            verdicts = loop.submit(load_reward(spec), [sample("42"), sample("four")]).result()
            return [(verdict.correct, verdict.score) for verdict in verdicts]

        assert graded_there(f"trl:{HERE}:awaited_lengths") == [(True, 2.0), (True, 4.0)]
        assert graded_there(f"verl:{HERE}:compute_awaited") == [(True, 0.5), (False, 0.5)]


def test_a_conversation_is_answered_by_a_message():
    row = {"prompt": [{"role": "user", "content": "6*7"}]}
    assert graded("trl", "conversational_reward", sample("42", row=row)).correct
    assert not graded("trl", "conversational_reward", sample("41", row=row)).correct


def test_a_verl_function_may_return_acc_and_pred():
    row = {"data_source": "math_dapo", "extra_info": {"index": 5}}
    assert graded("verl", "compute_score", sample("42", row=row)) == Verdict(
        correct=True, extracted="42", score=1.0
    )
    assert graded("verl", "compute_score", sample("41", row=row)) == Verdict(
        correct=False, extracted="41", score=-1.0
    )


def test_a_number_above_0_is_correct():
    assert graded("verl", "compute_number", sample("42")) == Verdict(correct=True, score=0.5)
    assert graded("verl", "compute_number", sample("41")) == Verdict(correct=False, score=0.0)


@pytest.mark.parametrize(
    "given",
    [{"score": 1.0, "acc": "no"}, {"score": "1.0"}, {"score": 1.0, "acc": 0.5}, {"reward": "'score'"}],
)
def test_a_verl_result_without_a_score_is_refused(given):
    """The text "no" was right, as every text is."""
    with pytest.raises(RuntimeError, match=r"'no'|'1.0'|0\.5|'score'"):
        grade_function(verl_reward(lambda **_: given))([sample("42")])


@pytest.mark.parametrize(
    ("given", "words"), [(1.0, "1.0"), ([None] * 2, "None"), ([1.0], "1 verdicts for 2")]
)
def test_a_trl_result_is_a_list_with_a_number_for_each_completion(given, words):
    with pytest.raises(RuntimeError, match=f"returned {words}"):
        grade_function(trl_reward(lambda **_: given))([sample("42"), sample("41")])


def test_a_verl_function_gets_only_the_arguments_that_it_has():
    def own(solution_str, ground_truth, method="strict"):
        return float(solution_str == ground_truth and method == "strict")

    assert [verl_reward(own)(sample(response)).correct for response in ("42", "41")] == [True, False]
