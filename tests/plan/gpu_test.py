"""Programs compiled for NVIDIA GPUs, which needs the CUDA plugin (extra cuda-plan) and no GPU."""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("jax_cuda12_plugin", reason="the extra cuda-plan")

from dapo_jax.config import load_config
from dapo_jax.doctor import machine
from dapo_jax.models.cudnn import packed_attention
from dapo_jax.parallel.gpu_settings import FLAGS
from dapo_jax.plan.chips import CHIPS
from dapo_jax.plan.compiled import compile_program
from dapo_jax.plan.decoder import decoder_of
from dapo_jax.plan.plan import plan
from dapo_jax.plan.programs import Programs
from dapo_jax.plan.topologies import devices_of, here, parse
from dapo_jax.plan.workload import Assumptions, workload_of
from dapo_jax.run.sources import lora_of
from tests.plan.repeatability import not_repeatable

EIGHT_BITS = ["sampling.weight_dtype=int8", "sampling.cache_dtype=int8", "loss.importance_range=[0,2]"]
TURNS = ["model.source=preset:qwen2.5-0.5b", "model.compute_dtype=bfloat16", "model.remat=full"]
CONFIGURATIONS = {
    "dense": ("gsm8k_qwen3_0.6b", "h100:1", ["batch.rows_per_microbatch=1"]),
    "LoRA": ("gsm8k_qwen3_0.6b_lora", "h100:1", []),
    "in flight": ("gsm8k_qwen3_0.6b", "h100:1", ["rollout.in_flight=512", "rollout.round_tokens=128"]),
    "turns": ("turns_quickstart", "h100:1", TURNS),
    "8 bits": ("gsm8k_qwen3_0.6b", "h100:1", EIGHT_BITS),
    "8 GPUs": ("gsm8k_qwen3_0.6b", "h100:8", ["parallel.fsdp=2", "parallel.tensor=4"]),
}


@functools.cache
def compiled_texts(name):
    """The compiled text of each program of a configuration, with the optimizations of a run."""
    config, topology, changes = CONFIGURATIONS[name]
    made, config = parse(topology), load_config(config, changes)
    decoder = replace(decoder_of(config.model), lora=lora_of(config.lora))
    memory = made.chip.device_hbm_bytes
    programs = Programs(config, decoder, workload_of(config, Assumptions()), devices_of(made), memory=memory)
    # The tests' own settings leave most optimizations out.
    whole = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
    lowered = programs.lowered().items()
    return {program: lower().compile(compiler_options=whole).as_text() for program, lower in lowered}


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def texts(request):
    """A configuration's name, and the compiled text of each of its programs by name."""
    return request.param, compiled_texts(request.param)


# Slow: compiles every program of six configurations. A small configuration is compiled below.
@pytest.mark.slow
def test_every_program_compiles_for_an_h100(texts):
    name, programs = texts
    assert programs.keys() >= {
        "generate",
        "prefill_row",
        "insert_row",
        "transfer",
        "update_add_longest",
        "update_apply",
    }
    assert ("paused" in programs, "insert_parked" in programs) == (name == "in flight", name == "turns")
    collectives = {
        kind
        for kind in ("all-gather", "reduce-scatter", "all-reduce")
        if kind in programs["update_add_longest"] + programs["update_apply"]
    }
    assert collectives == ({"all-gather", "reduce-scatter", "all-reduce"} if name == "8 GPUs" else set())
    # An array of bytes with one dimension is the workspace of a product.
    assert bool(re.search(r"s8\[\d+,", programs["generate"])) == (name == "8 bits")


