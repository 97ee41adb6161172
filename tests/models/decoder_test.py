"""The decoder against an independent float64 network in numpy; packing and rematerialisation change nothing."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dapo_jax.models.decoder import Decoder, graph_of
from dapo_jax.models.presets import PRESETS
from dapo_jax.models.rope import Rope
from dapo_jax.models.tensors import shapes_of
from dapo_jax.testing import tiny_decoder_config, tiny_params

FAMILIES = {
    "llama": tiny_decoder_config(),
    "llama, untied": tiny_decoder_config(tied_embeddings=False, norm_eps=1e-5),
    "qwen2": tiny_decoder_config(qkv_bias=True, ropes=(Rope(theta=1e6),)),
    "qwen3, untied": tiny_decoder_config(qk_norm="head", tied_embeddings=False),
}
SHAPE = (2, 12)


@functools.cache
def forward(family, **options):
    """(params, tokens, positions, segment_ids) -> (hidden states, logits), compiled once per family."""
    graph = graph_of(FAMILIES[family], **options)

    def run(params, tokens, positions, segment_ids):
        decoder = nnx.merge(graph, params)
        hidden = decoder(tokens, positions, segment_ids)
        return hidden, decoder.ends.logits(hidden)

    return jax.jit(run)


def packed(*rows):
    """Rows of segments of the given lengths, padded to `SHAPE`, with random tokens (in the padding too)."""
    tokens = np.random.default_rng(0).integers(0, 20, SHAPE).astype(np.int32)
    positions, segment_ids = np.zeros(SHAPE, np.int32), np.zeros(SHAPE, np.int32)
    for row, lengths in enumerate(rows):
        start = 0
        for segment, length in enumerate(lengths, start=1):
            positions[row, start : start + length] = np.arange(length)
            segment_ids[row, start : start + length] = segment
            start += length
    return tokens, positions, segment_ids


def reference_logits(config, params, tokens):
    """One sequence through the network, in float64, token by token and head by head."""
    ends = {name: np.asarray(value, np.float64) for name, value in params["ends"].items()}
    blocks = {name: np.asarray(value, np.float64) for name, value in params["blocks"].items()}
    dim, shared = config.head_dim, config.heads // config.kv_heads

    def norm(x, weight):
        return x / math.sqrt(sum(x * x) / len(x) + config.norm_eps) * weight

    def turn(x, position):
        """Complex numbers (x_i, x_{i + dim/2}), each turned by position * theta^(-2i / dim)."""
        out = np.zeros(dim)
        for i in range(dim // 2):
            angle = position * config.ropes[0].theta ** (-2 * i / dim)
            turned = complex(x[i], x[i + dim // 2]) * complex(math.cos(angle), math.sin(angle))
            out[i], out[i + dim // 2] = turned.real, turned.imag
        return out

    def head_of(x, weights, layer, name, head, position):
        out = weights[name][head] @ x
        if config.qkv_bias:
            out = out + weights[f"{name}_bias"][head]
        if config.qk_norm == "head" and name != "value":
            out = norm(out, weights[f"{name}_norm"])
        return out if name == "value" else turn(out, position)

    xs = [ends["embedding"][token] for token in tokens]
    for layer in range(config.layers):
        weights = {name: value[layer] for name, value in blocks.items()}
        normed = [norm(x, weights["attention_norm"]) for x in xs]
        keys, values = (
            [
                [head_of(x, weights, layer, name, head, t) for head in range(config.kv_heads)]
                for t, x in enumerate(normed)
            ]
            for name in ("key", "value")
        )
        for t, x in enumerate(normed):
            for head in range(config.heads):
                query = head_of(x, weights, layer, "query", head, t)
                scores = [math.exp(query @ keys[s][head // shared] / math.sqrt(dim)) for s in range(t + 1)]
                mixed = sum(score * values[s][head // shared] for s, score in enumerate(scores)) / sum(scores)
                xs[t] = xs[t] + weights["output"][:, head] @ mixed
        for t, x in enumerate(xs):
            y = norm(x, weights["mlp_norm"])
            gate = weights["gate"] @ y
            xs[t] = x + weights["down"] @ (gate / (1 + np.exp(-gate)) * (weights["up"] @ y))
    unembedding = ends["embedding"] if config.tied_embeddings else ends["lm_head"]
    return np.array([unembedding @ norm(x, ends["final_norm"]) for x in xs])


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_an_independent_network(family):
    """Two rows, three segments: each segment has the same logits as its tokens alone."""
    config = FAMILIES[family]
    params = tiny_params(config)
    batch = packed([7, 4], [9])
    _, logits = forward(family)(params, *batch)
    tokens, _, segment_ids = batch
    for row, segment in ((0, 1), (0, 2), (1, 1)):
        here = segment_ids[row] == segment
        exact = reference_logits(config, nnx.to_pure_dict(params), tokens[row, here])
        np.testing.assert_allclose(np.asarray(logits)[row, here], exact, rtol=1e-4, atol=2e-5)


@functools.cache
def loss_and_gradient(remat):
    config = FAMILIES["llama"]
    graph, batch = graph_of(config, remat=remat), packed([7, 4], [9])

    def loss(params):
        hidden = nnx.merge(graph, params)(*map(jnp.asarray, batch))
        return jnp.sum(hidden * jnp.cos(jnp.arange(hidden.size, dtype=jnp.float32)).reshape(hidden.shape))

    return jax.device_get(jax.jit(jax.value_and_grad(loss))(tiny_params(config)))


# Slow: compiles another gradient. tests/models/golden_families_test.py rematerializes everything.
@pytest.mark.parametrize("remat", ["dots", pytest.param("full", marks=pytest.mark.slow)])
def test_rematerialisation_changes_neither_value_nor_gradient(remat):
    value, gradient = loss_and_gradient("none")
    found_value, found = loss_and_gradient(remat)
    np.testing.assert_allclose(found_value, value, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, gradient)


def layer_scan(config, **options):
    """Returns the program's equations, and the equation that scans over the layers."""
    graph = graph_of(config, **options)
    shapes = [jax.ShapeDtypeStruct(SHAPE, jnp.int32)] * 3
    program = jax.make_jaxpr(lambda params, *batch: nnx.merge(graph, params)(*batch))(
        shapes_of(config), *shapes
    )
    (scan,) = [equation for equation in program.eqns if equation.primitive.name == "scan"]
    return program.eqns, scan


