"""Decoding programs compiled ahead of time for a described NVIDIA H100: kernels, copies, and reads by the host."""

import functools
import math
import re
from collections import Counter
from dataclasses import replace

import pytest

from dapo_jax.models.lora import lora_shape
from dapo_jax.models.presets import preset
from dapo_jax.models.tensors import shapes_of
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.weights import WeightTransfer
from dapo_jax.plan.topologies import devices_of, parse
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.sampling.engine_spec import EngineSpec

pytest.importorskip("jax_cuda12_plugin", reason="the extra cuda-plan")

QWEN3, SLOTS, CAPACITY, STEPS, MIB = preset("qwen3-0.6b"), 256, 384, 16, 2**20
FREE = (
    "parameter constant tuple get-tuple-element bitcast after-all copy-done async-done optimization-barrier"
)
"""Instructions that start no kernel."""


LARGE = preset("qwen3.5-0.8b")
DELTA = replace(LARGE, layers=4, vocab_size=8192, mixers=LARGE.mixers[:4])
KINDS = {
    "plain": (QWEN3, {}),
    "as in the trainer": (QWEN3, {"join": False}),
    "8 bits": (QWEN3, {"eight_bit": True}),
    "adapters": (replace(QWEN3, lora=lora_shape(rank=16, alpha=32.0, targets=["all"])), {}),
    "Gated DeltaNet": (DELTA, {}),
    "experts": (replace(preset("qwen3-30b-a3b"), vocab_size=8192), {}),
    "2 GPUs": (QWEN3, {"tensor": 2}),
}


@functools.cache
def compiled(layers, kind="plain"):
    """`generate` with this number of layers in bfloat16, with the optimizations of a run."""
    config, how = KINDS[kind]
    config, how = replace(config, layers=layers), dict(how)
    tensor = how.pop("tensor", 1)
    mesh = make_mesh(fsdp=1, tensor=tensor, devices=devices_of(parse(f"h100:{tensor}")))
    engine = DecoderEngine(
        config,
        mesh,
        EngineSpec(
            slots=SLOTS, capacity=CAPACITY, steps_per_call=STEPS, stop_ids=[1], compute_dtype="bfloat16"
        ),
    )
    weights = WeightTransfer(shapes_of(config), mesh, dtype="bfloat16", places=config.places, **how).shapes
    # The tests' configuration leaves most optimizations out.
    whole = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
    return engine.programs(weights, decoding())["generate"]().compile(compiler_options=whole)


def copies(text):
    """The instructions that copy or join arrays of at least 1 MiB in the dtype of the weights, or of 64 MiB in float32. The cache, and the new keys and values, are not counted."""
    found = re.findall(r"= ((bf16|s8|f32)\[([\d,]+)\]\S*) (copy|concatenate)\(", text)
    bytes_of, least = {"bf16": 2, "s8": 1, "f32": 4}, {"bf16": MIB, "s8": MIB, "f32": 64 * MIB}
    others = rf"\[2,{SLOTS},|\[{SLOTS},2,|,64,{QWEN3.head_dim}\]"
    return [
        (kind, operation) for kind, dtype, shape, operation in found
        if math.prod(map(int, shape.split(","))) * bytes_of[dtype] >= least[dtype] and not re.search(others, kind)
    ]  # fmt: skip


