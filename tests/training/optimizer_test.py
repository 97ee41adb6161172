"""Muon against optax on the matrices of single layers, and on a mesh."""

import re
from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax.contrib import muon

from dapo_jax.config import OptimizerConfig
from dapo_jax.models.attention_mixer import ATTENTION
from dapo_jax.models.gated import GATED
from dapo_jax.models.gated_delta import GatedDelta
from dapo_jax.models.presets import PRESETS, DecoderConfig, Experts, preset
from dapo_jax.models.tensors import shapes_of
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.testing import tiny_decoder_config, tiny_params
from dapo_jax.training.optimizer import make_optimizer, scheduled_rate
from dapo_jax.training.state import init_state, state_shardings

CONFIG = tiny_decoder_config(layers=2, qkv_bias=True, qk_norm="head")
HOW = {"weight_decay": 0.3, "epsilon": 1e-6, "beta1": 0.8, "beta2": 0.99}
MUON = make_optimizer(name="muon", max_grad_norm=2.0, **HOW)
MATRICES = {"query", "key", "value", "output", "gate", "up", "down"}


def names_of(tree):
    """Returns the arrays of a tree by the last name of their path."""
    return {
        jax.tree_util.keystr(path).split("'")[-2]: leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def gradients(params):
    """Returns three gradients whose norms are above 2, so that they are clipped."""
    rng = np.random.default_rng(0)
    return [
        jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), jnp.float32), params)
        for _ in range(3)
    ]


def changes(params, optimizer, grads):
    """Returns the changes of parameters that stay the same, as a list with a dict from names to arrays per update."""
    state, found, update = optimizer.init(params), [], jax.jit(optimizer.update)
    with jax.numpy_dtype_promotion("standard"):
        for gradient in grads:
            change, state = update(gradient, state, params)
            found.append({name: np.asarray(leaf) for name, leaf in names_of(change).items()})
    return found


def as_matrix(name, leaf):
    """Returns a matrix of one layer with the inputs first, as optax expects. `output` has two input dimensions, `query`, `key` and `value` two output dimensions."""
    return (
        leaf.reshape(len(leaf), -1).T
        if name in ("output", "gate", "up", "down")
        else leaf.reshape(-1, leaf.shape[-1]).T
    )


def test_muon_is_optax_muon_on_each_matrix_of_each_layer():
    """The rule for matrices: consistent_rms=0.2 and momentum 0.95, the other parameters: AdamW with Nesterov momentum."""
    params = tiny_params(CONFIG)
    grads = gradients(params)
    norms = [float(np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(gradient)))) for gradient in grads]
    assert min(norms) > 2
    scaled = [
        jax.tree.map(lambda leaf, norm=norm: leaf * (2.0 / norm), g)
        for g, norm in zip(grads, norms, strict=True)
    ]

    def apart(tree):
        """Returns the matrices of each layer, and the other parameters."""
        leaves = names_of(tree)
        matrices = {
            f"{name}.{layer}": as_matrix(name, leaf[layer])
            for name, leaf in leaves.items() if name in MATRICES for layer in range(CONFIG.layers)
        }  # fmt: skip
        return matrices, {name: leaf for name, leaf in leaves.items() if name not in MATRICES}

    of_matrices = muon(1.0, eps=1e-6, weight_decay=0.3, consistent_rms=0.2)
    of_others = optax.adamw(1.0, b1=0.8, b2=0.99, eps=1e-6, weight_decay=0.3, nesterov=True)
    expected = [
        changes(tree, optimizer, [apart(gradient)[part] for gradient in scaled])
        for part, (tree, optimizer) in enumerate(zip(apart(params), (of_matrices, of_others), strict=True))
    ]
    for found, *both in zip(changes(params, MUON, grads), *expected, strict=True):
        by_layer, others = apart({"x": found})
        for name, leaf in {**by_layer, **others}.items():
            # Five iterations multiply the rounding error of small singular values by up to 3.4445^5 = 485.
            np.testing.assert_allclose(leaf, {**both[0], **both[1]}[name], atol=1e-4, rtol=1e-5)
    assert others.keys() == {
        "embedding", "final_norm", "attention_norm", "mlp_norm", "query_norm", "key_norm", "query_bias", "key_bias", "value_bias",
    }  # fmt: skip


