"""The plan counts the programs and the memory of a run."""

from functools import partial

import jax
import pytest

from dapo_jax.config import load_config
from dapo_jax.plan.compiled import ProgramMemory
from dapo_jax.plan.memory import phases
from dapo_jax.plan.programs import Programs
from dapo_jax.plan.sizes import decoder_of
from dapo_jax.plan.workload import Assumptions, workload_of
from dapo_jax.run.policy import Policy, mesh_of, meshes_of
from dapo_jax.run.sampler_setup import response_sampler
from dapo_jax.sampling.decoding import decoding
from dapo_jax.text.tokenizers import ByteTokenizer

SMALL = [
    "model.source=preset:qwen2.5-0.5b", "parallel.fsdp=1", "sampling.slots=16", "sampling.prefill_tokens=32", "rollout.round_tokens=8", "dynamic_sampling.surplus=discard", "batch.group_size=4",
    "batch.prompts_per_step=8", "batch.groups_per_update=4", "batch.rows_per_microbatch=8",
]  # fmt: skip


def programs_of(*changes):
    config = load_config("quickstart", [*SMALL, *changes])
    decoder = decoder_of(config.model)
    return Programs(config, decoder, workload_of(config, Assumptions()), jax.devices()[:1])


def sampler_of(planned):
    """The sampler of a run, made from shapes."""
    config = planned.config
    mesh = mesh_of(config.parallel, rows_per_microbatch=8, devices=jax.devices()[:1])
    policy = Policy(decoder=planned.decoder, params=planned.state.params, tokenizer=ByteTokenizer())
    return response_sampler(
        policy, meshes_of(config.parallel, mesh), config.sampling, seed=0, group_size=config.batch.group_size,
        max_prompt_tokens=config.data.max_prompt_tokens, compute_dtype=config.model.compute_dtype, in_flight=config.rollout.in_flight,
    )  # fmt: skip


@pytest.mark.parametrize("in_flight", [0, 8, 24, 48])
@pytest.mark.parametrize("pages", [(), ("sampling.page_tokens=16", "sampling.cache_tokens=512")])
def test_sampling_programs_and_cache_equal_those_of_a_run(in_flight, pages):
    planned = programs_of(f"rollout.in_flight={in_flight}", *pages)
    engine = sampler_of(planned)._engine
    ours = {name for name in planned.lowered() if not name.startswith(("update", "score", "transfer"))}
    run = engine.programs(planned.weights, jax.eval_shape(partial(decoding, temperature=1.0)))
    assert ours == run.keys()
    assert planned.engine.page_sizes == engine.page_sizes
    assert planned._prefilled == engine._read.shape
    assert ("insert_paused" in ours) == (in_flight > 16)
    assert ("prefill_part" in ours) == bool(in_flight or pages)


def test_logits_of_paused_responses_are_resident_while_sampling():
    """32 of 48 responses pause next to 16 slots: two copies of the slots' logits, 151,936 each in float32."""
    planned = programs_of("rollout.in_flight=48")
    assert planned.resident.paused == 2 * 16 * planned.decoder.vocab_rows * 4
    assert programs_of("rollout.in_flight=16").resident.paused == 0
    names = ("generate", "paused", "insert_paused")
    nothing = ProgramMemory(arguments=0, outputs=0, aliased=0, temporaries=0, code=0)
    found = phases(dict.fromkeys(names, nothing), planned.resident, updates=1)
    assert {phase.program: phase.parts.get("paused responses", 0) for phase in found} == {
        "generate": planned.resident.paused,
        "paused": 0,
        "insert_paused": planned.resident.paused,
    }
