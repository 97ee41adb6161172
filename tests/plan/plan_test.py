"""`dapo-jax plan` from shapes: the published configurations, and what the command says."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dapo_jax.cli import main
from dapo_jax.config import ConfigError, load_config
from dapo_jax.plan.json_output import as_data
from dapo_jax.plan.plan import plan
from dapo_jax.plan.topologies import parse
from dapo_jax.plan.workload import Assumptions

CONFIGS = Path(__file__).parents[2] / "configs"
LARGE = ["dapo_qwen2.5_32b", "dapo_qwen2.5_32b_early", "dapo_qwen2.5_7b", "gsm8k_qwen3_0.6b"]


@pytest.mark.parametrize("name", LARGE)
def test_every_configuration_of_a_large_run_is_planned_from_shapes(name):
    made = plan(load_config(CONFIGS / f"{name}.yaml"))
    json.dumps(as_data(made))
    # What all devices hold together is 12 bytes a parameter, and more only for what is not cut.
    assert made.resident.state * made.layout.devices >= 12 * made.decoder.parameters
    assert made.resident.state * made.layout.devices < 12.5 * made.decoder.parameters
    assert made.fits


def test_the_32b_run_by_hand():
    """Weights in bfloat16 over 4 chips: 32,763,876,352 x 2 / 4 bytes, and norms in float32. A token's cache: 2 x 64 layers x 8 x 128
    x 2 bytes; a sampler on each of 32 hosts."""
    made = plan(load_config(CONFIGS / "dapo_qwen2.5_32b.yaml"))
    norms = (64 * 2 + 1) * 5120
    biases = 64 * 128 * (40 + 8 + 8)
    assert made.resident.weights == (made.decoder.parameters - norms) // 2 + 4 * norms
    assert biases < norms * 4
    assert as_data(made)["cache"]["bytes_per_token"] == 262_144
    assert made.layout.samplers == 32
    assert made.layout.devices == 128


def test_the_early_run_differs_in_dynamic_sampling_alone():
    whole, early = (load_config(CONFIGS / f"{name}.yaml") for name in LARGE[:2])
    sections = [name for name in vars(whole) if getattr(whole, name) != getattr(early, name)]
    assert sections == ["run_dir", "dynamic_sampling"]
    assert not early.dynamic_sampling.enabled


def test_the_paper_is_what_the_32b_configuration_says():
    """Section 4.1 of https://arxiv.org/abs/2503.14476."""
    config = load_config(CONFIGS / "dapo_qwen2.5_32b.yaml")
    assert (config.batch.prompts_per_step, config.batch.group_size) == (512, 16)
    assert config.batch.prompts_per_step // config.batch.groups_per_update == 16
    assert (config.sampling.max_response_tokens, config.reward.overlong.buffer_tokens) == (16384 + 4096, 4096)
    assert (config.loss.clip_ratio_low, config.loss.clip_ratio_high, config.loss.kl_coef) == (0.2, 0.28, 0.0)
    assert (config.optimizer.learning_rate, config.optimizer.warmup_steps) == (1e-6, 20)
    assert (config.eval.samples_per_prompt, config.eval.temperature, config.eval.top_p) == (32, 1.0, 0.7)


def test_axes_that_do_not_divide_are_named():
    config = load_config(
        CONFIGS / "dapo_qwen2.5_32b.yaml", ["parallel.fsdp=24", "batch.rows_per_microbatch=24"]
    )
    with pytest.raises(ConfigError, match=r"fsdp = 24 do not divide"):
        plan(config)
    config = load_config(CONFIGS / "dapo_qwen2.5_32b.yaml", ["batch.rows_per_microbatch=1"])
    with pytest.raises(
        ConfigError, match=r"rows_per_microbatch=1 must be a multiple of parallel.data x parallel.fsdp = 32"
    ):
        plan(config)


