"""The arrays on a device if a plan does not fit, and the keys that would free memory."""

from dataclasses import replace

import pytest
from rich.console import Console

from dapo_jax.config import load_config
from dapo_jax.plan.compiled import CompiledProgram, ProgramMemory
from dapo_jax.plan.memory import phases, together
from dapo_jax.plan.output import show_verdict
from dapo_jax.plan.plan import plan
from dapo_jax.plan.remedies import Tried, held_in
from dapo_jax.plan.topologies import parse

GIB = 2**30


def failed(overrides=(), program="generate", temporaries=80 * GIB, refused=False):
    """The plan of the 32B recipe from shapes, with a program that takes too much of a v5p's memory."""
    made = replace(plan(load_config("dapo_qwen2.5_32b", list(overrides))), topology=parse("v5p:4x4x8"))
    memory = ProgramMemory(arguments=0, outputs=0, aliased=0, temporaries=temporaries, code=0)
    refusal = "Used 95.00G of 90.00G hbm"
    compiled = CompiledProgram(
        name=program, compile_s=1.0, memory=None if refused else memory, refusal=refusal
    )
    found = [] if refused else phases({program: memory}, made.resident, updates=made.work.updates)
    return replace(made, programs=[compiled], phases=found)


def ways(made, program="generate"):
    return {held.part: [way.change for way in held.ways] for held in held_in(made, program)}


def test_the_largest_part_comes_first_with_the_bytes_that_a_key_would_free():
    """Weights, gradients and moments are 32.8e9 x 12 bytes on 128 chips, two thirds of them moments; the cache 272 GiB on 4."""
    *resident, added = held_in(failed(), "generate")
    assert added.part == "added by generate"
    assert [one.bytes for one in resident] == sorted((one.bytes for one in resident), reverse=True)
    by_part = {one.part: one for one in resident}
    assert list(by_part)[:3] == ["decode state", "sampler weights", "train state"]
    offload, wider = by_part["train state"].ways
    assert offload.tries == {"optimizer.offload": True}
    assert offload.frees == pytest.approx(32_763_876_352 * 8 / 128, rel=0.01)
    assert wider.change.startswith("parallel.fsdp=64 batch.rows_per_microbatch=64")
    assert not wider.tries, "it needs a larger slice"


def test_a_program_that_is_refused_alone_is_listed_with_the_resident_arrays():
    made = failed(refused=True)
    parts = ["decode state", "sampler weights", "train state", "sequence prefilled in chunks"]
    assert list(ways(made)) == [*parts, "all of generate"]
    assert held_in(made, "generate")[-1].bytes == 95 * GIB


def test_keys_that_are_set_already_are_not_named():
    plain = ways(failed())
    assert "sampling.weight_dtype=int8 (with loss.correction=truncate)" in plain["sampler weights"]
    assert "sampling.cache_dtype=int8 (with loss.correction=truncate)" in plain["decode state"]
    corrected = ways(failed(["loss.correction=mask"]))
    assert "sampling.weight_dtype=int8" in corrected["sampler weights"]
    eight = ["sampling.weight_dtype=int8", "sampling.cache_dtype=int8", "loss.importance_range=[0,2]"]
    used = ways(failed([*eight, "optimizer.offload=true"]))
    assert not any("dtype" in way or "offload" in way for part in used.values() for way in part)


def test_fewer_cache_tokens_are_named_if_there_are_pages_else_fewer_slots():
    assert ways(failed())["decode state"][0].startswith("sampling.cache_tokens=")
    whole = failed(["sampling.cache_tokens=0"])
    assert ways(whole)["decode state"][0] == "sampling.slots=144 (of 288)"


def test_fewer_responses_in_flight_need_no_logits_of_paused_ones():
    """32,768 are 1,024 on each of 32 samplers, more than three times its 288 slots; 9,216 have a slot each."""
    paused = ways(failed(["rollout.in_flight=32768"]))["paused responses"]
    assert paused == ["rollout.in_flight=9216 (of 32768)"]
    assert "paused responses" not in ways(failed(["rollout.in_flight=9216"]))


