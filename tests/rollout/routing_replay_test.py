"""Runs of a model with experts record them in flight, in checkpoints and between processes."""

import pytest
from rich.console import Console

from dapo_jax.config import EnvironmentConfig, LoraConfig
from dapo_jax.models.presets import Experts
from dapo_jax.run import train
from dapo_jax.run.updater_setup import recorded_values
from dapo_jax.testing import tiny_decoder_config
from dapo_jax.trackers.progress import Progress
from tests.rollout.processes_test import GRADER, assert_the_same, trained

FLYING = {
    "rollout__round_tokens": 2,
    "rollout__in_flight": 16,
    "sampling__slots": 16,
    "optimizer__epsilon": 0.1,
}
"""Responses of up to 6 tokens take three rounds, so that most continue under other weights."""


@pytest.fixture(scope="module")
def flying(micro, moe_model):
    return lambda run_dir=None, **changes: micro(run_dir, model__source=moe_model, **FLYING | changes)


@pytest.fixture(scope="module")
def flown(flying, run_micro):
    return run_micro(flying(steps=3, checkpoint__every_steps=1, checkpoint__keep=9))


# Slow: a run in flight. tests/sampling/routes_test.py compares records in flight with the trainer, and tests/run/metrics_page_test.py runs experts.
@pytest.mark.slow
def test_the_trainer_computes_the_samplers_logprobs_in_flight(flown):
    """In the first step, all tokens are sampled with the weights of the step; in float32 their experts are the trainer's."""
    first, *later = flown.metrics
    assert first["sync/logprob_diff_max"] <= 2e-5
    assert any(line["rollout/age_max"] > 0 for line in later)
    for line in flown.metrics:
        assert 0 < line["routing/no_record_frac"] < 0.5
    # The second update of the first step has other weights than the sampler.
    assert max(line["routing/flipped_frac"] for line in later) > 0


# Slow: two runs more. tests/rollout/flight_test.py resumes in flight, and tests/sampling/routes_test.py reads records from a checkpoint.
@pytest.mark.slow
def test_a_run_resumed_in_flight_is_the_uninterrupted_run(flying, flown, run_micro, same_run):
    config = flying(steps=1, checkpoint__every_steps=1)
    run_micro(config)
    same_run(run_micro(flying(config.run_dir, steps=3, checkpoint__every_steps=1), resume=True), flown)


# Slow: another run. `test_more_experts_than_a_byte_can_number_are_refused` has no records without replay.
@pytest.mark.slow
def test_without_replay_nothing_is_recorded(flying, run_micro):
    [line] = run_micro(flying(steps=1, rollout__routing_replay="off")).metrics
    assert "routing/flipped_frac" not in line
    assert line["routing/busiest_load"] >= 1.0


@pytest.mark.slow
@pytest.mark.parametrize("weight_dtype", ["", "int8"])
def test_adapters_are_sampled_as_they_are_trained(weight_dtype, flying, run_micro):
    """With a row of several responses and their prompt split over two devices. Rounding to eight bits gives the sampler another policy."""
    mesh = {"parallel__data": 2, "parallel__fsdp": 2, "parallel__context": 2}
    adapters = LoraConfig(rank=2, alpha=8.0, targets=["q_proj", "k_proj", "v_proj", "o_proj"])
    how = {
        "rollout__in_flight": 0,
        "batch__row_tokens": 24,
        "dynamic_sampling__surplus": "discard",
        "loss__importance_range": [0.0, 2.0],
    }
    config = flying(steps=3, **how, **mesh, lora=adapters, sampling__weight_dtype=weight_dtype)
    lines = run_micro(config).metrics
    assert all(line["update/grad_norm"] > 0 for line in lines)
    if weight_dtype:
        assert 1e-3 < max(line["sync/logprob_diff_mean"] for line in lines) < 0.1
    else:
        assert max(line["sync/logprob_diff_max"] for line in lines) <= 2e-5


# Slow: another run. tests/sampling/routes_test.py has the records of environment tokens and of rounds.
@pytest.mark.slow
def test_episodes_in_flight_have_records_of_all_their_tokens(flying, run_micro):
    """Turns of one token each, and the environment's tokens between them."""
    environment = EnvironmentConfig(source="guess", max_turns=2, turn_tokens=1)
    config = flying(
        steps=2, environment=environment, dynamic_sampling__enabled=False, rollout__round_tokens=1
    )
    lines = run_micro(config, reward=None).metrics
    assert lines[0]["sync/logprob_diff_max"] <= 2e-5
    # Two updates, and the last token of each of eight episodes has no record.
    assert 0 < lines[0]["routing/no_record_frac"] < 0.3


def test_more_experts_than_a_byte_can_number_are_recorded_in_two(flying):
    """The largest number means that nothing is recorded, so a byte has the numbers 0 to 254 of 255 experts."""
    for count, dtype in {255: "uint8", 256: "uint16", 512: "uint16"}.items():
        decoder = tiny_decoder_config(mlps=(Experts(count, 2, normalize=True),), mlp_dim=16)
        assert recorded_values(flying(), decoder) == (("routes", (2, 2), dtype),)
        assert recorded_values(flying(rollout__routing_replay="off"), decoder) == ()


# Groups are sent as arrays, which tests/rollout/checkpoint_arrays_test.py checks.
@pytest.mark.slow
@pytest.mark.parametrize("in_flight", [16, 0])
def test_two_processes_hand_over_their_records(in_flight, on_disk, moe_model, tmp_path):
    make = on_disk(tmp_path, GRADER, "third")
    how = {
        "model__source": moe_model,
        "rollout__round_tokens": 2,
        "rollout__in_flight": in_flight,
        "steps": 3,
    }
    one, _ = make("one", sampling__slots=16, **how)
    train(one, progress=Progress(one.steps, console=Console(quiet=True)))
    _, path = make("two", sampling__slots=8, **how)
    [first, _] = trained(path, 2)
    assert "routing replay records 4 bytes per token" in first
    assert_the_same(path.with_name("two"), path.with_name("one"), steps=(2, 3))