# Slow: as above. tests/plan/gpu_repeatability_test.py compiles parts of these programs.
@pytest.mark.slow
def test_no_program_adds_in_arbitrary_order(texts):
    _, programs = texts
    found = {name: not_repeatable(text, flags=FLAGS) for name, text in programs.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_offloaded_moments_are_on_the_device_only_during_the_optimizer_step():
    """Two moments of 4 bytes per parameter, next to 4 bytes of the parameter: a third of the train state remains."""
    found = []
    for offload in ("true", "false"):
        config = load_config("quickstart", [f"optimizer.offload={offload}"])
        found.append(plan(config, topology=parse("h100:1"), only=("update", "transfer")))
    offloaded, kept = ({phase.program: phase for phase in made.phases} for made in found)
    for program in ("update_add_longest", "update_apply", "transfer"):
        state = offloaded[program].parts["train state"]
        assert state == pytest.approx(kept[program].parts["train state"] / 3, rel=0.01)
        assert ("offloaded moments" in offloaded[program].parts) == (program == "update_apply")
    assert offloaded["update_apply"].total == kept["update_apply"].total


@pytest.fixture(scope="module")
def small():
    """A small run on two machines with one GPU each."""
    config = load_config("quickstart", ["model.compute_dtype=bfloat16", "model.remat=full"])
    return plan(config, topology=parse("h100x1:2"), only=("transfer", "update"))


def test_a_plan_has_the_memory_and_traffic_of_each_program(small):
    """All bytes come from the other machine. Its parameters and moments are 12 bytes each, half of them on each GPU."""
    assert small.fits
    programs = {program.name: program for program in small.programs}
    gradient, update = programs["update_add_longest"], programs["update_apply"]
    assert update.memory.aliased == pytest.approx(12 * small.decoder.parameters / 2, rel=0.02)
    assert {kind.kind for kind in gradient.traffic} >= {"all-gather", "reduce-scatter"}
    assert all(kind.network_bytes == kind.received_bytes > 0 for kind in gradient.traffic)
    bounds = {bound.work.phase: bound for bound in small.bounds}
    assert bounds["update"].ici_s == 0 < bounds["update"].network_s
    assert bounds["transfer"].network_s > 0


def test_a_plan_has_cudnn_s_workspace():
    """Two sequences of up to 1,024 tokens with 4 heads need 2 x 4 x 1,024^2 x 2 bytes, and shorter sequences need less."""
    placed = jax.sharding.SingleDeviceSharding(devices_of(parse("h100:1"))[0])
    shapes = [(heads, 64, 2, 1024) for heads in (4, 2, 2)]
    parts = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=placed) for shape in shapes]
    ids = jax.ShapeDtypeStruct((2, 1024), jnp.int32, sharding=placed)

    def total(q, k, v, ids):
        return packed_attention(q, k, v, ids, ids, dtype="bfloat16").sum()

    lowered = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*parts, ids)
    reported = lowered.compile().memory_analysis().temp_size_in_bytes
    found = compile_program("attention", lambda: lowered).memory
    assert found.temporaries - reported == 2 * 4 * 1024**2 * 2


def test_the_mesh_of_other_devices_is_resized_with_the_rows_per_device():
    """fsdp 16 x tensor 4 with one row per device on the fsdp axis. Nothing is compiled."""
    found = plan(load_config("dapo_qwen2.5_7b"), topology=parse("h100:8"), only=())
    assert (found.config.parallel.fsdp, found.config.parallel.tensor) == (2, 4)
    assert found.config.batch.rows_per_microbatch == 2
    assert "parallel.fsdp=2 batch.rows_per_microbatch=2" in " ".join(found.work.notes)


@pytest.mark.parametrize("name", [chip.name for chip in CHIPS.values() if chip.target])
def test_every_card_is_described_and_recognized(name, monkeypatch):
    devices = devices_of(parse(f"{name}x4:8"))
    assert [device.process_index for device in devices] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {device.platform for device in devices} == {"gpu"}
    monkeypatch.setattr(jax, "devices", lambda: devices[:4])
    monkeypatch.setattr(jax, "local_device_count", lambda: 4)
    assert here() == parse(f"{name}:4")
    monkeypatch.setattr(machine, "device_bytes", lambda device: 2**36)
    assert f"64.0 GiB each (`dapo-jax plan --topology {name}:4`)" in machine.devices().message
