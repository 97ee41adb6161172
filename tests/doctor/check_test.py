"""An examination continues after a failure and names the checks that it skipped."""

from dapo_jax.config import ConfigError
from dapo_jax.doctor.check import Check, Found, examine
from dapo_jax.doctor.subject import Subject


def fails(error):
    def look(subject):
        raise error

    return look


def outcomes(*checks):
    return {finding.name: finding.found for finding in examine(checks, Subject())}


def test_checks_that_need_a_failed_check_are_skipped_and_others_are_made():
    looked = []
    found = outcomes(
        Check("a", fails(RuntimeError("no\n  disk")), remedy="buy one"),
        Check("b", lambda _: looked.append("b") or Found("fine"), needs=("a",)),
        Check("c", lambda _: looked.append("c") or Found("fine"), needs=("b",)),
        Check("d", lambda _: looked.append("d") or Found("fine")),
    )
    assert found["a"] == Found("RuntimeError: no disk", "failed", "buy one")
    assert found["b"] == found["c"] == Found("because 'a' failed", "skipped")
    assert looked == ["d"]


def test_a_configuration_error_holds_its_own_remedy():
    found = outcomes(Check("a", fails(ConfigError("x=1 must be 2; set x=2")), remedy="buy one"))
    assert found["a"] == Found("x=1 must be 2; set x=2", "failed")


def test_a_warning_skips_nothing():
    found = outcomes(
        Check("a", lambda _: Found("close", "warning")),
        Check("b", lambda _: Found("fine"), needs=("a", "a check that is not in the list")),
    )
    assert found["b"].state == "ok"


def test_a_long_error_is_cut():
    found = outcomes(Check("a", fails(ValueError("x" * 5000))))
    assert len(found["a"].message) == 700
    assert found["a"].message.endswith("x...")