def test_the_program_does_not_grow_with_depth():
    shallow, first = layer_scan(tiny_decoder_config(layers=2))
    deep, second = layer_scan(tiny_decoder_config(layers=7))
    assert (first.params["length"], second.params["length"]) == (2, 7)
    assert len(shallow) == len(deep)
    assert len(first.params["jaxpr"].eqns) == len(second.params["jaxpr"].eqns)


def test_every_block_parameter_is_stacked_and_names_its_axes():
    shapes = shapes_of(tiny_decoder_config(layers=7, qkv_bias=True, qk_norm="head", tied_embeddings=False))
    assert (len(shapes["blocks"]), len(shapes["ends"])) == (14, 3)
    for variable in shapes["blocks"].values():
        assert variable.shape[0] == 7
        assert len(variable.get_metadata()["axes"]) == len(variable.shape) - 1
    for variable in shapes["ends"].values():
        assert len(variable.get_metadata()["axes"]) == len(variable.shape)


def test_layers_start_with_different_weights():
    state = jax.jit(lambda: nnx.state(Decoder(tiny_decoder_config(), rngs=nnx.Rngs(0))))()
    for name in ("query", "output", "gate"):
        first, second = np.asarray(state["blocks"][name][...])
        assert not np.isclose(first, second).any()
    # Scale fan_in^-0.5, and smaller by (2 layers)^0.5 for a matrix that writes to the residual stream.
    np.testing.assert_allclose(np.std(state["blocks"]["query"][...]), 32**-0.5, rtol=0.05)
    np.testing.assert_allclose(np.std(state["blocks"]["output"][...]), (32 * 2 * 2) ** -0.5, rtol=0.05)


def test_no_parameter_is_weakly_typed():
    """A weakly typed parameter changes its type with the first update, and all programs compile again."""
    config = tiny_decoder_config(qkv_bias=True, qk_norm="head")
    state = jax.eval_shape(lambda: nnx.state(Decoder(config, rngs=nnx.Rngs(0))))
    assert not [leaf for leaf in jax.tree.leaves(state) if leaf.weak_type]


@pytest.mark.parametrize("name", [*PRESETS, "untied", "everything"])
def test_the_parameter_count_is_the_real_one(name):
    own = {
        "untied": tiny_decoder_config(tied_embeddings=False),
        "everything": tiny_decoder_config(qkv_bias=True, qk_norm="head", layers=3),
    }
    config = own.get(name) or PRESETS[name]
    assert config.parameters == sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes_of(config)))


def test_bfloat16_computes_on_float32_parameters():
    params = tiny_params(FAMILIES["qwen2"])
    batch = packed([7, 4], [9])
    hidden, logits = forward("qwen2", compute_dtype="bfloat16")(params, *batch)
    exact, _ = forward("qwen2")(params, *batch)
    assert hidden.dtype == logits.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}
    # Weights of 8 bits of mantissa in two layers: a few roundings of 2^-8 on states of size about 1.
    error = np.abs(np.asarray(hidden) - np.asarray(exact))[batch[2] > 0]
    assert 0.0 < error.mean() < 0.03
