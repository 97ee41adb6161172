"""The kernel's cache against attention in float64, the dense cache and an engine that uses it.

The kernel is interpreted here; the same tests run it on a TPU with `-m tpu`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.sampling import cache as dense
from dapo_jax.sampling import tpu_cache
from dapo_jax.sampling.tpu_cache import Pairs, cache_for

INTERPRETED = pytest.param("cpu", id="interpreted")
ON_TPU = pytest.param("tpu", marks=pytest.mark.tpu, id="tpu")


def mesh_of(platform):
    return make_mesh(devices=jax.devices(platform)[:1])


def filled(slots, kv_heads, capacity, head_dim, dtype, seed=0):
    """A cache in which all rows hold something, those behind a slot's tokens too; and its keys and values, apart."""
    there = tpu_cache.empty(slots, kv_heads, capacity, head_dim, dtype).pairs
    pairs = jnp.asarray(np.random.default_rng(seed).normal(size=there.shape).astype(np.float32)).astype(dtype)
    keys, values = np.split(np.array(pairs.astype(jnp.float32)), 2, axis=-1)
    return Pairs(pairs), keys, values


def new_token(slots, heads, kv_heads, head_dim, dtype, seed=1):
    """Query, key and value, [heads, head_dim, slots], representable in the dtype."""
    rng = np.random.default_rng(seed)
    shapes = [(count, head_dim, slots) for count in (heads, kv_heads, kv_heads)]
    drawn = [jnp.asarray(rng.normal(size=shape).astype(np.float32)) for shape in shapes]
    return [part.astype(dtype).astype(jnp.float32) for part in drawn]


def attend(query, keys, values):
    """softmax(query keys) values in float64, and the same of the absolute values: how much is summed."""
    scores = keys.astype(np.float64) @ query.astype(np.float64)
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    return weights @ values, weights @ np.abs(values)


