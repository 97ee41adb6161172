"""The kernel for NVIDIA GPUs: every shape is exact when interpreted, lowers on a machine without a GPU, and reads ahead in the code compiled for an H100."""

import importlib.util
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec

from dapo_jax.plan.topologies import devices_of, parse
from dapo_jax.sampling import gpu_cache
from tests.sampling.paged_cache_test import Filled, attend, new_token

if reason := gpu_cache.without_kernel(None, "bfloat16"):
    pytest.skip(reason, allow_module_level=True)

SLOTS, PAGE = 256, 64
H100 = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
# (heads, key heads, head_dim) of one device. Qwen: 32B over 8 devices and 4, 7B over 4, 0.6B, 0.5B. SmolLM2, Llama 3.2 1B, Gemma 3 1B, Phi 3 mini, tiny.
SHAPES = [(5, 1, 128), (10, 2, 128), (7, 1, 128), (16, 8, 128), (14, 2, 64), (9, 3, 64), (32, 8, 64), (4, 1, 256), (32, 32, 96), (6, 2, 8)]  # fmt: skip


def step_of(shape, dtype, *, table=6, pages=512, compute_dtype="bfloat16", **how):
    """A decoding step of one layer, and the shapes of its arguments. The cache comes first."""
    heads, kv_heads, head_dim = shape

    def step(layer, tables, lengths, live, query, key, value):
        now = gpu_cache.reading(tables, lengths, live, page_tokens=PAGE)
        return gpu_cache.extend(layer, now, query, key, value, dtype=compute_dtype, **how)

    struct = jax.ShapeDtypeStruct
    return step, (
        jax.eval_shape(lambda: gpu_cache.empty(pages, kv_heads, PAGE, head_dim, dtype)),
        struct((SLOTS, table), jnp.int32),
        struct((SLOTS,), jnp.int32),
        struct((SLOTS,), jnp.bool_),
        struct((heads, head_dim, SLOTS), jnp.bfloat16),
        *[struct((kv_heads, head_dim, SLOTS), jnp.bfloat16)] * 2,
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_lowers(shape, dtype):
    compute_dtype = "float32" if dtype == "float32" else "bfloat16"
    step, arguments = step_of(shape, dtype, table=64, compute_dtype=compute_dtype, window=100, cap=50.0)
    with (
        jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=H100)),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", DeprecationWarning)
        lowered = jax.jit(step).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert "triton" in lowered.as_text().lower()


# Groups of 1, 3, 4, 5, 7, 8, 16 and 17 query heads, also on a GPU itself.
@pytest.mark.parametrize("platform", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "shape",
    [(2, 2, 96), (3, 1, 8), (4, 1, 256), (10, 2, 80), (7, 1, 64), (8, 1, 20), (16, 1, 16), (17, 1, 32)],
)
def test_any_group_and_any_head_size_attend_as_in_float64(platform, shape):
    """Lengths of up to 3 of 5 parts of at least 256 tokens. Products in float32 add 1e-5."""
    heads, kv_heads, head_dim = shape
    lengths = [0, 31, 64, 1023]
    there = Filled(("gpu", platform), 4, kv_heads, 1100, head_dim, "float32", page_tokens=64)
    query, key, value = new_token(4, heads, kv_heads, head_dim, "float32")
    found, keys, values = there.extended((query, key, value), lengths)
    scaled = np.asarray(query) * head_dim**-0.5
    for slot, length in enumerate(lengths):
        for head in range(heads):
            seen = head // (heads // kv_heads), slice(0, length + 1)
            exact, _ = attend(
                scaled[head, :, slot], there.of_slot(keys, slot)[seen], there.of_slot(values, slot)[seen]
            )
            np.testing.assert_allclose(found[head, :, slot], exact, rtol=0, atol=1e-5)


def test_keys_that_the_kernel_cannot_address_are_refused():
    """2^22 + 64 tokens of 8 heads of 64 bytes are more than 2^31 bytes."""
    step, arguments = step_of((8, 8, 64), "int8", pages=2**16 + 1)
    with pytest.raises(
        ValueError, match=r"2,147,516,416 bytes .* sampling\.cache_tokens to at most 4194304 per device"
    ):
        jax.eval_shape(step, *arguments)
    step, arguments = step_of((8, 8, 64), "bfloat16", pages=2**16 + 1)
    jax.eval_shape(step, *arguments)


# (heads, key heads, head_dim), table pages, and how many programs fit on one multiprocessor of an H100.
COMPILED = [
    ((16, 8, 128), 6, 3),
    ((9, 3, 64), 6, 6),
    ((7, 1, 128), 6, 3),
    ((32, 8, 64), 64, 6),
    ((4, 1, 256), 64, 3),
]


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda12_plugin") is None, reason="the extra cuda-plan")
# Slow: five compilations. The first shape is compiled by default.
@pytest.mark.parametrize(
    ("shape", "table", "programs"),
    [COMPILED[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in COMPILED[1:])],
)
def test_copies_of_the_next_block_are_in_flight_while_a_block_is_computed(shape, table, programs, tmp_path):
    """Keys and values are copied to shared memory 16 bytes at a time, past the registers. The loop waits for a block, and leaves the keys and values of the next one
    in flight. Little's law asks for 4.8 TB/s x 600 ns / 132 multiprocessors = 22 KB in flight on each multiprocessor of an H200."""
    step, arguments = step_of(shape, "bfloat16", table=table)
    placed = NamedSharding(Mesh(np.array(devices_of(parse("h100:1"))), ("x",)), PartitionSpec())
    step = jax.shard_map(
        step, mesh=placed.mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), arguments)
    # The tests' configuration leaves most optimizations out.
    whole = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
    jax.jit(step, donate_argnums=0).lower(*arguments).compile(
        compiler_options={**whole, "xla_dump_to": str(tmp_path)}
    )
    (text,) = (text for path in tmp_path.glob("*.ptx") if ".entry extend(" in (text := path.read_text()))
    assert set(re.findall(r"cp\.async\.c\w+\.shared\.global \[.*?\], \[.*?\], (\w+)", text)) == {"0x10"}
    assert re.findall(r"cp\.async\.wait_group\s+(\d+)", text) == ["2", "0"]
    assert ".local" not in text, "registers are spilled"
    launched = "".join(path.read_text() for path in tmp_path.glob("*thunk_sequence.txt"))
    shared = int(re.search(r"extend grid: .* shared_memory: (\d+) bytes", launched)[1])
    # A multiprocessor has 228 KiB of shared memory, and reserves 1 KiB per program.
    assert 228 * 1024 // (shared + 1024) == programs
    block = 2 * shape[2] * 2 * min(PAGE, gpu_cache._BLOCK_BYTES // (4 * shape[2]))
    assert programs * block >= 22_000
