"""The arrays that are on a device together, and the KV cache that would fit."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dapo_jax.parallel.device_memory import bytes_on_device
from dapo_jax.plan.chips import CHIPS
from dapo_jax.plan.compiled import ProgramMemory
from dapo_jax.plan.memory import Phase, Resident, as_compiled, phases
from dapo_jax.plan.plan import Plan
from dapo_jax.plan.topologies import Topology
from dapo_jax.plan.workload import Assumptions, workload_of
from dapo_jax.sampling.cache_sizes import PageSizes
from tests.plan.roofline_test import CONFIG, SIZES, SMALL


def struct(shape, *spec, dtype=jnp.float32):
    mesh = Mesh([[[[jax.devices()[0]]]]], ("data", "fsdp", "tensor", "context"))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def test_bytes_of_sharded_arrays():
    """16 x 6 floats over 4 x 2 devices: 4 x 3 x 4 bytes; whole: 20 bytes; 8 rows over data and fsdp: 2 x 2 bytes; 8 keys of 8 bytes."""
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))
    tree = [
        struct((16, 6), "fsdp", "tensor"),
        struct((5,)),
        struct((8,), ("data", "fsdp"), dtype=jnp.bfloat16),
        struct((8,), "fsdp", dtype=keys.dtype),
    ]
    assert bytes_on_device(tree, SIZES.train) == 48 + 20 + 4 + 16


def held(**changes):
    sizes = {"state": 100, "weights": 10, "minibatch": 2, "prefix": 5, "decode_state": 40, **changes}
    return Resident(**sizes)


def memory(arguments=0, outputs=0, aliased=0, temporaries=0, code=0):
    return ProgramMemory(
        arguments=arguments, outputs=outputs, aliased=aliased, temporaries=temporaries, code=code
    )


def totals(programs, there, updates=1):
    return {phase.program: phase.total for phase in phases(programs, there, updates=updates)}


def test_phases_add_up_the_arrays_that_are_there_at_the_same_time():
    """While sampling: state 100, weights 10, cache 40, two calls of prompts 2 x 5, and 7 bytes of outputs and temporaries that decoding adds.
    In training: state, minibatches and 29 bytes of temporaries. The update's code, 1 byte, is always there."""
    decode = memory(arguments=50, outputs=41, aliased=40, temporaries=6)
    apply = memory(arguments=102, outputs=100, aliased=100, temporaries=29, code=1)
    assert totals({"generate": decode, "update_apply": apply}, held(), updates=3) == {
        "generate": 100 + 10 + 40 + 10 + 7 + 1,
        "update_apply": 100 + 6 + 29 + 1,
    }


def test_the_gradient_is_there_between_the_programs_of_an_update():
    names = ("update_begin", "update_add_longest", "update_add_shortest", "update_apply")
    programs = {name: memory() for name in names} | {"update_begin": memory(outputs=33)}
    assert totals(programs, held(gradient=33)) == dict.fromkeys(names, 100 + 2 + 33)


def test_a_re_prefilled_response_is_there_together_with_one_call_of_prompts():
    """Its chunks so far, 20 bytes, then also the arrays for its slot, 19, then these alone; while others are decoded the larger of both."""
    programs = {name: memory() for name in ("prefill_part", "prefill_kept", "fill_part", "generate", "init")}
    base = 100 + 10 + 40 + 5
    assert totals(programs, held(minibatch=0, buffers=20, reread=19)) == {
        "prefill_part": base + 20,
        "prefill_kept": base + 39,
        "fill_part": base + 19,
        "generate": base + 20,
    }


def test_with_rollouts_in_flight_a_prefilled_response_waits_while_another_is_in_prefill():
    """Cache 40 and logits of paused responses, 8; prompts 5, chunks 20, and a prefilled response, 19."""
    there = held(minibatch=0, buffers=20, reread=19, waiting=19, paused=8)
    assert totals({"generate": memory()}, there) == {"generate": 100 + 10 + 40 + 8 + 5 + 20 + 19}
    found = as_compiled(there, {"insert_part": memory(arguments=66, aliased=40)})
    assert found.waiting == found.reread == 26


def test_compiled_programs_replace_sizes_from_shapes():
    """The compiler's decode state is twice as large as its shapes; the rest stays as it was."""
    decode = memory(arguments=95, outputs=81, aliased=80)
    expected = held(rotations=3, weights=12, decode_state=80)
    assert as_compiled(held(rotations=3), {"generate": decode}) == expected
    # Parameters of 50 bytes, 8 bytes of the longest rows, and the gradient of 50 bytes.
    add, apply = memory(arguments=108, aliased=50), memory(arguments=170, aliased=120)
    expected = held(state=120, minibatch=9, shorter=1, gradient=50)
    programs = {"update_add_longest": add, "update_apply": apply}
    assert as_compiled(held(shorter=1, gradient=40), programs) == expected
    taught = held(teacher=5, teaches_update=True)
    assert as_compiled(taught, {"update_add_longest": add}) == replace(taught, gradient=50, minibatch=3)
    insert = memory(arguments=48, aliased=40)
    assert as_compiled(held(), {"insert_row": memory(arguments=9), "insert_rows": insert}) == held(prefix=8)


PAGES = PageSizes(holders=64, capacity=16, page_tokens=4, pools=2, pool_pages=30)


def fit(limit, slots=64, part="decode state"):
    """A phase of 2500 bytes; a token has 10, and each of 2 devices 30 pages of 4."""
    config = replace(CONFIG, sampling=replace(CONFIG.sampling, slots=slots))
    chip = replace(CHIPS["v5e"], hbm_gib=-(-limit * 20 // 19) / 2**30)  # a twentieth stays free
    made = Plan(
        config=config, decoder=SMALL, work=workload_of(config, Assumptions()), resident=held(), sizes=SIZES, works=[], pages=PAGES,
        token_bytes={0: 10}, topology=Topology(chip=chip, shape=(2, 2)), phases=[Phase(name="decode", program="generate", parts={part: 2500})],
    )  # fmt: skip
    assert made.limit == limit
    return made.cache_fit


@pytest.mark.parametrize(("limit", "tokens"), [(3000, 168), (2500, 120), (2000, 68)])
def test_free_memory_is_filled_with_whole_pages(limit, tokens):
    """1200 bytes of the phase are the present 120 tokens. With 500 more they are 170, in pages of 4 168; on two devices. A response
    has a mean context of 6 + 4.5 tokens and half a page."""
    found = fit(limit)
    assert (found.tokens, found.slots) == (2 * tokens, 64)
    assert found.in_flight == pytest.approx(2 * (limit - 1300) / 10 / 12.5)


def test_responses_beyond_the_slots_need_logits_too():
    """4 slots of a device hold 4 responses. Each further one takes 125 bytes of cache and 4 copies of 32 logits of 4 bytes: of 1700 free bytes
    and the present 4 x 512, (1700 + 2048) / 637 = 5.88 responses of 12.5 tokens: 73, in whole pages 72."""
    found = fit(3000, slots=8)
    assert found.in_flight == pytest.approx(2 * 3748 / 637)
    assert (found.tokens, found.slots) == (2 * 72, 10)


def test_no_cache_fits_below_one_sequence_and_none_is_known_without_a_phase():
    """A slot may need 16 tokens, 160 bytes."""
    assert fit(1300 + 159) is None
    assert fit(1300 + 160).tokens == 32
    assert fit(3000, part="train state") is None