def computations(text):
    """{name of a computation: its instructions, each as (type, operation, the rest of the line)}, and the name of the entry."""
    found, entry, name = {}, "", ""
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            name = head[2]
            found[name], entry = [], name if head[1] else entry
        elif made := re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\((.*)", line):
            found[name].append(made.groups())
    return found, entry


def loops(found, name):
    """Bodies and trip counts of the loops in a computation. A count of None depends on data."""
    whiles = [rest for _, operation, rest in found[name] if operation == "while"]
    counts = [re.search(r'"known_trip_count":\{"n":"(\d+)"', rest) for rest in whiles]
    bodies = [re.search(r"body=%?([\w.\-]+)", rest)[1] for rest in whiles]
    return [(body, count and int(count[1])) for body, count in zip(bodies, counts, strict=True)]


def kernels(text):
    """Counts the operations that start a kernel or a copy in one turn of the program's only loop."""
    found, entry = computations(text)
    ((body, turns),) = loops(found, entry)
    assert turns == STEPS
    assert loops(found, body) == []
    return Counter(operation for _, operation, _ in found[body] if operation not in FREE.split())


def test_the_host_reads_nothing_before_a_call_ends():
    """The host would read the condition of a loop or of a branch that depends on data, and the read waits for all kernels."""
    text = compiled(2).as_text()
    found, _ = computations(text)
    operations = {operation for made in found.values() for _, operation, _ in made}
    assert not operations & {"conditional", "call", "infeed", "outfeed", "send", "recv", "async-start"}
    assert all(count is not None for name in found for _, count in loops(found, name))
    assert "S(5)" not in text, "an array in the host's memory"


def test_the_cache_is_updated_in_place():
    """The kernel for attention writes the new tokens, and nothing else writes or copies pages. Logits and the splits of products are temporary; a copy of a layer's
    keys would double them."""
    found, entry = computations(compiled(2).as_text())
    pages = rf"bf16\[{SLOTS * CAPACITY // 64},{QWEN3.kv_heads},64,{QWEN3.head_dim}\]"
    body = found[loops(found, entry)[0][0]]
    writes = [
        operation for kind, operation, _ in body if re.search(pages, kind) and operation not in FREE.split()
    ]
    assert writes == ["custom-call"] * 2
    aliased = re.findall(r"output_to_operand_aliasing=(\{\{2\}.*?\)\})", "\n".join(rest for *_, rest in body))
    assert aliased == ["{{2}: (4, {}), {3}: (5, {})}"] * 2
    layer = SLOTS * CAPACITY * QWEN3.kv_heads * QWEN3.head_dim * 2
    assert compiled(2).memory_analysis().temp_size_in_bytes < layer


IN_LAYER, REST = 11, 29
"""Kernels of a token in each layer, and for sampling, the embedding and the logits."""


def test_kernels_of_a_token_do_not_become_more():
    """Four products, two norms and the sums of a third, the queries, the new keys and values, attention, and the activation."""
    counted = kernels(compiled(2).as_text())
    assert counted["custom-call"] == 2 * 5 + 1, "attention, products, and the unembedding"
    assert counted.total() <= 2 * IN_LAYER + REST


def test_products_are_added_to_the_residual_stream_in_their_own_kernels():
    """Each layer adds two products. An addition in a separate kernel would be transposed."""
    text = compiled(2).as_text()
    assert len(re.findall(r'"beta":1[,.}]', text)) == 2 * 2
    assert copies(text) == []


# Slow: compiles six programs. tests/models/joined_test.py counts the products of steps like these.
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_step_copies_or_joins_matrices(kind):
    text = compiled(4 if kind == "Gated DeltaNet" else 2, kind).as_text()
    assert copies(text) == []
    # A sum that XLA splits into parts has the features last, like the residual stream.
    assert not re.search(rf"f32\[\d+,{QWEN3.embed_dim},{SLOTS}\]\{{2,1,0\}} fusion", text)


def test_a_joined_matrix_in_each_step_is_found():
    text = "  %c = bf16[6144,1024]{1,0} concatenate(%a, %b), dimensions={0}\n  %d = bf16[256,8,64,128]{3,2,1,0} copy(%c)\n"
    assert copies(text) == [("bf16[6144,1024]{1,0}", "concatenate")]


@pytest.mark.slow  # compiles all layers; a test above has the limits of a layer and of the rest
def test_kernels_of_a_token_of_all_layers():
    assert kernels(compiled(QWEN3.layers).as_text()).total() <= QWEN3.layers * IN_LAYER + REST
