"""The gradient of adapters compared with float64 and the chain rule, on one device and on eight."""

import math
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dapo_jax.dapo.batching import Example
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.models.decoder import REMAT_POLICIES, graph_of, unstacked
from dapo_jax.models.lora import lora_shape, parted
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.sharding import shardings
from dapo_jax.parallel.training_layout import layout_of
from dapo_jax.testing import tiny_decoder_config, tiny_params
from dapo_jax.training.optimizer import make_optimizer
from dapo_jax.training.row_packing import pack
from dapo_jax.training.state import init_state
from dapo_jax.training.update import UpdateOptions, Updater
from tests.training.correction_test import (
    HIGH,
    KEEP_GRADIENT,
    LOW,
    in_float64,
    logprobs_of,
    moved,
    one_device,
)

BASE = tiny_decoder_config(layers=1, embed_dim=16, mlp_dim=24, heads=4, kv_heads=2)
"""One layer, so that float32 rounding is below half of the tolerance."""
CONFIG = replace(BASE, lora=lora_shape(rank=3, alpha=6.0, targets=["all"]))
ADAPTERS, FROZEN = parted(moved(tiny_params(CONFIG), 1, 0.1))
"""B is not zero, so that A has a gradient."""


@cache
def rollouts():
    """Six prompts with four responses each; the log-probabilities of another policy, so that some ratios are clipped."""
    rng, found = np.random.default_rng(0), []
    for group in range(6):
        prompt = rng.integers(2, BASE.vocab_size, rng.integers(3, 7)).astype(np.int32)
        for _ in range(4):
            response = rng.integers(2, BASE.vocab_size, rng.integers(4, 14)).astype(np.int32)
            logprobs = rng.normal(-3.5, 0.5, len(response)).astype(np.float32)
            advantage = float(np.float32(rng.normal(0.5, 1.0)))
            found.append(
                Example(prompt=Tokens(prompt), response=Tokens(response, logprobs=logprobs), advantage=advantage, group=group)
            )  # fmt: skip
    return found


@cache
def table():
    """Returns tokens, the mask of responses, and the other policy's log-probabilities, each [24, longest]."""
    rows = [np.array([*each.prompt.ids, *each.response.ids]) for each in rollouts()]
    shape = (24, max(map(len, rows)))
    tokens, sampled, logprobs = np.zeros(shape, np.int32), np.zeros(shape, bool), np.zeros(shape)
    for row, (each, both) in enumerate(zip(rollouts(), rows, strict=True)):
        tokens[row, : len(both)] = both
        sampled[row, len(each.prompt.ids) : len(both)] = True
        logprobs[row, sampled[row]] = each.response.logprobs
    return tokens, sampled, logprobs


def exact(adapters):
    """Returns the sum of base and adapters in float64, by name."""
    whole = in_float64(nnx.merge_state(FROZEN, adapters))
    for name in [name.removesuffix("_lora_a") for name in whole if name.endswith("_lora_a")]:
        a, b = whole.pop(f"{name}_lora_a"), whole.pop(f"{name}_lora_b")
        change = np.einsum("lor,lri->loi", b.reshape(1, -1, 3), a.reshape(1, 3, -1))
        whole[name] = whole[name] + 2.0 * change.reshape(whole[name].shape)
    return whole


@cache
def by_the_chain_rule():
    """Returns the gradients of y = W x + 2 B A x (alpha 6, rank 3): dA = 2 B^T dW and dB = 2 dW A^T, with dW the gradient of the whole matrix."""
    tokens, sampled, other = table()
    advantages = np.array([each.advantage for each in rollouts()])[:, None]

    def loss(p):
        ratio = jnp.exp(jnp.where(sampled, logprobs_of(p, tokens, BASE), 0.0) - other)
        gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - LOW, 1 + HIGH) * advantages)
        return -jnp.where(sampled, gain, 0.0).sum() / float(sampled.sum())

    with jax.enable_x64(True):
        whole = jax.jit(jax.grad(loss))(exact(ADAPTERS))
    parts, found = in_float64(ADAPTERS), {}
    for name in [name.removesuffix("_lora_a") for name in parts if name.endswith("_lora_a")]:
        a, b = parts[f"{name}_lora_a"], parts[f"{name}_lora_b"]
        change = np.asarray(whole[name]).reshape(b.reshape(1, -1, 3).shape[1], -1)
        flat_a, flat_b = a.reshape(3, -1), b.reshape(-1, 3)
        found[f"{name}_lora_a"] = (2.0 * flat_b.T @ change).reshape(a.shape)
        found[f"{name}_lora_b"] = (2.0 * change @ flat_a.T).reshape(b.shape)
    return found


