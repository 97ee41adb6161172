"""Operations, bytes and minimum time of a step's phases, derived by hand."""

import json
import math
import statistics
from dataclasses import replace

import jax
import jax.extend
import jax.numpy as jnp
import pytest
from flax import nnx

from dapo_jax.config import (
    BatchConfig,
    DataConfig,
    DynamicSamplingConfig,
    EnvironmentConfig,
    LossConfig,
    ModelConfig,
    OverlongConfig,
    RewardConfig,
    RolloutConfig,
    SamplingConfig,
    TeacherConfig,
    TrainConfig,
)
from dapo_jax.models.attention_mixer import ATTENTION
from dapo_jax.models.decoder import graph_of
from dapo_jax.models.gated_delta import GatedDelta
from dapo_jax.models.lora import lora_shape
from dapo_jax.models.mamba import Mamba
from dapo_jax.models.presets import DecoderConfig, Experts, preset
from dapo_jax.models.tensors import shapes_of
from dapo_jax.plan.chips import CHIPS
from dapo_jax.plan.collectives import Traffic
from dapo_jax.plan.compiled import CompiledProgram
from dapo_jax.plan.roofline import (
    Work,
    bound,
    decode_steps,
    decode_weight_parameters,
    forward_flops,
    in_flight,
    work_of,
)
from dapo_jax.plan.topologies import parse
from dapo_jax.plan.workload import Assumptions, MeshSizes, workload_of
from dapo_jax.sampling.cache_sizes import PageSizes, slot_pages
from tests.several import ROOT

# A layer has 8 x (6 x 12 + 48) = 960 weights, 3 layers 2880, the unembedding 256. A query-key pair costs 288 operations. A cached token in
# bfloat16 has 144 bytes. All parameters: 3 x (960 + 16 of norms) + 256 + 8 = 3192.
SMALL = DecoderConfig(vocab_size=32, embed_dim=8, layers=3, heads=4, kv_heads=2, head_dim=6, mlp_dim=16)
SIZES = MeshSizes(
    train={"data": 1, "fsdp": 4, "tensor": 2, "context": 1},
    sampler={"data": 2, "fsdp": 1, "tensor": 2, "context": 1},
    samplers=2,
)
CONFIG = TrainConfig(
    run_dir="out",
    model=ModelConfig(compute_dtype="bfloat16", remat="full"),
    data=DataConfig(max_prompt_tokens=6),
    sampling=SamplingConfig(max_response_tokens=10, slots=8),
    reward=RewardConfig(overlong=OverlongConfig(buffer_tokens=2)),
    dynamic_sampling=DynamicSamplingConfig(prompts_per_wave=1536),
    batch=BatchConfig(prompts_per_step=8, group_size=4, groups_per_update=4, rows_per_microbatch=4),
)


def works(config=CONFIG, programs=(), pages=None, decoder=SMALL):
    work = workload_of(config, Assumptions(informative=1.0))
    pages = pages or slot_pages(config.sampling.slots, 16)
    return work, {one.phase: one for one in work_of(config, decoder, work, SIZES, pages, programs)}


