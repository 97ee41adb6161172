"""Copies within groups are seen, and independent responses raise no alarm."""

import math

import numpy as np
import pytest

from dapo_jax.dapo.rollouts import Group, Prompt, Response, Rollout, Verdict
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.training.independence import independence_metrics

SIZE = 16


def rollout(tokens, logprobs, correct):
    record = Tokens(np.array(tokens, np.int32), logprobs=np.array(logprobs, np.float32))
    response = Response(record=record, finish_reason="stop")
    return Rollout(response=response, text="", verdict=Verdict(correct=correct), reward=0.0)


def group(rollouts):
    return Group(
        prompt=Prompt(ordinal=0, tokens=np.zeros(1, np.int32), text="", answer=""), rollouts=tuple(rollouts)
    )


def test_two_equally_probable_tokens_by_hand():
    """G = 2 and Q = 1/2: E[distinct] = 2 (1 - 1/4) = 1.5. Of four groups, two have equal responses: shares of equal pairs 1, 1, 0, 0, each minus 1/2, have the mean 0."""
    half = [math.log(0.5)]
    found = independence_metrics(
        [group([rollout([a], half, a == 1), rollout([b], half, b == 1)]) for a in (0, 1) for b in (0, 1)]
    )
    assert found["rollout/distinct_frac"] == 0.75
    assert found["rollout/distinct_expected_frac"] == pytest.approx(0.75)
    assert found["rollout/copies_z"] == pytest.approx(0.0, abs=1e-6)
    assert found["rollout/copies_frac"] == 0.0


def test_the_expected_share_of_mixed_groups_by_hand():
    """With a = b = 1, the number of correct responses of two is 0, 1 or 2 with probability B(1, 3) / B(1, 1) = 1/3 each, and these counts fit no other beta distribution better."""
    pairs = [(False, False), (False, True), (True, True)] * 40
    token = iter(range(1000))
    found = independence_metrics(
        [group([rollout([next(token)], [-20.0], correct) for correct in pair]) for pair in pairs]
    )
    assert found["rollout/mixed_expected_frac"] == pytest.approx(1 / 3, abs=2e-3)


def sampled(seed, groups, *, same=None, tokens=4, vocabulary=6):
    """Groups of independent responses, whose prompts have accuracies from Beta(1.8, 1.2). `same` maps the index of a response to the index of the response that it copies."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(groups):
        accuracy, probabilities = rng.beta(1.8, 1.2), rng.dirichlet(np.ones(vocabulary))
        drawn = rng.choice(vocabulary, (SIZE, tokens), p=probabilities)
        correct = rng.random(SIZE) < accuracy
        source = [same(index) if same else index for index in range(SIZE)]
        found.append(
            group([rollout(drawn[i], np.log(probabilities[drawn[i]]), bool(correct[i])) for i in source])
        )
    return independence_metrics(found)


LONG = {"tokens": 40, "vocabulary": 50}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sizes", [{}, LONG], ids=["short", "long"])
def test_independent_responses_raise_no_alarm(seed, sizes):
    """A standard normal variable exceeds 4 once in 30,000 times. The largest of 15 such variables exceeds 5 about as often as once in 100,000."""
    found = sampled(seed, 64, **sizes)
    assert abs(found.get("rollout/copies_z", 0.0)) < 4
    assert found["rollout/copies_frac"] < 0.01
    assert found["rollout/verdict_lag_z"] < 5
    assert found["rollout/distinct_frac"] == pytest.approx(found["rollout/distinct_expected_frac"], abs=0.05)


@pytest.mark.parametrize(("every", "distance"), [(8, 8), (2, 2)])
@pytest.mark.parametrize("sizes", [{}, LONG], ids=["short", "long"])
def test_copies_of_engines_with_equal_seeds_are_seen(every, distance, sizes):
    """Two engines copy at distance 8; eight engines at distances 2, 4, .... The verdicts show it without tokens."""
    found = sampled(0, 64, same=lambda index: index % every, **sizes)
    assert found["rollout/verdict_lag_z"] > 5
    if sizes:
        assert found["rollout/copies_frac"] == pytest.approx(1 - every / SIZE)
    else:
        assert found["rollout/copies_z"] > 4
        assert found["rollout/distinct_frac"] < 0.8 * found["rollout/distinct_expected_frac"]


def test_groups_lose_their_signal_with_copies_and_the_expectation_does_not_follow():
    found = [
        sampled(1, 64, same=same, **LONG)["rollout/mixed_expected_frac"]
        for same in (None, lambda index: index // 8)
    ]
    assert found[1] == pytest.approx(found[0], abs=0.06)


def test_a_group_of_one_response_has_no_such_metric():
    assert independence_metrics([group([rollout([1], [-1.0], True)])]) == {}