def microbatches(*, packed):
    """Returns microbatches with packed rows of 48 tokens and shared prompts, or with one response per row."""
    weights = np.full(24, 1.0 / sum(len(each.response.ids) for each in rollouts()))
    how = {"row_tokens": 48, "rows_per_microbatch": 8}
    if packed:
        return pack(rollouts(), weights, **how)
    parts = [pack([each], weights[:1], row_tokens=48, rows_per_microbatch=1)[0] for each in rollouts()]
    return [
        jax.tree.map(lambda *rows: np.concatenate(rows), *parts[start : start + 8])
        for start in range(0, 24, 8)
    ]


def gradient(mesh, *, packed=True, apart=False, remat="none"):
    """Returns the library's gradient, by name."""
    layout = layout_of(mesh, attention="xla")
    frozen = jax.device_put(FROZEN, shardings(FROZEN, mesh))
    updater = Updater(
        graph_of(CONFIG, layout=layout, remat=remat), ADAPTERS, KEEP_GRADIENT, mesh,
        options=UpdateOptions(logprob_chunk_vocab=8, old_logprobs="sampler"),
        frozen=unstacked(frozen) if apart else frozen,
    )  # fmt: skip
    state = init_state(ADAPTERS, KEEP_GRADIENT, mesh)
    [prepared] = updater.prepare(state, [microbatches(packed=packed)])
    state, _ = updater.update(state, prepared, learning_rate=1.0, first=False)
    return in_float64(state.opt_state.trace)


def assert_exact(found):
    expected = by_the_chain_rule()
    assert found.keys() == expected.keys()
    assert len(found) == 14, "A and B of seven matrices"
    largest = max(np.abs(leaf).max() for leaf in expected.values())
    errors = {name: np.abs(found[name] - leaf).max() / largest for name, leaf in expected.items()}
    assert max(errors.values()) <= 1e-6, errors
    assert all(np.abs(leaf).max() > 1e-3 * largest for leaf in expected.values())