def products(jaxpr):
    """Operations of all matrix products of a program; a loop counts as often as it runs."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            inner = math.prod(left[axis] for axis in contracted)
            total += 2 * math.prod(equation.outvars[0].aval.shape) * inner
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inside in jax.extend.core.jaxprs_in_params(equation.params):
            total += times * products(inside)
    return total


def test_operations_equal_those_of_the_decoders_own_products():
    """20 tokens in one row are a single block of attention: all 20 x 20 pairs are computed, masked or not."""
    tokens = jnp.zeros((1, 20), jnp.int32)
    graph, params = graph_of(SMALL), shapes_of(SMALL)

    def logits(params):
        decoder = nnx.merge(graph, params)
        return decoder.ends.logits(decoder(tokens, tokens, tokens))

    counted = products(jax.make_jaxpr(logits)(params).jaxpr)
    assert counted == forward_flops(SMALL, tokens=20, pairs=400, logits=20)


@pytest.mark.parametrize("mixer", [GatedDelta(2, 4, 8, 6), Mamba(4, 6, 2, 8)])
def test_operations_of_recurrent_layers_equal_those_of_the_decoders_own_products(mixer):
    """128 tokens are two chunks, and two blocks of attention with 64 x 64 and 64 x 128 pairs."""
    decoder = replace(SMALL, attention_gate=True, mixers=(mixer, mixer, ATTENTION))
    tokens = jnp.zeros((1, 128), jnp.int32)
    graph, params = graph_of(decoder), shapes_of(decoder)

    def hidden(params):
        return nnx.merge(graph, params)(tokens, tokens, tokens)

    counted = products(jax.make_jaxpr(hidden)(params).jaxpr)
    assert counted == forward_flops(decoder, tokens=128, pairs=64 * 64 + 64 * 128)


def test_a_decoding_step_reads_and_writes_the_recurrent_states():
    """A state has 4 x 8 x 6 + 3 x (2 x 2 x 8 + 4 x 6) = 360 numbers in each of two layers, so 2 x 2 x 4 x 360 bytes per token, split over 2 devices."""
    decoder = replace(SMALL, mixers=(GatedDelta(2, 4, 8, 6), GatedDelta(2, 4, 8, 6), ATTENTION))
    assert decoder.state_bytes == 2 * 4 * 360
    work, found = works(decoder=decoder)
    steps = work.responses * work.response_mean / 2 / 8
    weights = decode_weight_parameters(decoder) * 2 / 2
    # One layer has keys and values: 48 bytes per token, split like the states over 2 x 2 devices of a sampler.
    tokens = work.responses * work.response_mean / 2
    cached = tokens / 2 * (work.context * 48 / 2 + 2 * decoder.state_bytes / 2)
    assert found["decode"].hbm_bytes == pytest.approx(steps * weights + cached)


def test_a_token_uses_the_chosen_experts_and_a_step_reads_those_of_all_tokens():
    """With 1 of 4 experts, a layer has 8 x (6 x 12 + 48 + 4 of the router) = 992 weights for a token. Two tokens use 4 x (1 - (3/4)^2) = 1.75 experts."""
    decoder = replace(SMALL, mlps=(Experts(4, 1, normalize=True),))
    assert forward_flops(decoder, tokens=1) == pytest.approx(2 * 3 * 992)
    assert decode_weight_parameters(decoder, 2) == pytest.approx(3 * 8 * (72 + 1.75 * 48 + 4) + 256)
    assert decoder.active_parameters == SMALL.parameters + 3 * 4 * 8
    assert decoder.parameters == decoder.active_parameters + 3 * 3 * 8 * 48


def test_a_measured_chip_suggests_a_time_at_its_share_of_the_roofline():
    """The shares are the medians in the baseline of the card. Decoding 4,800 GB takes 1 s at the H200's bandwidth."""
    figures = json.loads((ROOT / "benchmarks" / "baselines" / "h200.json").read_text())["figures"]
    shares = {phase: statistics.median(figures[f"gpu/{what}:ours/share_of_limit"]) for phase, what in (("decode", "rollout"), ("update", "update"))}  # fmt: skip
    assert CHIPS["h200"].measured == pytest.approx(shares, rel=5e-3)
    decode = Work(phase="decode", runs=1, flops=0, useful_flops=0, hbm_bytes=4800e9)
    assert bound(decode, parse("h200:1")).measured_s == pytest.approx(1 / 0.227)
    assert bound(replace(decode, phase="prefill"), parse("h200:1")).measured_s is None
    assert bound(decode, parse("h100:1")).measured_s is None


def test_the_longest_time_bounds_a_phase():
    """v5e: 197e12 operations, 819e9 and 200e9 bytes per second. H100: 989.4e12, 3350e9, 450e9, and 50e9 between machines."""
    work = Work(phase="x", runs=1, flops=394e12, useful_flops=0, hbm_bytes=819e9, ici_bytes=600e9)
    found = bound(work, parse("v5e:2x2"))
    assert (found.compute_s, found.hbm_s, found.ici_s) == (2, 1, 3)
    assert (found.seconds, found.limit) == (3, "ici")
    found = bound(replace(work, network_bytes=200e9), parse("h100:16"))
    assert (found.hbm_s, found.ici_s, found.network_s) == pytest.approx((819 / 3350, 4 / 3, 4))
    assert (found.seconds, found.limit) == (4, "network")


