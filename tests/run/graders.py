"""Reward functions that workers load. Each new worker imports this file, so it imports little."""

import asyncio
import time

from dapo_jax.rewards import whole_group


def sum_of_fours(sample):
    """Right for about a quarter of the responses, so that a third of the groups of four is flat."""
    return int(sample.tokens.sum()) % 4 == 0


def late_sum_of_fours(sample):
    """The same, after the sampler has run out of work."""
    time.sleep(0.05)
    return sum_of_fours(sample)


async def awaited_sum_of_fours(sample):
    await asyncio.sleep(0.05)
    return sum_of_fours(sample)


def brevity(sample):
    return 1.0 / len(sample.response)


@whole_group
def shortest(group):
    least = min(len(sample.response) for sample in group)
    return [len(sample.response) == least for sample in group]


def longer_than_the_mean(prompts, completions, **kwargs):
    """As TRL calls it: all completions to one prompt at once."""
    mean = sum(len(completion) for completion in completions) / len(completions)
    return [len(completion) - mean for completion in completions]


async def judge(sample):
    await asyncio.sleep(0.01)
    return 10.0 * len(sample.response)