def test_an_update_of_muon_has_the_size_of_adamw():
    """Without decay, the root mean square of a matrix's update is 0.2 times a factor between 0.7 and 1.2, the singular values after five iterations."""
    params = tiny_params(CONFIG)
    [change, *_] = changes(params, make_optimizer(name="muon", weight_decay=0.0), gradients(params))
    for name in MATRICES:
        for layer in range(CONFIG.layers):
            matrix = as_matrix(name, change[name][layer])
            # A matrix with orthonormal rows or columns has a root mean square of max(shape)^-0.5.
            assert 0.7 < np.sqrt((matrix**2).mean()) / 0.2 < 1.2
            values = np.linalg.svd(matrix, compute_uv=False) / (0.2 * max(matrix.shape) ** 0.5)
            assert values.max() < 1.3


@pytest.mark.parametrize("qk_norm", ["head", "all"])
def test_muon_has_one_moment_for_matrices_and_two_for_other_parameters(qk_norm):
    """A norm over all heads together has an axis for heads and an axis for dimensions, but is no matrix."""
    params = shapes_of(replace(CONFIG, qk_norm=qk_norm))
    moments = jax.eval_shape(MUON.init, params)
    total = sum(leaf.size for leaf in jax.tree.leaves(moments) if leaf.ndim and leaf.shape != (3,))
    sizes = {name: leaf.size for name, leaf in names_of(params).items()}
    assert total == sum(size * (1 if name in MATRICES else 2) for name, size in sizes.items())


# Slow: compiles for eight devices. The first mesh splits matrices in both directions.
@pytest.mark.parametrize(
    "axes",
    [{"fsdp": 2, "tensor": 2, "context": 2}, pytest.param({"fsdp": 8}, marks=pytest.mark.slow)],
    ids=str,
)
def test_muon_on_a_mesh_is_muon_on_one_device(axes):
    """The moments are sharded as their parameters."""
    params, mesh = tiny_params(CONFIG), make_mesh(**axes)
    placed = state_shardings(params, MUON, mesh)
    specs = [place.spec for place in jax.tree.leaves(placed.opt_state)]
    assert set(map(str, specs)) >= {str(place.spec) for place in jax.tree.leaves(placed.params)}
    state = init_state(params, MUON, mesh)
    assert [leaf.sharding.spec for leaf in jax.tree.leaves(state.opt_state)] == specs
    update = jax.jit(MUON.update, out_shardings=(placed.params, placed.opt_state))
    grads, moments = gradients(params), state.opt_state
    with jax.numpy_dtype_promotion("standard"):
        for gradient in grads:
            change, moments = update(jax.device_put(gradient, placed.params), moments, state.params)
    expected = changes(params, MUON, grads)[-1]
    for name, leaf in names_of(change).items():
        np.testing.assert_allclose(leaf, expected[name], atol=1e-4, rtol=1e-5)


def test_experts_on_several_devices_are_orthogonalized_where_they_are():
    """The matrices of 8 experts on 4 devices move as on one device, and the program gathers none of them."""
    config = tiny_decoder_config(layers=3, mlps=(Experts(8, 2, normalize=True),))
    params, mesh = tiny_params(config), make_mesh(devices=jax.devices()[:4], fsdp=4)
    optimizer = make_optimizer(name="muon")
    placed = state_shardings(params, optimizer, mesh)
    state, gradient = init_state(params, optimizer, mesh), gradients(params)[0]
    given = jax.device_put(gradient, placed.params), state.opt_state, state.params
    with jax.numpy_dtype_promotion("standard"):
        update = (
            jax.jit(optimizer.update, out_shardings=(placed.params, placed.opt_state)).lower(*given).compile()
        )
    gathered = re.findall(r"= f32\[([0-9,]+)\]\S* all-gather\(", update.as_text())
    assert not [shape for shape in gathered if len(shape.split(",")) > 3 or "24," in shape]
    change, _ = update(*given)
    expected = changes(params, optimizer, [gradient])[0]
    for name, leaf in names_of(change).items():
        np.testing.assert_allclose(leaf, expected[name], atol=1e-4, rtol=1e-5)


