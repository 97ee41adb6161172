"""What a step has to do, under assumptions."""

from dataclasses import replace

import pytest

from dapo_jax.config import (
    BatchConfig,
    ConfigError,
    DataConfig,
    DynamicSamplingConfig,
    EnvironmentConfig,
    OverlongConfig,
    RewardConfig,
    RolloutConfig,
    SamplingConfig,
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


def test_a_step_at_the_limit_by_hand():
    """Half of 16 groups are mixed: one wave. An update has 16 responses of 16 + 48 = 64 tokens, a row each, 2 rows to a
    microbatch: 8 of them, and room for as many."""
    work = workload_of(CONFIG, Assumptions(informative=0.5))
    assert (work.prompts, work.waves, work.responses, work.trained, work.updates) == (16, 1, 64, 32, 2)
    assert (work.microbatches, work.room, work.microbatch_tokens) == (8, 8, 128)
    assert len([note for note in work.notes if "not given" in note]) == 2


def test_shorter_responses_pack_but_room_stays_for_the_longest():
    """16 x (6 + 10) = 256 tokens are 4 rows of 64, 2 microbatches."""
    work = workload_of(CONFIG, Assumptions(response_tokens=10, prompt_tokens=6))
    assert (work.microbatches, work.room) == (2, 8)


def test_waves_follow_from_the_share_of_mixed_groups():
    """A quarter of 16 is 4 of the 8 that are needed."""
    assert workload_of(CONFIG, Assumptions(informative=0.25)).waves == 2
    with pytest.raises(ConfigError, match=r"need 4 waves, over dynamic_sampling.max_waves=3"):
        workload_of(CONFIG, Assumptions(informative=0.125))


def test_where_fewer_groups_do_too_few_waves_are_no_error():
    """Three waves of 16 at an eighth: 6 of the 8 groups."""
    fewer = replace(CONFIG, dynamic_sampling=replace(CONFIG.dynamic_sampling, on_shortfall="train_fewer"))
    work = workload_of(fewer, Assumptions(informative=0.125))
    assert (work.prompts, work.waves, work.responses) == (48, 3, 192)
    assert "trains on about 6 of 8 groups" in " ".join(work.notes)
    assert workload_of(fewer, Assumptions(informative=0.25)).waves == 2


def test_where_surplus_is_carried_a_step_draws_what_it_needs_and_no_whole_waves():
    """8 of 3/8: 21.3 prompts, 22, in two waves of at most 16; whole ones would be 32."""
    carry = replace(CONFIG, dynamic_sampling=replace(CONFIG.dynamic_sampling, surplus="carry"))
    work = workload_of(carry, Assumptions(informative=0.375))
    assert (work.prompts, work.waves, work.responses) == (22, 2, 88)
    assert workload_of(CONFIG, Assumptions(informative=0.375)).prompts == 32


def test_what_stays_in_flight_draws_what_it_needs_in_no_waves():
    """8 of 3/8: 22 prompts, and no more than dynamic sampling allows."""
    flying = replace(CONFIG, rollout=RolloutConfig(in_flight=32, round_tokens=8))
    work = workload_of(flying, Assumptions(informative=0.375))
    assert (work.prompts, work.waves, work.responses) == (22, 0, 88)
    assert "32 responses stay in flight" in " ".join(work.notes)
    with pytest.raises(ConfigError, match=r"over dynamic_sampling.max_waves=3"):
        workload_of(flying, Assumptions(informative=0.125))


def test_the_mean_context_is_taken_over_tokens():
    """Responses of 3 tokens behind 2 of a prompt attend to 2, 3, 4: mean 3. Of lengths 1 and 5 (mean 3, deviation 2) the six
    tokens attend to 2; 2, 3, 4, 5, 6: mean 22 / 6."""
    one = workload_of(CONFIG, Assumptions(response_tokens=3, prompt_tokens=2))
    assert one.context == 3
    assert one.attended == 15  # 1 + 2 + 3 + 4 + 5
    two = workload_of(CONFIG, Assumptions(response_tokens=3, response_tokens_std=2, prompt_tokens=2))
    assert two.context == pytest.approx(22 / 6)
    assert two.attended == (6 + 28) / 2  # 1 + 2 + 3, and 1 + ... + 7


def test_waves_that_are_not_told_are_three_times_the_step():
    """A third of 24 is the 8 that are needed."""
    work = workload_of(
        replace(CONFIG, dynamic_sampling=DynamicSamplingConfig()), Assumptions(informative=1 / 3)
    )
    assert (work.prompts, work.waves) == (24, 1)


@pytest.mark.parametrize("tokens", [0.0, 49.0])
def test_lengths_beyond_the_configuration_are_refused(tokens):
    with pytest.raises(ConfigError, match=r"at most sampling.max_response_tokens = 48"):
        workload_of(CONFIG, Assumptions(response_tokens=tokens))


def with_turns(**sampling):
    sampling = replace(CONFIG.sampling, **sampling)
    return replace(CONFIG, environment=EnvironmentConfig(source="guess", max_turns=5), sampling=sampling)


def test_an_episode_is_read_again_between_its_turns_where_no_bit_may_depend_on_how_it_is_read():
    """64 episodes of 16 + 48 tokens: between two turns they have 16 + 24 on average, four times 64 x 40 = 2560; of three turns two times."""
    invariant = with_turns(batch_invariant=True)
    work = workload_of(invariant, Assumptions())
    assert (work.readings, work.between) == (4, 40)
    told = "\n".join(work.notes)
    assert (
        "--turns was not given: an episode has environment.max_turns = 5, which is the most; each but" in told
    )
    assert "(sampling.batch_invariant), 10,240 tokens a step" in told
    assert "not counted are the time of its answers" in told
    work = workload_of(invariant, Assumptions(turns=3))
    assert work.readings == 2
    assert "--turns 3; each but the first reads the episode again" in "\n".join(work.notes)
    assert "5,120 tokens a step" in "\n".join(work.notes)


def test_what_is_fed_is_not_read_again_and_the_most_that_could_be_is_said():
    work = workload_of(with_turns(), Assumptions())
    assert work.readings == 0
    assert "is fed to the pages that an episode keeps; if none kept them, 10,240 tokens a step more" in "\n".join(work.notes)  # fmt: skip


def test_without_an_environment_nothing_is_said_of_turns():
    work = workload_of(replace(CONFIG, sampling=with_turns(batch_invariant=True).sampling), Assumptions())
    assert work.readings == 0
    assert "turn" not in " ".join(work.notes)


@pytest.mark.parametrize("turns", [0.5, 5.5])
def test_turns_beyond_the_configuration_are_refused(turns):
    with pytest.raises(ConfigError, match=r"at least 1 and at most environment.max_turns = 5"):
        workload_of(with_turns(), Assumptions(turns=turns))
    with pytest.raises(ConfigError, match=r"without an environment.source there are no turns"):
        workload_of(CONFIG, Assumptions(turns=turns))
