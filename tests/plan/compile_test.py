"""Programs compiled for TPU slices, which needs libtpu (extra tpu) and no TPU."""

import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

pytest.importorskip("libtpu", reason="the extra tpu")

from dapo_jax.cli import main
from dapo_jax.config import load_config
from dapo_jax.plan.decoder import decoder_of
from dapo_jax.plan.output import show_verdict
from dapo_jax.plan.plan import plan
from dapo_jax.plan.programs import Programs
from dapo_jax.plan.remedies import suggestions
from dapo_jax.plan.topologies import devices_of, parse
from dapo_jax.plan.workload import Assumptions, workload_of
from dapo_jax.run.sources import with_adapters
from tests.plan.arguments import copied_arguments

# 256 wide: libtpu 0.0.50 cannot compile the update of a sharded model that is 128 wide ("AllReduceScatterFusion not implemented").
DESCRIBED = {
    "model_type": "qwen3", "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 256, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip
CONFIG = """
run_dir: out
model: {{source: {folder}, compute_dtype: bfloat16, remat: full}}
data: {{max_prompt_tokens: 128}}
sampling: {{max_response_tokens: 128, slots: 8}}
reward: {{overlong: {{buffer_tokens: 32}}}}
batch: {{prompts_per_step: 16, group_size: 4, groups_per_update: 8, rows_per_microbatch: 4}}
dynamic_sampling: {{prompts_per_wave: 32}}
parallel: {{tensor: 2, fsdp: 2}}
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A configuration with a model of two layers."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(DESCRIBED))
    path = folder / "run.yaml"
    path.write_text(CONFIG.format(folder=folder))
    return path


@pytest.fixture
def folder(tmp_path):
    """The model with enough positions for long rows."""
    (tmp_path / "config.json").write_text(json.dumps({**DESCRIBED, "max_position_embeddings": 65_536}))
    return tmp_path


@pytest.fixture(scope="module")
def compiled(file):
    return plan(load_config(file), topology=parse("v5e:2x2"))


def test_sizes_that_are_known_are_checked_before_anything_compiles():
    """Parameters and moments of 32.8e9 x 12 bytes are 92 GiB on each of 4 chips with 95.7 GiB; the cache on 4 chips is 68 GiB."""
    config, said = load_config("dapo_qwen2.5_32b"), []
    plan(config, topology=parse("v5p:2x2x1"), only=["no_program"], say=said.append)
    [line] = said
    assert line.startswith("will not fit: sampling: ")
    assert {"train state 91.5 GiB", "decode state 68.0 GiB"} <= set(
        re.findall(r"[a-z ]+ [\d.]+ GiB", line.partition("(")[2].replace(", ", ","))
    )
    said.clear()
    plan(config, topology=parse("v5p:4x4x8"), only=["no_program"], say=said.append)
    assert said == []


def test_every_program_of_a_step_compiles_and_fits(compiled):
    assert [program.name for program in compiled.programs] == [
        "init", "generate", "release",
        "prefill_row", "prefill_row_embed", "prefill_row_head", "prefill_rows", "prefill_rows_embed", "prefill_rows_head",
        "fill_row", "insert_row", "fill_rows", "insert_rows", "transfer", "transfer_ends", "update_begin", "update_add_longest", "update_apply", "score",
    ]  # fmt: skip
    assert compiled.fits
    assert all(phase.total > 0 for phase in compiled.phases)
    assert 0 < compiled.mfu_bound < 1
    assert all(bound.work.ici_bytes > 0 for bound in compiled.bounds)


def test_the_arguments_have_the_sizes_of_the_shapes(file, compiled):
    """Except rotations, scalars, and padding to tiles of 8 x 128; these shapes nearly are multiples of a tile."""
    devices, memory = devices_of(compiled.topology), compiled.topology.chip.device_hbm_bytes
    programs = Programs(load_config(file), compiled.decoder, compiled.work, devices, memory=memory)
    needed = {program.name: program.memory for program in compiled.programs}
    there = programs.resident
    # Newer versions of jax do not pass the prompts of splash attention and the log-probabilities of an absent reference: 2 of [8, 4, 256] on 2 devices.
    unused = 2 * 8 * 4 * 256 * 4 / 2
    passed = needed["update_add_longest"].kept
    assert there.state / 3 + there.minibatch - unused <= passed < (there.state / 3 + there.minibatch) * 1.1
    pairs = [
        (needed["update_add_longest"].aliased, there.gradient),
        (needed["update_apply"].aliased, there.state),
        (2 * needed["transfer"].outputs + needed["transfer_ends"].outputs, there.weights),
        (needed["generate"].arguments, there.weights + there.decode_state),
        (needed["generate"].aliased, there.decode_state),
        (2 * needed["prefill_rows"].outputs + needed["prefill_rows_head"].outputs, there.prefix),
    ]
    for compiled_bytes, shapes in pairs:
        assert shapes * 0.99 < compiled_bytes < shapes * 1.1 + 2**19


LONG = [
    "data.max_prompt_tokens=256", "sampling.max_response_tokens=1792", "sampling.cache_tokens=8192",
]  # fmt: skip


# Slow: compiles seven programs. tests/plan/programs_test.py has the names of chunked prefill, and tests/plan/memory_test.py the bytes.
@pytest.mark.slow
def test_rows_of_several_lengths_and_chunked_prefill_have_their_programs(folder, file):
    """Rows of 2048 tokens, and of 1024; 8 slots of 2048 tokens in pages of half as many."""
    config = load_config(file, [f"model.source={folder}", *LONG])
    work, made = workload_of(config, Assumptions()), parse("v5e:2x2")
    memory = made.chip.device_hbm_bytes
    names = Programs(config, decoder_of(config.model), work, devices_of(made), memory=memory).lowered()
    assert [name for name in names if name.startswith(("update", "score"))] == [
        "update_begin", "update_add_longest", "update_add_shortest", "update_apply", "score", "score_shortest",
    ]  # fmt: skip
    parts = ("prefill_part", "prefill_kept", "fill_part", "insert_part")
    # The others take half a minute more to compile.
    updates = ("update_begin", "update_add_shortest", "update_apply")
    found = plan(config, topology=parse("v5e:2x2"), only=(*updates, *parts))
    assert found.fits
    phases = {phase.program: phase.parts for phase in found.phases}
    assert set(parts) < set(phases)
    # The first program makes the gradient, a third of the state. It stays until the last has run.
    needed = {program.name: program.memory for program in found.programs}
    gradient = found.resident.state / 3
    assert needed["update_begin"].outputs == pytest.approx(gradient, rel=0.01)
    assert needed["update_add_shortest"].aliased == pytest.approx(gradient, rel=0.01)
    for name in ("update_add_shortest", "update_apply"):
        assert phases[name]["gradient"] == pytest.approx(gradient, rel=0.01)
    # Keys and values of a token on one of two devices: 2 layers x 1 head x 128 x 2 x 2 bytes; 256 tokens have 256 activations and 128
    # rotations.
    assert found.resident.buffers == 2048 * 1024 + 256 * (256 + 128) * 4
    assert phases["prefill_kept"]["sequence prefilled in chunks"] == found.resident.buffers
    assert found.resident.reread == pytest.approx(2048 * 1024, rel=0.05)


# Slow: compiles four programs. tests/plan/programs_test.py has their names, and tests/plan/memory_test.py the bytes.
@pytest.mark.slow
def test_rollouts_in_flight_have_their_programs(file):
    """32 responses in flight share 8 slots. A row of prefill has 128 of the 256 tokens of a re-prefilled response."""
    changes = ["rollout.in_flight=32", "rollout.round_tokens=16", "sampling.prefill_tokens=128"]
    config = load_config(file, changes)
    names = ("paused", "insert_paused", "prefill_part", "prefill_kept")
    found = plan(config, topology=parse("v5e:2x2"), only=names)
    assert {program.name for program in found.programs} == set(names)
    assert found.fits
    # Each of the 32 responses may be paused: 512 logits in float32, and its length.
    parts = {phase.program: phase.parts for phase in found.phases}
    assert parts["insert_paused"]["paused responses"] == 32 * (512 + 1) * 4


# Slow: compiles an update. tests/parallel/training_layout_test.py offloads the moments of a state.
@pytest.mark.slow
def test_moments_in_the_hosts_memory_are_not_on_the_device(file, compiled):
    """8 of 12 bytes per parameter."""
    config = load_config(file, ["optimizer.offload=true"])
    found = plan(config, topology=parse("v5e:2x2"), only=("update",))
    assert found.resident.moments == 0
    before = next(phase for phase in compiled.phases if phase.program == "update_apply").parts["train state"]
    for update in found.phases:
        assert update.parts["train state"] == pytest.approx(before / 3, rel=0.01)
    assert compiled.resident.moments == pytest.approx(before * 2 / 3, rel=0.01)


# Slow: compiles several decode steps. tests/plan/remedies_test.py has the message and the remedies.
@pytest.mark.slow
def test_arrays_that_do_not_fit_are_named_and_a_remedy_is_compiled(file, folder, capsys):
    """A cached token on one of its 2 devices has 2 layers x 1 head x 128 x 2 x 2 bytes = 1 KiB. 1024 slots of 16,384 on each of 2 groups of
    devices are 16 GiB of the 15.75. The suggestion is as many tokens as the limit leaves."""
    changes = [
        f"model.source={folder}", "sampling.slots=2048", "sampling.max_response_tokens=16256",
        "sampling.cache_tokens=33554432",
    ]  # fmt: skip
    config = load_config(file, changes)
    found = plan(config, topology=parse("v5e:2x2"), only=("generate",))
    assert found.failures == ["generate"]
    assert "15.75G" in found.programs[0].refusal
    show_verdict(found, [], Console(width=160))
    printed = capsys.readouterr().out
    assert "DOES NOT FIT: 1 of 1 programs; generate alone needs" in printed
    assert "15.75G" in printed, "the compiler's own message"
    tried = suggestions(found, assumed=Assumptions(), seconds=300.0)
    assert tried[-1].fits
    [override] = tried[-1].overrides
    key, _, tokens = override.partition("=")
    assert key == "sampling.cache_tokens"
    assert 0.85 < int(tokens) / (2048 * 16_384) < 0.95


# Slow: compiles every program for three meshes.
@pytest.mark.slow
def test_the_command_compiles_and_sweeps(file, capsys):
    assert main(["plan", str(file), "--topology", "v5e:2x2", "--sweep", "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {one["mesh"] for one in data} == {"fsdp 4 x tensor 1", "fsdp 2 x tensor 2", "fsdp 1 x tensor 4"}
    assert data[0]["roofline"]["step_s"] <= data[1]["roofline"]["step_s"]


# Slow: up to 20 minutes each on two cores.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "slice", "responses"),
    [
        ("gsm8k_qwen3_0.6b", "v5litepod-8", (300, 200)),
        ("dapo_qwen2.5_7b", "v6e-64", (2000, 1500)),
        ("dapo_qwen2.5_32b", "v5p-256", (5000, 4000)),
        ("gsm8k_gemma3_1b", "v5litepod-4", (300, 200)),
        ("gsm8k_qwen3.5_0.8b", "v6e-4", (300, 200)),
        ("code_qwen2.5_coder_1.5b", "v5litepod-8", (800, 600)),
    ],
)
def test_the_recipes_fit_their_slices(name, slice, responses):
    """The commands of docs/results/plans."""
    mean, std = responses
    assumed = Assumptions(response_tokens=mean, response_tokens_std=std)
    found = plan(load_config(f"configs/{name}.yaml"), topology=parse(slice), assumed=assumed)
    assert found.fits
    if name == "dapo_qwen2.5_32b":
        # The gradient of a tied embedding, or of a bias that is sharded too finely, is all-reduced.
        traffic = next(program.traffic for program in found.programs if program.name == "update_add_longest")
        trained = {kind.kind: kind for kind in traffic}
        assert trained.keys() <= {"all-gather", "reduce-scatter", "all-reduce"}
        assert trained["all-reduce"].received_bytes < 0.01 * trained["reduce-scatter"].received_bytes


EIGHT_H100 = ["parallel.fsdp=2", "batch.rows_per_microbatch=2"]
SIXTEEN_H100 = ["parallel.fsdp=2", "parallel.tensor=8", "batch.rows_per_microbatch=2"]
COPIED = {
    # A chip has 288 of the 1,152 columns of the embedding, stored by columns. The loop over microbatches holds the table in bfloat16, and this copy is freed
    # before the loop: the compiler rounds the table by rows.
    "gsm8k_gemma3_1b": {"f32[262144,288]{1,0:T(8,128)}"},
    # The loop over microbatches adds gradients of the embedding by columns, because the product has them by columns. This is 0.24 of 31.25 GiB.
    "gsm8k_qwen3.5_0.8b": {"f32[248320,256]{0,1:T(8,128)}"},
    # The activations of one call of prefill, 80 MiB, before the logits of the prompts' last tokens. The program holds little else.
    "dapo_qwen2.5_32b": {"f32[5120,4096]{0,1:T(8,128)}"},
}


# Slow: compiles every program of each plan in docs/results/plans, with four layers. tests/models/experts_test.py compiles one product.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "slice", "changes"),
    [
        ("gsm8k_qwen3_0.6b", "v5litepod-8", []),
        ("dapo_qwen2.5_7b", "v6e-64", []),
        ("dapo_qwen2.5_32b", "v5p-256", []),
        ("gsm8k_gemma3_1b", "v5litepod-4", []),
        ("gsm8k_qwen3.5_0.8b", "v6e-4", []),
        ("dapo_qwen3_30b_a3b", "v5p-16", []),
        ("dapo_qwen3_30b_a3b_lora", "v6e-4", []),
        ("gsm8k_qwen3_0.6b", "h100:1", []),
        ("dapo_qwen2.5_7b", "h100:8", EIGHT_H100),
        ("dapo_qwen2.5_32b", "h100:64", ["parallel.fsdp=16", "batch.rows_per_microbatch=16"]),
        ("dapo_qwen2.5_32b", "h100:16", SIXTEEN_H100),
    ],
)
def test_no_program_copies_an_argument_of_64_mib(name, slice, changes):
    """The sampler's layers are separate arrays. A copy of a stack of four layers is counted as a copy of all layers."""
    made, config = parse(slice), load_config(name, changes)
    if made.chip.target:
        pytest.importorskip("jax_cuda12_plugin", reason="the extra cuda-plan")
    whole = with_adapters(decoder_of(config.model), config.lora)
    by_layer = {each: getattr(whole, each)[-4:] for each in ("mixers", "rope_of_layer", "windows")}
    decoder = replace(whole, layers=4, **by_layer)
    stacks = {len(decoder.layers_of(stack)): len(whole.layers_of(stack)) for stack in decoder.stacks}
    hosts = devices_of(made.one_host) if made.hosts > 1 else None
    work = workload_of(config, Assumptions())
    programs = Programs(config, decoder, work, devices_of(made), hosts, memory=made.chip.device_hbm_bytes)
    # The tests' own settings leave most optimizations out.
    options = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
    found = []
    for program, lower in programs.lowered().items():
        for kind, size in copied_arguments(lower().compile(compiler_options=options).as_text()):
            first = int(re.search(r"\[(\d*)", kind)[1] or 1)
            if size / first * stacks.get(first, first) > 2**26:
                found.append((program, kind))
    assert {kind for _, kind in found} <= COPIED.get(name, set()), found


# Slow: compiles a decode step of 64 layers for 256 chips.
@pytest.mark.slow
def test_the_32b_run_does_not_fit_256_chips_of_16_gb():
    config = load_config("configs/dapo_qwen2.5_32b.yaml", ["parallel.fsdp=32", "parallel.tensor=8"])
    assert plan(config, topology=parse("v5e:16x16"), only=["generate"]).failures == ["generate"]