def test_calls_with_the_same_arguments_share_programs():
    assert make_optimizer(name="muon") is make_optimizer(name="muon")
    assert make_optimizer(name="muon") is not make_optimizer()


OUTPUTS = {"query": 2, "key": 2, "value": 2, "value_gate": 2, **dict.fromkeys(("output", "gate", "up", "down", "router", "write", "forget"), 1)}  # fmt: skip
"""How many of a matrix's dimensions are outputs. They follow the dimensions of layers and, in `gate`, `up` and `down` of experts, of experts."""


def matrices_alone(name, leaf, experts):
    """Returns the matrices of each layer and expert, with the inputs first."""
    batch = 2 if experts and name in ("gate", "up", "down") else 1
    rows = np.prod(leaf.shape[batch : batch + OUTPUTS[name]])
    stacked = np.asarray(leaf).reshape(np.prod(leaf.shape[:batch]), rows, -1)
    return {f"{name}.{index}": matrix.T for index, matrix in enumerate(stacked)}


def shrunk(name):
    """Returns a tiny decoder with the parameters of a preset. All sizes differ, so a matrix that is split in a wrong place has another shape."""
    large = preset(name)
    sizes = {
        "layers": 2,
        "vocab_size": 11,
        "embed_dim": 10,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "mlp_dim": 14,
    }
    if large.fixed:
        sizes |= {"mixers": (GatedDelta(1, 2, 4, 6), ATTENTION)}
    options = ("tied_embeddings", "qkv_bias", "qk_norm", "norm_place", "norm_offset", "attention_gate")
    experts = large.experts and replace(large.experts, count=5, chosen=2)
    return DecoderConfig(mlps=(experts or GATED,), **sizes, **{key: getattr(large, key) for key in options})


QUICK = ("tiny-nemotron-h",)
"""A preset with experts, attention and Mamba-2. Each preset compiles an update, so the others are slow."""


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, id=name, marks=[] if name in QUICK else pytest.mark.slow)
        for config, name in {shrunk(name): name for name in (*PRESETS, *QUICK)}.items()
    ],
)
def test_every_matrix_of_every_layer_and_expert_moves_as_with_optax_muon_alone(config):
    """One update without decay. Expert e has gradients 10^-e times as large, and the last expert has none, as if no token chose it.

    A norm over several experts would leave most of them almost without a change.
    """
    params = shapes_of(config)
    rng = np.random.default_rng(3)

    def gradient(path, leaf):
        found = rng.standard_normal(leaf.shape)
        if config.experts and jax.tree_util.keystr(path).split("'")[-2] in ("gate", "up", "down"):
            found *= np.array([1, 0.1, 0.01, 0.001, 0])[:, None, None]
        return jnp.asarray(found, jnp.float32)

    grads = jax.tree_util.tree_map_with_path(gradient, params)
    ours = make_optimizer(name="muon", weight_decay=0.0, max_grad_norm=1e9)
    with jax.numpy_dtype_promotion("standard"):
        found, _ = jax.jit(lambda g: ours.update(g, ours.init(g), g))(grads)
    alone = muon(1.0, consistent_rms=0.2)
    experts = config.experts is not None
    for stack, of_gradient in nnx.to_pure_dict(grads).items():
        changed = {} if stack == "ends" else nnx.to_pure_dict(found)[stack]
        for key in OUTPUTS.keys() & changed.keys():
            given = matrices_alone(key, of_gradient[key], experts)
            with jax.numpy_dtype_promotion("standard"):
                expected, _ = jax.jit(lambda g: alone.update(g, alone.init(g), g))(given)
            for each, matrix in matrices_alone(key, changed[key], experts).items():
                np.testing.assert_allclose(matrix, expected[each], atol=1e-4, err_msg=f"{stack}.{each}")


