"""The conversion of a verdict's fields."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.dapo.rollouts import Verdict
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
