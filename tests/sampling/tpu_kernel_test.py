"""The kernel for TPU compiles for every shape of the configurations, in place and without padding; for chips that are not there."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dapo_jax.plan.topologies import devices_of, parse
from dapo_jax.sampling import tpu_cache

pytest.importorskip("libtpu", reason="the extra tpu")

SLOTS, PAGES, PAGE, TABLE = 64, 512, 128, 64
CHIPS = ["v5e:2x2", "v6e:2x2", "v5p:2x2x1"]
# (heads, key heads, head_dim) of one device: 32B over 8 and 4 devices, whole, 7B over 4 and whole, 0.6B, SmolLM2 whole and over 3, 0.5B.
SHAPES = [
    (5, 1, 128), (10, 2, 128), (40, 8, 128), (7, 1, 128), (28, 4, 128), (16, 8, 128), (9, 3, 64), (3, 1, 64), (14, 2, 64),
]  # fmt: skip
DTYPES = ["bfloat16", "int8", "float8_e4m3fn"]


# Slow: many more compilations of the same kernel. One stays.
CASES = [
    pytest.param(*case, marks=() if case == ("v6e:2x2", (9, 3, 64), "int8") else pytest.mark.slow)
    for case in itertools.product(CHIPS, SHAPES, DTYPES)
]


# (heads, key heads, head_dim, window, cap): Gemma 3 1B, Gemma 2 2B over 2 devices, and with sinks, gpt-oss 20B over 4.
MASKED_SHAPES = [(4, 1, 256, 512, None), (4, 2, 256, 4096, 50.0), (16, 2, 64, 128, None)]


@pytest.mark.slow
@pytest.mark.parametrize("shape", MASKED_SHAPES)
def test_the_kernel_compiles_with_a_window_and_a_cap(shape):
    *shape, window, cap = shape
    for dtype in DTYPES[:2]:
        compiles_in_place("v6e:2x2", shape, dtype, window=window, cap=cap)


@pytest.mark.parametrize(("chip", "shape", "dtype"), CASES)
def test_the_kernel_compiles_in_place(chip, shape, dtype):
    compiles_in_place(chip, shape, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_the_kernel_compiles_with_as_many_slots_as_its_scalar_memory_allows(chip):
    at_once = tpu_cache.pages_at_once(1, PAGE, 128, "bfloat16")
    most = tpu_cache.SCALAR_BYTES // tpu_cache.scalar_bytes(TABLE, at_once)
    compiles_in_place(chip, (1, 1, 128), "bfloat16", slots=most)
    with pytest.raises(Exception, match="smem"):
        compiles_in_place(chip, (1, 1, 128), "bfloat16", slots=most * 102 // 100)


def compiles_in_place(chip, shape, dtype, window=0, cap=None, slots=SLOTS):
    """The result is stored in place of the argument; all other memory is less than an eighth of it (a pool has 8 to 256 MiB here)."""
    heads, kv_heads, head_dim = shape
    mesh = Mesh(np.array(devices_of(parse(chip))[:1]), ("x",))
    where = NamedSharding(mesh, PartitionSpec())
    at_once = tpu_cache.pages_at_once(kv_heads, PAGE, head_dim, dtype)

    def step(layer, tables, lengths, live, *new):
        now = tpu_cache.reading(tables, lengths, live, page_tokens=PAGE, at_once=at_once, windows=(window, 0))
        return tpu_cache.extend(layer, now, *new, dtype="bfloat16", window=window, cap=cap)

    def struct(dims, kind=jnp.float32):
        return jax.ShapeDtypeStruct(dims, kind, sharding=where)

    layer = jax.eval_shape(lambda: tpu_cache.empty(PAGES, kv_heads, PAGE, head_dim, dtype))
    layer = jax.tree.map(lambda leaf: struct(leaf.shape, leaf.dtype), layer)
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    compiled = jax.jit(mapped, donate_argnums=0).lower(
        layer, struct((SLOTS, TABLE), jnp.int32), struct((SLOTS,), jnp.int32), struct((SLOTS,), bool),
        struct((heads, head_dim, SLOTS)), *[struct((kv_heads, head_dim, SLOTS))] * 2, *[struct((heads,))] * (window == 128),
    ).compile()  # fmt: skip
    pool = sum(np.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(layer))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pool
    assert memory.temp_size_in_bytes < pool / 8
