"""Metrics of a step's rollouts, computed by hand."""

from dataclasses import replace

import pytest

from dapo_jax.dapo.dynamic_sampling import Collected
from dapo_jax.dapo.rollouts import Span, Verdict
from dapo_jax.training.step_metrics import rollout_metrics
from tests.dapo.made import group_of, rollout_of

NOW = (Span(0, 3),)


def make_group(*responses, spans=NOW):
    """(verdict, tokens, truncated, reward, penalty) for each rollout."""
    return group_of(
        rollout_of(tokens, truncated=truncated, spans=spans, reward=reward, penalty=penalty, correct=correct)
        for correct, tokens, truncated, reward, penalty in responses
    )


MIXED = make_group((True, 2, False, 1.0, 0.0), (False, 4, False, -1.0, 0.0))
RIGHT = make_group((True, 6, False, 0.75, -0.25), (True, 8, False, 1.0, 0.0))
WRONG = make_group((False, 10, True, -2.0, -1.0), (False, 10, True, -2.0, -1.0))
CARRIED = make_group((True, 1, False, 1.0, 0.0), (False, 1, False, -1.0, 0.0), spans=(Span(0, 0),))


def collected(**changes):
    values = {"groups": [CARRIED, MIXED], "carry": [], "sampled": [MIXED, RIGHT, WRONG], "cursor": 3, "waves": 1,
              "surplus": 0, "version": 3}  # fmt: skip
    return Collected(**{**values, **changes})


def test_sampled_and_trained_groups_are_counted_separately():
    """Sampled lengths 2, 4, 6, 8, 10, 10 (mean 40 / 6; the 95th percentile is between the two tens), rewards 1, -1,
    0.75, 1, -2, -2 with mean -2.25 / 6 = -0.375 and mean square (1 + 1 + 0.5625 + 1 + 4 + 4) / 6 = 1.9271.

    All tokens are equal and certain (Q = 1), so responses of equal lengths are equal: 5 of 6 are distinct, and one of each group is expected. The shares of equal pairs
    minus Q are -1, -1 and 0: the mean -2/3 by the standard error sqrt(1/3) / sqrt(3). As many groups have no, one or two correct responses as with a = b = 1."""
    found = rollout_metrics(collected(surplus=2, carry=[MIXED]))
    assert found.pop("rollout/mixed_expected_frac") == pytest.approx(1 / 3, abs=2e-3)
    assert found == pytest.approx(
        {
            "rollout/distinct_frac": 5 / 6,
            "rollout/distinct_expected_frac": 1 / 2,
            "rollout/copies_frac": 0.0,
            "rollout/copies_z": -2.0,
            "rollout/verdict_lag_z": 0.0,
            "rollout/prompts": 3,
            "rollout/waves": 1,
            "rollout/trained_groups": 2,
            "rollout/surplus_groups": 2,
            "rollout/carried_groups": 1,
            "rollout/age_mean": 1.5,
            "rollout/age_p95": 0.95 * 3,
            "rollout/age_max": 3,
            "rollout/newest_age_mean": 1.5,
            "rollout/newest_age_p95": 0.95 * 3,
            "rollout/newest_age_max": 3,
            "rollout/earlier_tokens_frac": 2 / 8,
            "rollout/trained_accuracy": 0.5,
            "rollout/trained_response_tokens": (2 + 4 + 1 + 1) / 4,
            "rollout/accuracy": 0.5,
            "rollout/all_correct_frac": 1 / 3,
            "rollout/all_wrong_frac": 1 / 3,
            "rollout/mixed_frac": 1 / 3,
            "rollout/response_tokens": 40 / 6,
            "rollout/response_tokens_max": 10,
            "rollout/response_tokens_p95": 10.0,
            "rollout/truncated_frac": 2 / 6,
            "reward/lost": 0,
            "reward/nonfinite": 0,
            "reward/mean": -0.375,
            "reward/std": (11.5625 / 6 - 0.375**2) ** 0.5,
            "reward/overlong_penalty": -2.25 / 6,
        }
    )


def test_ages_are_those_of_the_oldest_and_the_newest_token():
    """At version 5, two responses of 4 tokens: earlier weights sampled three tokens of the first and one of the second."""
    early = make_group((True, 4, False, 1.0, 0.0), spans=(Span(0, 2), Span(1, 4), Span(3, 5)))
    late = make_group((False, 4, False, -1.0, 0.0), spans=(Span(0, 4), Span(1, 5)))
    both = replace(early, rollouts=(*early.rollouts, *late.rollouts))
    found = rollout_metrics(collected(groups=[both], version=5))
    ages = {name: found[f"rollout/{name}"] for name in ("age_max", "newest_age_max", "earlier_tokens_frac")}
    assert ages == {"age_max": 3, "newest_age_max": 0, "earlier_tokens_frac": 4 / 8}
    assert early.rollouts[0].response.versions.tolist() == [2, 4, 4, 5]


def with_verdicts(group, *verdicts):
    rollouts = [
        replace(rollout, verdict=Verdict(correct=False, **verdict))
        for rollout, verdict in zip(group.rollouts, verdicts, strict=True)
    ]
    return replace(group, rollouts=tuple(rollouts))


def test_groups_with_different_scores_are_counted_if_there_are_scores():
    """The first of three groups has scores 0.5 and 0.25, the second twice 0.5. The verdicts of the third are lost, which is not a difference."""
    scores = [{"score": 0.5}, {"score": 0.25}], [{"score": 0.5}] * 2, [{"lost": "died"}] * 2
    sampled = [with_verdicts(MIXED, *verdicts) for verdicts in scores]
    assert rollout_metrics(collected(sampled=sampled))["rollout/scores_differ_frac"] == pytest.approx(1 / 3)
    assert "rollout/scores_differ_frac" not in rollout_metrics(collected())


def test_each_part_of_a_score_is_logged_as_its_mean_over_the_sampled_rollouts_that_have_it():
    parts = (
        {"exact": 1.0, "brief": 0.5},
        {"exact": -1.0, "brief": 0.25},
        {"exact": 1.0, "brief": 0.0},
        {"exact": 1.0},
    )
    first, second, third, fourth = ({"parts": each} for each in parts)
    sampled = [with_verdicts(MIXED, first, second), with_verdicts(RIGHT, third, fourth)]
    metrics = rollout_metrics(collected(sampled=sampled))
    assert {name: value for name, value in metrics.items() if "parts" in name} == {
        "reward/parts/brief": 0.25,
        "reward/parts/exact": 0.5,
    }


def test_a_step_that_sampled_nothing_has_no_metrics_of_samples():
    metrics = rollout_metrics(collected(sampled=[], waves=0))
    assert "rollout/accuracy" not in metrics
    assert metrics["rollout/prompts"] == 0
    assert metrics["rollout/trained_groups"] == 2
