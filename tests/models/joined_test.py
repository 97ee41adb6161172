"""Joined matrices give the same layers, and a decoding step has one product with each input."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dapo_jax.models.decoder import Block, rope_tables
from dapo_jax.models.joined import Joined, joined
from dapo_jax.models.lora import lora_shape
from dapo_jax.models.presets import DeltaSizes
from dapo_jax.models.tensors import shapes_of
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.weights import WeightTransfer
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.testing import tiny_decoder_config

LORA = lora_shape(rank=2, alpha=8.0, targets=["all"])
DELTA = {"delta": DeltaSizes(2, 4, 8, 8), "delta_layers": (True, False)}
KINDS = {
    "plain": {},
    "biases and norms": {"qkv_bias": True, "mlp_bias": True, "qk_norm": "head"},
    "gate": {"attention_gate": True, "qk_norm": "head"},
    "adapters": {"lora": LORA},
    "adapters of two matrices": {"lora": lora_shape(rank=2, alpha=8.0, targets=["k_proj", "v_proj"])},
    "delta": DELTA,
}


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_with_joined_matrices_has_the_same_output(kind, parts):
    config = tiny_decoder_config(**KINDS[kind])
    block = Block(config, rngs=nnx.Rngs(0), delta=config.delta is not None)
    graph, layer = nnx.split(block)
    # Biases, norms and the second matrices of adapters begin as constants.
    leaves, tree = jax.tree.flatten(layer)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    layer = jax.tree.unflatten(
        tree,
        [leaf + jax.random.normal(key, leaf.shape) * 0.1 for leaf, key in zip(leaves, keys, strict=True)],
    )
    x = jax.random.normal(jax.random.key(2), (config.embed_dim, 5))
    (rope, *_) = rope_tables(jnp.arange(5, dtype=jnp.int32), config)

    def attend(*given):
        kept = jax.tree.leaves(given)
        return (kept[2] if config.delta is not None else given[0]), kept

    one, kept, _ = nnx.merge(graph, layer)(x, rope, attend)
    made = joined(layer, parts)
    assert sum(isinstance(leaf.get_value(), Joined) for leaf in made.values()) >= 2
    assert len(jax.tree.leaves(made)) < len(leaves)
    other, also_kept, _ = nnx.merge(graph, made)(x, rope, attend)
    np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5)
    for found, expected in zip(also_kept, kept, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "how", "most"),
    [
        ({"qkv_bias": True, "qk_norm": "head"}, {}, 1),
        ({}, {"eight_bit": True}, 1),
        (DELTA, {}, 1),
        ({"lora": LORA}, {}, 2),  # the matrices, and the first matrices of their adapters
    ],
    ids=["plain", "int8", "delta", "adapters"],
)
def test_a_decoding_step_multiplies_each_input_once(changes, how, most):
    """Otherwise, XLA would join the matrices in every step on a GPU, which copies them."""
    config = tiny_decoder_config(**changes)
    mesh = make_mesh(devices=jax.devices()[:1])
    engine = DecoderEngine(config, slots=4, capacity=16, steps_per_call=2, stop_ids=[1], mesh=mesh)
    weights = WeightTransfer(shapes_of(config), mesh, dtype="float32", places=config.places, **how).shapes
    text = engine.programs(weights, decoding())["generate"]().as_text()
    products = re.findall(r"stablehlo\.dot_general (%[\w#]+), (%[\w#]+), contracting", text)
    assert len(products) > 4 * config.layers
    used = Counter((function, operand) for function, part in enumerate(text.split("func.func")) for operand in re.findall(
        r"stablehlo\.dot_general %[\w#]+, (%[\w#]+), contracting", part))  # fmt: skip
    assert max(used.values()) == most


def test_norms_of_queries_and_keys_in_one_kernel_equal_separate_norms():
    config = tiny_decoder_config(qk_norm="head", norm_offset=1.0)
    block = Block(config, rngs=nnx.Rngs(0))
    query, key = (
        jax.random.normal(jax.random.key(heads), (heads, config.head_dim, 5))
        for heads in (config.heads, config.kv_heads)
    )
    for found, expected in zip(
        block._normed_together(query, key), block._normed_apart(query, key), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
