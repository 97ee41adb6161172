"""Groups and responses in flight are equal after a round trip through arrays."""

import json
from dataclasses import asdict, replace

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
from dapo_jax.dapo.tokens import VALUES, Tokens
from dapo_jax.rollout.checkpoint_arrays import (
    _rollout,
    _rollout_record,
    drawn_arrays,
    drawn_of,
    flight_arrays,
    flight_of,
    group_arrays,
    groups_of,
)
from dapo_jax.rollout.collector import InFlight
from dapo_jax.rollout.exchange import _answered, _as_json
from dapo_jax.rollout.virtual_clock import ClockSizes, ResponseId, VirtualClock
from dapo_jax.sampling.requests import Request
from dapo_jax.sampling.round_sampler import Drawn
from tests.dapo.tokens_test import FURTHER, numbered


def prompt_at(ordinal):
    return Prompt(ordinal=ordinal, tokens=np.array([2, 3], np.int32), text=f"question {ordinal}", answer="!")


# Byte models sample anything: zeros, quotes, half a surrogate pair, separators of other formats.
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
                "forgotten": st.lists(st.integers(0, 3), max_size=2).map(tuple),
            }
        ),
        "text": texts,
        "reward": st.floats(-2, 2),
        "overlong_penalty": st.floats(-1, 0),
    }
)


def assert_equal(found, expected):
    """Two lists of dataclasses, with dtypes."""
    np.testing.assert_equal(
        *([asdict(each, dict_factory=plain) for each in some] for some in (found, expected))
    )


def plain(pairs):
    values = {name: value.arrays if isinstance(value, Tokens) else value for name, value in pairs}
    return {
        name: (value, value.dtype) if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }


WHOLE = (Span(0, 0),)


