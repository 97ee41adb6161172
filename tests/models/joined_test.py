"""Joined matrices give the same layers, and a decoding step has one product with each input."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dapo_jax.models.attention_mixer import ATTENTION
from dapo_jax.models.decoder import Block
from dapo_jax.models.gated_delta import GatedDelta
from dapo_jax.models.joined import joined
from dapo_jax.models.lora import lora_shape
from dapo_jax.models.mamba import Mamba
from dapo_jax.models.projections import rope_tables
from dapo_jax.models.tensors import shapes_of
from dapo_jax.numerics.quantization import quantized
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.weights import WeightTransfer
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.sampling.engine_spec import EngineSpec
from dapo_jax.testing import tiny_decoder_config

LORA = lora_shape(rank=2, alpha=8.0, targets=["all"])
DELTA = {"mixers": (GatedDelta(2, 4, 8, 8), ATTENTION)}
KINDS = {
    "plain": {},
    "biases and norms": {"qkv_bias": True, "mlp_bias": True, "qk_norm": "head"},
    "gate": {"attention_gate": True, "qk_norm": "head"},
    "adapters": {"lora": LORA},
    "adapters of two matrices": {"lora": lora_shape(rank=2, alpha=8.0, targets=["k_proj", "v_proj"])},
    "delta": DELTA,
    "mamba": {"mixers": (Mamba(4, 8, 2, 8), ATTENTION)},
    "mamba with one group": {"mixers": (Mamba(4, 8, 1, 8), ATTENTION)},
}


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_with_joined_matrices_has_the_same_output(kind, parts):
    config = tiny_decoder_config(**KINDS[kind])
    block = Block(config, config.kinds[0], rngs=nnx.Rngs(0))
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
        return (kept[2] if config.fixed else given[0]), kept

    one, kept, _ = nnx.merge(graph, layer)(x, rope, attend)
    made = joined(layer, parts)
    assert sum(leaf.get_value() is None for leaf in made.values()) >= 2
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
    engine = DecoderEngine(config, mesh, EngineSpec(slots=4, capacity=16, steps_per_call=2, stop_ids=[1]))
    weights = WeightTransfer(
        shapes_of(config), mesh, dtype="float32", places=config.places, join=True, **how
    ).shapes
    text = engine.programs(weights, decoding())["generate"]().as_text()
    products = re.findall(r"stablehlo\.dot_general (%[\w#]+), (%[\w#]+), contracting", text)
    assert len(products) > 4 * config.layers
    used = Counter((function, operand) for function, part in enumerate(text.split("func.func")) for operand in re.findall(
        r"stablehlo\.dot_general %[\w#]+, (%[\w#]+), contracting", part))  # fmt: skip
    assert max(used.values()) == most


def test_the_computations_for_a_gpu_give_the_same_values():
    """Norms of queries and keys in one kernel, and products of 8-bit weights with the features last. Here a CPU executes them."""
    config = tiny_decoder_config(qk_norm="head", norm_offset=1.0)
    graph, layer = nnx.split(Block(config, config.kinds[0], rngs=nnx.Rngs(0), compute_dtype="bfloat16"))
    for name in ("gate", "up"):
        layer[name] = layer[name].replace(quantized(layer[name].get_value(), (1,)))
    layer = joined(layer, 1)
    (rope, *_) = rope_tables(jnp.arange(5, dtype=jnp.int32), config)

    def output(x):
        return nnx.merge(graph, layer)(x, rope, lambda query, key, value: (query + 0.0, (key, value)))[0]

    x = jax.random.normal(jax.random.key(2), (config.embed_dim, 5))
    anywhere = [jax.export.DisabledSafetyCheck.platform()]
    try:
        found, expected = (
            np.asarray(
                jax.export.export(jax.jit(output), platforms=[platform], disabled_checks=anywhere)(x).call(x)
            )
            for platform in ("cuda", "tpu")
        )
    except jax.errors.JaxRuntimeError as error:  # jax 0.12
        if "UNIMPLEMENTED" not in str(error):
            raise
        pytest.skip(f"this version of jax cannot execute products for a GPU on a CPU: {error}")
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