def test_decoding_by_hand():
    """1536 prompts x 4 responses of 10 tokens are 61,440 tokens, half on each sampler: 30,720 over 8 slots are 3840 steps. A step
    reads 2 x 3136 / 2 bytes of weights and 4 slots x 144 / 2 bytes x a mean context of 6 + 4.5."""
    work, phases = works()
    decode = phases["decode"]
    assert in_flight(CONFIG, work, slot_pages(8, 16), 2) == 8
    assert decode_steps(work, 2, 8.0) == 3840
    assert decode_steps(work, 2, 1e6) == 10, "a wave is as long as its longest response"
    assert decode.hbm_bytes == 3840 * (3136 + 288 * 10.5)
    # 2 x 3136 + 288 x 10.5 operations per token, over 4 devices.
    assert decode.flops == 30_720 * (6272 + 3024) / 4
    assert decode.runs == 768


def test_pages_hold_as_many_responses_as_their_mean_context_and_half_a_page_fit():
    """30 pages of 4 tokens in each of 2 pools are 240 tokens; a response has 10.5 and 2 more: 19.2 of them. 30,720 tokens are 1600 steps."""
    pages = PageSizes(holders=64, capacity=16, page_tokens=4, pools=2, pool_pages=30)
    config = replace(CONFIG, sampling=replace(CONFIG.sampling, slots=64))
    work, phases = works(config, pages=pages)
    assert in_flight(config, work, pages, 2) == 19.2
    assert phases["decode"].hbm_bytes == pytest.approx(1600 * 3136 + 30_720 / 2 * 10.5 * 72)
    full = PageSizes(holders=8, capacity=16, page_tokens=4, pools=2, pool_pages=16)
    assert in_flight(CONFIG, work, full, 2) == 8, "every slot has room for the longest response"


def test_a_token_attends_to_its_window():
    """Windows of 4 in two of three layers. The 10 tokens after a prompt of 6 attend to 7 + ... + 16 = 115 tokens in one layer and to 40 in each of the others:
    65 on average instead of 115. A prompt of 6 has 21 pairs; 1 + 2 + 3 + 3 x 4 = 18 of them are in a window."""
    windowed = replace(SMALL, windows=(4, 0, 4))
    _, plain = works()
    _, found = works(decoder=windowed)
    seen = 10.5 * 65 / 115
    assert found["decode"].hbm_bytes == pytest.approx(3840 * (3136 + 288 * seen))
    assert found["decode"].flops == pytest.approx(30_720 * (6272 + 288 * seen) / 4)
    assert plain["prefill"].flops - found["prefill"].flops == pytest.approx(768 * 288 * 2 / 4)
    # A whole sequence of 16 has 136 pairs, and 10 + 12 x 4 = 58 in a window: 84 on average.
    less = plain["update"].useful_flops - found["update"].useful_flops
    assert less == pytest.approx(3 * 32 * 288 * (136 - 84) / 8)


def test_eight_bits_read_less():
    """Weights of one byte; 72 numbers per token of one byte, and 12 scales of 4, over the 2 devices that share its heads."""
    sampling = replace(CONFIG.sampling, weight_dtype="int8", cache_dtype="int8")
    _, phases = works(replace(CONFIG, sampling=sampling, loss=LossConfig(importance_range=[0.0, 2.0])))
    assert phases["decode"].hbm_bytes == 3840 * (3136 / 2 + 4 * 10.5 * (72 + 48) / 2)