def make_rollout(values, *, spans=WHOLE):
    tokens = np.arange(values["start"], values["start"] + values["length"], dtype=np.int32)
    return Rollout(
        response=Response(
            record=Tokens(tokens, logprobs=-tokens.astype(np.float32) / np.float32(7)),
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
    assert_equal(groups_of(arrays, prompt_at), groups)


@given(values=rollouts)
def test_an_earlier_checkpoint_has_no_turns_outside_the_loss_and_other_lengths_are_errors(values):
    rollout = make_rollout(values)
    *rest, verdict = _rollout_record(rollout, True)

    def read(fields):
        return _rollout([*rest, fields], lambda _: {"record": rollout.response.record})

    assert_equal([read(verdict[:-1]).verdict], [replace(rollout.verdict, forgotten=())])
    for wrong in (verdict[:-2], [*verdict, 0]):
        with pytest.raises(ValueError, match="argument"):
            read(wrong)


def test_a_response_in_brief_takes_at_most_110_bytes_whatever_its_length():
    values = {
        "length": 20_000, "start": 0, "finish_reason": "stop", "text": "x" * 60_000, "reward": 1.0, "overlong_penalty": 0.0,
        "verdict": {"correct": True, "extracted": "12", "reason": "because", "score": None, "lost": "", "parts": {}},
    }  # fmt: skip
    group = Group(prompt=prompt_at(3), rollouts=tuple(make_rollout(values) for _ in range(16)))
    packed, _ = pack_arrays(group_arrays([group], whole=[False]))
    assert len(packed) < 16 * 110
    [again] = groups_of(group_arrays([group], whole=[False]), prompt_at)
    assert [rollout.response_tokens for rollout in again.rollouts] == [20_000] * 16

    # The first two responses to each problem keep their texts, of 60,000 characters.
    arrays = group_arrays([group, group], whole=[False, False], texts=2)
    packed, _ = pack_arrays(arrays)
    assert 4 * 60_000 < len(packed) < 4 * 60_000 + 32 * 110
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
            request.append(Tokens(tokens, logprobs=-tokens.astype(np.float32)))
        if one == (1, 0):
            request.end_turn("stop")
            request.due, request.begun, request.contexts = 7, 2, (ContextSpan(1, 2),)
            request.standing = Standing(rewards=(0.5,), metrics={"a": 1.0})
        request.finish_reason = "length" if one == (0, 1) else None
        responses[one] = request.rest()
    return InFlight(clock=clock, responses=responses)


def test_responses_in_flight_survive_as_arrays():
    given = in_flight()
    arrays = flight_arrays(given)
    assert groups_of(arrays, prompt_at) == []
    found = flight_of({"records": np.zeros(1), **arrays}, prompt_at)
    assert found.clock == given.clock
    assert found.responses.keys() == given.responses.keys()
    assert_equal(without_limits(found), without_limits(given))
    assert (flight_arrays(None), flight_of({}, prompt_at)) == ({}, None)


parts = st.builds(
    lambda length, reason: Drawn(
        record=Tokens(np.arange(length), logprobs=-np.arange(length) / 7), new=length, finish_reason=reason
    ),
    st.integers(0, 5),
    st.sampled_from([None, "stop", "length"]),
)


@given(st.lists(parts, max_size=5))
def test_the_new_tokens_of_a_round_survive_as_arrays(drawn):
    assert_equal(drawn_of(drawn_arrays(drawn)), drawn)
    packed, _ = pack_arrays(drawn_arrays(drawn))
    assert len(packed) == 12 * len(drawn) + 8 * sum(len(part.record) for part in drawn)


def test_all_values_of_tokens_survive_as_arrays_and_a_prompts_only_once(monkeypatch):
    """Of responses that share the values of their prompt, that have other values, or that have none, with further values of each token."""
    for name, value in FURTHER.items():
        monkeypatch.setitem(VALUES, name, value)
    prompt, again, other = (numbered(first, first + 2).processed for first in (5, 5, 6))
    processed = ("routes", "load")
    given = [
        Drawn(record=numbered(2, 2 + count, *left_out), new=count, finish_reason=None, prompt_values=of_prompt)
        for of_prompt, count, left_out in (
            ({}, 3, processed), (prompt, 3, ()), (again, 5, ()), ({}, 1, ()), (prompt, 0, ()), (other, 3, processed), ({}, 3, processed), (other, 2, ()),
        )
    ]  # fmt: skip
    arrays = drawn_arrays(given)
    assert_equal(drawn_of(arrays), given)
    assert len(arrays["routes"]) == 2 + 3 + 5 + 1 + 0 + 2 + 2, "two records of prompts"
    values = {"length": 3, "start": 2, "finish_reason": "stop", "text": "", "reward": 1.0, "overlong_penalty": 0.0, "verdict": {"correct": True}}  # fmt: skip
    plain = make_rollout(values)
    rollouts = [
        replace(plain, response=replace(plain.response, record=part.record, prompt_values=part.prompt_values))
        for part in given
    ]
    groups = [Group(prompt=prompt_at(at), rollouts=tuple(rollouts[4 * at : 4 * at + 4])) for at in range(2)]
    assert_equal(groups_of(group_arrays(groups), prompt_at), groups)
    brief, whole = groups_of(group_arrays(groups, whole=[False, True]), prompt_at)
    assert brief.rollouts[1].response.record.routes is None
    assert_equal([whole], groups[1:])
    flight = in_flight()
    for request, part in zip(flight.responses.values(), given[1:], strict=False):
        request.record, request.prompt_values = part.record, part.prompt_values
    restored = flight_of(flight_arrays(flight), prompt_at)
    assert_equal(without_limits(restored), without_limits(flight))


def without_limits(flight):
    """The requests without the numbers that the driver of the rounds sets for the next round."""
    return [replace(request, limit=0, target=0, version=0) for request in flight.responses.values()]


def test_an_answer_of_an_environment_survives_as_json():
    standing = Standing(rewards=(0.1, -1.0), correct=True, metrics={"luck": 1 / 3}, lost="died", reason="x")
    for before in (None, Continuation(np.array([3, 1], np.int32), True), Continuation(np.zeros(0, np.int32))):
        found = _answered(*json.loads(json.dumps(_as_json((before, standing)))))
        np.testing.assert_equal(found, (before, standing))
