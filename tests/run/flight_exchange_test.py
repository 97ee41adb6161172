"""What a round drew, as bytes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dapo_jax.dapo.in_flight import Drawn
from dapo_jax.run.flight_exchange import _packed, _unpacked

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
