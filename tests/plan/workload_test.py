"""The work of a step under assumptions."""

from dataclasses import replace

import pytest

from dapo_jax.config import (
    AdvantageConfig,
    BatchConfig,
    ConfigError,
    DataConfig,
    DynamicSamplingConfig,
    EnvironmentConfig,
    OverlongConfig,
    RewardConfig,
    RolloutConfig,
    SamplingConfig,
    TeacherConfig,
    TrainConfig,
)
from dapo_jax.plan.workload import Assumptions, workload_of

CONFIG = TrainConfig(
    run_dir="out",
    data=DataConfig(max_prompt_tokens=16),
    sampling=SamplingConfig(max_response_tokens=48, slots=8),
    reward=RewardConfig(overlong=OverlongConfig(buffer_tokens=8)),
    batch=BatchConfig(prompts_per_step=8, group_size=4, groups_per_update=4, rows_per_microbatch=2),
    dynamic_sampling=DynamicSamplingConfig(prompts_per_wave=16, max_waves=3),
)


def dynamic(**changes):
    return replace(CONFIG, dynamic_sampling=replace(CONFIG.dynamic_sampling, **changes))


def test_a_step_at_the_limit_by_hand():
    """Half of 16 groups are mixed: one wave. An update has 16 responses of 16 + 48 = 64 tokens, one per row, 2 rows per
    microbatch: 8 of them, and room for as many."""
    work = workload_of(CONFIG, Assumptions(informative=0.5))
    assert (work.prompts, work.waves, work.responses, work.trained, work.updates) == (16, 1, 64, 32, 2)
    assert (work.microbatches, work.room, work.microbatch_tokens) == (8, 8, 128)
    assert len([note for note in work.notes if "not given" in note]) == 2


def test_a_step_on_saved_rollouts_samples_nothing():
    saved = replace(
        CONFIG,
        data=replace(CONFIG.data, deduplicate=False),
        batch=replace(CONFIG.batch, group_size=1, groups_per_update=8),
        dynamic_sampling=DynamicSamplingConfig(enabled=False),
        advantage=AdvantageConfig(baseline="none"),
        teacher=TeacherConfig(source="preset:tiny"),
        rollout=RolloutConfig(saved=True),
    )
    work = workload_of(saved, Assumptions())
    assert (work.prompts, work.waves, work.responses, work.trained, work.updates) == (0, 0, 0, 8, 1)


def test_only_kept_responses_are_trained_on():
    """An update has 4 x 2 responses instead of 4 x 4: 8 rows of 64 tokens in 4 microbatches."""
    work = workload_of(replace(CONFIG, batch=replace(CONFIG.batch, keep=2)), Assumptions(informative=0.5))
    assert (work.responses, work.trained, work.microbatches, work.room) == (64, 16, 4, 4)


def test_shorter_responses_are_packed_but_room_stays_for_the_longest():
    """16 x (6 + 10) = 256 tokens are 4 rows of 64, 2 microbatches."""
    work = workload_of(CONFIG, Assumptions(response_tokens=10, prompt_tokens=6))
    assert (work.microbatches, work.room) == (2, 8)


@pytest.mark.parametrize(
    ("config", "informative", "prompts", "waves"),
    [
        (CONFIG, 0.25, 32, 2),  # a quarter of 16 is 4 of the 8 that are needed
        (dynamic(on_shortfall="train_fewer"), 0.125, 48, 3),  # 6 of 8 groups
        (dynamic(surplus="carry"), 0.375, 22, 2),  # 8 of 3/8 are 21.3, in waves of at most 16
        (replace(CONFIG, rollout=RolloutConfig(in_flight=32, round_tokens=8)), 0.375, 22, 0),
        (replace(CONFIG, dynamic_sampling=DynamicSamplingConfig()), 1 / 3, 24, 1),  # a wave is three times the step
    ],
)  # fmt: skip
def test_prompts_and_waves_follow_from_the_share_of_mixed_groups(config, informative, prompts, waves):
    work = workload_of(config, Assumptions(informative=informative))
    assert (work.prompts, work.waves, work.responses) == (prompts, waves, 4 * prompts)


@pytest.mark.parametrize("in_flight", [0, 32])
def test_too_few_mixed_groups_are_refused(in_flight):
    config = replace(CONFIG, rollout=RolloutConfig(in_flight=in_flight, round_tokens=8))
    with pytest.raises(ConfigError, match=r"4 waves.*dynamic_sampling\.max_waves=3"):
        workload_of(config, Assumptions(informative=0.125))


def test_the_mean_context_is_over_tokens():
    """Responses of 3 tokens after 2 of a prompt attend to 2, 3, 4: mean 3. With lengths 1 and 5 (mean 3, deviation 2) the six
    tokens attend to 2; 2, 3, 4, 5, 6: mean 22 / 6."""
    one = workload_of(CONFIG, Assumptions(response_tokens=3, prompt_tokens=2))
    assert one.context == 3
    assert one.attended == 15  # 1 + 2 + 3 + 4 + 5
    two = workload_of(CONFIG, Assumptions(response_tokens=3, response_tokens_std=2, prompt_tokens=2))
    assert two.context == pytest.approx(22 / 6)
    assert two.attended == (6 + 28) / 2  # 1 + 2 + 3, and 1 + ... + 7


def with_turns(**sampling):
    sampling = replace(CONFIG.sampling, **sampling)
    return replace(CONFIG, environment=EnvironmentConfig(source="guess", max_turns=5), sampling=sampling)


@pytest.mark.parametrize(("turns", "reprefills", "tokens"), [(None, 4, "10,240"), (3, 2, "5,120")])
def test_batch_invariant_episodes_are_re_prefilled_between_turns(turns, reprefills, tokens):
    """64 episodes of 16 + 48 tokens: between two turns they have 16 + 24 on average, four times 64 x 40 = 2560; with three turns two times."""
    work = workload_of(with_turns(batch_invariant=True), Assumptions(turns=turns))
    assert (work.reprefills, work.between) == (reprefills, 40)
    assert f"{tokens} tokens per step" in work.notes[-2]


def test_kept_episodes_are_not_re_prefilled_and_the_largest_cost_is_named():
    work = workload_of(with_turns(), Assumptions())
    assert work.reprefills == 0
    assert "10,240 tokens per step" in work.notes[-2]
    plain = workload_of(replace(CONFIG, sampling=with_turns(batch_invariant=True).sampling), Assumptions())
    assert plain.reprefills == 0, "there is no environment"


@pytest.mark.parametrize(
    ("config", "assumed", "match"),
    [
        (CONFIG, {"response_tokens": 49.0}, r"sampling\.max_response_tokens = 48"),
        (with_turns(), {"turns": 5.5}, r"environment\.max_turns = 5"),
        (CONFIG, {"turns": 2.0}, r"--turns=.*environment\.source"),
    ],
)
def test_assumptions_beyond_the_configuration_are_refused(config, assumed, match):
    with pytest.raises(ConfigError, match=match):
        workload_of(config, Assumptions(**assumed))