def test_a_router_is_a_matrix_of_muon():
    """Two experts, three features, gradient diag(3, 4).

    Divided by the norm 5, its singular values are 0.6 and 0.8. Five times x -> 3.4445 x - 4.775 x^3 + 2.0315 x^5 makes them 0.72288 and 1.11920, and
    0.2 sqrt(max(2, 3)) makes them 0.25041 and 0.38770. AdamW would change both entries by 1.
    """
    gradient = nnx.State(
        {"router": nnx.Param(jnp.asarray([[[3.0, 0, 0], [0, 4, 0]]]), axes=("features", "norm"))}
    )
    optimizer = make_optimizer(name="muon", weight_decay=0.0)
    with jax.numpy_dtype_promotion("standard"):
        [change] = jax.tree.leaves(optimizer.update(gradient, optimizer.init(gradient), gradient)[0])
    np.testing.assert_allclose(change[0], [[-0.25041, 0, 0], [0, -0.38770, 0]], atol=1e-5)


SCHEDULES = [
    (schedule, warmup, decay, end)
    for schedule, warmup, decay, end in product(
        ("constant", "linear", "cosine"), (0, 3, 12), (0, 4), (0.0, 0.1)
    )
    if not (schedule == "constant" and (decay or end)) and warmup + decay <= 12
]
"""Settings that the configuration permits in a run of twelve steps."""


@pytest.mark.parametrize(("schedule", "warmup", "decay", "end"), SCHEDULES)
def test_a_schedule_is_a_warmup_times_the_schedule_of_optax(schedule, warmup, decay, end, x64):
    """Twelve steps. With `decay`, only the last four decay."""
    config = OptimizerConfig(schedule=schedule, warmup_steps=warmup, decay_steps=decay, end_factor=end)
    span = decay or 12 - warmup
    decaying = optax.constant_schedule(1.0)
    if schedule == "linear":
        decaying = optax.linear_schedule(1.0, end, span)
    elif schedule == "cosine" and span:
        decaying = optax.cosine_decay_schedule(1.0, span, end)
    rising = optax.linear_schedule(0.0, 1.0, warmup) if warmup else optax.constant_schedule(1.0)
    for step in range(1, 13):
        expected = 3e-6 * rising(step) * decaying(max(step - 1 - (12 - span), 0))
        assert 3e-6 * factor(config, step) == pytest.approx(float(expected), rel=1e-12)


def factor(config, step):
    """The share of the learning rate in a step of a run of twelve."""
    return scheduled_rate(
        1.0, step=step, steps=12, warmup_steps=config.warmup_steps, schedule=config.schedule,
        steps_before_decay=config.steps_before_decay(12), end_factor=config.end_factor,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        # Steps 4 to 12 decay: 1 - (step - 4) / 9.
        ({"schedule": "linear", "warmup_steps": 3}, {1: 1 / 3, 4: 1.0, 5: 8 / 9, 12: 1 / 9}),
        # Step 12: 0.1 + 0.9 (1 + cos(8 pi / 9)) / 2 = 0.1271.
        ({"schedule": "cosine", "warmup_steps": 3, "end_factor": 0.1}, {4: 1.0, 12: 0.1271383}),
        ({"schedule": "linear", "warmup_steps": 2, "decay_steps": 4}, {1: 0.5, 9: 1.0, 10: 0.75, 12: 0.25}),
        ({"schedule": "linear", "warmup_steps": 12}, {6: 0.5, 12: 1.0}),
    ],
)
def test_a_step_has_the_rate_of_the_formula(schedule, rates):
    config = OptimizerConfig(**schedule)
    assert {step: factor(config, step) for step in rates} == pytest.approx(rates, abs=1e-7)
