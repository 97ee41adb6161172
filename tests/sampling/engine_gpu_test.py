"""Decoding programs compiled ahead of time for a described NVIDIA H100: kernels, copies, and reads by the host."""

import functools
import re
from collections import Counter
from dataclasses import replace

import pytest

from dapo_jax.models.presets import preset
from dapo_jax.models.tensors import shapes_of
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.weights import WeightTransfer
from dapo_jax.plan.topologies import devices_of, parse
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.engine import DecoderEngine

pytest.importorskip("jax_cuda12_plugin", reason="the extra cuda-plan")

QWEN3, SLOTS, CAPACITY, STEPS = preset("qwen3-0.6b"), 256, 384, 16
FREE = (
    "parameter constant tuple get-tuple-element bitcast after-all copy-done async-done optimization-barrier"
)
"""Instructions that start no kernel."""


@functools.cache
def compiled(layers):
    """`generate` of Qwen3-0.6B with this number of layers in bfloat16, with the optimizations of a run."""
    config = replace(QWEN3, layers=layers)
    mesh = make_mesh(fsdp=1, devices=devices_of(parse("h100:1")))
    engine = DecoderEngine(
        config, slots=SLOTS, capacity=CAPACITY, steps_per_call=STEPS, stop_ids=[1], mesh=mesh, compute_dtype="bfloat16",
    )  # fmt: skip
    weights = WeightTransfer(shapes_of(config), mesh, dtype="bfloat16").shapes
    # The tests' configuration leaves most optimizations out.
    whole = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
    return engine.programs(weights, decoding())["generate"]().compile(compiler_options=whole)


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
    aliased = [rest for _, operation, rest in body if operation == "custom-call"]
    assert all("output_to_operand_aliasing={{2}: (5, {}), {3}: (6, {})}" in rest for rest in aliased)
    layer = SLOTS * CAPACITY * QWEN3.kv_heads * QWEN3.head_dim * 2
    assert compiled(2).memory_analysis().temp_size_in_bytes < layer


def test_kernels_of_a_token_do_not_become_more():
    """Fifteen in a layer, and 29 for sampling, the embedding and the logits. Queries, keys, values and attention are not transposed or padded by kernels."""
    counted = kernels(compiled(2).as_text())
    assert counted["custom-call"] == 2, "attention"
    assert counted.total() <= 2 * 15 + 29


@pytest.mark.slow  # compiles all layers; the test above has the limits of a layer and of the rest
def test_kernels_of_a_token_of_all_layers():
    assert kernels(compiled(QWEN3.layers).as_text()).total() <= QWEN3.layers * 15 + 29
