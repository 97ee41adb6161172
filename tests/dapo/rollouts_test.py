"""The conversion of a verdict's fields."""

import re
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.dapo.rollouts import Group, Prompt, Response, Rollout, Verdict
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.rewards import as_verdict


@pytest.mark.parametrize("kind", [bool, int, float, np.bool_, np.int64, np.array, jnp.array])
def test_values_that_mean_true_or_false(kind):
    for right in (True, False):
        assert Verdict(correct=kind(right)).correct is right


@pytest.mark.parametrize("quarter", [0.25, np.float32(0.25), np.array(0.25), jnp.array(0.25)])
def test_numbers_of_any_kind_are_scores(quarter):
    verdict = Verdict(correct=True, score=quarter, parts={"a": quarter}, turn_rewards=[quarter])
    assert (verdict.score, verdict.parts, verdict.turn_rewards) == (0.25, {"a": 0.25}, (0.25,))
    assert type(verdict.score) is float
    assert as_verdict(quarter, name="f") == Verdict(correct=True, score=0.25)
    assert Verdict(correct=True, extracted=quarter).extracted == "0.25"


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("correct", "no", "str"),
        ("correct", 0.5, "float"),
        ("correct", re.match("a", "a"), "Match"),
        ("score", "0.5", "str"),
        ("extracted", ["34"], "list"),
        ("reason", b"bytes", "bytes"),
        ("lost", "perhaps", "str"),
        ("parts", {"a": "b"}, "dict"),
        ("parts", {1: 1.0}, "dict"),
        ("turn_rewards", 3, "int"),
    ],
)
def test_other_values_are_refused_by_field_and_value(field, value, kind):
    with pytest.raises(ValueError, match=rf"Verdict: {field}=.*\({kind}\), needs ") as raised:
        Verdict(**{"correct": True, field: value})
    assert repr(value)[:40] in str(raised.value)


@pytest.mark.parametrize(
    ("by", "count", "kept"),
    [
        # Of 3, 2, 2, 5 and 0 tokens.
        ("shortest", 1, (4,)),
        ("shortest", 2, (1, 4)),
        ("shortest", 3, (1, 2, 4)),
        ("shortest", 4, (0, 1, 2, 4)),
        # 1 / 3, -1 / 2, -1 / 2, 2 / 5 and, for no token, -1.
        ("reward_per_token", 1, (3,)),
        ("reward_per_token", 2, (0, 3)),
        ("reward_per_token", 3, (0, 1, 3)),
        ("reward_per_token", 5, (0, 1, 2, 3, 4)),
    ],
)
def test_the_best_responses_stay_in_their_order_and_know_their_index(by, count, kept):
    group = make_group("x..x.", [3, 2, 2, 5, 0])
    rewards = [1.0, -1.0, -1.0, 2.0, -1.0]
    rollouts = [replace(one, reward=reward) for one, reward in zip(group.rollouts, rewards, strict=True)]
    group = replace(group, rollouts=tuple(rollouts))
    best = group.best(count, by=by)
    assert best.kept == kept
    assert best.indexed == [(index, rollouts[index]) for index in kept]
    assert group.indexed == list(enumerate(rollouts))
    assert group.best(0, by=by) is group


def make_group(verdicts, lengths):
    rollouts = tuple(
        Rollout(
            response=Response(
                record=Tokens(np.full(length, 5, np.int32)),
                finish_reason="stop",
            ),
            text="",
            verdict=Verdict(correct=mark == "x"),
            reward=float(mark == "x"),
        )
        for mark, length in zip(verdicts, lengths, strict=True)
    )
    prompt = Prompt(ordinal=0, tokens=np.array([2], np.int32), text="?", answer="!")
    return Group(prompt=prompt, rollouts=rollouts)
