"""Reward functions of other trainers: called as there, and their results read as there."""

import asyncio
import warnings
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dapo_jax.config import RewardConfig
from dapo_jax.dapo.rollouts import Prompt, Response, Span, Verdict
from dapo_jax.rewards import Sample, grade_function
from dapo_jax.rewards.adapters import trl_reward, verl_reward
from dapo_jax.rewards.async_calls import AsyncCalls
from dapo_jax.rewards.functions import load_reward
from dapo_jax.rewards.shaping import Shaping, samples_of, shaped_group
from dapo_jax.run.grader_setup import submit_of

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


def for_short_ones(completions, trainer_state, log_extra, log_metric):
    """TRL's keyword arguments. None: the function does not apply to long responses."""
    log_metric("characters", sum(map(len, completions)))
    log_metric("characters", 0)  # a metric is the mean of its values
    log_extra("length", [len(completion) for completion in completions])
    log_extra("upper", [completion.upper() for completion in completions])
    step = trainer_state.global_step
    return [step + len(completion) if len(completion) < 4 else None for completion in completions]


def for_none(completions, **kwargs):
    assert {"trainer_state", "log_extra", "log_metric"} <= set(kwargs)
    return [None] * len(completions)


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
    ("given", "words"),
    [(1.0, "1.0"), (None, "None"), ([1.0], "1 verdicts for 2"), ([None], "1 verdicts for 2")],
)
def test_a_trl_result_is_a_list_with_a_number_for_each_completion(given, words):
    with pytest.raises(RuntimeError, match=f"returned {words}"):
        grade_function(trl_reward(lambda **_: given))([sample("42"), sample("41")])


def rewarded(graders, *texts, workers=0):
    """The rewards and verdicts of responses that were sampled after 5 steps, as a run computes them."""
    responses = [
        Response(
            tokens=np.array([3], np.int32),
            logprobs=np.zeros(1, np.float32),
            finish_reason="stop",
            spans=(Span(0, 5),),
        )
        for _ in texts
    ]
    prompt = sample("").prompt
    samples = [
        replace(one, response=text)
        for one, text in zip(samples_of(prompt, responses, tokenizer=Empty()), texts, strict=True)
    ]
    config = (
        RewardConfig(graders=graders, workers=workers)
        if len(graders) > 1
        else RewardConfig(grader=graders[0]["grader"], workers=workers)
    )
    submit, close = submit_of(config)
    try:
        verdicts = submit(samples).result()
    finally:
        if close:
            close()
    group = shaped_group(prompt, responses, samples, verdicts, Shaping())
    return group.rewards.tolist(), verdicts, group


class Empty:
    def decode(self, ids):
        return ""


SHORT, NONE, LENGTH = (
    {"grader": f"trl:{HERE}:{name}"} for name in ("for_short_ones", "for_none", "length_reward")
)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_trl_function_gets_the_step_and_its_logs_reach_the_verdicts(workers):
    """(4 + 0) / 2 characters; step 5 + lengths 1 and 3."""
    rewards, [first, second], _ = rewarded([SHORT], "a", "abc", workers=workers)
    assert rewards == [6.0, 8.0]
    assert first.parts == second.parts == {"characters": 2.0}
    assert (first.reason, second.reason) == ("length=1, upper=A", "length=3, upper=ABC")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_response_to_which_a_trl_function_does_not_apply_adds_nothing_to_a_sum(workers):
    """As `nansum` in TRL: 0.5 x 6 + 1 and 0 + 5, where the second function is the length."""
    rewards, verdicts, _ = rewarded([LENGTH, SHORT | {"weight": 0.5}], "a", "abcde", workers=workers)
    assert rewards == [4.0, 5.0]
    assert [verdict.parts["for_short_ones"] for verdict in verdicts] == [6.0, 0.0]
    assert [verdict.parts["characters"] for verdict in verdicts] == [3.0, 3.0]
    assert not any(verdict.lost for verdict in verdicts)


def test_a_response_to_which_no_function_applies_has_the_mean_reward_and_is_warned_of():
    """As in TRL 1.16, its advantage is 0: (6 + 8) / 2."""
    for graders in ([SHORT], [SHORT | {"weight": 1.0}, NONE | {"weight": 3.0}]):
        with pytest.warns(UserWarning, match="no reward function applies"):
            rewards, _, group = rewarded(graders, "a", "abc", "abcd")
        assert rewards == [6.0, 8.0, 7.0]
        assert [one.verdict.score for one in group.rollouts] == [6.0, 8.0, 7.0]
        assert [one.verdict.correct for one in group.rollouts] == [True, True, False]
    with pytest.warns(UserWarning, match="no reward function applies"):
        assert rewarded([NONE], "a", "abc")[0] == [0.0, 0.0]


def test_a_function_that_applies_to_each_response_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rewarded([LENGTH, NONE | {"weight": 3.0}], "a", "abcd")[0] == [1.0, 4.0]


def test_bools_of_a_trl_function_are_numbers():
    """TRL makes a float tensor of them; a bool of our own kind would be worth reward.incorrect=-1."""
    verdicts = grade_function(trl_reward(lambda **_: [True, False]))([sample("42"), sample("41")])
    assert [(verdict.correct, verdict.score) for verdict in verdicts] == [(True, 1.0), (False, 0.0)]


def test_a_verl_function_gets_only_the_arguments_that_it_has():
    def own(solution_str, ground_truth, method="strict"):
        return float(solution_str == ground_truth and method == "strict")

    assert [verl_reward(own)(sample(response)).correct for response in ("42", "41")] == [True, False]
