"""Facts about compiled programs: cost, largest arrays, and refusals."""

import jax
import jax.numpy as jnp
import pytest

from dapo_jax.plan.chips import CHIPS
from dapo_jax.plan.compiled import Cost, cost_of, largest_arrays, needed_bytes, of_scalars, refused
from dapo_jax.plan.topologies import devices_of, parse

PROGRAM = """HloModule jit_f, is_scheduled=true

%fused (p: f32[8,128]) -> f32[8,128] {
  ROOT %inner = f32[8,128]{1,0} add(%p, %p), backend_config={"window_config":{"estimated_cycles":"999"}}
}

%body (carried: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %carried = (s32[], f32[8,128]{1,0}) parameter(0)
  %x = f32[8,128]{1,0} get-tuple-element(%carried), index=1
  %copy-start.1 = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x)
  %copy-done.1 = f32[8,128]{1,0:T(8,128)S(1)} copy-done(%copy-start.1)
  %fusion.1 = f32[8,128]{1,0} fusion(%copy-done.1), kind=kLoop, calls=%fused, backend_config={"window_config":{"estimated_cycles":"100"}}
  %kernel = f32[8,128]{1,0} custom-call(%fusion.1), custom_call_target="tpu_custom_call"
  ROOT %tuple = (s32[], f32[8,128]{1,0}) tuple(%x, %kernel)
}

%condition (carried.1: (s32[], f32[8,128])) -> pred[] {
  %carried.1 = (s32[], f32[8,128]{1,0}) parameter(0)
  ROOT %known = pred[] get-tuple-element(%carried.1), index=0
}

ENTRY %main (p.1: f32[8,128]) -> f32[8,128] {
  %p.1 = f32[8,128]{1,0} parameter(0)
  %copy-start.2 = (f32[8,128]{1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%p.1)
  %copy-start.3 = (f32[8,128]{1,0:T(8,128)S(5)}, f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%p.1)
  %while = (s32[], f32[8,128]{1,0}) while(%p.1), condition=%condition, body=%body
  ROOT %sum = f32[8,128]{1,0} add(%p.1, %p.1), backend_config={"window_config":{"estimated_cycles":"7"}}
}
"""


def test_cycles_and_copies_count_as_often_as_they_run():
    """Three trips of 100 cycles, 4096 bytes and a kernel; 7 cycles outside, and a copy that reads and writes the device's memory. Copies
    from the host's memory do not count, and cycles inside a fusion are in the fusion's cycles. Unknown cycles, 2^63 - 1, count as 0."""
    assert cost_of(PROGRAM, trips=(3,)) == Cost(cycles=307, copied_bytes=3 * 4096 + 8192, kernels=3)
    assert cost_of(PROGRAM).cycles == 107
    unknown = PROGRAM.replace('"estimated_cycles":"7"', f'"estimated_cycles":"{2**63 - 1}"')
    assert cost_of(unknown).cycles == 100


def test_a_loop_that_the_compilers_own_sum_counts_once_counts_as_often_as_it_runs():
    """Products of 2048 x 2048, two or 16 of them in a loop: the compiler's sum of operations is the same, the cycles differ eightfold."""
    pytest.importorskip("libtpu", reason="the extra tpu")
    [device] = devices_of(parse("v5e:1x1"))
    place = jax.sharding.SingleDeviceSharding(device)

    def looped(x, many):
        return jax.lax.scan(lambda x, one: (jnp.tanh(x @ one), None), x, many)[0]

    def cycles(count):
        shapes = [
            jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place)
            for shape in ((2048, 2048), (count, 2048, 2048))
        ]
        compiled = jax.jit(looped).lower(*shapes).compile()
        assert compiled.cost_analysis()["flops"] == pytest.approx(2 * 2048**3, rel=0.02)
        return cost_of(compiled.as_text()).cycles

    often = cycles(16)
    assert often == pytest.approx(8 * cycles(2), rel=0.2)
    chip = CHIPS["v5e"]
    assert 1 < often / chip.cycles_s / (16 * 2 * 2048**3 / chip.device_flops) < 2


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


def test_a_full_memory_for_scalars_is_recognised():
    scalars = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space smem. Used 1.08M of 1.00M smem."
    assert of_scalars(scalars)
    assert not of_scalars(LIST.splitlines()[0])


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
