"""What is on a device together."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dapo_jax.config import ConfigError
from dapo_jax.parallel.device_memory import bytes_on_device
from dapo_jax.plan.memory import ProgramMemory, Resident, as_compiled, phases
from dapo_jax.plan.refusals import largest_arrays, needed_bytes, of_scalars, refused

SIZES = {"data": 1, "fsdp": 4, "tensor": 2, "context": 1}


def struct(shape, *spec, dtype=jnp.float32):
    mesh = Mesh([[[[jax.devices()[0]]]]], ("data", "fsdp", "tensor", "context"))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def test_bytes_of_arrays_by_their_places():
    """16 x 6 floats cut 4 x 2 ways: 4 x 3 x 4 bytes; whole: 20 bytes; 8 rows over data and fsdp: 2 x 2 bytes; 8 keys of 8 bytes."""
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))
    tree = [
        struct((16, 6), "fsdp", "tensor"),
        struct((5,)),
        struct((8,), ("data", "fsdp"), dtype=jnp.bfloat16),
        struct((8,), "fsdp", dtype=keys.dtype),
    ]
    assert bytes_on_device(tree, SIZES) == 48 + 20 + 4 + 16


def test_an_axis_that_does_not_divide_is_named():
    with pytest.raises(ConfigError, match=r"dimension of 6, which the mesh axes fsdp = 4 do not divide"):
        bytes_on_device(struct((6,), "fsdp"), SIZES)


def held(**bytes_):
    return Resident(
        **{"state": 100, "weights": 10, "minibatch": 2, "prefix": 5, "decode_state": 40, **bytes_}
    )


def memory(arguments=0, outputs=0, aliased=0, temporaries=0, code=0):
    return ProgramMemory(
        arguments=arguments, outputs=outputs, aliased=aliased, temporaries=temporaries, code=code
    )


def test_phases_add_up_what_is_there_at_the_same_time():
    """While sampling: state 100, weights 10, cache 40, two calls of prompts 2 x 5, and what decoding
    adds: 7 of outputs and temporaries beyond its arguments. In training: state, minibatches and 29 of temporaries. The
    update's code, 1, is there all the time."""
    decode = memory(arguments=50, outputs=41, aliased=40, temporaries=6)
    update = memory(arguments=102, outputs=100, aliased=100, temporaries=29, code=1)
    found = {
        phase.program: phase for phase in phases({"generate": decode, "update": update}, held(), updates=3)
    }
    assert found["generate"].total == 100 + 10 + 40 + 10 + 7 + 1
    assert found["update"].total == 100 + 6 + 29 + 1
    assert list(found) == ["generate", "update"]


def test_the_gradient_lies_between_the_programs_of_an_update_of_several_row_lengths():
    """Of 33 bytes it is what the first program makes, what those that add to it are given, and what the last one takes."""
    names = ("update_begin", "update_add_longest", "update_add_shortest", "update_apply", "update")
    programs = {name: memory() for name in names} | {"update_begin": memory(outputs=33)}
    found = {phase.program: phase.total for phase in phases(programs, held(gradient=33), updates=1)}
    assert found == {name: 100 + 2 + (0 if name == "update" else 33) for name in names}


def test_a_response_that_is_read_again_lies_beside_one_call_of_prompts():
    """Its keys and values so far, 20, then also as its slot takes them, 19, then these alone; while others are decoded the larger of both."""
    programs = {name: memory() for name in ("prefill_part", "prefill_kept", "fill_part", "generate", "init")}
    found = {
        phase.program: phase.total
        for phase in phases(programs, held(minibatch=0, buffers=20, reread=19), updates=1)
    }
    beside = 100 + 10 + 40 + 5
    assert found == {
        "prefill_part": beside + 20,
        "prefill_kept": beside + 39,
        "fill_part": beside + 19,
        "generate": beside + 20,
    }


def test_where_rollouts_are_in_flight_a_response_that_is_read_waits_while_another_is_half_read():
    """Cache 40 and logits of those that pause, 8; prompts 5, a sequence so far, 20, and one that is read, 19."""
    there = held(minibatch=0, buffers=20, reread=19, waiting=19, paused=8)
    [found] = phases({"generate": memory()}, there, updates=1)
    assert found.total == 100 + 10 + 40 + 8 + 5 + 20 + 19
    read = {"insert_part": memory(arguments=66, aliased=40)}
    assert as_compiled(there, read).waiting == as_compiled(there, read).reread == 26


def test_padding_is_counted_once_programs_are_compiled():
    """The compiler's decode state is twice as large as its shapes; what is not compiled stays as it was."""
    decode = memory(arguments=95, outputs=81, aliased=80)
    assert as_compiled(held(rotations=3), {"generate": decode}) == held(
        rotations=3, weights=12, decode_state=80
    )
    update, add = memory(arguments=128, aliased=120), memory(arguments=160, aliased=50)
    assert as_compiled(held(shorter=1, gradient=40), {"update": update, "update_add_longest": add}) == held(
        state=120, minibatch=9, shorter=1, gradient=50
    )
    read = {"insert_row": memory(arguments=9), "insert_rows": memory(arguments=48, aliased=40)}
    assert as_compiled(held(), read) == held(prefix=8)


def test_a_reference_policy_is_always_there():
    there = held(reference=30, minibatch=0, prefix=0, decode_state=0)
    found = phases({name: memory() for name in ("transfer", "generate", "update")}, there, updates=1)
    assert [phase.total for phase in found] == [140, 140, 130]


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


def test_a_refusal_is_read_in_both_of_its_forms():
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


def test_a_full_memory_for_scalars_is_told_apart():
    scalars = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space smem. Used 1.08M of 1.00M smem."
    assert of_scalars(scalars)
    assert not of_scalars(LIST.splitlines()[0])


def test_the_largest_arrays_are_those_outside_of_fusions():
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
    assert [(one.bytes, one.operation) for one in largest_arrays(text)] == [
        (2048, "jit(f)/mul"),
        (1024, "convert"),
    ]
