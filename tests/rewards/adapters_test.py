"""Reward functions of other trainers: called as there, and their results read as there."""

import warnings
from contextlib import closing
from pathlib import Path

import pytest

from dapo_jax.config import RewardConfig
from dapo_jax.config.reward_schema import GRADER_WORKERS
from dapo_jax.dapo.rollouts import Response, Span, Verdict
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.rewards import grade_function
from dapo_jax.rewards.adapters import trl_reward, verl_reward
from dapo_jax.rewards.async_calls import AsyncCalls
from dapo_jax.rewards.functions import load_reward
from dapo_jax.rewards.shaping import Shaping, samples_of, shaped_group
from dapo_jax.run.grader_setup import submit_of
from dapo_jax.text.tokenizers import ByteTokenizer
from tests.rewards.samples import sample, samples

FUNCTIONS = Path(__file__).with_name("other_trainers.py")
TOKENIZER = ByteTokenizer()


def graded(kind, name, *responses, row):
    return grade_function(f"{kind}:{FUNCTIONS}:{name}")(samples(*responses, row=row))


def test_a_trl_function_is_called_once_with_the_whole_group():
    """Lengths 2, 4 and 6: the mean is 4."""
    verdicts = graded("trl", "against_the_group", "42", "4242", "424242", row={"level": 5})
    assert [verdict.score for verdict in verdicts] == [2.0, 0.0, -2.0]


def test_async_functions_of_other_trainers_are_awaited():
    with closing(AsyncCalls(at_once=2, timeout_s=20.0)) as loop:

        def graded_there(spec):
            verdicts = loop.submit(load_reward(spec), samples("42", "four")).result()
            return [(verdict.correct, verdict.score) for verdict in verdicts]

        assert graded_there(f"trl:{FUNCTIONS}:awaited_lengths") == [(True, 2.0), (True, 4.0)]
        assert graded_there(f"verl:{FUNCTIONS}:compute_awaited") == [(True, 0.5), (False, 0.5)]


def test_a_conversation_is_answered_by_a_message():
    row = {"prompt": [{"role": "user", "content": "6*7"}]}
    correct = [graded("trl", "conversational_reward", text, row=row)[0].correct for text in ("42", "41")]
    assert correct == [True, False]


def test_a_verl_function_may_return_acc_and_pred():
    row = {"data_source": "math_dapo", "extra_info": {"index": 5}}
    assert graded("verl", "compute_score", "42", "41", row=row) == [
        Verdict(correct=True, extracted="42", score=1.0), Verdict(correct=False, extracted="41", score=-1.0),
    ]  # fmt: skip


def test_a_verl_function_gets_only_the_arguments_that_it_has_and_a_number_above_0_is_correct():
    def own(solution_str, ground_truth, method="strict"):
        return 0.5 if solution_str == ground_truth and method == "strict" else 0

    verdicts = grade_function(verl_reward(own))(samples("42", "41"))
    assert verdicts == [Verdict(correct=True, score=0.5), Verdict(correct=False, score=0.0)]


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
        grade_function(trl_reward(lambda **_: given))(samples("42", "41"))


def test_bools_of_a_trl_function_are_numbers():
    """TRL makes a float tensor of them; a bool of our own kind would be worth reward.incorrect=-1."""
    verdicts = grade_function(trl_reward(lambda **_: [True, False]))(samples("42", "41"))
    assert [(verdict.correct, verdict.score) for verdict in verdicts] == [(True, 1.0), (False, 0.0)]


def rewarded(config, *texts, workers=0):
    """The rewards and the group of responses that were sampled after 5 steps, as a run computes them."""
    responses = [
        Response(record=Tokens(tokens), finish_reason="stop", spans=(Span(0, 5),))
        for tokens in map(TOKENIZER.encode, texts)
    ]  # fmt: skip
    prompt = sample().prompt
    given = samples_of(prompt, responses, tokenizer=TOKENIZER)
    submit, close = submit_of(config, workers=GRADER_WORKERS._replace(count=workers))
    try:
        verdicts = submit(given).result()
    finally:
        if close:
            close()
    group = shaped_group(prompt, responses, given, verdicts, Shaping())
    return group.rewards.tolist(), [rollout.verdict for rollout in group.rollouts]


SHORT, NONE = (f"trl:{FUNCTIONS}:{name}" for name in ("for_short_ones", "for_none"))


def sum_of(**weights):
    return [{"grader": f"trl:{FUNCTIONS}:{name}", "weight": weight} for name, weight in weights.items()]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_trl_function_gets_the_step_and_its_logs_reach_the_verdicts(workers):
    """(4 + 0) / 2 characters; step 5 + lengths 1 and 3."""
    rewards, [first, second] = rewarded(RewardConfig(grader=SHORT), "a", "abc", workers=workers)
    assert rewards == [6.0, 8.0]
    assert first.parts == second.parts == {"characters": 2.0}
    assert (first.reason, second.reason) == ("length=1, upper=A", "length=3, upper=ABC")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_response_to_which_a_trl_function_does_not_apply_adds_nothing_to_a_sum(workers):
    """As `nansum` in TRL: 0.5 x 6 + 1 and 0 + 5, where the second function is the length."""
    config = RewardConfig(grader=sum_of(length_reward=1.0, for_short_ones=0.5))
    rewards, verdicts = rewarded(config, "a", "abcde", workers=workers)
    assert rewards == [4.0, 5.0]
    assert [verdict.parts["for_short_ones"] for verdict in verdicts] == [6.0, 0.0]
    assert [verdict.parts["characters"] for verdict in verdicts] == [3.0, 3.0]
    assert not any(verdict.lost for verdict in verdicts)


def test_a_response_to_which_no_function_applies_has_the_mean_reward_and_is_warned_of():
    """As in TRL 1.16, its advantage is 0: (6 + 8) / 2."""
    for config in (
        RewardConfig(grader=SHORT),
        RewardConfig(grader=sum_of(for_short_ones=1.0, for_none=3.0)),
    ):
        with pytest.warns(UserWarning, match="no reward function applies"):
            rewards, verdicts = rewarded(config, "a", "abc", "abcd")
        assert rewards == [6.0, 8.0, 7.0]
        assert [verdict.score for verdict in verdicts] == [6.0, 8.0, 7.0]
        assert [verdict.correct for verdict in verdicts] == [True, True, False]
    with pytest.warns(UserWarning, match="no reward function applies"):
        assert rewarded(RewardConfig(grader=NONE), "a", "abc")[0] == [0.0, 0.0]


def test_a_function_that_applies_to_each_response_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = RewardConfig(grader=sum_of(length_reward=1.0, for_none=3.0))
        assert rewarded(config, "a", "abcd")[0] == [1.0, 4.0]