def test_re_prefills_between_turns_are_not_useful_work():
    """3072 episodes per sampler with three turns are re-prefilled twice, with 6 + 5 tokens on average, which are 66 pairs; one per call."""
    sampling = replace(CONFIG.sampling, batch_invariant=True)
    _, plain = works(replace(CONFIG, sampling=sampling))
    environment = EnvironmentConfig(source="guess", max_turns=3)
    work, turns = works(replace(CONFIG, sampling=sampling, environment=environment))
    assert (work.reprefills, work.between) == (2, 11)
    one, again = plain["prefill"], turns["prefill"]
    assert again.flops - one.flops == 6144 * (11 * 5760 + 66 * 288 + 512) / 4
    assert again.useful_flops == one.useful_flops
    assert again.runs - one.runs == 6144
    assert turns["decode"] == plain["decode"]


def test_responses_in_flight_decode_without_waves_and_are_re_prefilled():
    """All 8 groups are mixed: 8 prompts x 4 responses of 10 tokens are 320 tokens, 160 on each of 2 samplers, each with 6 of the 12 responses
    in flight: 26.67 steps. Per step a sampler prefills 4 prompts of 6 tokens, two per row of 16 and two rows per call, and its 6 responses
    at the mean context of 10.5, one per row."""
    flying = replace(CONFIG, rollout=RolloutConfig(in_flight=12, round_tokens=8))
    work, phases = works(flying)
    assert (work.prompts, work.waves, work.responses) == (8, 0, 32)
    assert in_flight(flying, work, slot_pages(8, 16), 2) == 6
    assert decode_steps(work, 2, 1e6) == 160 / 1e6, "no step waits for the longest response"
    assert phases["decode"].runs == pytest.approx(160 / 6 / 5)
    prompts = 4 * (2 * 2880 * 6 + 288 * 21 + 512)
    again = 6 * (2 * 2880 * 10.5 + 288 * 10.5 * 11.5 / 2 + 512)
    assert phases["prefill"].flops == pytest.approx((prompts + again) / 4)
    assert phases["prefill"].useful_flops == prompts / 4
    assert phases["prefill"].runs == 4 / 4 + 6 / 2


def test_prefill_and_transfer_by_hand():
    """768 prompts of 6 tokens on each sampler, 2 in each of 2 rows of 16: 21 pairs and one row of logits each. The transfer reads
    3192 x 4 / 8 bytes and writes 3192 x 2 / 2."""
    _, phases = works()
    assert phases["prefill"].flops == 768 * (2 * 2880 * 6 + 288 * 21 + 512) / 4
    assert (phases["prefill"].runs, phases["prefill"].hbm_bytes) == (192, 192 * 3136)
    assert phases["transfer"].hbm_bytes == 1596 + 3192


def test_training_by_hand():
    """An update has 16 rows of 16 tokens, 4 microbatches of 64: 256 tokens, each with 8.5 pairs and its logits: 256 x (5760 + 288 x
    8.5 + 512) operations forward, 4 times that with full rematerialisation; 2 updates, 8 devices. The first update needs no old
    log-probabilities, so one forward pass is scored."""
    _, phases = works()
    forward = 256 * (5760 + 2448 + 512)
    assert phases["update"].flops == 2 * 4 * forward / 8
    assert phases["update"].useful_flops == 2 * 3 * forward / 8
    assert (phases["log-probabilities"].flops, phases["log-probabilities"].runs) == (forward / 8, 1)
    # Each of 4 passes over a microbatch reads 3192 x 2 / 2 bytes. A device holds 3192 / 8 = 399 parameters: their gradients are accessed 3
    # times per microbatch, and parameters, gradients and moments 7 times at the end.
    assert phases["update"].hbm_bytes == 2 * (4 * 4 * 3192 + 4 * 12 * 399 + 28 * 399)


