"""Decoding programs compiled ahead of time for a described TPU slice: communication, copies and padding."""

import math
import re
from collections import Counter

import pytest

from dapo_jax.models.tensors import shapes_of
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.weights import WeightTransfer
from dapo_jax.plan.topologies import devices_of, parse
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.sampling.engine_spec import EngineSpec
from dapo_jax.sampling.prompt_packing import PrefillShape
from dapo_jax.testing import tiny_decoder_config

pytest.importorskip("libtpu", reason="the extra tpu")

SLOTS, CAPACITY, STEPS, EMBED, VOCAB, LAYERS = 64, 4096, 16, 1024, 8192, 2
MIB = 2**20


def compiled(head_dim=128, name="generate", dtype="bfloat16", eight_bit=False, windows=(), **sizes):
    """A program for one host of four chips, and the bytes of a layer's cache on each."""
    mesh = make_mesh(**{"fsdp": 1, **sizes}, devices=devices_of(parse("v5e:2x2")))
    config = tiny_decoder_config(
        vocab_size=VOCAB, embed_dim=EMBED, layers=LAYERS, heads=8, kv_heads=4, head_dim=head_dim, mlp_dim=4096,
        qkv_bias=True, tied_embeddings=False, max_positions=CAPACITY, windows=windows,
    )  # fmt: skip
    engine = DecoderEngine(
        config,
        mesh,
        EngineSpec(
            slots=SLOTS,
            capacity=CAPACITY,
            steps_per_call=STEPS,
            stop_ids=[1],
            compute_dtype=dtype,
            prefill=PrefillShape(rows=1, width=512, longest=512),
        ),
    )
    weights = WeightTransfer(shapes_of(config), mesh, dtype=dtype, eight_bit=eight_bit).shapes
    program = engine.programs(weights, decoding())[name]()
    return program.compile(), SLOTS * 4 * CAPACITY * 2 * head_dim * 2 // 4


def moved(program):
    """Counts the collectives by (kind, dtype, elements), without the small ones for the sampled tokens."""
    found = Counter()
    kinds = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"
    for results, kind in re.findall(rf"= (\(?[^=]*?\)?) ({kinds})(?:-done)?\(", program.as_text()):
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", results):
            elements = math.prod(int(size) for size in shape.split(",") if size)
            if elements > SLOTS * STEPS:
                found[kind, dtype, elements] += 1
    return found


def assert_in_place(program, layer, caches=None):
    """The state is updated in place: temporary memory is less than the cache of one layer. `caches` is the size of all caches."""
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes > (caches or LAYERS * layer)
    assert memory.temp_size_in_bytes < layer // 4


def test_tensor_parallel_decoding_has_two_sums_per_layer_and_one_exchange_of_logits():
    program, layer = compiled(tensor=4)
    embedded = SLOTS * EMBED
    assert moved(program) == {
        ("all-reduce", "bf16", embedded): 1 + 2 * LAYERS,
        ("all-to-all", "f32", SLOTS * VOCAB // 4): 1,
    }
    assert_in_place(program, layer)


@pytest.mark.slow  # three more compilations; the test above has the sums of the plain program
@pytest.mark.parametrize(
    ("name", "how", "added"),
    [
        ("generate", {"eight_bit": True}, {"bf16": 2 * LAYERS}),
        ("prefill_row", {}, {"bf16": 2}),
        ("prefill_row", {"dtype": "float32"}, {"f32": 2}),
    ],
)
def test_sums_over_chips_are_in_the_compute_dtype(name, how, added):
    """Also with weights in eight bits. Their scales are applied after the sum; an embedding is summed as integers."""
    program, _ = compiled(name=name, tensor=4, **how)
    sums = Counter()
    for (kind, dtype, _), times in moved(program).items():
        if kind == "all-reduce" and dtype in ("bf16", "f32"):
            sums[dtype] += times
    assert sums == added


@pytest.mark.slow  # another compilation, as the next two
def test_slots_over_the_chips_exchange_only_sampled_tokens():
    program, layer = compiled(data=4)
    assert not moved(program)
    assert_in_place(program, layer)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [256, 512])
def test_layers_with_and_without_a_window_are_in_one_program(head_dim):
    """Heads of 256, as in Gemma, and of 512, as in the layers without a window of Gemma 4. Each kind of layer has its own pages, and all caches are updated in place. A window of 512 tokens is in up to 5 pages of 128, and the
    16 tokens of a call may begin another one."""
    program, layer = compiled(data=4, head_dim=head_dim, windows=(512, 0))
    assert not moved(program)
    assert_in_place(program, layer, layer + layer * 6 * 128 // CAPACITY)


# Slow: compiles a decode step. tests/sampling/tpu_kernel_test.py compiles the kernel for such heads without padding.
@pytest.mark.slow
def test_heads_of_64_are_not_padded_to_a_register():
    """A key and its value are 128 numbers together. The other arguments are matrices, logits and 2 x 32 x 4096 angles."""
    program, layer = compiled(tensor=4, head_dim=64)
    matrices = LAYERS * EMBED * (3 * 4096 + 64 * (2 * 8 + 2 * 4)) + 2 * VOCAB * EMBED
    expected = LAYERS * layer + matrices * 2 // 4 + SLOTS * VOCAB * 4 // 4 + 2 * 32 * CAPACITY * 4
    assert program.memory_analysis().argument_size_in_bytes == pytest.approx(expected, abs=MIB)
