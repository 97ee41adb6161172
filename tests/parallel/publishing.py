"""One of two processes with four devices each, for `weights_test.py`.

One trainer over all devices; a sampler for each process, or one for both. Prints a line after all checks have passed.
"""

from functools import cache

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dapo_jax.models.tensors import shapes_of
from dapo_jax.parallel import processes
from dapo_jax.parallel.mesh import make_mesh, make_meshes
from dapo_jax.parallel.sharding import SAMPLER_RULES, shardings
from dapo_jax.parallel.weights import local, weight_transfer
from dapo_jax.testing import tiny_decoder_config, tiny_params

CONFIG = tiny_decoder_config(qkv_bias=True, qk_norm=True, tied_embeddings=False)
SHAPES = shapes_of(CONFIG)
COMPILED = []
"""An entry per compiled program."""


@cache
def numbers(seed):
    return jax.tree.map(np.asarray, tiny_params(CONFIG, seed=seed))


def placed(seed, mesh):
    """Returns the same numbers in every process, each with its own shards."""

    def put(array, sharding):
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(put, numbers(seed), shardings(SHAPES, mesh))


def expected(seed, dtype):
    cast = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if "norm" in jax.tree_util.keystr(path) else leaf.astype(dtype), numbers(seed)
    )
    layers = tuple(jax.tree.map(lambda leaf, i=i: leaf[i], cast["blocks"]) for i in range(CONFIG.layers))
    return {"layers": layers, "ends": cast["ends"]}


def assert_exact(weights, seed, dtype):
    """Compares every local shard bit for bit."""

    def same(found, whole):
        assert found.dtype == whole.dtype
        for shard in found.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index])

    jax.tree.map(same, weights, expected(seed, dtype))


def pointers(tree):
    """Returns address -> bytes of every buffer of `tree` on this process's devices."""
    shards = [shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]
    return {shard.data.unsafe_buffer_pointer(): shard.data.nbytes for shard in shards}


def check(sizes, *, dtype, sampler_tensor=0, sampler_hosts=1):
    meshes = make_meshes(make_mesh(**sizes), sampler_tensor=sampler_tensor, sampler_hosts=sampler_hosts)
    first, second = placed(1, meshes.train), placed(2, meshes.train)
    transfer = weight_transfer(SHAPES, meshes, dtype=dtype)
    weights = transfer(first)
    assert_exact(weights, 1, dtype)
    for layer in (*weights["layers"], weights["ends"]):
        wanted = shardings(jax.eval_shape(lambda tree: tree, layer), meshes.sampler, SAMPLER_RULES)
        assert jax.tree.map(lambda leaf: leaf.sharding, layer) == wanted
        assert all(leaf.is_fully_addressable == (sampler_hosts == 1) for leaf in jax.tree.leaves(layer))

    COMPILED.clear()
    before = pointers(jax.live_arrays())
    again = transfer(second)
    assert not COMPILED
    # Only the sampler's own shards are new on this process's devices.
    new = {at: size for at, size in pointers(jax.live_arrays()).items() if at not in before}
    assert new == pointers(again)

    update = jax.jit(lambda params: jax.tree.map(lambda leaf: leaf * 0 - 1, params), donate_argnums=0)
    changed = jax.block_until_ready(update(second))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(second))
    assert_exact(again, 2, dtype)
    assert_exact(weights, 1, dtype)
    assert all(float(leaf.addressable_data(0).max()) == -1 for leaf in jax.tree.leaves(changed))
    return meshes, again


def check_that_local_means_local(meshes, weights, index):
    """Programs on the sampler's mesh need no other process: the processes run different numbers of them."""
    total = jax.jit(lambda ends: sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(ends)))
    for _ in range(1 + 4 * index):
        found = float(total(weights["ends"]))
    ends = nnx.to_pure_dict(expected(2, "float32")["ends"])
    np.testing.assert_allclose(found, sum(leaf.sum(dtype=np.float64) for leaf in ends.values()), rtol=1e-4)
    assert meshes.index == index


def check_the_wrap(meshes):
    """The same addresses before and after, device by device."""
    publish, here = (
        shardings(SHAPES["ends"], mesh, SAMPLER_RULES) for mesh in (meshes.publish, meshes.sampler)
    )
    whole = jax.tree.map(
        lambda leaf, sharding: jax.make_array_from_callback(
            leaf.shape, sharding, lambda index: np.zeros(leaf.shape, np.float32)[index]
        ),
        SHAPES["ends"],
        publish,
    )
    assert pointers(local(whole, here)) == pointers(whole)


def main():
    processes.start()
    index = jax.process_index()
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: COMPILED.append(event) if "backend_compile" in event else None
    )
    check_that_local_means_local(*check({"fsdp": 4, "tensor": 2}, dtype="float32"), index)
    check({"fsdp": 8}, dtype="bfloat16", sampler_tensor=2)
    meshes, _ = check({"data": 2, "fsdp": 2, "tensor": 2}, dtype="bfloat16", sampler_hosts=2)
    check_the_wrap(meshes)
    print(f"process {index} has its weights", flush=True)
    processes.leave()
