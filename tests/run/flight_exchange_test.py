"""What a round drew, as bytes; and what environments said, as JSON."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dapo_jax.dapo.in_flight import Drawn, Standing
from dapo_jax.dapo.rollouts import Continuation
from dapo_jax.run.flight_exchange import Said, _heard, _packed, _told, _unpacked

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
def test_what_was_drawn_survives_as_bytes(drawn):
    found = _unpacked(_packed(drawn))
    assert len(found) == len(drawn)
    for a, b in zip(found, drawn, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)
        assert a.finish_reason == b.finish_reason


def test_what_an_environment_said_survives_as_json():
    standing = Standing(rewards=(0.1, -1.0), correct=True, metrics={"luck": 1 / 3}, lost="died", reason="x")
    for before in (None, Continuation(np.array([3, 1], np.int32), True), Continuation(np.zeros(0, np.int32))):
        said = Said(before=before, standing=standing)
        found = _heard(*json.loads(json.dumps(_told(said))))
        assert found.standing == standing
        if before is None:
            assert found.before is None
        else:
            assert found.before.anew == before.anew
            np.testing.assert_array_equal(found.before.tokens, before.tokens)
