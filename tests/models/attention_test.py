"""Attention against a float64 loop; a slot does not depend on its cache beyond its length, nor on other slots."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.models import attention
from dapo_jax.models.attention import cached_attention, causal_attention, part_attention

HEADS, KV_HEADS, DIM = 4, 2, 8
CAPACITY = 13


def attend_by_loops(query, keys, values):
    """One query [dim] over keys and values [n, dim]: softmax(q k / sqrt(dim)) v, number by number."""
    scores = [sum(float(q) * float(k) for q, k in zip(query, key, strict=True)) for key in keys]
    weights = [math.exp(score / math.sqrt(len(query))) for score in scores]
    total = sum(weights)
    return [sum(w * float(v) for w, v in zip(weights, column, strict=True)) / total for column in values.T]


def causal_by_loops(query, key, value, segment_ids):
    out = np.zeros(query.shape)
    batch, seq, heads, _ = query.shape
    shared = heads // key.shape[2]
    for b, t, h in np.ndindex(batch, seq, heads):
        seen = [s for s in range(t + 1) if segment_ids[b, s] == segment_ids[b, t]]
        out[b, t, h] = attend_by_loops(query[b, t, h], key[b, seen, h // shared], value[b, seen, h // shared])
    return out


def random_inputs(seed, batch=2, seq=9):
    rng = np.random.default_rng(seed)
    shapes = [(batch, seq, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def random_cache(seed, slots):
    rng = np.random.default_rng(seed)
    shapes = [(slots, HEADS, DIM), (slots, KV_HEADS, CAPACITY, DIM), (slots, KV_HEADS, CAPACITY, DIM)]
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def causal(query, key, value, segment_ids, **how):
    """`causal_attention` of [batch, seq, heads, dim]: it takes tokens last, and rows joined."""

    def tokens_last(part):
        return jnp.asarray(part).transpose(2, 3, 0, 1).reshape(part.shape[2], DIM, -1)

    out = causal_attention(*map(tokens_last, (query, key, value)), jnp.asarray(segment_ids), **how)
    return out.reshape(-1, DIM, *segment_ids.shape).transpose(2, 3, 0, 1)


@functools.cache
def jitted(chunk):
    """`cached_attention` of a query [slots, heads, dim] and keys [slots, heads, capacity, dim]."""

    def attend(query, keys, values, lengths):
        out = cached_attention(query.transpose(1, 2, 0), keys.swapaxes(2, 3), values, lengths, chunk=chunk)
        return out.transpose(2, 0, 1)

    return jax.jit(attend)


@pytest.mark.parametrize("block", [64, 3, 4])
def test_causal_attention_sees_its_own_segment_up_to_itself(block, monkeypatch):
    """Nine queries in one block, in three of 3, and in blocks of 4, 4 and 1."""
    monkeypatch.setattr(attention, "SMALLEST_BLOCK", block)
    query, key, value = random_inputs(0)
    segment_ids = np.array([[1, 1, 1, 2, 2, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 1]], np.int32)
    found = causal(query, key, value, segment_ids)
    np.testing.assert_allclose(found, causal_by_loops(query, key, value, segment_ids), rtol=1e-5, atol=1e-6)


def test_causal_attention_sees_the_prompt_that_its_segment_follows():
    """A prompt of 3 tokens, responses of 2 and 4 after it: each response attends as if it alone followed the prompt."""
    query, key, value = random_inputs(3, batch=1)
    found = causal(query, key, value, np.array([[1, 1, 1, 2, 2, 3, 3, 3, 3]], np.int32),
                   prefix_ids=jnp.ones((1, 9), jnp.int32))  # fmt: skip
    for response in ([3, 4], [5, 6, 7, 8]):
        at = [0, 1, 2, *response]
        alone = causal_by_loops(
            *(part[:, at] for part in (query, key, value)), np.ones((1, len(at)), np.int32)
        )
        np.testing.assert_allclose(found[:, at], alone, rtol=1e-5, atol=1e-6)


def test_blocks_of_queries_change_no_gradient(monkeypatch):
    """26 queries in four blocks of 7 (the last of 5), and in one: three segments, the first is the prompt of the third."""
    inputs = random_inputs(4, batch=1, seq=26)
    segment_ids = np.array([[1] * 5 + [2] * 10 + [3] * 11], np.int32)
    prefix_ids = jnp.asarray(np.where(segment_ids == 3, 1, segment_ids))
    weights = jnp.asarray(random_inputs(5, batch=1, seq=26)[0])

    def gradients(block):
        monkeypatch.setattr(attention, "SMALLEST_BLOCK", block)

        def loss(*parts):
            return (causal(*parts, segment_ids, prefix_ids=prefix_ids) * weights).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*map(jnp.asarray, inputs))

    for in_blocks, whole in zip(gradients(1), gradients(64), strict=True):
        np.testing.assert_allclose(in_blocks, whole, atol=1e-5)


BLOCKS = np.array([[1] * 5 + [2] * 6 + [3] * 9 + [4] * 4 + [0] * 6, [1] * 17 + [2] * 2 + [3] * 11], np.int32)
"""Two rows of 30 tokens, in blocks of 4. In the first row, segments 2 and 3 follow segment 1; in the second row, no segment follows another."""


def by_blocks_and_whole(monkeypatch, *, first=0, window=None, cap=None, sinks=None, dtype="float32", part=30):
    """Returns the outputs and the gradients of a row's queries from column `first` on, with blocks of 4 and with row_attention's plain form."""
    monkeypatch.setattr(attention, "SMALLEST_BLOCK", 4)
    rng = np.random.default_rng(7)
    query, key, value = (
        jnp.asarray(rng.normal(size=(heads, DIM, 2, 30)), jnp.float32)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    prefix = np.where((BLOCKS == 2) | (BLOCKS == 3), 1, BLOCKS)
    prefix[1] = BLOCKS[1]
    cut = slice(first, first + part)
    ids = [jnp.asarray(each) for each in (BLOCKS[:, cut], prefix[:, cut], BLOCKS)]
    near = (
        None
        if window is None
        else (jnp.int32(window), jnp.broadcast_to(jnp.arange(30, dtype=jnp.int32), (2, 30)))
    )
    real = jnp.asarray(BLOCKS[None, None, :, cut] > 0, jnp.float32)
    along = jnp.asarray(rng.normal(size=query[..., cut].shape), jnp.float32)
    how = {"first": jnp.int32(first) if first else None, "near": near, "cap": cap, "dtype": dtype}

    def both(by_blocks):
        def loss(*parts):
            given = dict(zip(("sinks",), parts[3:], strict=False))
            out = attention.row_attention(*parts[:3], *ids, **how, **given, by_blocks=by_blocks) * real
            return (out * along).sum(), out

        parts = query[..., cut], key, value, *([] if sinks is None else [jnp.asarray(sinks)])
        grads, out = jax.jit(jax.grad(loss, argnums=range(len(parts)), has_aux=True))(*parts)
        return out, *grads

    return both(True), both(False)


# Slow: compile two gradients each. The quick cases have a window, a cap, a part of a row and sinks.
@pytest.mark.parametrize(
    "case",
    [{"window": 6, "cap": 1.0, "dtype": "bfloat16"}, {"first": 10, "part": 10, "window": 5}, {"window": 3, "sinks": [0.5, -1.0, 3.0, 0.0]},
     *(pytest.param(case, marks=pytest.mark.slow) for case in ({}, {"window": 3}, {"window": 0}, {"cap": 0.5}, {"first": 15, "part": 15}))],
    ids=str,
)  # fmt: skip
def test_attention_by_blocks_has_the_results_and_gradients_of_whole_rows(case, monkeypatch):
    for found, expected in zip(*by_blocks_and_whole(monkeypatch, **case), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=5e-6)


def test_attention_by_blocks_reads_no_block_that_the_mask_leaves_empty(monkeypatch):
    """Segment 2 fills the blocks at 8 and 12, which no query of the other segments may read."""
    monkeypatch.setattr(attention, "SMALLEST_BLOCK", 4)
    segment_ids = jnp.asarray([[1] * 8 + [2] * 8 + [3] * 8 + [0] * 8], jnp.int32)
    parts = [jnp.ones((heads, DIM, 1, 32)) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    parts[1:] = [jnp.where(segment_ids == 2, jnp.nan, part) for part in parts[1:]]

    def loss(query, key, value):
        out = attention.row_attention(query, key, value, *[segment_ids] * 3, by_blocks=True)
        return jnp.where(segment_ids == 2, 0, out).sum(), out

    grads, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*parts)
    for each in (out, *grads[1:]):
        assert np.isfinite(np.asarray(each)[..., np.asarray(segment_ids[0]) != 2]).all()
    np.testing.assert_array_equal(out[..., 24:], 0)


def test_attention_by_blocks_stores_no_scores():
    """Without blocks, the backward pass stores more than half of the scores. The scores of 4 heads have 4 x 512 x 512 x 4 bytes = 4 MiB. Other arrays of the rows have 64 KiB each."""
    ids = jnp.ones((1, 512), jnp.int32)
    parts = [jax.ShapeDtypeStruct((heads, DIM, 1, 512), jnp.float32) for heads in (HEADS, KV_HEADS, KV_HEADS)]

    def memory(by_blocks):
        def loss(*parts):
            return attention.row_attention(*parts, ids, ids, ids, by_blocks=by_blocks).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2))).lower(*parts).compile().memory_analysis().temp_size_in_bytes

    assert memory(by_blocks=False) > 2 * 2**20 > memory(by_blocks=True)


def test_causal_attention_takes_its_softmax_in_float32_whatever_the_inputs():
    """Inputs with 8 bits of mantissa: the error is at most 2^-9, from rounding the weights; the sum adds none."""
    rounded = [jnp.asarray(part, jnp.bfloat16).astype(jnp.float32) for part in random_inputs(1, seq=9)]
    segment_ids = np.ones((2, 9), np.int32)
    found = causal(*rounded, segment_ids, dtype="bfloat16")
    assert found.dtype == jnp.float32
    exact = causal_by_loops(*(np.asarray(part, np.float64) for part in rounded), segment_ids)
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, atol=2**-9 * np.abs(exact).max())


@pytest.mark.parametrize("chunk", [256, 13, 4, 5, 1], ids=lambda chunk: f"chunk={chunk}")
def test_cached_attention_sees_the_first_tokens_of_its_slot(chunk):
    """13 entries in chunks of 4, 5 and 1: the last chunk is moved back and must count nothing twice."""
    lengths = np.array([13, 1, 8, 5, 12], np.int32)
    query, keys, values = random_cache(2, len(lengths))
    found = jitted(chunk)(query, keys, values, lengths)
    for slot, head in np.ndindex(len(lengths), HEADS):
        shared = head // (HEADS // KV_HEADS)
        seen = slice(0, lengths[slot])
        exact = attend_by_loops(query[slot, head], keys[slot, shared, seen], values[slot, shared, seen])
        np.testing.assert_allclose(found[slot, head], exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", [13, 5])
def test_a_slot_does_not_depend_on_its_neighbours_to_the_last_bit(chunk):
    query, keys, values = random_cache(4, 3)
    alone = jitted(chunk)(query, keys, values, np.array([6, 0, 0], np.int32))
    for neighbours in ((1, 6), (13, 2), (5, 13)):
        found = jitted(chunk)(query, keys, values, np.array([6, *neighbours], np.int32))
        np.testing.assert_array_equal(found[0], alone[0])


@pytest.mark.parametrize("chunk", [13, 5])
def test_the_cache_beyond_the_length_never_counts(chunk):
    """For any finite values, which the cache guarantees."""
    query, keys, values = random_cache(5, 3)
    lengths = np.array([6, 3, 11], np.int32)
    clean = np.asarray(jitted(chunk)(query, keys, values, lengths))  # done before the arrays change
    for slot, length in enumerate(lengths):
        keys[slot, :, length:], values[slot, :, length:] = 1e30, -1e30
    np.testing.assert_array_equal(jitted(chunk)(query, keys, values, lengths), clean)


@pytest.mark.parametrize("chunk", [13, 5])
def test_a_free_slot_gives_zero(chunk):
    query, keys, values = random_cache(6, 3)
    for lengths in ([4, 0, 13], [0, 0, 0]):
        found = np.asarray(jitted(chunk)(query, keys, values, np.array(lengths, np.int32)))
        np.testing.assert_array_equal(found[1], 0.0)
        assert np.isfinite(found).all()


@pytest.mark.parametrize("window", [0, 4])
def test_attention_in_parts_equals_attention_of_the_whole(window):
    """12 tokens of 5 parts of 3: each part's queries over the keys up to it, with any values after them. A window of 4 begins in the part before."""
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(heads, 4, 15)), jnp.float32) for heads in (4, 2, 2))
    near = jnp.int32(window), jnp.arange(12, dtype=jnp.int32)[None]
    tokens = query[..., :12], key[..., :12], value[..., :12]
    whole = causal_attention(*tokens, jnp.ones((1, 12), jnp.int32), near=near)
    for start in range(0, 12, 3):
        cut = slice(start, start + 3)
        beyond = jnp.arange(15) >= start + 3
        keys, values = (jnp.where(beyond, 1e3, part) for part in (key, value))
        found = part_attention(query[..., cut], keys, values, jnp.int32(start), window=near[0])
        np.testing.assert_allclose(found, whole[..., cut], rtol=1e-5, atol=1e-6)
