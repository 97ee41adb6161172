"""Waves are a setting of the clock: a wave is a round as long as the longest response."""

import random

import numpy as np
import pytest

from dapo_jax.dapo.dynamic_sampling import Collector
from dapo_jax.dapo.rollouts import Group, Prompt, Response, Rollout, Verdict
from dapo_jax.dapo.virtual_clock import ClockSizes, VirtualClock


def make_group(ordinal, informative):
    response = Response(tokens=np.empty(0, np.int32), logprobs=np.empty(0, np.float32), finish_reason="stop")
    rollouts = tuple(
        Rollout(response=response, text="", verdict=Verdict(correct=correct), reward=0.0)
        for correct in (True, not informative)
    )
    return Group(
        prompt=Prompt(ordinal=ordinal, tokens=np.zeros(1, np.int32), text="", answer=""), rollouts=rollouts
    )


def in_waves(informative, *, needed, wave, steps, order):
    cursor, found = 0, []
    for step in range(steps):
        collector = Collector(
            needed=needed, cursor=cursor, prompts_per_wave=wave, version=step, max_waves=10**6
        )
        while ordinals := [one for some in iter(lambda: collector.draw(1024), []) for one in some]:
            for ordinal in order.sample(ordinals, len(ordinals)):
                collector.add(make_group(ordinal, informative(ordinal)))
        collected = collector.finish()
        cursor = collected.cursor
        found.append(([group.prompt.ordinal for group in collected.groups], cursor, collected.waves))
    return found


def by_clock(informative, *, needed, wave, steps, group=4):
    clock = VirtualClock(
        ClockSizes(in_flight=wave * group, samples_per_prompt=group, needed=needed, verdict_rounds=0)
    )
    found = []
    for _ in range(steps):
        rounds = 0
        while not clock.step_ends:
            started = clock.start()
            rounds += 1
            clock.judge({ordinal: informative(ordinal) for ordinal in clock.end_round(started)})
        taken = sorted(clock.end_step())
        clock.ready.clear()
        assert not clock.groups
        found.append((taken, clock.following.ordinal, rounds))
    return found


@pytest.mark.parametrize("seed", range(0, 400, 100))
def test_a_wave_is_a_round_as_long_as_the_longest_response(seed):
    """For random shares of informative groups, sizes of steps and of waves: the same groups, the same cursor, as many waves as rounds."""
    for case in range(seed, seed + 100):
        numbers = random.Random(case)
        share, needed, wave = numbers.uniform(0.05, 0.95), numbers.randint(1, 12), numbers.randint(1, 30)

        def informative(ordinal, case=case, share=share):
            return random.Random(case * 1_000_003 + ordinal).random() < share

        sizes = {"needed": needed, "wave": wave, "steps": 6}
        assert in_waves(informative, **sizes, order=numbers) == by_clock(informative, **sizes), case
