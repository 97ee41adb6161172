"""The kernel for NVIDIA GPUs lowers for every shape of the configurations, on a machine that has none: Triton's text is made, and not compiled."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from dapo_jax.sampling import gpu_cache

if gpu_cache.kernel() is None:
    pytest.skip("this jax has no kernel for a cache in pages on a GPU", allow_module_level=True)

SLOTS, PAGES, PAGE, TABLE = 64, 512, 64, 64
H100 = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
# (heads, key heads, head_dim) of one device: 32B over 8 devices and 4, 7B over 4, 0.6B, SmolLM2, 0.5B.
SHAPES = [(5, 1, 128), (10, 2, 128), (7, 1, 128), (16, 8, 128), (9, 3, 64), (14, 2, 64)]


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_lowers(shape, dtype):
    heads, kv_heads, head_dim = shape

    def step(layer, tables, lengths, live, query, key, value):
        now = gpu_cache.reading(tables, lengths, live, page_tokens=PAGE)
        return gpu_cache.extend(layer, now, query, key, value, dtype="bfloat16")

    struct = jax.ShapeDtypeStruct
    layer = jax.eval_shape(lambda: gpu_cache.empty(PAGES, kv_heads, PAGE, head_dim, dtype))
    arguments = (
        layer,
        struct((SLOTS, TABLE), jnp.int32),
        struct((SLOTS,), jnp.int32),
        struct((SLOTS,), jnp.bool_),
        struct((heads, head_dim, SLOTS), jnp.bfloat16),
        *[struct((kv_heads, head_dim, SLOTS), jnp.bfloat16)] * 2,
    )
    with (
        jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=H100)),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", DeprecationWarning)
        lowered = jax.jit(step).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert "triton" in lowered.as_text().lower()
