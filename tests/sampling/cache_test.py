"""The dense cache stores tokens at their places."""

import jax.numpy as jnp
import numpy as np

from dapo_jax.sampling import cache as kv


def of(values):
    """Keys of `values` [slots, heads, capacity, dim], and values of the same number but negative."""
    return kv.LayerCache(jnp.asarray(values).swapaxes(2, 3), -jnp.asarray(values))


def numbered(slots, capacity):
    """[slots, 1 head, capacity, 2]: every entry its own number."""
    return np.arange(1.0, slots * capacity * 2 + 1, dtype=np.float32).reshape(slots, 1, capacity, 2)


def assert_holds(cache, expected):
    np.testing.assert_array_equal(np.asarray(cache.keys).swapaxes(2, 3), expected)
    np.testing.assert_array_equal(cache.values, -expected)


def test_fill_brings_tokens_to_a_page_and_writes_all_of_it():
    """Row 1 of width 3, from its second token on: the rest of the row, then zeros."""
    before, rows = numbered(3, 5), 100 + numbered(2, 3)
    after = kv.fill(of(before), of(rows), jnp.int32(2), jnp.int32(1), jnp.int32(1))
    expected = before.copy()
    expected[2, :, :2], expected[2, :, 2:] = rows[1][:, [1, 2]], 0.0
    assert_holds(after, expected)


def test_fill_overwrites_all_of_a_page_even_nan():
    filled = kv.fill(
        of(np.full((2, 1, 5, 2), np.nan, np.float32)), of(numbered(1, 3)), *(jnp.zeros((3,), jnp.int32))
    )
    assert np.isfinite(filled.keys[0]).all()
    assert np.isfinite(filled.values[0]).all()
    assert np.isnan(filled.keys[1]).all()


def test_append_writes_after_a_slots_tokens():
    before, new = numbered(3, 5), np.arange(6, dtype=np.float32).reshape(3, 1, 2)
    lengths = np.array([0, 3, 4], np.int32)
    token = jnp.asarray(new.transpose(1, 2, 0))
    after = kv.append(of(before), token, -token, jnp.asarray(lengths))
    expected = before.copy()
    for slot, length in enumerate(lengths):
        expected[slot, :, length] = new[slot]
    assert_holds(after, expected)