def test_the_command_writes_tables_or_json(capsys):
    name = str(CONFIGS / "dapo_qwen2.5_32b.yaml")
    assert main(["plan", name, "--response-tokens", "5000,4000", "--informative", "0.25"]) == 0
    printed = capsys.readouterr().out
    assert "train state (parameters and moments)" in printed
    assert "2 waves of 1536 prompts" in printed
    assert main(["plan", name, "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["expected_step"]["waves"]["seconds"] is None
    assert told["expected_step"]["waves"]["chip_hours"] is None
    # Weights and two moments in float32; in waves no response waits.
    assert told["expected_step"]["waves"]["checkpoint_bytes"] == 12 * told["model"]["parameters"]
    assert "a checkpoint on disk" in printed
    assert told["schema_version"] == 3
    assert told["fits"] is None
    assert told["workload"]["response_mean"] == 20480


def test_a_step_is_told_in_waves_and_in_flight(capsys):
    """288 slots on each of 32 samplers, of which the pages hold 255 responses of the mean context."""
    name = str(CONFIGS / "dapo_qwen2.5_32b.yaml")
    lengths = ["--response-tokens", "5000,4000", "--prompt-tokens", "200"]
    assert main(["plan", name, *lengths]) == 0
    printed = capsys.readouterr().out
    assert "7,136 in flight" in printed
    assert "age of a group's oldest token in steps" in printed
    assert "sampling, s" not in printed, "nobody knows without a chip"
    assert main(["plan", name, *lengths, "rollout.in_flight=4096", "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)["expected_step"]
    assert (told["in_flight"], told["configured"]) == (4096, True)
    assert told["flight"]["kept_bytes"] == 8 * told["flight"]["kept_tokens"]
    # 128 on each of 32 samplers, by a mean context of 4,300 tokens; and of groups under way those that have ended.
    assert told["flight"]["kept_tokens"] > 4096 * 3000
    assert told["flight"]["decode_steps"] < told["waves"]["decode_steps"]


def test_the_turns_of_an_episode_are_told(capsys):
    """32 x 16 episodes of 6 + 28 tokens: of seven turns six read 6 + 14 tokens on average, 61,440 in all; of three, two."""
    name = str(CONFIGS / "turns_quickstart.yaml")
    asked = ["plan", name, "--informative", "1", "sampling.batch_invariant=true"]
    for options, again in ([], 61_440), (["--turns", "3"], 20_480):
        assert main([*asked, *options, "--json", "-"]) == 0
        output = capsys.readouterr()
        expected = json.loads(output.out)["expected_step"]
        assert [expected[way]["read_again_tokens"] for way in ("waves", "flight")] == [again, again]
        assert f"{again:,} tokens a step" in " ".join(output.err.split())
        assert "not counted are the time of its answers" in " ".join(output.err.split())


def test_with_a_slice_a_step_is_told_in_seconds():
    """Nothing compiled: the roofline's times, without what is received."""
    config = load_config(CONFIGS / "gsm8k_qwen3_0.6b.yaml")
    assumed = Assumptions(response_tokens=300, response_tokens_std=200, prompt_tokens=100)
    found = replace(plan(config, assumed=assumed), slice=parse("v5e:2x4"))
    other = sum(bound.seconds for bound in found.bounds if bound.work.phase not in ("prefill", "decode"))
    waves, flight = found.expected.waves, found.expected.flight
    assert waves.step_s == pytest.approx(waves.seconds + other)
    assert flight.step_s == pytest.approx(flight.seconds + other)
    # The roofline has the slots full until the last token is drawn, and reads at the peak.
    decode, prefill = (
        next(bound for bound in found.bounds if bound.work.phase == phase) for phase in ("decode", "prefill")
    )
    assert 0.95 * decode.seconds < waves.seconds - waves.read_s < 1.5 * decode.seconds
    assert waves.read_s == pytest.approx(prefill.compute_s / 0.4, rel=0.01)
    printed = as_data(found)["expected_step"]
    assert printed["waves"]["step_s"] == waves.step_s
    # All steps on 8 chips; an hour has 3,600 seconds.
    for way in ("waves", "flight"):
        hours = config.steps * printed[way]["step_s"] * 8 / 3600
        assert printed[way]["chip_hours"] == pytest.approx(hours)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--topology", "v5p-257"], "the nearest in size"),
        (["--topology", "v5e:2x2"], r"pip install -e '.[tpu]'"),
        (["--sweep"], "name it with --topology"),
        (["--informative", "0"], "above 0 and at most 1"),
        (["--turns", "2"], "without an environment.source there are no turns"),
    ],
)
def test_what_is_wrong_is_said_in_one_message(options, message, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    assert main(["plan", str(CONFIGS / "dapo_qwen2.5_32b.yaml"), *options]) == 2
    assert message in capsys.readouterr().err
