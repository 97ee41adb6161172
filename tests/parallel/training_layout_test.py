"""An update computes the same on every mesh. Eight virtual CPU devices.

Sums over devices are taken in another order than on one device, so results differ by float32 rounding: by 1e-5 of the norm of
each array.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from dapo_jax.dapo.batching import Example
from dapo_jax.dapo.losses import dapo_loss
from dapo_jax.dapo.metrics import to_scalars
from dapo_jax.dapo.objectives import gspo_loss
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.models import attention
from dapo_jax.models.decoder import graph_of
from dapo_jax.models.presets import Experts
from dapo_jax.models.rope import Rope
from dapo_jax.models.tensors import shapes_of
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.sharding import shardings
from dapo_jax.parallel.training_layout import ROWS as ROWS_SPLIT
from dapo_jax.parallel.training_layout import layout_of
from dapo_jax.testing import tiny_decoder_config, tiny_params
from dapo_jax.training.optimizer import make_optimizer
from dapo_jax.training.row_packing import pack
from dapo_jax.training.state import init_state, state_shardings
from dapo_jax.training.update import UpdateOptions, Updater

CONFIG = tiny_decoder_config(heads=4, kv_heads=2, qkv_bias=True, qk_norm="head", tied_embeddings=False)
MESHES = {
    "fsdp 8": {"fsdp": 8},
    "fsdp 4 x tensor 2": {"fsdp": 4, "tensor": 2},
    "data 2 x fsdp 2 x tensor 2": {"data": 2, "fsdp": 2, "tensor": 2},
    "fsdp 2 x tensor 2 x context 2": {"fsdp": 2, "tensor": 2, "context": 2},
    "data 2 x context 4": {"data": 2, "context": 4, "fsdp": 1},
}
EVERY_SWITCH = tiny_decoder_config(
    layers=3, qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm="all", norm_place="both", norm_offset=1.0,
    windows=(6, 0, 6), ropes=(Rope(theta=100.0), None), rope_of_layer=(0, 1, 0), query_scale=0.3, query_growth=(0.1, 8),
    score_cap=5.0, logit_cap=8.0, logit_divisor=1.5, embed_scale=3.0, residual_scale=0.7, activation="gelu_tanh",
    clip_qkv=1.2, tied_embeddings=False, sinks=True,
)  # fmt: skip
"""Switches that no single family combines."""
ROW_TOKENS, ROWS = 32, 8


def all_but_slow(*quick):
    """Returns all meshes; a mesh that is not in `quick` is slow, since compiling for eight devices takes long."""
    return [
        pytest.param(axes, id=name, marks=[] if name in quick else pytest.mark.slow)
        for name, axes in MESHES.items()
    ]


RATE = 1e-4
"""As in the quickstart. AdamW divides by the gradient's size. If a gradient is only rounding, its parameter moves by up to
the rate in either direction, and three such steps must stay below 1e-5 of the largest parameter, which is over 1."""
CLIPPED = 0.01
"""The gradient's norm is several times larger, so it is clipped."""
KEEP_GRADIENT = optax.chain(optax.clip_by_global_norm(CLIPPED), optax.trace(decay=0.0), optax.scale(-100.0))
"""SGD; its state is the last gradient, clipped."""
ADAMW = make_optimizer(max_grad_norm=CLIPPED)


def rollouts(seed=0):
    """24 responses of 4 to 20 tokens to 6 prompts of 5: groups of 4."""
    rng = np.random.default_rng(seed)
    rows = []
    for group in range(6):
        prompt = rng.integers(2, CONFIG.vocab_size, 5).astype(np.int32)
        for _ in range(4):
            response = rng.integers(2, CONFIG.vocab_size, rng.integers(4, 21)).astype(np.int32)
            logprobs = rng.normal(-3.0, 0.3, len(response)).astype(np.float32)
            rows.append(Example(prompt=Tokens(prompt), response=Tokens(response, logprobs=logprobs), advantage=float(rng.normal()), group=group))  # fmt: skip
    return rows


def minibatch(*, apart, seed=0, shorter=()):
    """Packed, prompts shared; or one rollout to a row."""
    rows = rollouts(seed)
    weights = np.full(len(rows), 1.0 / sum(len(row.response.ids) for row in rows))
    if not apart:
        return pack(rows, weights, row_tokens=ROW_TOKENS, rows_per_microbatch=ROWS, shorter_rows=shorter)
    parts = [pack([row], weights[:1], row_tokens=ROW_TOKENS, rows_per_microbatch=1)[0] for row in rows]
    return [
        jax.tree.map(lambda *rows: np.concatenate(rows), *parts[i : i + ROWS]) for i in range(0, 24, ROWS)
    ]


BATCHES = [minibatch(apart=False), minibatch(apart=True, seed=1), minibatch(apart=False, seed=2)]


