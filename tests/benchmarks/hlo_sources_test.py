"""Operations of compiled programs are attributed to functions of the library: by hand in a made-up program, and in compiled ones."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from benchmarks import profiling
from benchmarks.hlo_sources import Source, read, unattributed
from dapo_jax.models.decoder import Decoder
from dapo_jax.testing import tiny_decoder_config

# Frame 1 is `norm`. Frame 2 is `product` in precision.py, which `layer` (frame 3's number minus one is its parent) calls.
TEXT = """HloModule jit_f, entry_computation_layout={(f32[8,8]{1,0})->f32[8,8]{1,0}}

FileNames
1 "/somewhere/dapo_jax/models/decoder.py"
2 "/somewhere/dapo_jax/numerics/precision.py"

FunctionNames
1 "norm"
2 "Block.layer.<locals>.inner"
3 "product"

FileLocations
1 {file_name_id=1 function_name_id=1 line=1}
2 {file_name_id=1 function_name_id=2 line=2}
3 {file_name_id=2 function_name_id=3 line=3}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}
3 {file_location_id=3 parent_frame_id=3}

%silent (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  %square = f32[8,8]{1,0} multiply(%p, %p), metadata={op_name="jit(f)/mul" stack_frame_id=1}
  %other = f32[8,8]{1,0} add(%square, %p), metadata={op_name="jit(f)/add" stack_frame_id=1}
  ROOT %dot.1 = f32[8,8]{1,0} dot(%other, %p), metadata={op_name="jit(f)/transpose(jvp())/dot_general" stack_frame_id=3}
}

%normed (q: f32[8,8]) -> f32[8,8] {
  %q = f32[8,8]{1,0} parameter(0)
  ROOT %sum = f32[8,8]{1,0} add(%q, %q), metadata={op_name="jit(f)/add" stack_frame_id=2}
}

ENTRY %main (x: f32[8,8]) -> (f32[8,8], f32[8,8]) {
  %x = f32[8,8]{1,0} parameter(0)
  %copy.1 = f32[8,8]{0,1} copy(%x)
  %bitcast.1 = f32[64]{0} bitcast(%copy.1)
  %gemm_fusion.5 = f32[8,8]{1,0} fusion(%bitcast.1), kind=kCustom, calls=%silent, metadata={op_name="jit(f)/mul" stack_frame_id=1}
  %loop-fusion = f32[8,8]{1,0} fusion(%gemm_fusion.5), kind=kLoop, calls=%normed
  %call.2 = f32[8,8]{1,0} custom-call(%loop-fusion), custom_call_target="__gpu$xla.gpu.triton", metadata={stack_frame_id=1}, backend_config={name = "attention_h16"}
  %copy.9 = f32[8,8]{0,1} copy(%call.2)
  ROOT %tuple = (f32[8,8]{1,0}, f32[8,8]{0,1}) tuple(%loop-fusion, %copy.9)
}
"""

NORM, LAYER = Source("decoder.py:norm", False), Source("decoder.py:Block.layer", False)
PRODUCT = Source("decoder.py:Block.layer", True)


def test_a_fusion_counts_for_the_products_in_it_then_for_itself_then_for_all_in_it():
    found = read(TEXT).by_name()
    assert found["dot.1"] == found["gemm_fusion.5"] == PRODUCT
    assert found["loop-fusion"] == LAYER
    assert found["call.2"] == NORM


def test_a_copy_counts_for_the_operation_that_reads_it():
    found = read(TEXT).by_name()
    assert found["copy.1"] == PRODUCT
    assert found["copy.9"] == Source(None, False)
    assert unattributed(TEXT) == (1, 5)


def test_operations_that_are_read_in_very_many_ways_are_attributed_once():
    """60 sums of an array with itself: there are 2^60 ways from the first to the product."""
    sums = [f"  %a{n + 1} = f32[8] add(%a{n}, %a{n})" for n in range(60)]
    text = TEXT.replace("  ROOT %tuple", "\n".join(["  %a0 = f32[8] copy(%x)", *sums, "  %last = f32[8] copy(%a60), metadata={stack_frame_id=1}", "  ROOT %tuple"]))  # fmt: skip
    assert read(text).by_name()["a0"] == NORM


@pytest.fixture
def with_stacks():
    """The tests leave stacks out of programs."""
    before = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", 10)
    yield
    jax.config.update("jax_traceback_in_locations_limit", before)


def test_every_product_of_a_compiled_decoder_has_a_function_that_the_table_names(with_stacks):
    """Forward and backward pass; products are in `numerics/precision.py`, and count for its callers."""
    graph, params = nnx.split(Decoder(tiny_decoder_config(), rngs=nnx.Rngs(0)))

    def loss(params, tokens):
        decoder, ones = nnx.merge(graph, params), jnp.ones_like(tokens)
        return decoder.ends.logits(decoder(tokens, jnp.cumsum(ones, axis=1), ones)).sum()

    compiled = jax.jit(jax.grad(loss)).lower(params, jnp.ones((2, 8), jnp.int32)).compile()
    program = read(compiled.as_text())
    products = [program.source(one) for one in program.operations if one.opcode == "dot"]
    assert len(products) > 20
    named = {
        profiling.PARTS.get(source.function or "")
        or profiling.PARTS.get((source.function or "").split(":")[0])
        for source in products
    }
    assert named == {"products with the layers' weights", "attention", "unembedding"}
    assert any(source.backward for source in products)
