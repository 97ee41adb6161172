"""The plan counts the programs and the memory of a run."""

from dataclasses import replace

import jax
import pytest

from dapo_jax.config import load_config
from dapo_jax.models.presets import preset
from dapo_jax.plan.compiled import ProgramMemory
from dapo_jax.plan.decoder import decoder_of
from dapo_jax.plan.memory import phases, together
from dapo_jax.plan.programs import Programs
from dapo_jax.plan.workload import Assumptions, workload_of
from dapo_jax.testing import tiny_params

SMALL = [
    "model.source=preset:qwen2.5-0.5b", "parallel.fsdp=1", "sampling.slots=16", "sampling.prefill_tokens=32", "rollout.round_tokens=8", "dynamic_sampling.surplus=discard", "batch.group_size=4",
    "batch.prompts_per_step=8", "batch.groups_per_update=4", "batch.rows_per_microbatch=8",
]  # fmt: skip


def programs_of(*changes):
    config = load_config("quickstart", [*SMALL, *changes])
    decoder = decoder_of(config.model)
    return Programs(config, decoder, workload_of(config, Assumptions()), jax.devices()[:1])


@pytest.mark.parametrize("in_flight", [0, 8, 48])
@pytest.mark.parametrize("pages", [(), ("sampling.cache_tokens=512",)])
def test_responses_are_paused_beyond_the_slots_and_prefilled_in_chunks_if_they_may_be_re_prefilled(
    in_flight, pages
):
    names = programs_of(f"rollout.in_flight={in_flight}", *pages).lowered()
    assert ("insert_paused" in names) == (in_flight > 16)
    assert ("prefill_part" in names) == bool(in_flight or pages)


def test_sample_workers_have_the_programs_of_the_sampler_and_the_trainer_pauses_no_response():
    """48 responses in flight and 16 slots. One of 2 workers may get the responses of the other. The trainer's sampler only evaluates."""
    changes = ("rollout.in_flight=48", "cluster.address=auto", "cluster.samplers=2")
    trainer = programs_of(*changes)
    worker = replace(trainer, samplers=2)
    assert {"score", "update_apply", "generate"} <= trainer.lowered().keys()
    assert "insert_paused" not in trainer.lowered()
    assert trainer.resident.paused == 0
    assert {"generate", "insert_paused"} <= worker.lowered().keys()
    assert not any(name.startswith(("score", "update", "transfer")) for name in worker.lowered())
    rows = worker.decoder.vocab_rows
    assert worker.resident.paused == 48 * (rows + 1) * 4
    assert (worker.resident.state, worker.sizes.samplers) == (0, 2)


def test_an_episode_keeps_its_pages_while_another_uses_its_slot():
    planned = programs_of("environment.source=guess")
    assert planned.engine.page_sizes.holders == 2 * 16
    assert "insert_parked" in planned.lowered()


def test_a_teacher_is_resident_in_the_compute_dtype_and_its_scoring_program_is_counted():
    """All but the norms, two of each layer and one at the end, in bfloat16."""
    taught = ("teacher.source=preset:tiny", "dynamic_sampling.enabled=false")
    planned, tiny = programs_of(*taught), preset("tiny")
    assert planned.resident.teacher == 4 * tiny.parameters
    assert programs_of().resident.teacher == 0
    lowered = planned.lowered()
    assert "score_teacher" in lowered
    lowered["score_teacher"]()
    assert "score_teacher" not in programs_of().lowered()
    own = programs_of(
        "teacher.source=self", "teacher.prompt={prompt} {answer}", "dynamic_sampling.enabled=false"
    )
    assert own.resident.teacher == 0
    own.lowered()["score_teacher"]()
    for program in ("generate", "score_teacher", "update_apply"):
        assert together(program, planned.resident, updates=1)[1]["teacher"] == 4 * tiny.parameters
    full = programs_of(*taught, "teacher.kl=full")
    assert full.resident.teacher == planned.resident.teacher
    assert "score_teacher" not in full.lowered()
    # The update's arguments are the same, and the teacher's parameters.
    arguments, more = (
        len(jax.tree.leaves(each.lowered()["update_add_longest"]().args_info))
        for each in (programs_of(), full)
    )
    assert more - arguments == len(jax.tree.leaves(tiny_params(tiny)))
    norms = (2 * tiny.layers + 1) * tiny.embed_dim
    rounded = programs_of(*taught, "model.compute_dtype=bfloat16")
    assert rounded.resident.teacher == 2 * tiny.parameters + 2 * norms


def test_logits_of_paused_responses_are_resident_while_sampling():
    """Each of 48 responses may be paused: 151,936 logits in float32, and its length."""
    planned = programs_of("rollout.in_flight=48")
    assert planned.resident.paused == 48 * (planned.decoder.vocab_rows + 1) * 4
    assert programs_of("rollout.in_flight=16").resident.paused == 0
    names = ("generate", "paused", "insert_paused")
    nothing = ProgramMemory(arguments=0, outputs=0, aliased=0, temporaries=0, code=0)
    found = phases(dict.fromkeys(names, nothing), planned.resident, updates=1)
    assert {phase.program: phase.parts.get("paused responses", 0) for phase in found} == {
        "generate": planned.resident.paused,
        "paused": planned.resident.paused,
        "insert_paused": planned.resident.paused,
    }
