"""avg@k, pass@k and cons@k against hand-counted numbers."""

import itertools
import math

import numpy as np
import pytest

from dapo_jax.evaluation import consensus, pass_at_k, summarize
from dapo_jax.rollouts import Group, Prompt, Response, Rollout, Verdict


def make_group(answers, *, right="7", lengths=None, truncated=()):
    """One rollout per extracted answer (None: none was found); it is correct if it is `right`."""
    lengths = lengths or [1] * len(answers)
    rollouts = tuple(
        Rollout(
            response=Response(
                tokens=np.ones(length, np.int32),
                logprobs=np.zeros(length, np.float32),
                finish_reason="length" if index in truncated else "stop",
            ),
            text="",
            verdict=Verdict(correct=answer == right, extracted=answer),
            reward=0.0,
        )
        for index, (answer, length) in enumerate(zip(answers, lengths, strict=True))
    )
    prompt = Prompt(ordinal=0, tokens=np.array([2], np.int32), text="?", answer=right)
    return Group(prompt=prompt, rollouts=rollouts)


@pytest.mark.parametrize(("samples", "correct"), [(5, 0), (5, 1), (5, 3), (5, 5)])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_pass_at_k_is_the_share_of_all_draws_that_hold_a_correct_one(samples, correct, k):
    draws = list(itertools.combinations(range(samples), k))
    share = sum(any(index < correct for index in draw) for draw in draws) / len(draws)
    assert pass_at_k(samples, correct, k) == pytest.approx(share)


@pytest.mark.parametrize(("samples", "correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)])
def test_pass_at_k_refuses_impossible_counts(samples, correct, k):
    with pytest.raises(ValueError, match="need 0 <= correct <= samples"):
        pass_at_k(samples, correct, k)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["7", "7", "3"], 1.0),
        (["3", "3", "7"], 0.0),
        (["3", "7"], 0.5),  # two leaders, one of them right
        (["1", "3", "7"], 1 / 3),
        (["7", None, None], 1.0),  # silence does not vote
        ([None, None], 0.0),
    ],
)
def test_the_consensus_is_the_most_frequent_answer(answers, expected):
    assert consensus(make_group(answers)) == pytest.approx(expected)


def test_summary_of_three_prompts():
    """Accuracies 1, 1/2, 0. avg: 1/2, its error std([1, .5, 0], ddof=1) / sqrt(3) = 0.5 / sqrt(3) = 0.2887. pass@2: 1, 1,
    0, mean 2/3, error sqrt(1/3) / sqrt(3) = 1/3. cons: 1, 1/2, 0. Tokens (1+2+3+4+5+6) / 6 = 3.5, one of six truncated."""
    groups = [
        make_group(["7", "7"], lengths=[1, 2]),
        make_group(["7", "3"], lengths=[3, 4]),
        make_group(["3", "3"], lengths=[5, 6], truncated={1}),
    ]
    assert summarize(groups, name="toy") == pytest.approx(
        {
            "eval/toy/avg@2": 0.5,
            "eval/toy/pass@2": 2 / 3,
            "eval/toy/cons@2": 0.5,
            "eval/toy/avg@2_stderr": 0.5 / math.sqrt(3),
            "eval/toy/pass@2_stderr": 1 / 3,
            "eval/toy/cons@2_stderr": 0.5 / math.sqrt(3),
            "eval/toy/response_tokens": 3.5,
            "eval/toy/truncated_frac": 1 / 6,
        }
    )


def test_one_prompt_has_no_standard_error():
    assert math.isnan(summarize([make_group(["7", "3"])], name="toy")["eval/toy/avg@2_stderr"])


@pytest.mark.parametrize("groups", [[], [make_group(["7"]), make_group(["7", "3"])]])
def test_groups_of_different_sizes_have_no_common_k(groups):
    with pytest.raises(ValueError, match="groups of one size"):
        summarize(groups, name="toy")
