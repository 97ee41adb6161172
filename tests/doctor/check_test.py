"""An examination goes on after a failure, and says what it could not look at, and why."""

from dapo_jax.config import ConfigError
from dapo_jax.doctor.check import Check, Found, examine


def fails(error):
    def look():
        raise error

    return look


def outcomes(*checks):
    return {finding.name: finding.found for finding in examine(checks)}


def test_what_needs_a_failed_check_is_skipped_because_of_it_and_all_else_is_looked_at():
    looked = []
    found = outcomes(
        Check(name="a", look=fails(RuntimeError("no\n  disk")), remedy="buy one"),
        Check(name="b", look=lambda: looked.append("b") or Found(message="fine"), needs=("a",)),
        Check(name="c", look=lambda: looked.append("c") or Found(message="fine"), needs=("b",)),
        Check(name="d", look=lambda: looked.append("d") or Found(message="fine")),
    )
    assert found["a"] == Found(state="failed", message="RuntimeError: no disk", remedy="buy one")
    assert found["b"] == found["c"] == Found(state="skipped", message="because 'a' failed")
    assert looked == ["d"]


def test_the_message_of_a_configuration_error_stands_alone_as_it_holds_its_remedy():
    found = outcomes(Check(name="a", look=fails(ConfigError("x=1 must be 2; set x=2")), remedy="buy one"))
    assert found["a"] == Found(state="failed", message="x=1 must be 2; set x=2")


def test_a_warning_stops_nothing():
    found = outcomes(
        Check(name="a", look=lambda: Found(message="close", state="warning")),
        Check(name="b", look=lambda: Found(message="fine"), needs=("a",)),
    )
    assert found["b"].state == "ok"


def test_an_error_of_pages_is_cut():
    found = outcomes(Check(name="a", look=fails(ValueError("x" * 5000))))
    assert len(found["a"].message) == 700
    assert found["a"].message.endswith("x...")
