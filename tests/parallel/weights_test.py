"""One program transfers weights to the sampler: exact, unstacked and resharded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dapo_jax.models.attention_mixer import ATTENTION
from dapo_jax.models.gated_delta import GatedDelta
from dapo_jax.models.joined import split
from dapo_jax.models.presets import Experts
from dapo_jax.models.tensors import shapes_of
from dapo_jax.parallel.mesh import make_mesh, make_meshes
from dapo_jax.parallel.sharding import shardings
from dapo_jax.parallel.weights import WeightTransfer, both_on, local, not_arrived_frac, stages
from dapo_jax.testing import tiny_decoder_config, tiny_params

CONFIG = tiny_decoder_config(qkv_bias=True, qk_norm="head", tied_embeddings=False)


@pytest.fixture(scope="module")
def one_device():
    return make_mesh(devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def eight_devices():
    return make_mesh(data=2, fsdp=2, tensor=2)


def separate(layer):
    """The values of a layer's parameters by name, with joined matrices taken apart."""
    found = {name: variable.get_value() for name, variable in layer.items()}
    for first, variable in layer.items():
        if shapes := variable.get_metadata("joined", None):
            leaves, tree = jax.tree.flatten(found[first])
            apart = zip(*(split(leaf, shapes) for leaf in leaves), strict=True)
            names = [name for name in variable.get_metadata("joins") if name in layer]
            found |= dict(zip(names, (jax.tree.unflatten(tree, each) for each in apart), strict=True))
    return found


