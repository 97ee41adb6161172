"""The cache holds what was put in, where it was put."""

import jax.numpy as jnp
import numpy as np

from dapo_jax.sampling import cache as kv


def of(values):
    return kv.LayerCache(jnp.asarray(values), -jnp.asarray(values))


def numbered(slots, capacity):
    """[slots, 1 head, capacity, 2]: every entry its own number."""
    return np.arange(1.0, slots * capacity * 2 + 1, dtype=np.float32).reshape(slots, 1, capacity, 2)


def test_fill_copies_one_row_to_the_front_of_one_slot():
    before, prompts = numbered(3, 5), 100 + numbered(2, 2)
    after = kv.fill(of(before), of(prompts), jnp.int32(2), jnp.int32(1))
    expected = before.copy()
    expected[2, :, :2] = prompts[1]
    np.testing.assert_array_equal(after.keys, expected)
    np.testing.assert_array_equal(after.values, -expected)


def test_append_writes_behind_what_is_there():
    before, new = numbered(3, 5), np.full((3, 1, 2), 7.0, np.float32)
    lengths = np.array([0, 3, 4], np.int32)
    after = kv.append(of(before), jnp.asarray(new), -jnp.asarray(new), jnp.asarray(lengths))
    expected = before.copy()
    for slot, length in enumerate(lengths):
        expected[slot, :, length] = 7.0
    np.testing.assert_array_equal(after.keys, expected)
    np.testing.assert_array_equal(after.values, -expected)


def test_append_keeps_the_dtype_of_the_cache():
    cache = kv.empty(2, 1, 4, 2, "bfloat16")
    new = jnp.ones((2, 1, 2))
    assert kv.append(cache, new, new, jnp.zeros(2, jnp.int32)).keys.dtype == jnp.bfloat16
