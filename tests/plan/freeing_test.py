"""What lies on a device where a plan does not fit, and the keys that would free it."""

from dataclasses import replace

import pytest
from rich.console import Console

from dapo_jax.config import load_config
from dapo_jax.plan.freeing import held_in
from dapo_jax.plan.memory import ProgramMemory, phases
from dapo_jax.plan.plan import Program, plan
from dapo_jax.plan.table import show, show_failures
from dapo_jax.plan.topologies import parse

GIB = 2**30


def failed(overrides=(), program="generate", name="dapo_qwen2.5_32b", temporaries=80 * GIB, refused=False):
    """The plan of a configuration by shapes, and a program of it that takes too much of a v5p's memory."""
    made = replace(plan(load_config(f"configs/{name}.yaml", list(overrides))), slice=parse("v5p:4x4x8"))
    memory = ProgramMemory(arguments=0, outputs=0, aliased=0, temporaries=temporaries, code=0)
    compiled = Program(
        name=program, compile_s=1.0, memory=None if refused else memory, refusal="Used 95.00G of 90.00G hbm"
    )
    found = [] if refused else phases({program: memory}, made.resident, updates=made.work.updates)
    return replace(made, programs=[compiled], phases=found)


def ways(made, program="generate"):
    return {held.part: [way.change for way in held.ways] for held in held_in(made, program)}


def test_the_largest_comes_first_and_says_how_much_a_key_would_free():
    """Weights, gradients and moments are 32.8e9 x 12 bytes on 128 chips, two thirds of them moments; the cache 272 GiB on 4."""
    made = failed()
    *resident, added = held_in(made, "generate")
    assert added.part == "added by generate"
    assert [one.bytes for one in resident] == sorted((one.bytes for one in resident), reverse=True)
    by_part = {one.part: one for one in resident}
    assert list(by_part)[:3] == ["decode state", "sampler weights", "train state"]
    offload = by_part["train state"].ways[0]
    assert str(offload) == "optimizer.offload=true keeps the moments in the host's memory and frees 1.91 GiB"
    wider = by_part["train state"].ways[1].change
    assert wider == "parallel.fsdp=64 batch.rows_per_microbatch=64 on a slice of twice the chips"
    assert offload.frees == pytest.approx(32_763_876_352 * 8 / 128, rel=0.01)


def test_a_program_that_is_refused_alone_has_what_lies_beside_it_all_the_same():
    made = failed(refused=True)
    assert list(ways(made)) == [
        "decode state",
        "sampler weights",
        "train state",
        "sequence read in parts",
        "all of generate",
    ]
    assert held_in(made, "generate")[-1].bytes == 95 * GIB


def test_keys_that_are_used_already_are_not_named():
    plain = ways(failed())
    assert any("sampling.weight_dtype=int8" in way for way in plain["sampler weights"])
    assert any("sampling.cache_dtype=int8" in way for way in plain["decode state"])
    eight = [
        "sampling.weight_dtype=int8",
        "sampling.cache_dtype=int8",
        "loss.importance_cap=2",
        "optimizer.offload=true",
    ]
    used = ways(failed(eight))
    assert not any("dtype" in way for part in used.values() for way in part)
    assert not any("offload" in way for part in used.values() for way in part)


def test_eight_bits_are_named_with_importance_weights_unless_there_are_some():
    def named(*overrides):
        found = ways(failed(overrides))
        eight = [way for part in found.values() for way in part if "=int8" in way]
        return [way.split(" ", 1)[1:] for way in eight]

    assert named() == [["(with loss.importance_cap)"]] * 2
    assert named("loss.correction=mask") == [[]] * 2


def test_pages_are_named_where_there_are_pages_and_slots_where_a_slot_has_room_for_the_longest():
    assert ways(failed())["decode state"][0].startswith("sampling.cache_tokens=")
    whole = failed(["sampling.cache_tokens=0", "sampling.page_tokens=22528"])
    assert ways(whole)["decode state"][0] == "sampling.slots=144 (of 288)"


def test_where_responses_take_turns_fewer_in_flight_need_no_logits_beside_the_slots():
    """32,768 are 1,024 on each of 32 samplers, more than three times its 288 slots; 9,216 have a slot each."""
    assert ways(failed(["rollout.in_flight=32768"]))["paused responses"] == [
        "rollout.in_flight=9216 (of 32768)"
    ]
    assert "paused responses" not in ways(failed(["rollout.in_flight=9216"]))


def test_an_update_is_told_to_take_fewer_rows_or_to_compute_activations_again():
    update = failed(["model.remat=none", "batch.rows_per_microbatch=64"], program="update")
    changes = ways(update, "update")["added by update"]
    assert changes == ["model.remat=full", "batch.rows_per_microbatch=32 (now 64)"]


def test_a_phase_of_several_programs_is_one_line_the_fullest(capsys):
    made = failed()
    programs = dict.fromkeys(("prefill_row", "prefill_row_head"), made.programs[0].memory)
    programs["prefill_row"] = replace(programs["prefill_row"], temporaries=GIB)
    found = phases(programs, made.resident, updates=made.work.updates)
    show(replace(made, phases=found), Console(width=300))
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("sampling: prefill")]
    assert "added by prefill_row_head" in line


def test_the_message_has_what_is_resident_before_the_arrays_of_the_program(capsys):
    show_failures(failed(), [], Console(width=300))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("DOES NOT FIT: sampling: decode needs")
    assert lines[1].startswith("    the decode state (the cache, and logits of the slots): 68.")
    assert "of 90.95 GiB; sampling.cache_tokens=" in lines[1]
