"""avg@k, pass@j and cons@k against hand-counted numbers and exhaustive enumeration."""

import itertools
import math
from dataclasses import replace

import pytest

from dapo_jax.evaluation import (
    consensus,
    consensus_answers,
    lost_verdicts,
    pass_at_k,
    problem_record,
    problem_scores,
    responses_kept,
    summarize,
    table,
)
from tests.dapo.made import group_of, rollout_of


def make_group(answers, *, right=("7",), lengths=None, truncated=(), lost=(), row=None):
    """One rollout per extracted answer (None: not found); it is correct if it is among `right`."""
    rollouts = [
        rollout_of(
            length, truncated=index in truncated, correct=answer in right, extracted=answer, lost="timeout" if index in lost else ""
        )
        for index, (answer, length) in enumerate(zip(answers, lengths or [1] * len(answers), strict=True))
    ]  # fmt: skip
    return group_of(rollouts, ordinal=5, answer=right[0], row=row or {})


@pytest.mark.parametrize("samples", range(1, 9))
def test_pass_at_k_is_the_share_of_all_draws_with_a_correct_sample(samples):
    """Every number of correct samples, every k, every choice of k samples."""
    for correct, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        draws = list(itertools.combinations(range(samples), k))
        share = sum(any(index < correct for index in draw) for draw in draws) / len(draws)
        assert pass_at_k(samples, correct, k) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize(("samples", "correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)])
def test_pass_at_k_refuses_impossible_counts(samples, correct, k):
    with pytest.raises(ValueError, match=f"correct={correct}, samples={samples}, k={k}"):
        pass_at_k(samples, correct, k)


@pytest.mark.parametrize("samples", range(1, 7))
def test_the_consensus_is_the_chance_that_a_correct_answer_wins_when_ties_are_broken_by_order(samples):
    """All multisets of three answers and a missing one, which does not vote, each in all orders; a tie goes to the first answer."""
    for answers in itertools.combinations_with_replacement(("7", "3", "1", None), samples):
        orders = list(itertools.permutations(answers))
        wins = sum(first_most_frequent(order) == "7" for order in orders)
        assert consensus(make_group(answers)) == pytest.approx(wins / len(orders), abs=1e-12)


def first_most_frequent(order):
    votes = [answer for answer in order if answer is not None]
    return max(votes, key=votes.count, default=None)  # the first of several maxima


def test_equal_numbers_with_different_texts_are_different_votes():
    """Three of five responses are correct, but as texts 3 has two votes, 1/2 two and 0.5 one."""
    group = make_group(["3", "1/2", "0.5", "1/2", "3"], right=("0.5", "1/2"))
    assert consensus_answers(group) == ["3", "1/2"]
    assert consensus(group) == 0.5
    assert consensus_answers(make_group([None, "7", None])) == ["7"]
    assert consensus_answers(make_group([None])) == []
    # An empty answer, such as the content of an empty box, is no vote.
    assert consensus_answers(make_group(["", "7", ""])) == ["7"]


@pytest.mark.parametrize(
    ("k", "draws"), [(1, [1]), (2, [2]), (3, [2, 3]), (4, [2, 4]), (6, [2, 4, 6]), (8, [2, 4, 8]), (9, [2, 4, 8, 9])]
)  # fmt: skip
def test_pass_is_given_for_the_powers_of_two_and_for_all_samples(k, draws):
    names = list(problem_scores(make_group(["7"] * k)))
    assert names == [f"avg@{k}", *(f"pass@{j}" for j in draws), f"cons@{k}", "reward"]


def test_the_reward_of_a_problem_is_the_mean_without_length_shaping():
    """Scores 0.5 and -1.5, the second with a length penalty of 0.25: (0.5 - 1.5) / 2 = -0.5, not -0.625. Two such problems and
    one of 0.25: the mean is (-0.5 - 0.5 + 0.25) / 3 = -0.25, its error std([-.5, -.5, .25], ddof=1) / sqrt(3) = 0.25."""
    group = make_group([None, None])
    first, second = group.rollouts
    shaped = replace(second, reward=-1.75, overlong_penalty=-0.25)
    group = replace(group, rollouts=(replace(first, reward=0.5), shaped))
    other = replace(group, rollouts=(replace(first, reward=0.25),) * 2)
    found = summarize([group, group, other], name="toy")
    assert found["eval/toy/reward"] == pytest.approx(-0.25)
    assert found["eval/toy/reward_stderr"] == pytest.approx(0.25)
    assert problem_record(group)["reward"] == -0.5


def test_summary_of_three_prompts():
    """Accuracies 1, 1/2, 0. avg: 1/2, its error std([1, .5, 0], ddof=1) / sqrt(3) = 0.5 / sqrt(3) = 0.2887. pass@2: 1, 1,
    0, mean 2/3, error sqrt(1/3) / sqrt(3) = 1/3. cons: 1, 1/2, 0. Tokens (1+2+3+4+5+6) / 6 = 3.5, one of six truncated."""
    groups = [
        make_group(["7", "7"], lengths=[1, 2]),
        make_group(["7", "3"], lengths=[3, 4]),
        make_group(["3", "3"], lengths=[5, 6], truncated={1}),
    ]
    error = 0.5 / math.sqrt(3)
    expected = {
        "avg@2": 0.5, "avg@2_stderr": error, "pass@2": 2 / 3, "pass@2_stderr": 1 / 3, "cons@2": 0.5, "cons@2_stderr": error,
        "reward": 0.0, "reward_stderr": 0.0, "response_tokens": 3.5, "truncated_frac": 1 / 6, "problems": 3.0,
    }  # fmt: skip
    found = summarize(groups, name="toy")
    assert found == pytest.approx({f"eval/toy/{name}": value for name, value in expected.items()})


def test_there_is_no_consensus_without_a_vote():
    """A grader that returns a bool extracts nothing, so every response has a verdict and no answer."""
    silent = [make_group([None, None], right=("7", right)) for right in (None, "7")]
    found = summarize(silent, name="toy")
    assert found["eval/toy/avg@2"] == 0.5  # all right, all wrong
    assert not [key for key in found if "cons" in key]
    # One answer in the whole evaluation is a vote: one of three problems has a consensus.
    found = summarize([*silent, make_group(["7", None])], name="toy")
    assert found["eval/toy/cons@2"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("groups", [[], [make_group(["7"]), make_group(["7", "3"])]])
def test_groups_of_different_sizes_have_no_common_k(groups):
    with pytest.raises(ValueError, match=r"sizes \["):
        summarize(groups, name="toy")


def test_a_problem_record_has_scores_and_their_inputs():
    """Two of four correct: pass@2 is 1 - C(2, 2) / C(4, 2) = 5 / 6. A correct response may lack an extracted answer."""
    group = make_group(
        ["3", "7", None, "3"], right=("7", None), lengths=[1, 2, 3, 4], truncated={3}, lost={0, 3}, row={"source_row": "own.jsonl, line 12"}
    )  # fmt: skip
    assert problem_record(group) == {
        "ordinal": 5, "place": "own.jsonl, line 12", "prompt": "?", "answer": "7", "samples": 4, "correct": 2,
        "avg@4": 0.5, "pass@2": pytest.approx(5 / 6), "pass@4": 1.0, "cons@4": 0.0, "reward": 0.0, "consensus_answers": ["3"],
        "extracted": [
            {"answer": answer, "count": count, "correct": correct}
            for answer, count, correct in (("3", 2, 0), ("7", 1, 1), (None, 1, 1))
        ],
        "response_tokens": 2.5, "truncated": 1, "lost": 2, "responses": [],
    }  # fmt: skip
    assert problem_record(make_group(["7"]))["place"] is None


def test_a_problem_record_keeps_the_first_responses_with_their_verdicts():
    group = make_group(["3", "7", None], lengths=[1, 2, 3], truncated={2}, lost={2})
    assert problem_record(group, 2)["responses"] == [
        {
            "response": "", "correct": correct, "extracted": extracted, "reason": "", "score": None,
            "response_tokens": tokens, "finish_reason": "stop",
        }
        for correct, extracted, tokens in ((False, "3", 1), (True, "7", 2))
    ]  # fmt: skip
    assert len(problem_record(group, 9)["responses"]) == 3


@pytest.mark.parametrize(("problems", "responses"), [(30, 64), (1319, 64), (1, 64), (3, 0), (0, 64)])
def test_the_kept_responses_are_spread_evenly_over_the_problems(problems, responses):
    kept = responses_kept(problems, responses)
    assert len(kept) == problems
    assert sum(kept) == (responses if problems else 0)
    assert not problems or max(kept) - min(kept) <= 1
    assert kept == sorted(kept, reverse=True)


def test_the_table_has_a_row_for_each_dataset_and_a_dash_for_a_missing_score():
    """Accuracies 1/4 and 3/4 at k = 4 as above; a single problem with k = 2, half correct, has no standard error."""
    scores = {
        **summarize([make_group(["7", "3", "3", "1"]), make_group(["7", "7", "3", "7"])], name="a"),
        **summarize([make_group(["7", "3"], lengths=[10, 11], truncated={1})], name="hf:org/set"),
    }
    assert table(scores) == (
        "dataset     avg@2  avg@4          pass@2         pass@4         cons@2  cons@4         reward         tokens  truncated  problems\n"
        "a           -      0.500 ± 0.250  0.750 ± 0.250  1.000 ± 0.000  -       0.500 ± 0.500  0.000 ± 0.000     1.0      0.000         2\n"
        "hf:org/set  0.500  -              1.000          -              0.500   -              0.000            10.5      0.500         1\n"
    )


def test_the_table_orders_its_columns_by_number_and_takes_a_line_of_metrics():
    """metrics.jsonl has None for a missing number, and other metrics. With the metric score there are no accuracies."""
    line = {"step": 3, "rollout/waves": 2, "time/eval_s": 0.5, "eval/a/pass@16": 1, "eval/a/pass@2": 0.5,
            "eval/a/avg@16": 0.25, "eval/a/avg@16_stderr": None, "eval/a/cons@16": None}  # fmt: skip
    assert table(line) == (
        "dataset  avg@16  pass@2  pass@16  cons@16  tokens  truncated  problems\n"
        "a        0.250   0.500   1.000    -             -          -         -\n"
    )
    header, row = table({**line, "eval/a/reward": -0.25}, metric="score").splitlines()
    assert header == "dataset  reward  tokens  truncated  problems"
    assert row.split()[:2] == ["a", "-0.250"]


@pytest.mark.parametrize("scores", [{}, {"rollout/accuracy": 0.5, "eval/a/response_tokens": 3.0}])
def test_metrics_without_an_evaluation_make_no_table(scores):
    with pytest.raises(ValueError, match=f"{len(scores)} metrics .* eval/NAME/avg@8"):
        table(scores)


def test_responses_without_a_verdict_are_counted_with_the_first_reason():
    whole, cut = make_group(["7", "7"]), make_group(["7", "7", "8"], lost=(1, 2))
    assert lost_verdicts([whole]) == ""
    assert lost_verdicts([whole, cut]) == "2 of 5 responses got no verdict and count as wrong: timeout"
