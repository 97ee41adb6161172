"""Carried groups come back from a checkpoint as they went in."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dapo_jax.rollouts import Group, Prompt, Response, Rollout, Verdict
from dapo_jax.run.carry import carry_arrays, carry_groups


def prompt_at(ordinal):
    return Prompt(ordinal=ordinal, tokens=np.array([2, 3], np.int32), text=f"question {ordinal}", answer="!")


# Byte models sample anything: zeros, quotes, half a surrogate pair, an answer that holds what separates fields elsewhere.
texts = st.text(st.characters(), max_size=8) | st.sampled_from(["\0", "a\0b", '"\\', "\n", "\ud800", ""])


@st.composite
def rollouts(draw):
    length = draw(st.integers(1, 5))
    seed = draw(st.integers(0, 99))
    response = Response(
        tokens=np.arange(seed, seed + length, dtype=np.int32),
        logprobs=-np.arange(seed, seed + length, dtype=np.float32) / 7,
        finish_reason=draw(st.sampled_from(["stop", "length"])),
    )
    verdict = Verdict(
        correct=draw(st.booleans()),
        extracted=draw(st.none() | texts),
        reason=draw(texts),
        score=draw(st.none() | st.floats(-2, 2)),
    )
    return Rollout(
        response=response,
        text=draw(texts),
        verdict=verdict,
        reward=draw(st.floats(-2, 2)),
        overlong_penalty=draw(st.floats(-1, 0)),
    )


groups = st.lists(st.lists(rollouts(), min_size=1, max_size=3), max_size=4).map(
    lambda sizes: [
        Group(prompt=prompt_at(3 * place), rollouts=tuple(members)) for place, members in enumerate(sizes)
    ]
)


@given(groups=groups)
def test_groups_survive_as_arrays(groups):
    found = carry_groups(carry_arrays(groups), prompt_at)
    assert len(found) == len(groups)
    for a, b in zip(found, groups, strict=True):
        assert a.prompt.ordinal == b.prompt.ordinal
        assert a.prompt.text == b.prompt.text
        assert len(a.rollouts) == len(b.rollouts)
        for x, y in zip(a.rollouts, b.rollouts, strict=True):
            np.testing.assert_array_equal(x.response.tokens, y.response.tokens)
            np.testing.assert_array_equal(x.response.logprobs, y.response.logprobs)
            assert (x.response.tokens.dtype, x.response.logprobs.dtype) == (np.int32, np.float32)
            assert x.response.finish_reason == y.response.finish_reason
            assert (x.text, x.verdict, x.reward, x.overlong_penalty) == (
                y.text, y.verdict, y.reward, y.overlong_penalty
            )  # fmt: skip


def test_the_arrays_hold_no_python_objects():
    """A checkpoint stores bytes, not pickles."""
    [group] = [Group(prompt=prompt_at(1), rollouts=())]
    response = Response(tokens=np.ones(1, np.int32), logprobs=np.ones(1, np.float32), finish_reason="stop")
    rollout = Rollout(response=response, text="x", verdict=Verdict(correct=True), reward=1.0)
    arrays = carry_arrays([Group(prompt=group.prompt, rollouts=(rollout,))])
    assert all(array.dtype != object for array in arrays.values())
    assert carry_arrays([]) == {}
