"""XLA's own estimate of a phase: cycles and copies as often as they run."""

import jax
import jax.numpy as jnp
import pytest

from dapo_jax.plan.chips import CHIPS
from dapo_jax.plan.estimate import Cost, cost_of, estimates
from dapo_jax.plan.roofline import Work
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


def test_cycles_and_copies_are_counted_as_often_as_they_run():
    """Three turns of 100 cycles, 4096 bytes and a kernel; 7 cycles beside, and a copy that both reads and writes the device's memory. What
    comes from the host's memory comes another way, and what is inside of a fusion is in the fusion's cycles."""
    found = cost_of(PROGRAM, {"flops": 5.0, "utilization0{}": 1.0}, unknown_trips=(3,))
    assert found == Cost(cycles=307, copied_bytes=3 * 4096 + 8192, kernels=3, told={"flops": 5.0})
    assert cost_of(PROGRAM, None).cycles == 107


def test_an_operation_whose_cycles_are_not_known_has_none():
    """The largest integer of 64 bits stands there."""
    text = PROGRAM.replace('"estimated_cycles":"7"', f'"estimated_cycles":"{2**63 - 1}"')
    assert cost_of(text, None).cycles == 100


def cost(**changes):
    return Cost(**{"cycles": 0, "copied_bytes": 0, "kernels": 0, "told": {}, **changes})


def work(phase, **changes):
    plain = {"runs": 1, "flops": 0, "useful_flops": 0, "hbm_bytes": 0, "ici_bytes": 0}
    return Work(phase=phase, **{**plain, **changes})


def test_an_estimate_adds_what_follows_one_another_and_is_no_less_than_what_is_received():
    """A v5e has 1.5e9 cycles, 819e9 and 200e9 bytes a second. Two runs of a program of a second's cycles and three of one that copies for half a
    second; then 10 seconds of what is received."""
    chip = CHIPS["v5e"]
    assert chip.cycles_s == pytest.approx(1.503e9, rel=1e-3)
    costs = {"a": cost(cycles=round(chip.cycles_s)), "b": cost(copied_bytes=819 * 10**9 // 2)}
    calls = {"x": [("a", 1), ("b", 3)]}
    found = estimates([work("x", runs=2)], calls, costs, chip)["x"]
    assert found.seconds == pytest.approx(2 + 3)
    assert estimates([work("x", runs=2, ici_bytes=2e12)], calls, costs, chip)["x"].seconds == 10


def test_a_kernel_has_the_roofline_of_its_share_and_a_phase_without_its_programs_has_no_estimate():
    """197e12 operations and 819e9 bytes a second: the longer of both, where there is a kernel."""
    chip, one = CHIPS["v5e"], work("x", kernel_flops=197e12, kernel_hbm_bytes=3 * 819e9)
    for kernels, seconds in ((64, 3), (0, 0)):
        found = estimates([one], {"x": [("a", 1)]}, {"a": cost(kernels=kernels)}, chip)
        assert found["x"].kernels_s == seconds
    assert estimates([one], {"x": [("a", 1), ("b", 1)]}, {"a": cost()}, chip) == {}


def test_a_loop_that_the_compilers_own_sum_counts_once_is_counted_as_often_as_it_runs():
    """Products of 2048 x 2048, one or eight of them in a loop: flops are those of one either way, cycles eight times as many."""
    pytest.importorskip("libtpu", reason="the extra tpu")
    [device] = devices_of(parse("v5e:1x1"))
    place = jax.sharding.SingleDeviceSharding(device)

    def looped(x, many):
        return jax.lax.scan(lambda x, one: (jnp.tanh(x @ one), None), x, many)[0]

    def measured(count):
        shapes = [
            jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place)
            for shape in ((2048, 2048), (count, 2048, 2048))
        ]
        compiled = jax.jit(looped).lower(*shapes).compile()
        return cost_of(compiled.as_text(), compiled.cost_analysis())

    once, often = measured(2), measured(16)
    assert (
        often.told["flops"]
        == pytest.approx(once.told["flops"], rel=0.01)
        == pytest.approx(2 * 2048**3, rel=0.01)
    )
    assert often.cycles == pytest.approx(8 * once.cycles, rel=0.2)
    chip = CHIPS["v5e"]
    assert 1 < often.cycles / chip.cycles_s / (16 * 2 * 2048**3 / chip.device_flops) < 2
