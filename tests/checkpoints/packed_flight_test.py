"""Rollouts in flight survive as arrays, and forged ones are refused."""

import json

import numpy as np
import pytest

from dapo_jax.checkpoints.packed_flight import flight_arrays, flight_of, split_flight
from dapo_jax.dapo.in_flight import NOTHING, Drawn, InFlight
from dapo_jax.dapo.virtual_clock import ClockSizes, ResponseId, VirtualClock


def in_flight():
    """Three groups of two: of 0 one response has ended, 1 is in flight, of 2 one response has begun with no token yet; at version 2."""
    clock = VirtualClock(ClockSizes(in_flight=4, samples_per_prompt=2, needed=1), version=2)
    clock.start()
    clock.end_round([ResponseId(0, 1)])
    clock.start()
    responses = {}
    for place, one in enumerate(clock.started()):
        response = NOTHING
        for version in range(3) if one.ordinal < 2 else ():
            reason = "length" if one == (0, 1) and version == 2 else None
            tokens = np.arange(place + 1, dtype=np.int32) + version
            response = response.longer(
                Drawn(tokens=tokens, logprobs=-tokens.astype(np.float32), finish_reason=reason), version
            )
        responses[one] = response
    return InFlight(clock=clock, responses=responses)


def restored(arrays, **changes):
    return flight_of({**arrays, **changes}, vocabulary=16, version=2)


def test_what_is_in_flight_survives_as_arrays():
    given = in_flight()
    arrays = flight_arrays(given)
    assert all(array.dtype != object for array in arrays.values())
    found = restored(arrays)
    assert found.clock == given.clock
    assert found.responses.keys() == given.responses.keys()
    for one, response in given.responses.items():
        again = found.responses[one]
        np.testing.assert_array_equal(again.tokens, response.tokens)
        np.testing.assert_array_equal(again.logprobs, response.logprobs)
        assert (again.spans, again.finish_reason) == (response.spans, response.finish_reason)
    assert (flight_arrays(None), flight_of({}, vocabulary=16, version=2)) == ({}, None)


def test_its_arrays_are_told_from_those_of_carried_groups():
    flight = flight_arrays(in_flight())
    assert split_flight({"ordinals": np.zeros(1), **flight}) == ({"ordinals": np.zeros(1)}, flight)


def a_clock(**changes):
    state = in_flight().clock.state() | changes
    return {"flight_clock": np.frombuffer(json.dumps(state).encode(), np.uint8)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (a_clock(version=3), "the clock is of step 3"),
        (a_clock(rounds="x"), "the clock cannot be read: it is not of a clock"),
        ({"flight_clock": np.frombuffer(b"{", np.uint8)}, "the clock cannot be read"),
        ({"flight_lengths": np.zeros(5, np.float32)}, "'lengths' is missing or of another kind"),
        ({"flight_lengths": np.zeros(4, np.int64)}, "'lengths' has 4 entries instead of 5"),
        ({"flight_lengths": np.array([3, 6, 9, 12, -1])}, "'lengths' has one that is negative"),
        ({"flight_reasons": np.array([0, 3, 0, 0, 0])}, "'reasons' has one that is none"),
        (
            {"flight_reasons": np.array([1, 2, 0, 0, 0])},
            "response 0 to prompt 0 has ended, or not, other than",
        ),
        ({"flight_reasons": np.zeros(5, np.int64)}, "response 1 to prompt 0 has ended, or not, other than"),
        ({"flight_tokens": np.full(30, 16, np.int32)}, "'tokens' has one that is not from 0 to 15"),
        ({"flight_tokens": np.zeros(29, np.int32)}, "'tokens' has 29 entries instead of 30"),
        ({"flight_span_counts": np.array([3, 3, 3, 2, 1])}, "'span_counts' has spans of no tokens"),
        ({"flight_span_firsts": np.zeros(12, np.int64)}, "'span_firsts' has spans that do not begin with"),
        ({"flight_span_versions": np.zeros(12, np.int64)}, "'span_versions' has versions that do not rise"),
        (
            {"flight_span_versions": np.array([0, 1, 3] * 4)},
            "'span_versions' has versions that do not rise up to 2",
        ),
    ],
)
def test_forged_arrays_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        restored(flight_arrays(in_flight()), **changes)