def assert_exact(weights, params, dtype, *, copies=1):
    """Compares layer i with row i of every stack, rounded to `dtype` except norms. Each key head has `copies`, one after the other."""
    stacked, ends = nnx.to_pure_dict(params)["blocks"], nnx.to_pure_dict(params)["ends"]
    assert len(weights["layers"]) == CONFIG.layers
    parts = [(weights["ends"], ends)]
    parts += [
        (layer, {name: v[i] for name, v in stacked.items()}) for i, layer in enumerate(weights["layers"])
    ]
    for found, expected in parts:
        found = separate(found)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            kept = jnp.float32 if "norm" in name else dtype
            if name in ("key", "value", "key_bias", "value_bias"):
                value = jnp.repeat(value, copies, axis=0)
            assert found[name].dtype == kept, name
            np.testing.assert_array_equal(found[name], value.astype(kept), err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_transfer_is_exact_and_keeps_norms_in_float32(dtype, one_device):
    params = tiny_params(CONFIG)
    transfer = WeightTransfer(shapes_of(CONFIG), one_device, dtype=dtype)
    assert_exact(transfer(params), params, dtype)


def test_rates_and_filters_of_a_recurrence_stay_in_float32(one_device):
    """Gated DeltaNet multiplies decays over a whole sequence, so a rounded rate is an error in each step."""
    config = tiny_decoder_config(layers=2, mixers=(GatedDelta(2, 4, 8, 8), ATTENTION))
    transfer = WeightTransfer(shapes_of(config), one_device, dtype="bfloat16", places=config.places)
    layer, _ = transfer(tiny_params(config))["layers"]
    kept = {name for name, value in separate(layer).items() if value.dtype == jnp.float32}
    filters = {"query_conv", "key_conv", "value_conv"}
    assert kept == {"decay", "step_bias", "delta_norm", "attention_norm", "mlp_norm"} | filters


def test_the_transfer_between_shardings_is_exact(eight_devices):
    params = jax.device_put(tiny_params(CONFIG), shardings(shapes_of(CONFIG), eight_devices))
    weights = WeightTransfer(params, eight_devices, dtype="float32", join=True)(params)
    assert_exact(weights, tiny_params(CONFIG), jnp.float32)
    # [mlp 48, embed 32]: the trainer has it cut both ways, the sampler along mlp alone, each half joined with the same half of `up`.
    assert params["blocks"]["gate"][...].sharding.shard_shape((2, 48, 32)) == (2, 24, 16)
    joined = weights["layers"][0]["gate"].get_value()
    assert joined.sharding.shard_shape(joined.shape) == (1, 2 * 24, 32)
    gate, up = (nnx.to_pure_dict(params)["blocks"][name][0] for name in ("gate", "up"))
    np.testing.assert_array_equal(joined[1], np.concatenate([gate[24:], up[24:]]))
    assert [weights["layers"][0][name].get_value() for name in ("key", "value", "up")] == [None] * 3


@pytest.mark.parametrize("mesh", ["one_device", "eight_devices"])
def test_matrices_in_eight_bits_have_a_scale_for_each_output(mesh, request):
    """The error is at most half of 1/127 of the largest weight of the output; biases and norms are not quantized."""
    mesh = request.getfixturevalue(mesh)
    params = jax.device_put(tiny_params(CONFIG), shardings(shapes_of(CONFIG), mesh))
    made = WeightTransfer(shapes_of(CONFIG), mesh, dtype="bfloat16", eight_bit=True)
    weights, stacked = made(params), nnx.to_pure_dict(tiny_params(CONFIG))["blocks"]
    found = separate(weights["layers"][1])
    scales = {"query": (4, 8, 1), "value": (2, 8, 1), "output": (32, 1, 1), "gate": (48, 1), "down": (32, 1)}
    for name, shape in scales.items():
        exact, whole = stacked[name][1], found[name].whole
        assert found[name].scale.shape == shape
        largest = np.abs(exact).max(
            tuple(axis for axis, size in enumerate(shape) if size == 1), keepdims=True
        )
        assert (np.abs(whole - exact) <= largest / 127 / 2 * 1.0001).all(), name
    for name in ("query_bias", "attention_norm"):
        np.testing.assert_array_equal(found[name], stacked[name][1].astype(found[name].dtype))
    assert jax.tree.map(lambda leaf: leaf.sharding, weights) == jax.tree.map(
        lambda leaf: leaf.sharding, made.shapes
    )


@pytest.mark.parametrize("eight_bit", [False, True], ids=["bfloat16", "int8"])
def test_experts_are_gathered_and_the_router_stays_in_float32(eight_bit, eight_devices):
    config = tiny_decoder_config(mlps=(Experts(8, 2, normalize=True),), mlp_dim=16)
    params = jax.device_put(tiny_params(config), shardings(shapes_of(config), eight_devices))
    made = WeightTransfer(shapes_of(config), eight_devices, dtype="bfloat16", eight_bit=eight_bit)
    layer, stacked = made(params)["layers"][1], nnx.to_pure_dict(tiny_params(config))["blocks"]
    # [experts 8, mlp 16, embed 32]: the trainer has half of the experts and half of each, the sampler half of each expert.
    assert params["blocks"]["gate"][...].sharding.shard_shape((2, 8, 16, 32)) == (2, 4, 8, 32)
    np.testing.assert_array_equal(layer["router"][...], stacked["router"][1])
    assert layer["router"][...].dtype == jnp.float32
    for name, shape in {"gate": (8, 8, 32), "down": (8, 32, 8)}.items():
        found, exact = layer[name].get_value(), stacked[name][1]
        values = found.values if eight_bit else found
        assert values.sharding.shard_shape(values.shape) == shape
        if eight_bit:
            largest = np.abs(exact).max(2, keepdims=True)
            assert (np.abs(found.whole - exact) <= largest / 127 / 2 * 1.0001).all()
        else:
            np.testing.assert_array_equal(found, exact.astype(jnp.bfloat16))


def compiled(caplog):
    """Returns the programs of a transfer that were compiled since the log was cleared."""
    messages = [record.getMessage() for record in caplog.records]
    return {
        name
        for name in ("_layer_program", "_ends_program")
        for m in messages
        if f"Compiling jit({name})" in m
    }


def test_new_weights_compile_nothing_and_leave_the_old_alive(one_device, caplog):
    transfer = WeightTransfer(shapes_of(CONFIG), one_device, dtype="float32")
    first, second = tiny_params(CONFIG, seed=1), tiny_params(CONFIG, seed=2)
    with jax.log_compiles():
        sharding, first_time = transfer(first), compiled(caplog)
        caplog.clear()
        transfer(second)
    assert len(first_time) == 2  # one program for every layer, one for the ends
    assert not compiled(caplog)
    # An update donates the trainer's arrays; the sampler's are its own, float32 or not.
    jax.tree.map(lambda leaf: leaf.delete(), first)
    assert_exact(sharding, tiny_params(CONFIG, seed=1), jnp.float32)


@pytest.mark.parametrize(
    ("sizes", "sampler_tensor", "copies"),
    [
        ({"data": 2, "fsdp": 4}, 2, 1),
        ({"fsdp": 2, "tensor": 2, "context": 2}, 1, 1),
        ({"data": 2, "fsdp": 2, "tensor": 2}, 4, 2),
    ],
)
def test_trainer_and_sampler_may_have_different_meshes(sizes, sampler_tensor, copies):
    """The model has 2 key heads, so each of 4 devices gets a copy of one of them."""
    meshes = make_meshes(make_mesh(**sizes), sampler_tensor=sampler_tensor)
    transfer = WeightTransfer(shapes_of(CONFIG), meshes, dtype="bfloat16")
    weights = transfer(jax.device_put(tiny_params(CONFIG), shardings(shapes_of(CONFIG), meshes.train)))
    assert_exact(weights, tiny_params(CONFIG), jnp.bfloat16, copies=copies)
    assert weights["layers"][1]["down"][...].sharding == NamedSharding(meshes.sampler, P(None, "tensor"))

    def described(leaf):
        return leaf.shape, leaf.dtype, leaf.sharding

    assert jax.tree.map(described, weights) == jax.tree.map(described, transfer.shapes)


@pytest.mark.parametrize("eight_bit", [False, True], ids=["bfloat16", "int8"])
def test_layers_whose_weights_a_sampler_lacks_are_counted(eight_bit):
    """Two layers, and the ends. Matrices are joined, split in another way, and each of 4 devices has a copy of a key head, but the bits are the same."""
    meshes = make_meshes(make_mesh(data=2, fsdp=2, tensor=2), sampler_tensor=4)
    where = shardings(shapes_of(CONFIG), meshes.train)
    transfer = WeightTransfer(
        shapes_of(CONFIG), meshes, dtype="bfloat16", eight_bit=eight_bit, join=True
    )  # fmt: skip
    old, new = (jax.device_put(tiny_params(CONFIG, seed=seed), where) for seed in (1, 2))
    weights = transfer(new)
    assert not_arrived_frac(transfer, new, weights) == 0
    assert not_arrived_frac(transfer, new, transfer(old)) == 1
    norm = weights["layers"][1]["mlp_norm"]
    lost = norm.replace(norm[...].at[3].multiply(1 + 2**-23))
    layers = (weights["layers"][0], nnx.State({**weights["layers"][1], "mlp_norm": lost}))
    assert not_arrived_frac(transfer, new, {**weights, "layers": layers}) == 1 / 3


def test_pieces_change_places_before_they_are_gathered():
    """[mlp 48, embed 32] cut along embed by 4, copied twice; wanted cut along mlp by 2, copied four times.

    All eight devices first take a piece of their own, as the trainer has it and then as the sampler does; of embed 36 there are
    no eight equal pieces, so the copies stay.
    """
    meshes = make_meshes(make_mesh(data=2, fsdp=4), sampler_tensor=2)
    source = NamedSharding(meshes.train, P("tensor", "fsdp"))
    target = NamedSharding(meshes.publish, P("tensor", None))
    found = [stage.shard_shape((48, 32)) for stage in stages((48, 32), source, target)]
    assert found == [(48, 8), (48, 4), (24, 8), (24, 8), (24, 32)]
    assert [stage.shard_shape((48, 36)) for stage in stages((48, 36), source, target)][1] == (24, 9)


def test_a_split_that_both_share_needs_no_stages():
    meshes = make_meshes(make_mesh(fsdp=4, tensor=2))
    source, target = (NamedSharding(mesh, P("tensor", None)) for mesh in (meshes.train, meshes.publish))
    assert stages((48, 32), source, target) == [source, target]


def test_the_sampler_gets_the_published_buffers_without_a_copy(eight_devices):
    meshes = both_on(eight_devices)
    published = jax.device_put(jnp.ones((16, 8)), NamedSharding(meshes.publish, P("tensor")))
    found = local(published, NamedSharding(meshes.sampler, P("tensor")))
    before, after = (
        [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]
        for array in (published, found)
    )
    assert before == after
