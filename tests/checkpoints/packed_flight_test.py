"""Rollouts in flight survive as arrays, and forged ones are refused."""

import json
from dataclasses import replace

import numpy as np
import pytest

from dapo_jax.checkpoints.packed_flight import flight_arrays, flight_of, split_flight
from dapo_jax.dapo.in_flight import NOTHING, Drawn, EpisodeSoFar, InFlight, Standing
from dapo_jax.dapo.rollouts import Continuation
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


def talking():
    """Two groups of two, at version 0. Of group 0 one episode is over after two turns, the second of which began a context anew, and one is in its first turn; of group 1 one waits to begin, and one for the
    answer to its first turn."""
    clock = VirtualClock(ClockSizes(in_flight=4, samples_per_prompt=2, needed=1))
    over, first, start, waits = clock.start()
    clock.end_round([over])

    def said(count):
        return Drawn(tokens=np.arange(count), logprobs=-np.ones(count, np.float32), finish_reason="stop")

    def told(*tokens, anew=False):
        return Continuation(np.array(tokens, np.int32), anew)

    begins = replace(NOTHING, episode=EpisodeSoFar(due=1))
    begun = begins.answered(told(7), Standing(), None, 0)
    heard = begun.longer(said(2), 0).turn_ended(said(2), due=2)
    standing = Standing(rewards=(0.5,), correct=False, metrics={"luck": 0.1})
    anew = heard.answered(told(8, 9, anew=True), standing, None, 0)
    last = anew.longer(said(3), 0).turn_ended(said(3), due=3)
    standing = Standing(rewards=(0.5, 0.0), correct=True, lost="raised", reason="it broke")
    ended = last.answered(None, standing, "stop", 0)
    middle = begun.longer(replace(said(1), finish_reason=None), 0)
    return InFlight(clock=clock, responses={over: ended, first: middle, start: begins, waits: heard})


def test_episodes_survive_as_arrays():
    given = talking()
    found = flight_of(flight_arrays(given), vocabulary=16, version=0)
    for one, response in given.responses.items():
        assert found.responses[one].episode == response.episode
        np.testing.assert_array_equal(found.responses[one].tokens, response.tokens)
    ended, middle, begins, heard = (found.responses[one] for one in given.clock.started())
    assert ended.whole(0).turns == ((1, 3), (5, 8))
    assert ended.whole(0).contexts == ((3, 5),)
    assert ended.tokens.tolist() == [7, 0, 1, 8, 9, 0, 1, 2]
    assert ended.logprobs.tolist() == [0, -1, -1, 0, 0, -1, -1, -1]
    assert middle.present_turn == (0, 1, None)
    assert ended.present_turn == (2, 5, 3), "tokens before its context are not in it"
    assert ended.context_tokens == 5
    assert (begins.episode.due, heard.episode.due) == (1, 2)
    assert [turn.tokens.tolist() for turn in ended.drawn_turns] == [[0, 1], [0, 1, 2]]


def forged(place, **changes):
    arrays = flight_arrays(talking())
    said = json.loads(arrays["flight_episodes"].tobytes())
    said[place] |= changes
    return {**arrays, "flight_episodes": np.frombuffer(json.dumps(said).encode(), np.uint8)}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (forged(0, due=5), "response 0 to prompt 0 that it cannot have"),
        (forged(0, due="x"), "'episodes' cannot be read"),
        (forged(0, turns=[[1, 3], [5, 9]]), "response 0 to prompt 0 that it cannot have"),
        (forged(0, turns=[[1, 4], [5, 8]]), "response 0 to prompt 0 that it cannot have"),
        (forged(0, turns=[[1, 3]]), "response 0 to prompt 0 that it cannot have"),
        (forged(0, turns=[[1, 3, 5]]), "'episodes' cannot be read"),
        (forged(0, reasons=["stop", "gone"]), "'episodes' cannot be read"),
        (forged(1, begun=3), "response 1 to prompt 0 that it cannot have"),
        (forged(2, due=1 << 30), "response 0 to prompt 1 that it cannot have"),
        (forged(3, begun=3), "response 1 to prompt 1 that it cannot have"),
        (forged(3, turns=[[1, 2]]), "response 1 to prompt 1 that it cannot have"),
        (forged(0, contexts=[[3, 5], [5, 5]]), "response 0 to prompt 0 that it cannot have"),
        (forged(1, begun=-1), "'episodes' cannot be read"),
        (forged(3, standing={"rewards": [1.0]}), "response 1 to prompt 1 that it cannot have"),
        (forged(3, standing={"rewards": [], "lost": "bored"}), "'episodes' cannot be read"),
        (forged(0, standing={"rewards": [1.0, float("inf")]}), "'episodes' cannot be read"),
        (forged(0, standing={"correct": True}), "'episodes' cannot be read"),
        (forged(0, mood="fine"), "'episodes' cannot be read"),
        (
            {**flight_arrays(talking()), "flight_episodes": np.frombuffer(b"[null]", np.uint8)},
            "'episodes' are not those of 4",
        ),
        (
            {**flight_arrays(talking()), "flight_episodes": np.frombuffer(b"7", np.uint8)},
            "'episodes' cannot be read",
        ),
    ],
)
def test_forged_episodes_are_refused(arrays, message):
    with pytest.raises(ValueError, match=message):
        flight_of(arrays, vocabulary=16, version=0)
