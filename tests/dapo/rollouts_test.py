"""The conversion of a verdict's fields."""

import math
import re
from decimal import Decimal
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.dapo.rollouts import Verdict
from dapo_jax.rewards import as_verdict, grade_function
from dapo_jax.rewards.functions import RewardError
from dapo_jax.rewards.pool import GradingPool


@pytest.mark.parametrize(
    "right", [True, np.True_, np.isclose(1.0, 1.0), np.array(True), jnp.array(True), 1, np.int64(1), 1.0]
)
def test_values_that_mean_true(right):
    assert Verdict(correct=right).correct is True


@pytest.mark.parametrize("wrong", [False, np.False_, np.array(False), jnp.array(False), 0, Fraction(0)])
def test_values_that_mean_false(wrong):
    assert Verdict(correct=wrong).correct is False


@pytest.mark.parametrize(
    "quarter",
    [
        0.25,
        np.float32(0.25),
        np.array(0.25),
        jnp.array(0.25),
        Fraction(1, 4),
        Decimal("0.25"),
        np.float16(0.25),
    ],
)
def test_numbers_of_any_kind_are_scores(quarter):
    verdict = Verdict(correct=True, score=quarter, parts={"a": quarter})
    assert (verdict.score, verdict.parts) == (0.25, {"a": 0.25})
    assert type(verdict.score) is float
    assert as_verdict(quarter, name="f") == Verdict(correct=True, score=0.25)


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("correct", "no", "str"),
        ("correct", None, "NoneType"),
        ("correct", 0.5, "float"),
        ("correct", np.array([True, False]), "ndarray"),
        ("correct", re.match("a", "a"), "Match"),
        ("score", "0.5", "str"),
        ("score", 1j, "complex"),
        ("score", np.array([0.5]), "ndarray"),
        ("extracted", re.match("a", "a"), "Match"),
        ("extracted", ["34"], "list"),
        ("reason", b"bytes", "bytes"),
        ("lost", "perhaps", "str"),
        ("parts", {"a": "b"}, "dict"),
        ("parts", {1: 1.0}, "dict"),
        ("parts", 3, "int"),
    ],
)
def test_other_values_are_refused_by_function_field_and_value(field, value, kind):
    with pytest.raises(ValueError, match=rf"Verdict: {field}=.*\({kind}\), needs ") as raised:
        Verdict(**{"correct": True, field: value})
    assert repr(value)[:40] in str(raised.value)

    def own(sample):
        return Verdict(**{"correct": True, field: value})

    with pytest.raises(RewardError, match=rf"reward function .*own raised ValueError: Verdict: {field}="):
        grade_function(own)([_sample()])


def _sample():
    from tests.rewards.pool_test import sample

    return sample("34")


def test_text_may_be_a_number_or_left_out():
    verdict = Verdict(correct=True, extracted=np.int64(34), reason=None)
    assert (verdict.extracted, verdict.reason) == ("34", "")
    assert Verdict(correct=True, extracted=Fraction(1, 3)).extracted == "1/3"


def test_a_number_beyond_all_floats_is_infinite():
    assert Verdict(correct=True, score=-(10**400)).score == -math.inf
    with pytest.raises(ValueError, match="f returned inf"):
        as_verdict(10**400, name="f")
    with pytest.raises(ValueError, match=r"f returned a verdict with a nan"):
        as_verdict(Verdict(correct=True, parts={"a": math.nan}), name="f")


def test_a_refused_field_is_an_error_in_a_worker_too():
    graders = GradingPool(f"{__file__}:says_no", workers=1, timeout_s=10.0, memory_mb=512)
    wrong = r"says_no raised ValueError: Verdict: correct='no' \(str\)"
    with graders, pytest.raises(RewardError, match=wrong):
        graders.grade([_sample()])


def says_no(sample):
    return Verdict(correct="no")