@pytest.mark.parametrize(
    ("axes", "packed"),
    [
        ({"fsdp": 2, "tensor": 2, "context": 2}, True),
        # Slow: one device. `test_a_base_with_separate_layers_gives_the_same_gradient` has the same gradient on one device.
        pytest.param({}, True, marks=pytest.mark.slow),
        # Slow: compiles another update for rows without shared prompts. tests/training/update_test.py compares both ways of packing.
        pytest.param({}, False, marks=pytest.mark.slow),
        # Eight devices again; the case above has all kinds of collectives.
        pytest.param({"data": 2, "context": 4, "fsdp": 1}, False, marks=pytest.mark.slow),
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_gradient_of_adapters_follows_by_the_chain_rule(axes, packed):
    assert_exact(gradient(make_mesh(**axes) if axes else one_device(), packed=packed))


@pytest.mark.parametrize(
    "remat", ["full", *(pytest.param(slow, marks=pytest.mark.slow) for slow in ("none", "dots"))]
)
def test_a_base_with_separate_layers_gives_the_same_gradient(remat):
    """Trainer and sampler share such arrays."""
    assert_exact(gradient(one_device(), apart=True, remat=remat))


# Slow: compiles an update for eight devices. The tests above have separate layers on one device, and a stack on eight.
@pytest.mark.slow
def test_a_base_with_separate_layers_can_be_sharded():
    assert_exact(gradient(make_mesh(data=4, fsdp=1, tensor=2), apart=True))


def update_of(layers, *, apart, remat="none"):
    """Returns the updater of a model with `layers` layers, its state, and a prepared minibatch."""
    config = replace(CONFIG, layers=layers)
    adapters, frozen = parted(moved(tiny_params(config), 1, 0.1))
    updater = Updater(
        graph_of(config, remat=remat), adapters, KEEP_GRADIENT, one_device(),
        options=UpdateOptions(logprob_chunk_vocab=8, old_logprobs="sampler"),
        frozen=unstacked(frozen) if apart else frozen,
    )  # fmt: skip
    state = init_state(adapters, KEEP_GRADIENT, one_device())
    [prepared] = updater.prepare(state, [microbatches(packed=True)])
    return updater, state, prepared


# Slow: compiles two updates each. `test_a_base_with_separate_layers_gives_the_same_gradient` compares with float64.
@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full", "dots"])
def test_separate_layers_give_the_same_bits_as_a_stack(remat):
    results = []
    for apart in (False, True):
        updater, state, prepared = update_of(3, apart=apart, remat=remat)
        results.append(updater.update(state, prepared, learning_rate=1.0, first=False))
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.slow  # two large programs; a test below has their gradients
@pytest.mark.parametrize("remat", REMAT_POLICIES)
def test_separate_layers_add_no_products_and_no_stack_of_weights_to_the_update(remat):
    """The program has one loop over layers, in which the weights of one layer are chosen."""

    def lowered(layers, *, apart):
        updater, state, _ = update_of(layers, apart=apart, remat=remat)
        return updater.programs(state, capacity=1, rows=1, lengths=[48])["update_add_longest"]().as_text()

    def stacks(text):
        weights = FROZEN["blocks"].values()
        shapes = [weight.shape[1:] for weight in weights if weight.ndim > 2]
        flat = [(shape[0], math.prod(shape[1:])) for shape in shapes]
        return {shape for shape in shapes + flat if f"tensor<{'x'.join(map(str, (8, *shape)))}xf32>" in text}

    shallow, deep, stacked = lowered(4, apart=True), lowered(8, apart=True), lowered(8, apart=False)
    products = [text.count("stablehlo.dot_general") for text in (shallow, deep, stacked)]
    assert len(set(products)) == 1
    assert len(deep) < 1.2 * len(shallow)
    assert stacks(stacked)
    assert not stacks(deep)


def test_some_ratios_are_clipped():
    tokens, sampled, other = table()
    with jax.enable_x64(True):
        logprobs = jax.jit(logprobs_of, static_argnums=2)(exact(ADAPTERS), tokens, BASE)
    ratio = np.exp(np.asarray(logprobs) - other)[sampled]
    assert 0.1 < ((ratio > 1 + HIGH) | (ratio < 1 - LOW)).mean() < 0.9


# Slow: compiles two updates with the optimizer. The gradient by the chain rule is compared above.
@pytest.mark.slow
def test_full_rank_adapters_with_identity_a_are_updated_as_in_full_training():
    """In y = W x + 1 B I x, B changes as W would, and A does not change while B is zero. Every width is 16, without weight decay and clipping."""
    base = tiny_decoder_config(layers=2, embed_dim=16, mlp_dim=16, heads=2, kv_heads=2, head_dim=8)
    config = replace(base, lora=lora_shape(rank=16, alpha=16.0, targets=["all"]))
    optimizer = make_optimizer(weight_decay=0.0, max_grad_norm=1e9, epsilon=1e-3)
    params, mesh = tiny_params(config), one_device()
    adapters, frozen = parted(params)
    eye = jnp.eye(16, dtype=jnp.float32)

    def start(path, leaf):
        name = jax.tree_util.keystr(path)
        identity = jnp.broadcast_to(eye, (2, 16, 16)).reshape(leaf.shape)
        return identity if "_lora_a" in name else jnp.zeros_like(leaf)

    adapters = jax.tree_util.tree_map_with_path(start, adapters)
    options = UpdateOptions(logprob_chunk_vocab=8, old_logprobs="sampler")

    def updated(config, params, **how):
        updater = Updater(graph_of(config), params, optimizer, mesh, options=options, **how)
        state = init_state(params, optimizer, mesh)
        [prepared] = updater.prepare(state, [microbatches(packed=True)])
        return updater.update(state, prepared, learning_rate=1e-2, first=False)[0].params

    found = updated(config, adapters, frozen=frozen)
    expected = nnx.to_pure_dict(updated(base, frozen)["blocks"])
    adapted = nnx.to_pure_dict(found["blocks"])
    before = nnx.to_pure_dict(frozen["blocks"])
    for name in ("query", "key", "value", "output", "gate", "up", "down"):
        change = np.asarray(expected[name]) - np.asarray(before[name])
        assert np.abs(change).max() > 1e-4
        a, b = (np.asarray(adapted[f"{name}_lora_{part}"]) for part in "ab")
        product = b.reshape(2, -1, 16) @ a.reshape(2, 16, -1)
        np.testing.assert_allclose(product.reshape(change.shape), change, rtol=0, atol=2e-6)
    for path, leaf in jax.tree_util.tree_leaves_with_path(found):
        if "_lora_a" in jax.tree_util.keystr(path):
            np.testing.assert_array_equal(
                np.asarray(leaf).reshape(2, 16, 16), np.broadcast_to(eye, (2, 16, 16))
            )


def test_gradients_of_the_base_are_not_computed():
    """With N parameters in a layer's matrices, a token costs 2 N forward, 2 N for the gradient of activations, and 2 N for the gradient of trained weights."""
    base = tiny_decoder_config(layers=1, embed_dim=64, mlp_dim=128, heads=4, kv_heads=4, head_dim=16)
    config = replace(base, lora=lora_shape(rank=1, alpha=1.0, targets=["all"]))
    mesh, options = one_device(), UpdateOptions(old_logprobs="sampler", logprob_chunk_vocab=8)

    def flops(config, **how):
        trained, _ = parted(jax.eval_shape(lambda: tiny_params(config)))
        updater = Updater(graph_of(config), trained, KEEP_GRADIENT, mesh, options=options, **how)
        state = jax.eval_shape(lambda: init_state(trained_zeros(trained), KEEP_GRADIENT, mesh))
        lower = updater.programs(state, capacity=1, rows=1, lengths=[64])["update_add_longest"]
        return lower().cost_analysis()["flops"]

    def trained_zeros(shapes):
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    frozen = parted(jax.eval_shape(lambda: tiny_params(config)))[1]
    matrices = 4 * 64 * 64 + 3 * 64 * 128
    saved = flops(base) - flops(config, frozen=frozen)
    assert saved >= 0.9 * 2 * matrices * 64
