"""Carried groups come back from a checkpoint as they went in."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_jax.checkpoints.packed_groups import carry_arrays, carry_groups, check_carry
from dapo_jax.dapo.rollouts import Group, Prompt, Response, Rollout, Span, Verdict


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
    check_carry(carry_arrays(groups), cursor=99, vocabulary=1 << 31, version=1 << 31)
    found = carry_groups(carry_arrays(groups), prompt_at)
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
            assert (x.text, x.verdict) == (y.text, y.verdict)
            assert (x.reward, x.overlong_penalty) == (y.reward, y.overlong_penalty)


def test_groups_of_an_older_checkpoint_have_no_parts():
    response = Response(tokens=np.ones(1, np.int32), logprobs=np.ones(1, np.float32), finish_reason="stop")
    verdict = Verdict(correct=True, reason="equal", extracted="2", lost="memory")
    rollout = Rollout(response=response, text="x", verdict=verdict, reward=1.0)
    arrays = carry_arrays([Group(prompt=prompt_at(1), rollouts=(rollout,))])
    for words, lost in ((["x", "equal", "2"], ""), (["x", "equal", "2", "memory"], "memory")):
        text = json.dumps(words).encode()
        older = {"texts": np.frombuffer(text, np.uint8), "text_lengths": np.array([len(text)])}
        [group] = carry_groups({**arrays, **older}, prompt_at)
        assert group.rollouts[0].verdict == replace(verdict, lost=lost)


def test_groups_of_a_checkpoint_that_does_not_say_how_old_they_are_are_a_step_old():
    values = {
        "length": 2, "start": 0, "finish_reason": "stop", "text": "", "reward": 1.0, "overlong_penalty": 0.0, "verdict": {"correct": True},
    }  # fmt: skip
    arrays = carry_arrays([Group(prompt=prompt_at(1), rollouts=(make_rollout(values),))])
    for name in ("span_counts", "span_firsts", "span_versions"):
        del arrays[name]
    assert [group.oldest for group in carry_groups(arrays, prompt_at, version=7)] == [6]
    older = {**arrays, "ages": np.array([3])}
    assert [group.oldest for group in carry_groups(older, prompt_at, version=7)] == [4]


def test_the_arrays_hold_no_python_objects():
    """A checkpoint stores bytes, not pickles."""
    response = Response(tokens=np.ones(1, np.int32), logprobs=np.ones(1, np.float32), finish_reason="stop")
    rollout = Rollout(response=response, text="x", verdict=Verdict(correct=True), reward=1.0)
    arrays = carry_arrays([Group(prompt=prompt_at(1), rollouts=(rollout,))])
    assert all(array.dtype != object for array in arrays.values())
    assert carry_arrays([]) == {}


def two_groups():
    """Arrays of two groups, of two responses of two tokens each."""
    values = {
        "length": 2, "start": 5, "finish_reason": "stop", "text": "t", "reward": 1.0, "overlong_penalty": 0.0,
        "verdict": {"correct": True, "parts": {"a": 1.0}},
    }  # fmt: skip
    members = (make_rollout(values), make_rollout(values))
    return carry_arrays([Group(prompt=prompt_at(place), rollouts=members) for place in (1, 2)])


def texts_of(*words):
    text = json.dumps(words).encode()
    return {
        "texts": np.frombuffer(text * 4, np.uint8),
        "text_lengths": np.full(4, len(text)),
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (texts_of("t", "", None, "perhaps", {}), "lost='perhaps'"),
        (texts_of("t", "", None, "", {"a": "x"}), "parts="),
        (
            {"tokens": np.array([5, 6, 7, -1, 5, 6, 7, 8], np.int32)},
            "'tokens' has one that is not from 0 to 9",
        ),
        ({"tokens": np.full(8, 10, np.int32)}, "'tokens' has one that is not from 0 to 9, of the vocabulary"),
        ({"tokens": np.full(8, 2**40)}, "'tokens' has one"),
        ({"rewards": np.array([1.0, np.inf, 1.0, 1.0])}, "'rewards' has one that is not finite"),
        ({"scores": np.array([1.0, np.nan, 1.0, 1.0])}, "'scores' has one that is not finite"),
        ({"group_sizes": np.array([4, 0])}, "'group_sizes' has a group without responses"),
        ({"ordinals": np.array([1, 3])}, "'ordinals' has one that is not from 0 to 2"),
        ({"span_counts": np.array([1, 1, 1, 0])}, "'span_counts' has a response without a span"),
        ({"span_firsts": np.zeros(5, np.int64)}, "'span_firsts' is not one number for each of 4 spans"),
        ({"span_firsts": np.array([0, 1, 0, 0])}, "'span_firsts' has spans that do not begin with"),
        (
            {
                "span_counts": np.array([2, 1, 1, 1]),
                "span_firsts": np.array([0, 2, 0, 0, 0]),
                "span_versions": np.arange(5) % 2,
            },
            "a span that begins behind its response's last token",
        ),
        (
            {
                "span_counts": np.array([2, 1, 1, 1]),
                "span_firsts": np.array([0, 1, 0, 0, 0]),
                "span_versions": np.zeros(5, np.int64),
            },
            "'span_versions' has versions that do not rise up to 4",
        ),
        ({"span_versions": np.array([0, 0, 5, 0])}, "'span_versions' has versions that do not rise up to 4"),
    ],
)
def test_forged_groups_are_refused_before_they_are_unpacked(changes, message):
    arrays = two_groups()
    check_carry(arrays, cursor=3, vocabulary=10, version=4)
    with pytest.raises(ValueError, match=message):
        check_carry({**arrays, **changes}, cursor=3, vocabulary=10, version=4)


def test_a_log_probability_that_is_not_a_number_is_the_guards_affair():
    """A sampler can give one, and the checkpoint that carries it is as it was written."""
    check_carry(
        two_groups() | {"logprobs": np.full(8, np.nan, np.float32)}, cursor=3, vocabulary=10, version=4
    )
