"""Weights reach the sampler exact, unstacked and where they belong, by one program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dapo_jax.models.folder import shapes_of
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.sharding import shardings
from dapo_jax.parallel.weights import split_layers, weight_transfer
from dapo_jax.testing import tiny_decoder_config, tiny_params

CONFIG = tiny_decoder_config(qkv_bias=True, qk_norm=True, tied_embeddings=False)


@pytest.fixture(scope="module")
def one_device():
    return make_mesh(devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def eight_devices():
    return make_mesh(data=2, fsdp=2, tensor=2)


def assert_exact(weights, params, dtype):
    """Layer i is row i of every stack, rounded to `dtype` but for the norms."""
    stacked, ends = nnx.to_pure_dict(params)["blocks"], nnx.to_pure_dict(params)["ends"]
    assert len(weights["layers"]) == CONFIG.layers
    parts = [(weights["ends"], ends)]
    parts += [
        (layer, {name: v[i] for name, v in stacked.items()}) for i, layer in enumerate(weights["layers"])
    ]
    for found, expected in parts:
        found = nnx.to_pure_dict(found)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            kept = jnp.float32 if "norm" in name else dtype
            assert found[name].dtype == kept, name
            np.testing.assert_array_equal(found[name], value.astype(kept), err_msg=name)


def test_layers_are_cut_from_the_stack():
    params = tiny_params(CONFIG)
    assert_exact(split_layers(params), params, jnp.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_transfer_is_exact_and_keeps_norms_in_float32(dtype, one_device):
    params = tiny_params(CONFIG)
    transfer = weight_transfer(shapes_of(CONFIG), one_device, dtype=dtype)
    assert_exact(transfer(params), params, dtype)


def test_the_transfer_between_shardings_is_exact(eight_devices):
    params = jax.device_put(tiny_params(CONFIG), shardings(shapes_of(CONFIG), eight_devices))
    weights = weight_transfer(params, eight_devices, dtype="float32")(params)
    assert_exact(weights, tiny_params(CONFIG), jnp.float32)
    gate = weights["layers"][0]["gate"][...]
    # [mlp 48, embed 32]: the trainer has it cut both ways, the sampler along mlp alone.
    assert params["blocks"]["gate"][...].sharding.shard_shape((2, 48, 32)) == (2, 24, 16)
    assert gate.sharding.shard_shape(gate.shape) == (24, 32)


def test_new_weights_compile_nothing_and_leave_the_old_alive(one_device):
    transfer = weight_transfer(shapes_of(CONFIG), one_device, dtype="float32")
    first, second = tiny_params(CONFIG, seed=1), tiny_params(CONFIG, seed=2)
    held, _ = transfer(first), transfer(second)
    assert transfer._cache_size() == 1
    # An update donates the trainer's arrays; the sampler's are its own, float32 or not.
    jax.tree.map(lambda leaf: leaf.delete(), first)
    assert_exact(held, tiny_params(CONFIG, seed=1), jnp.float32)


def test_a_head_count_that_does_not_divide_is_refused():
    mesh = make_mesh(fsdp=2, tensor=4)
    with pytest.raises(ValueError, match=r"has a dimension of 2, which parallel\.tensor=4 does not divide"):
        weight_transfer(shapes_of(CONFIG), mesh, dtype="float32")