@pytest.mark.parametrize("platform", [INTERPRETED, ON_TPU])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "capacity", "dtype"),
    [(10, 2, 128, 1300, "bfloat16"), (7, 1, 64, 600, "bfloat16"), (6, 3, 32, 40, "float32")],
    ids=["halves of the heads, 1536 rows", "one head of 64", "three heads, one block"],
)
def test_a_live_slot_attends_to_its_tokens_and_the_new_one(
    heads, kv_heads, head_dim, capacity, dtype, platform
):
    """A slot that is full but for one, one whose new token begins a block, one of a single token, one that is not live.

    In float32 sums differ by their order. In bfloat16 the scaled query is rounded, here too, and a weight: with 7 bits behind
    the leading one by at most half of 2^-7 of it, so the result by so much of the sum of |weight x value|.
    """
    mesh, lengths = mesh_of(platform), np.array([capacity - 1, min(512, capacity // 2), 1, 7], np.int32)
    live = np.array([True, True, True, False])
    cache, keys, values = filled(4, kv_heads, capacity, head_dim, dtype)
    query, key, value = new_token(4, heads, kv_heads, head_dim, dtype)
    extend = jax.jit(cache_for(mesh, paired=True).extend)
    found, grown = jax.device_get(extend(cache, query, key, value, jnp.asarray(lengths), jnp.asarray(live)))
    scaled = np.asarray((query * head_dim**-0.5).astype(dtype).astype(jnp.float32))
    for slot, length in enumerate(lengths[:3]):
        for array, new in ((keys, key), (values, value)):
            array[slot, :, length] = np.asarray(new)[:, :, slot]
        for head in range(heads):
            seen = slot, head // (heads // kv_heads), slice(0, length + 1)
            exact, summed = attend(scaled[head, :, slot], keys[seen], values[seen])
            slack = (2**-8 if dtype == "bfloat16" else 0) * summed + 1e-5
            assert (np.abs(found[head, :, slot] - exact) <= slack).all(), (slot, head)
    assert not found[:, :, 3].any()
    np.testing.assert_array_equal(
        np.asarray(grown.pairs, np.float32), np.concatenate([keys, values], axis=-1)
    )


def test_without_a_live_slot_no_token_is_written():
    cache, _, _ = filled(3, 2, 40, 8, "float32")
    new = new_token(3, 4, 2, 8, "float32")
    out, grown = cache_for(mesh_of("cpu"), paired=True).extend(
        cache, *new, jnp.array([40, 3, 0], jnp.int32), jnp.zeros(3, bool)
    )
    assert not np.asarray(out).any()
    # The kernel takes a step all the same, over the last slot: what it writes there lies in front of a slot that is free.
    np.testing.assert_array_equal(grown.pairs[:2], cache.pairs[:2])
    np.testing.assert_array_equal(grown.pairs[2, :, 1:], cache.pairs[2, :, 1:])


def test_a_slots_result_does_not_depend_on_its_neighbours_to_the_last_bit():
    """Other lengths of the neighbours, so that the slot comes at another step of the kernel, or alone."""
    cache, _, _ = filled(3, 2, 600, 8, "float32")
    new = new_token(3, 4, 2, 8, "float32")
    extend = jax.jit(cache_for(mesh_of("cpu"), paired=True).extend)

    def second(first, third, *, live=(True, True, True)):
        lengths = jnp.array([first, 550, third], jnp.int32)
        return np.asarray(extend(cache, *new, lengths, jnp.asarray(live))[0][..., 1])

    alone = second(0, 0, live=(False, True, False))
    np.testing.assert_array_equal(second(599, 3), alone)
    np.testing.assert_array_equal(second(5, 512), alone)


def test_the_walk_passes_the_blocks_of_live_slots_slot_by_slot():
    """2, 1 and 3 blocks; the second slot is not live: steps 0, 1 | 2, 3, 4 begin at 0 | 2."""
    blocks, live = jnp.array([2, 1, 3], jnp.int32), jnp.array([True, False, True])
    count, slot_of, starts = tpu_cache._walk(blocks, live, 9)
    assert count == 5
    assert slot_of[:5].tolist() == [0, 0, 2, 2, 2]
    assert starts[jnp.array([0, 2])].tolist() == [0, 2]


@pytest.mark.parametrize(
    ("rows", "row_bytes", "expected"),
    # 2^20 / 512 = 2048 = 4 x 512 divides 44 x 512; of 7 x 512 rows 7 x 512 are too many; at 4096 bytes 256 would fit: one unit.
    [(22_528, 512, 2048), (3584, 512, 512), (3584, 256, 3584), (4096, 4096, 512), (80, 512, 80)],
)
def test_a_block_is_the_longest_that_fits_the_slot_and_the_limit(rows, row_bytes, expected):
    assert tpu_cache._block(rows, row_bytes) == expected


@pytest.mark.parametrize(
    ("capacity", "rows"), [(22_528, 22_528), (1300, 1536), (513, 1024), (512, 512), (40, 48)]
)
def test_capacity_is_rounded_up_to_whole_blocks(capacity, rows):
    """513 are two units of 512, 40 three tiles of 16."""
    shape = jax.eval_shape(lambda: tpu_cache.empty(2, 1, capacity, 64, "bfloat16")).pairs.shape
    assert shape == (2, 1, rows, 128)


def test_prompts_are_brought_to_slots_as_in_the_dense_cache():
    """Two rows of 3 tokens; of the second from its second token on, into the last of three slots of 16 rows."""
    tokens = np.arange(1, 2 * 4 * 6 + 1, dtype=np.float32).reshape(2, 4, 6)
    where = [jnp.int32(number) for number in (2, 1, 1)]

    def filled_by(kind):
        read = kind.of_rows(jnp.asarray(tokens), -jnp.asarray(tokens), 2)
        return kind.fill(kind.empty(3, 2, 16, 4, "float32"), read, *where)

    pairs, apart = filled_by(tpu_cache), filled_by(dense)
    expected = np.concatenate([apart.keys.swapaxes(2, 3), apart.values], axis=-1)
    np.testing.assert_array_equal(pairs.pairs, expected)


def test_the_cache_is_the_one_for_the_meshs_platform():
    mesh = mesh_of("cpu")
    assert cache_for(mesh) is dense.DENSE
    assert cache_for(mesh, paired=False) is dense.DENSE
    assert cache_for(mesh, paired=True).empty is tpu_cache.empty
