"""Largest arrays and refusals of compiled programs."""

from dapo_jax.plan.compiled import largest_arrays, needed_bytes, of_scalars, refused

SUM = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (32.12G) exceeds available HBM (15.75G)."
LIST = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 17.63G of 15.75G hbm. Exceeded hbm capacity by 1.88G.

Largest program allocations in hbm:

  1. Size: 2.50G
     Operator: op_name="jit(step)/while/body/dot_general"
     Shape: f32[22528,27648]{1,0:T(8,128)}
     Unpadded size: 2.32G

  2. Size: 512.0M
     Shape: bf16[64,8,128]{2,1,0}
"""  # fmt: skip


def test_a_refusal_is_parsed_in_both_of_its_forms():
    message, largest = refused(RuntimeError(SUM))
    assert largest == []
    assert needed_bytes(message) == 34488587387  # 32.12 x 2^30 = 34488587386.9
    message, largest = refused(RuntimeError(LIST))
    assert needed_bytes(message) == 18930068358  # 17.63 x 2^30 = 18930068357.1
    assert [(one.bytes, one.shape) for one in largest] == [
        (5 * 2**29, "f32[22528,27648]{1,0:T(8,128)}"),
        (2**29, "bf16[64,8,128]{2,1,0}"),
    ]
    assert largest[0].operation == "jit(step)/while/body/dot_general"
    assert refused(RuntimeError("INVALID_ARGUMENT: something else")) is None
    assert not of_scalars(message)
    assert of_scalars("RESOURCE_EXHAUSTED: Ran out of memory in memory space smem. Used 1.08M of 1.00M smem.")


def test_the_largest_arrays_are_outside_of_fusions():
    text = """HloModule m
%fused_computation.1 (p: f32[64]) -> f32[4096] {
  %inside = f32[4096]{0} broadcast(%p), dimensions={}
}
ENTRY %main (p: f32[64]) -> f32[512] {
  %p = f32[9999]{0} parameter(0)
  %a = f32[512]{0:T(128)} fusion(%p), kind=kLoop, calls=%fused_computation.1, metadata={op_name="jit(f)/mul"}
  %b = bf16[512]{0} convert(%a)
}
"""
    found = [(one.bytes, one.operation) for one in largest_arrays(text)]
    assert found == [(2048, "jit(f)/mul"), (1024, "convert")]