def trained(
    mesh,
    optimizer,
    batches=BATCHES,
    *,
    rate,
    old_logprobs="trainer",
    attention="xla",
    offload=False,
    objective=dapo_loss,
    config=CONFIG,
):
    """Returns the state and the metrics after the update on each batch; all updates but the first have ratios other than 1."""
    graph = graph_of(config, layout=layout_of(mesh, attention=attention))
    options = UpdateOptions(old_logprobs=old_logprobs, logprob_chunk_vocab=4, offload=offload)
    params = jax.eval_shape(lambda: tiny_params(config))
    updater = Updater(graph, params, optimizer, mesh, objective=objective, options=options)
    state, states, metrics = init_state(tiny_params(config), optimizer, mesh, offload=offload), [], []
    for index, prepared in enumerate(updater.prepare(state, batches)):
        state, measured = updater.update(state, prepared, learning_rate=rate, first=index == 0)
        metrics.append(to_scalars(measured))
        states.append(jax.tree.map(np.asarray, state))
    return states, metrics


def one_device():
    return make_mesh(devices=jax.devices()[:1])


def assert_same(found, expected, scale=1e-5):
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        assert np.linalg.norm(a - b) <= scale * np.linalg.norm(b), jax.tree_util.keystr(path)


@pytest.fixture(scope="module")
def expected_of_sgd():
    return trained(one_device(), KEEP_GRADIENT, rate=1.0)


@pytest.fixture(scope="module")
def expected_of_adamw():
    return trained(one_device(), ADAMW, rate=RATE, old_logprobs="sampler")


def test_the_gradients_are_clipped(expected_of_sgd):
    assert all(of_update["update/grad_norm"] > 2 * CLIPPED for of_update in expected_of_sgd[1])


@pytest.mark.parametrize("axes", all_but_slow("fsdp 2 x tensor 2 x context 2"))
def test_losses_gradients_and_sgd_equal_the_results_on_one_device(axes, expected_of_sgd):
    """Packed with shared prompts, and unpacked."""
    states, metrics = trained(make_mesh(**axes), KEEP_GRADIENT, rate=1.0)
    for found, expected in zip(states, expected_of_sgd[0], strict=True):
        assert_same(found.opt_state, expected.opt_state)
        assert_same(found.params, expected.params)
    for found, expected in zip(metrics, expected_of_sgd[1], strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6, nan_ok=True)


@pytest.mark.slow  # compiles an update for eight devices; tests/models/attention_test.py has the parts of rows alone
def test_attention_by_blocks_over_several_devices_has_the_gradients_of_whole_rows(
    expected_of_sgd, monkeypatch
):
    monkeypatch.setattr(attention, "SMALLEST_BLOCK", 8)
    mesh = make_mesh(**MESHES["fsdp 2 x tensor 2 x context 2"])
    assert layout_of(mesh).by_blocks
    assert layout_of(one_device()).by_blocks
    [found], _ = trained(mesh, KEEP_GRADIENT, BATCHES[:1], rate=1.0)
    assert_same(found.opt_state, expected_of_sgd[0][0].opt_state)


