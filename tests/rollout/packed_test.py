"""Groups and responses in flight come back from arrays as they went in."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_jax.checkpoints.manifest import pack_arrays
from dapo_jax.dapo.rollouts import (
    ContextSpan,
    Continuation,
    Group,
    Prompt,
    Response,
    Rollout,
    Span,
    Standing,
    TurnSpan,
    Verdict,
)
from dapo_jax.rollout.collector import InFlight
from dapo_jax.rollout.exchange import Answered, _answered, _as_json
from dapo_jax.rollout.packed import (
    drawn_arrays,
    drawn_of,
    flight_arrays,
    flight_of,
    group_arrays,
    groups_of,
    split_flight,
)
from dapo_jax.rollout.virtual_clock import ClockSizes, ResponseId, VirtualClock
from dapo_jax.sampling.requests import Request
from dapo_jax.sampling.rounds import Drawn


def prompt_at(ordinal):
    return Prompt(ordinal=ordinal, tokens=np.array([2, 3], np.int32), text=f"question {ordinal}", answer="!")


# Byte models sample anything: zeros, quotes, half a surrogate pair, an answer that holds what separates fields elsewhere.
texts = st.text(st.characters(), max_size=8) | st.sampled_from(["\0", "a\0b", '"\\', "\n", "\ud800", ""])


rollouts = st.fixed_dictionaries(
    {
        "length": st.integers(1, 5),
        "start": st.integers(0, 99),
        "finish_reason": st.sampled_from(["stop", "length"]),
        "verdict": st.fixed_dictionaries(
            {
                "correct": st.booleans(),
                "extracted": st.none() | texts,
                "reason": texts,
                "score": st.none() | st.floats(-2, 2),
                "lost": st.sampled_from(["", "timeout"]),
                "parts": st.dictionaries(texts, st.floats(-2, 2), max_size=2),
                "turn_rewards": st.lists(st.floats(-2, 2), max_size=3).map(tuple),
            }
        ),
        "text": texts,
        "reward": st.floats(-2, 2),
        "overlong_penalty": st.floats(-1, 0),
    }
)


WHOLE = (Span(0, 0),)


def make_rollout(values, *, spans=WHOLE):
    tokens = np.arange(values["start"], values["start"] + values["length"], dtype=np.int32)
    return Rollout(
        response=Response(
            tokens=tokens,
            logprobs=-tokens.astype(np.float32) / np.float32(7),
            finish_reason=values["finish_reason"],
            spans=spans,
            turns=(TurnSpan(0, values["length"]),) if values["verdict"].get("turn_rewards") else (),
            contexts=(ContextSpan(0, 1),) if len(values["verdict"].get("turn_rewards", ())) > 1 else (),
        ),
        text=values["text"],
        verdict=Verdict(**values["verdict"]),
        reward=values["reward"],
        overlong_penalty=values["overlong_penalty"],
    )


def spans_of(values):
    """One span, or as many as the response has tokens."""
    return tuple(Span(first, 3 * first) for first in range(values["length"])) or (Span(0, 4),)


@given(drawn=st.lists(st.lists(rollouts, min_size=1, max_size=3), max_size=4))
def test_groups_survive_as_arrays(drawn):
    groups = [
        Group(
            prompt=prompt_at(3 * place),
            rollouts=tuple(make_rollout(values, spans=spans_of(values)) for values in members),
        )
        for place, members in enumerate(drawn)
    ]
    arrays = group_arrays(groups)
    assert all(array.dtype != object for array in arrays.values()), "a checkpoint stores bytes, not pickles"
    found = groups_of(arrays, prompt_at)
    assert len(found) == len(groups)
    for a, b in zip(found, groups, strict=True):
        assert (a.prompt.ordinal, a.prompt.text) == (b.prompt.ordinal, b.prompt.text)
        assert len(a.rollouts) == len(b.rollouts)
        for x, y in zip(a.rollouts, b.rollouts, strict=True):
            np.testing.assert_array_equal(x.response.tokens, y.response.tokens)
            np.testing.assert_array_equal(x.response.logprobs, y.response.logprobs)
            assert (x.response.tokens.dtype, x.response.logprobs.dtype) == (np.int32, np.float32)
            assert x.response.finish_reason == y.response.finish_reason
            assert x.response.spans == y.response.spans
            assert (x.response.turns, x.response.contexts) == (y.response.turns, y.response.contexts)
            assert (x.text, x.verdict) == (y.text, y.verdict)
            assert (x.reward, x.overlong_penalty) == (y.reward, y.overlong_penalty)


def test_a_response_in_brief_takes_about_100_bytes_whatever_its_length():
    values = {
        "length": 20_000, "start": 0, "finish_reason": "stop", "text": "x" * 60_000, "reward": 1.0, "overlong_penalty": 0.0,
        "verdict": {"correct": True, "extracted": "12", "reason": "because", "score": None, "lost": "", "parts": {}},
    }  # fmt: skip
    group = Group(prompt=prompt_at(3), rollouts=tuple(make_rollout(values) for _ in range(16)))
    packed, _ = pack_arrays(group_arrays([group], whole=[False]))
    assert len(packed) < 16 * 100
    [again] = groups_of(group_arrays([group], whole=[False]), prompt_at)
    assert [rollout.response_tokens for rollout in again.rollouts] == [20_000] * 16

    # The first two responses to each problem keep their texts, of 60,000 characters.
    arrays = group_arrays([group, group], whole=[False, False], texts=2)
    packed, _ = pack_arrays(arrays)
    assert 4 * 60_000 < len(packed) < 4 * 60_000 + 32 * 100
    for again in groups_of(arrays, prompt_at):
        assert [len(rollout.text) for rollout in again.rollouts] == [60_000] * 2 + [0] * 14
        assert [rollout.verdict.reason for rollout in again.rollouts] == ["because"] * 2 + [""] * 14

    # Whole groups are next to groups in brief.
    first, second = groups_of(group_arrays([group, group], whole=[False, True]), prompt_at)
    assert not first.rollouts[3].response.tokens.any()
    np.testing.assert_array_equal(second.rollouts[3].response.tokens, np.arange(20_000))


def in_flight():
    """Three groups of two: of 0 one response has ended, 1 is in flight, of 2 one response has begun with no token yet; at version 2."""
    clock = VirtualClock(ClockSizes(in_flight=4, samples_per_prompt=2, needed=1), version=2)
    clock.start()
    clock.end_round([ResponseId(0, 1)])
    clock.start()
    responses = {}
    for place, one in enumerate(clock.started()):
        request = Request(prompt_at(one.ordinal), one.index, 99)
        for version in range(3) if one.ordinal < 2 else ():
            tokens = np.arange(place + 1, dtype=np.int32) + version
            request.version = version
            request.append(tokens, -tokens.astype(np.float32))
        if one == (1, 0):
            request.end_turn("stop")
            request.due, request.begun = 7, 2
            request.contexts, request.standing = (
                (ContextSpan(1, 2),),
                Standing(rewards=(0.5,), metrics={"a": 1.0}),
            )
        request.finish_reason = "length" if one == (0, 1) else None
        responses[one] = request
    return InFlight(clock=clock, responses=responses)


def test_responses_in_flight_survive_as_arrays():
    given = in_flight()
    groups, flight = split_flight({"records": np.zeros(1), **flight_arrays(given)})
    assert groups == {"records": np.zeros(1)}
    found = flight_of(flight, prompt_at)
    assert found.clock == given.clock
    assert found.responses.keys() == given.responses.keys()
    for one, request in given.responses.items():
        again = found.responses[one]
        np.testing.assert_array_equal(again.tokens[: again.drawn], request.tokens[: request.drawn])
        np.testing.assert_array_equal(again.logprobs[: again.drawn], request.logprobs[: request.drawn])
        for name in (
            "drawn",
            "begun",
            "spans",
            "turns",
            "reasons",
            "contexts",
            "due",
            "standing",
            "finish_reason",
        ):
            assert getattr(again, name) == getattr(request, name), (one, name)
        assert (again.prompt.text, again.index) == (request.prompt.text, request.index)
    assert (flight_arrays(None), flight_of({}, prompt_at)) == ({}, None)


@pytest.mark.parametrize("change", [lambda array: array[:-1], lambda array: np.append(array, array[:1])])
@pytest.mark.parametrize("name", ["tokens", "logprobs"])
def test_arrays_that_do_not_fit_together_are_refused(name, change):
    arrays = flight_arrays(in_flight())
    with pytest.raises(ValueError, match=name):
        flight_of({**arrays, f"flight_{name}": change(arrays[f"flight_{name}"])}, prompt_at)
    with pytest.raises(ValueError, match="records"):
        groups_of({**arrays, "records": arrays["flight_records"]}, prompt_at)


parts = st.builds(
    lambda length, reason: Drawn(
        tokens=np.arange(length, dtype=np.int32),
        logprobs=-np.arange(length, dtype=np.float32) / 7,
        finish_reason=reason,
    ),
    st.integers(0, 5),
    st.sampled_from([None, "stop", "length"]),
)


@given(st.lists(parts, max_size=5))
def test_the_new_tokens_of_a_round_survive_as_arrays(drawn):
    found = drawn_of(drawn_arrays(drawn))
    assert len(found) == len(drawn)
    for a, b in zip(found, drawn, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)
        assert a.finish_reason == b.finish_reason
    packed, _ = pack_arrays(drawn_arrays(drawn))
    assert len(packed) == 8 * len(drawn) + 8 * sum(len(part.tokens) for part in drawn)


def test_an_answer_of_an_environment_survives_as_json():
    standing = Standing(rewards=(0.1, -1.0), correct=True, metrics={"luck": 1 / 3}, lost="died", reason="x")
    for before in (None, Continuation(np.array([3, 1], np.int32), True), Continuation(np.zeros(0, np.int32))):
        found = _answered(*json.loads(json.dumps(_as_json(Answered(before=before, standing=standing)))))
        assert found.standing == standing
        if before is None:
            assert found.before is None
        else:
            assert found.before.anew == before.anew
            np.testing.assert_array_equal(found.before.tokens, before.tokens)
