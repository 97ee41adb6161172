"""Splash attention against attention in float64. It is interpreted here; with `-m tpu` the chip runs it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.models.attention import causal_attention
from dapo_jax.models.kernels import splash_attention, splash_kernel

HEADS, KV_HEADS, DIM, ROWS, SEQ = 4, 2, 128, 2, 256
INTERPRETED = pytest.param(True, id="interpreted")
ON_TPU = pytest.param(False, marks=pytest.mark.tpu, id="tpu")


def inputs(dtype, seed=0):
    """Query, key and value, [heads, dim, rows, seq], such that the scaled query and the others are representable in the dtype."""
    rng = np.random.default_rng(seed)
    shapes = [(heads, DIM, ROWS, SEQ) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    query, key, value = (
        jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype).astype(jnp.float32) for shape in shapes
    )
    return (query * DIM**-0.5).astype(dtype).astype(jnp.float32) * DIM**0.5, key, value


def packed():
    """One row of three rollouts and padding, one of a single rollout."""
    three = np.repeat([1, 2, 3, 0], [100, 60, 70, 26])
    return np.stack([three, np.ones(SEQ, int)]).astype(np.int32)


def exactly(query, key, value, segment_ids, window=0, cap=None):
    """Attention in float64, [heads, dim, rows, seq], and the same of the absolute values: how much is summed."""
    q, k, v = (np.asarray(part, np.float64) for part in (query, key, value))
    near = np.tril(np.ones((SEQ, SEQ), bool))
    near &= ~np.tril(near, -window) if window else True
    seen = near & (segment_ids[:, :, None] == segment_ids[:, None])
    shared = np.arange(HEADS) // (HEADS // KV_HEADS)
    scores = np.einsum("hdbs,hdbt->bhst", q, k[shared]) * DIM**-0.5
    scores = scores if cap is None else cap * np.tanh(scores / cap)
    weights = np.where(seen[:, None], np.exp(scores - scores.max(-1, keepdims=True)), 0.0)
    weights /= weights.sum(-1, keepdims=True)
    return [np.einsum("bhst,hdbt->hdbs", weights, part[shared]) for part in (v, np.abs(v))]


def assert_attends(found, parts, segment_ids, dtype, **masks):
    """In bfloat16, weights and results are rounded by up to 2^-8 of their value. In float32, only the order of sums differs."""
    exact, summed = exactly(*parts, segment_ids, **masks)
    slack = (2**-8 if dtype == "bfloat16" else 0) * (summed + np.abs(exact)) + 1e-5
    assert (np.abs(np.asarray(found) - exact) <= slack).all()


@pytest.mark.parametrize(("head_dim", "block"), [(64, 1024), (128, 1024), (256, 512)])
def test_blocks_of_wide_heads_have_fewer_tokens(head_dim, block):
    """The update of a decoder with capped scores, heads of 256 and blocks of 1,024 needs more memory than a core of v5p has."""
    kernel = splash_kernel(1, 4096, head_dim=head_dim, interpret=True)
    assert kernel.kwargs["block_sizes"].block_q_dkv == block


MASKS = [{}, {"window": 70}, {"window": 130, "cap": 1.0}]
SINKS = jnp.linspace(-1.0, 3.0, HEADS)
"""Rows have two blocks of 128 tokens. The segments of the first row are cut by the windows, too."""


# Slow: the kernel is interpreted. The case with a cap has a window, too.
QUICK = [MASKS[0], pytest.param(MASKS[1], marks=pytest.mark.slow), MASKS[2]]


@pytest.mark.parametrize("interpret", [INTERPRETED, ON_TPU])
@pytest.mark.parametrize("masks", QUICK, ids=str)
def test_splash_attention_sees_its_own_segment_up_to_itself(interpret, masks):
    parts, ids = inputs("bfloat16"), jnp.asarray(packed())
    kernel = splash_kernel(HEADS, SEQ, interpret=interpret, **masks)
    found = jax.jit(lambda *parts: splash_attention(kernel, *parts, ids, ids, dtype="bfloat16"))(*parts)
    assert_attends(found, parts, packed(), "bfloat16", **masks)


@pytest.mark.parametrize("interpret", [INTERPRETED, ON_TPU])
# Slow: compiles two gradients. The case with a window and a cap has everything.
@pytest.mark.parametrize(
    "masks", [*(pytest.param(masks, marks=pytest.mark.slow) for masks in MASKS[:2]), MASKS[2]], ids=str
)
def test_gradients_through_splash_attention_are_those_of_plain_attention(interpret, masks):
    """Weights, results and their cotangents are rounded by 2^-8 each, which is 2^-6 of a gradient's norm in total."""
    parts, segment_ids = inputs("bfloat16"), jnp.asarray(packed())
    kernel = splash_kernel(HEADS, SEQ, interpret=interpret, **masks)
    columns = jnp.broadcast_to(jnp.arange(SEQ, dtype=jnp.int32), segment_ids.shape)
    near = (jnp.int32(masks["window"]), columns) if masks else None
    along = inputs("bfloat16", seed=1)[0]

    parts = *parts, SINKS

    def by_splash(*parts):
        how = {"sinks": parts[3], "dtype": "bfloat16"}
        return (splash_attention(kernel, *parts[:3], segment_ids, segment_ids, **how) * along).sum()

    def plainly(*parts):
        *parts, sinks = parts
        joined = (part.reshape(*part.shape[:2], -1) for part in parts)
        return (
            causal_attention(*joined, segment_ids, near=near, cap=masks.get("cap"), sinks=sinks).reshape(
                along.shape
            )
            * along
        ).sum()

    found = jax.jit(jax.grad(by_splash, (0, 1, 2, 3)))(*parts)
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(jax.grad(plainly, (0, 1, 2, 3)))(*parts)
    for one, other in zip(found, expected, strict=True):
        assert np.linalg.norm(np.asarray(one - other)) < 2**-6 * np.linalg.norm(np.asarray(other))
