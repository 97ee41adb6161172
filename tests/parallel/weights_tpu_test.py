"""Memory and collectives of the weight transfer, compiled ahead of time for TPU slices."""

import math
import re

import pytest

from dapo_jax.models.presets import preset
from dapo_jax.models.tensors import shapes_of
from dapo_jax.parallel.mesh import make_mesh, make_meshes
from dapo_jax.parallel.weights import WeightTransfer
from dapo_jax.plan.topologies import devices_of, parse
from dapo_jax.testing import tiny_decoder_config

pytest.importorskip("libtpu", reason="the extra tpu")

MIB = 2**20
WIDTH = {"bf16": 2, "f32": 4}


def collectives(compiled):
    """Returns the kind of collective -> bytes of its results on each device; an asynchronous one counts at its end."""
    found = {}
    kinds = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"
    for results, kind in re.findall(rf"= (\(?[^=]*?\)?) ({kinds})(?:-done)?\(", compiled.as_text()):
        for dtype, shape in re.findall(r"(bf16|f32)\[([\d,]*)\]", results):
            size = WIDTH[dtype] * math.prod(int(size) for size in shape.split(",") if size)
            found[kind] = found.get(kind, 0) + size
    return found


def compiled_for(config, devices, sizes, sampler_tensor):
    meshes = make_meshes(make_mesh(**sizes, devices=devices), sampler_tensor=sampler_tensor)
    transfer = WeightTransfer(shapes_of(config), meshes, dtype="bfloat16")
    lowered = transfer.lower(shapes_of(config))
    return {part: lowered[part].compile() for part in ("blocks", "ends")}


def bytes_per_device(config, tensor):
    """Returns the bytes of a device for one layer and for the ends in bfloat16, without norms and biases."""
    layer = config.embed_dim * (2 * config.head_dim * (config.heads + config.kv_heads) + 3 * config.mlp_dim)
    return {"blocks": 2 * layer / tensor, "ends": 2 * 2 * config.vocab_size * config.embed_dim / tensor}


def assert_frugal(compiled, config, *, devices, tensor, temporary):
    """There is no sum. A device gathers no more than it keeps, and its own piece changes place at most twice before."""
    for part, kept in bytes_per_device(config, tensor).items():
        memory, moved = compiled[part].memory_analysis(), collectives(compiled[part])
        assert memory.output_size_in_bytes == pytest.approx(kept, rel=0.01)
        assert memory.temp_size_in_bytes < temporary
        assert moved.keys() <= {"all-gather", "all-to-all", "collective-permute"}
        gathered, piece = moved.pop("all-gather"), kept * tensor / devices
        assert gathered == pytest.approx(kept, rel=0.01)
        assert sum(moved.values()) <= 2.02 * piece


@pytest.mark.parametrize(
    ("sizes", "sampler_tensor"),
    [
        ({"fsdp": 16}, 4),
        pytest.param({"fsdp": 4, "tensor": 4}, 0, marks=pytest.mark.slow),  # more compilations of the same
        pytest.param({"fsdp": 2, "tensor": 4, "context": 2}, 0, marks=pytest.mark.slow),
    ],
)
def test_there_is_no_sum_and_a_device_gathers_only_its_own_weights(sizes, sampler_tensor):
    """In bfloat16 a layer has 30 MiB and the ends 32 MiB. A device keeps a quarter, and needs at most twice as much meanwhile."""
    config = tiny_decoder_config(
        vocab_size=8192, embed_dim=1024, heads=8, kv_heads=4, head_dim=128, mlp_dim=4096, qkv_bias=True, tied_embeddings=False,
    )  # fmt: skip
    compiled = compiled_for(config, devices_of(parse("v5p:2x2x4")), sizes, sampler_tensor)
    assert_frugal(compiled, config, devices=16, tensor=4, temporary=16 * MIB)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "sampler_tensor"),
    [
        ({"fsdp": 32, "tensor": 4}, 0),
        ({"fsdp": 128}, 4),
        ({"fsdp": 8, "tensor": 8, "context": 2}, 0),
        ({"data": 2, "fsdp": 16, "tensor": 4}, 0),
    ],
)
def test_32b_on_128_chips_needs_less_than_half_a_gib_more_than_its_result(sizes, sampler_tensor):
    """64 layers and two ends of 15.26 GiB on each chip, and programs that need less than 512 MiB of temporary memory."""
    config = preset("qwen2.5-32b")
    compiled = compiled_for(config, devices_of(parse("v5p:4x4x8")), sizes, sampler_tensor)
    assert_frugal(compiled, config, devices=128, tensor=4, temporary=512 * MIB)
    layer, ends = (compiled[part].memory_analysis().output_size_in_bytes for part in ("blocks", "ends"))
    assert (config.layers * layer + ends) / 2**30 == pytest.approx(15.26, abs=0.01)