# Slow: compiles an update for eight devices. The test above has the same mesh, and tests/run/windows_test.py has windows over several devices.
@pytest.mark.slow
def test_every_switch_of_the_decoder_has_the_gradients_of_one_device():
    """The norm over all heads is a sum over `tensor`, windows need the positions of other devices' keys, and some biases are replicated."""
    mesh = make_mesh(**MESHES["fsdp 2 x tensor 2 x context 2"])
    [found], measured = trained(mesh, KEEP_GRADIENT, BATCHES[:1], rate=0.0, config=EVERY_SWITCH)
    [expected], other = trained(one_device(), KEEP_GRADIENT, BATCHES[:1], rate=0.0, config=EVERY_SWITCH)
    assert_same(found.opt_state, expected.opt_state)
    assert measured[0] == pytest.approx(other[0], rel=1e-5, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize(
    ("count", "axes"),
    [
        # Slow: compiles updates for eight devices. tests/models/experts_test.py compares the gradients with float64 on eight devices.
        pytest.param(8, {"fsdp": 2, "tensor": 2, "context": 2}, marks=pytest.mark.slow),
        # The number of experts cannot be divided, so their matrices are gathered.
        pytest.param(6, {"fsdp": 4, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param(8, {"fsdp": 8}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_experts_over_several_devices_have_the_gradients_of_one_device(count, axes):
    experts = Experts(count, 2, normalize=True, biases=True)
    config = tiny_decoder_config(mlps=(experts,), gate_limit=0.5, mlp_dim=16, qk_norm="all")
    mesh = make_mesh(**axes)
    split = shardings(shapes_of(config), mesh)["blocks"]["gate"].get_value().spec
    assert tuple(split) == (None, *(("fsdp", "tensor", None) if count == 8 else (None, "tensor", "fsdp")))
    [found], measured = trained(mesh, KEEP_GRADIENT, BATCHES[:1], rate=0.0, config=config)
    [expected], other = trained(one_device(), KEEP_GRADIENT, BATCHES[:1], rate=0.0, config=config)
    assert_same(found.opt_state, expected.opt_state)
    assert measured[0] == pytest.approx(other[0], rel=1e-5, abs=1e-6, nan_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"fsdp": 8}, {"fsdp": 2, "tensor": 2, "context": 2}], ids=str)
def test_rows_of_several_lengths_change_no_gradient(axes):
    """Against one device with rows of one length."""
    mixed = minibatch(apart=False, shorter=(24,))
    assert {part.tokens.shape[1] for part in mixed} == {ROW_TOKENS, 24}
    [first], _ = trained(make_mesh(**axes), KEEP_GRADIENT, [mixed], rate=0.0)
    [second], _ = trained(one_device(), KEEP_GRADIENT, [minibatch(apart=False)], rate=0.0)
    assert_same(first.opt_state, second.opt_state)


@pytest.mark.slow  # tests/dapo/objectives_test.py splits the rows of the objective alone
@pytest.mark.parametrize(
    "axes", [{"fsdp": 2, "tensor": 2, "context": 2}, {"data": 2, "context": 4, "fsdp": 1}], ids=str
)
def test_an_objective_along_responses_equals_the_result_on_one_device(axes):
    """GSPO with packed rows and a wide clip. The sampler's log-probabilities are the old ones, so ratios differ from 1."""
    how = {
        "rate": 0.0,
        "old_logprobs": "sampler",
        "objective": partial(gspo_loss, clip_ratio_low=0.1, clip_ratio_high=0.1),
    }
    states, metrics = trained(make_mesh(**axes), KEEP_GRADIENT, BATCHES[:2], **how)
    expected_states, expected = trained(one_device(), KEEP_GRADIENT, BATCHES[:2], **how)
    for found, other in zip(states, expected_states, strict=True):
        assert_same(found.opt_state, other.opt_state)
    for found, other in zip(metrics, expected, strict=True):
        assert found == pytest.approx(other, rel=1e-5, abs=1e-6, nan_ok=True)
        assert 0 < other["policy/clip_low_frac"] < 1


@pytest.mark.slow
def test_moments_may_be_in_host_memory(expected_of_adamw):
    """Between updates they are there, and parameters are the same bit for bit."""
    mesh = one_device()
    states, metrics = trained(mesh, ADAMW, rate=RATE, old_logprobs="sampler", offload=True)
    assert all(of_update["update/grad_norm"] > 2 * CLIPPED for of_update in metrics)
    jax.tree.map(np.testing.assert_array_equal, states, expected_of_adamw[0])
    placed = state_shardings(tiny_params(CONFIG), ADAMW, mesh, offload=True)
    assert {place.memory_kind for place in jax.tree.leaves(placed.opt_state)} == {"pinned_host"}
    assert {place.memory_kind for place in jax.tree.leaves(placed.params)} == {"device"}


@pytest.mark.slow  # the kernel is interpreted
@pytest.mark.parametrize(
    ("axes", "windows", "cap"),
    [
        ({"fsdp": 2, "tensor": 2, "context": 2}, (), None),
        ({"fsdp": 2, "context": 4}, (), None),
        ({"fsdp": 2, "context": 4}, (70, 0), 1.0),
        ({"fsdp": 2, "tensor": 2, "context": 2}, (70, 70), None),
    ],
    ids=str,
)
def test_splash_attention_over_split_rows_is_the_plain_one(axes, windows, cap):
    """Each device has its own part of the queries, and of the kernel's tables. Both compute in float32, so only the order
    of sums differs, over up to 512 tokens and for gradients over up to 4 heads."""
    rng, mesh = np.random.default_rng(0), make_mesh(**axes)
    rows, seq, dim = 2, 512, 32
    query, key, value = (rng.normal(size=(heads, dim, rows * seq)).astype(np.float32) for heads in (4, 2, 2))
    segments = np.sort(rng.integers(1, 4, (rows, seq)).astype(np.int32), axis=1)
    split = PartitionSpec("tensor", None, ("data", "fsdp"), "context")

    def attended(attention):
        layout = layout_of(mesh, attention=attention)

        def part(query, key, value, segments):
            flat = [each.reshape(*each.shape[:2], -1) for each in (query, key, value)]
            # Within a segment, columns differ by as much as positions.
            width = segments.shape[1]
            column = jax.lax.axis_index("context") * width + jnp.arange(width, dtype=jnp.int32)
            positions, total = jnp.broadcast_to(column, segments.shape), 0.0
            for window in windows or (None,):
                near = None if window is None else (jnp.int32(window), positions)
                how = {"near": near, "windows": windows, "cap": cap}
                total = total + layout.attend(*flat, segments, None, "float32", **how)
            return total.reshape(query.shape)

        mapped = jax.shard_map(part, mesh=mesh, in_specs=(split, split, split, ROWS_SPLIT), out_specs=split,
                               check_vma=False)  # fmt: skip

        def loss(query, key, value):
            apart = (each.reshape(*each.shape[:2], rows, seq) for each in (query, key, value))
            out = mapped(*apart, segments)
            return (out * out).sum(), out

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(query, key, value)

    found, expected = attended("splash_interpreted"), attended("xla")
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other)