PROGRAMS = ("generate", "prefill_rows", "prefill_part", "score", "update_add_longest", "update_apply")


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        # The 28 heads, and 4 of keys and values, are not divisible by 8.
        ("dapo_qwen2.5_7b", []),
        # Half of three updates is one.
        ("gsm8k_qwen3_0.6b", ["batch.prompts_per_step=48", "batch.groups_per_update=16"]),
        # Each device decodes blocks of 8 slots, and the cache must have room for all slots.
        ("gsm8k_qwen3_0.6b", ["sampling.batch_invariant=true", "sampling.slots=192"]),
        # The prompts at once fill fewer rows than 65,536 tokens.
        ("gsm8k_qwen3_0.6b_lora", ["sampling.prefill_tokens=65536"]),
        # The ratio of the loss corrects for a rounded sampler, and allows no importance weights.
        ("gsm8k_qwen3_0.6b", ["loss.old_logprobs=sampler", "sampling.cache_tokens=65536"]),
        # The cache has room for the responses in flight, whatever the number of slots.
        ("quickstart_in_flight", ["loss.kl_coef=0.1"]),
    ],
)
def test_each_change_is_accepted_and_frees_the_bytes_that_it_states(name, overrides):
    """On devices with 10 MiB, so that all arrays are listed. A change may free more, for example if trainer and sampler then share weights."""

    def planned(more):
        made, topology = plan(load_config(name, [*overrides, *more])), parse("v5p:4x4x8")
        small = replace(topology, chip=replace(topology.chip, hbm_gib=10 / 1024))
        memory = ProgramMemory(arguments=0, outputs=0, aliased=0, temporaries=80 * GIB, code=0)
        found = phases(dict.fromkeys(PROGRAMS, memory), made.resident, updates=made.work.updates)
        return replace(made, topology=small, phases=found)

    made = planned([])
    found = {
        way.change: (program, held, way)
        for program in PROGRAMS
        for held in held_in(made, program)
        for way in held.ways
        if not way.change.startswith("a lower sampling.max_response_tokens")
    }
    assert len(found) > 3
    for change, (program, held, way) in found.items():
        text, _, condition = change.removesuffix(" on twice as many devices").partition(" (with ")
        keys = [text.partition(" (")[0], condition.removesuffix(")")]
        less = planned(" ".join(keys).split())
        if way.frees is not None:
            left = together(program, less.resident, updates=less.work.updates)[1].get(held.part, 0)
            assert held.bytes - left >= 0.9 * way.frees, change


def test_an_update_is_answered_with_fewer_rows_and_rematerialisation():
    update = failed(["model.remat=none", "batch.rows_per_microbatch=64"], program="update_add_longest")
    changes = ways(update, "update_add_longest")["added by update_add_longest"]
    assert changes == ["model.remat=full (recomputes activations)", "batch.rows_per_microbatch=32 (now 64)"]
    [last] = ways(failed(program="update_add_longest"), "update_add_longest")["added by update_add_longest"]
    assert last.startswith("parallel.fsdp=16 parallel.tensor=8 batch.rows_per_microbatch=16")


def shown(made, capsys, tried=()):
    show_verdict(made, tried, Console(width=300))
    return capsys.readouterr().out.splitlines()


def test_each_kind_of_array_is_one_block_however_many_programs_do_not_fit(capsys):
    """Twenty programs of the sampler hold the same arrays."""
    made = failed()
    programs = {f"fill_{number}": made.programs[0].memory for number in range(20)}
    compiled = [replace(made.programs[0], name=name) for name in programs]
    found = phases(programs, made.resident, updates=made.work.updates)
    lines = shown(replace(made, programs=compiled, phases=found), capsys)
    blocks = [line.partition(": ")[0] for line in lines if not line.startswith(" ")]
    assert blocks[:3] == ["arrays of a program itself", "decode state", "sampler weights"]
    assert len(set(blocks)) == len(blocks)
    assert "68.04 GiB of 90.95 GiB (programs: 20)" in lines[1]
    assert lines[2].startswith("    sampling.cache_tokens=")
    changes = [line.partition("=")[0] for line in lines if line.startswith("    ")]
    assert sorted(set(changes)) == sorted(changes)
    assert lines[-1].startswith("DOES NOT FIT: 20 of 20 programs; sampling: fill slots needs ")


def test_the_last_line_is_the_verdict(capsys):
    over = failed()
    assert shown(over, capsys)[-1].startswith("DOES NOT FIT: 1 of 1 programs; sampling: decode needs ")
    tried = [Tried(overrides=("a=1",), fits=False), Tried(overrides=("a=1", "b=2"), fits=True)]
    assert shown(over, capsys, tried)[-1].endswith("; it fits with a=1 b=2")
    assert shown(failed(refused=True), capsys)[-1].startswith(
        "DOES NOT FIT: 1 of 1 programs; generate alone needs 95.00 GiB of 90.95 GiB"
    )
    assert shown(failed(temporaries=0), capsys)[-1].startswith("FITS; sampling: decode needs ")
    assert shown(replace(over, programs=[], phases=[]), capsys) == []
