"""Operations and bytes by shape."""

import math

import jax
import jax.extend
import jax.numpy as jnp
import pytest
from flax import nnx

from dapo_jax.config import SamplingConfig
from dapo_jax.models.decoder import Decoder
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.plan.costs import (
    cache_bytes_per_token,
    decode_weight_parameters,
    forward_flops,
    matrix_parameters,
)

SMALL = DecoderConfig(vocab_size=32, embed_dim=8, layers=3, heads=4, kv_heads=2, head_dim=6, mlp_dim=16)


def products(jaxpr):
    """Operations of all matrix products of a program, loops counted as often as they run."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            inner = math.prod(left[axis] for axis in contracted)
            total += 2 * math.prod(equation.outvars[0].aval.shape) * inner
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inside in jax.extend.core.jaxprs_in_params(equation.params):
            total += times * products(inside)
    return total


def test_operations_are_those_of_the_decoders_own_products():
    """Of 20 tokens in one row, which is a single block of attention: all 20 x 20 pairs are computed, masked or not."""
    tokens = jnp.zeros((1, 20), jnp.int32)
    graph, params = nnx.split(nnx.eval_shape(lambda: Decoder(SMALL, rngs=nnx.Rngs(0))))

    def logits(params):
        decoder = nnx.merge(graph, params)
        return decoder.ends.logits(decoder(tokens, tokens, tokens))

    counted = products(jax.make_jaxpr(logits)(params).jaxpr)
    assert counted == forward_flops(SMALL, tokens=20, pairs=400, logits=20)


def test_operations_by_hand():
    """A layer: 8 x (6 x (4 + 4 + 2 + 2) + 3 x 16) = 8 x 120 = 960 weights, 3 layers 2880; unembedding 32 x 8 = 256. Attention: 2
    products of 2 operations in 4 heads of 6 in 3 layers: 288 a pair. 2 x 2880 x 10 + 288 x 55 + 2 x 256 x 1."""
    assert matrix_parameters(SMALL) == 2880
    assert forward_flops(SMALL, tokens=10, pairs=55, logits=1) == 57_600 + 15_840 + 512


@pytest.mark.parametrize(
    ("cache_dtype", "compute_dtype", "bytes_per_token"),
    [("", "bfloat16", 144), ("", "float32", 288), ("int8", "bfloat16", 120)],
)
def test_cache_of_a_token(cache_dtype, compute_dtype, bytes_per_token):
    """Keys and values, 3 layers, 2 heads of 6: 72 numbers; in eight bits each of the 12 heads has a scale of 4 bytes."""
    sampling = SamplingConfig(cache_dtype=cache_dtype)
    assert cache_bytes_per_token(SMALL, sampling, compute_dtype=compute_dtype) == bytes_per_token
    assert decode_weight_parameters(SMALL) == 2880 + 256