def test_adapters_by_hand():
    """Rank 2: 2 x (32 + 20 + 20 + 32 + 3 x 24) = 352 weights per layer, 1056 in all, which every token passes. The gradients of the
    2880 + 256 frozen weights are not computed, and the optimizer has 1056 / 8 = 132 parameters per device. A transfer moves the 1056
    adapter weights."""
    decoder = replace(SMALL, lora=lora_shape(rank=2, alpha=1.0, targets=["all"]))
    assert decoder.trained_parameters == 1056
    _, phases = works(decoder=decoder)
    forward = 256 * (2 * (2880 + 1056) + 2448 + 512)
    assert phases["update"].flops == 2 * (4 * forward - 2 * 3136 * 256) / 8
    assert phases["update"].hbm_bytes == 2 * (4 * 4 * (3192 + 1056) + 4 * 12 * 132 + 28 * 132)
    assert phases["transfer"].hbm_bytes == 4 * 132 + 1056


def test_options_change_the_work():
    def without(**sections):
        return works(replace(CONFIG, **sections))[1]

    _, phases = works()
    plain = without(model=replace(CONFIG.model, remat="none"))
    assert plain["update"].flops == 3 / 4 * phases["update"].flops
    assert "log-probabilities" not in without(loss=LossConfig(old_logprobs="sampler"))
    assert without(loss=LossConfig(kl_coef=0.1))["log-probabilities"].runs == 3
    # A selection reads entropies of the weights at the start, so the first of the two updates is scored, too.
    assert without(loss=LossConfig(select="high_entropy"))["log-probabilities"].runs == 2
    taught = without(teacher=TeacherConfig(source="preset:tiny", rewards=True))
    assert taught["update"] == phases["update"]
    assert taught["log-probabilities"] == phases["log-probabilities"]
    found, tiny = taught["teacher's log-probabilities"], preset("tiny")
    assert found.flops == 2 * forward_flops(tiny, tokens=256, pairs=256 * 8.5, logits=256) / 8
    assert found.runs == 2
    own = without(teacher=TeacherConfig(source="self", prompt="{prompt}", rewards=True))
    assert own["teacher's log-probabilities"].flops == 2 * phases["log-probabilities"].flops
    full = without(teacher=TeacherConfig(source="preset:tiny", rewards=True, kl="full"))
    assert "teacher's log-probabilities" not in full
    for name in ("flops", "useful_flops", "hbm_bytes"):
        assert getattr(full["update"], name) == getattr(phases["update"], name) + getattr(found, name)
    float32 = without(model=replace(CONFIG.model, compute_dtype="float32"))
    assert float32["decode"].hbm_bytes == 2 * phases["decode"].hbm_bytes


def test_an_objective_that_requires_the_reference_policy_is_scored_by_it(tmp_path):
    """Two updates by the reference policy, and one by the policy."""
    file = tmp_path / "near.py"
    file.write_text("def near(logprobs, old_logprobs, advantages, mask, *, weights, ref_logprobs): ...")
    _, phases = works(replace(CONFIG, loss=LossConfig(objective=f"{file}:near")))
    assert phases["log-probabilities"].runs == 3


def compiled(name, received):
    traffic = [Traffic(kind="all-gather", count=1, received_bytes=received)]
    return CompiledProgram(name=name, compile_s=1.0, memory=None, traffic=traffic)


def test_traffic_counts_as_often_as_a_program_runs():
    """A call decodes 5 tokens, so 3840 steps are 768 calls; an update's traffic is received twice."""
    bytes_of = {
        "generate": 100,
        "update_add_longest": 150,
        "update_apply": 50,
        "transfer": 100,
        "transfer_ends": 100,
    }
    _, phases = works(programs=[compiled(name, received) for name, received in bytes_of.items()])
    assert phases["decode"].ici_bytes == pytest.approx(76_800)
    assert phases["update"].ici_bytes == 400
    assert phases["log-probabilities"].ici_bytes == 0
    # The transfer has a program for each of 3 layers, and one for the ends.
    assert phases["transfer"].ici_bytes == 400


def test_bytes_from_other_machines_are_not_received_over_links():
    traffic = [Traffic(kind="all-gather", count=1, received_bytes=200, network_bytes=50)]
    _, phases = works(
        programs=[CompiledProgram(name="update_apply", compile_s=1.0, memory=None, traffic=traffic)]
    )
    assert (phases["update"].ici_bytes, phases["update"].network_bytes) == (300, 100)
