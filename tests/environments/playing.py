"""Plays an episode without a sampler, with given turns."""

import asyncio

import numpy as np

from dapo_jax.environments import Turn
from dapo_jax.text.tokenizers import ByteTokenizer

TOKENIZER = ByteTokenizer()


def turn_of(text, number=0, finish_reason="stop"):
    tokens = np.append(TOKENIZER.encode(text), TOKENIZER.eos_id).astype(np.int32)
    logprobs = np.full(len(tokens), -0.5, np.float32)
    return Turn(tokens=tokens, logprobs=logprobs, text=text, finish_reason=finish_reason, number=number)


async def result_of(given):
    return await given if asyncio.iscoroutine(given) else given


def played(environment, row, *texts, seed=1):
    """Returns the first context of an episode, its steps, and the episode."""
    return asyncio.run(playing(environment, row, *texts, seed=seed))


async def playing(environment, row, *texts, seed=1):
    """Like `played`, on the running event loop."""
    episode = await result_of(environment.episode(row, seed))
    context = await result_of(episode.start())
    steps = []
    for number, text in enumerate(texts):
        assert not (steps and steps[-1].done), "the episode is over"
        steps.append(await result_of(episode.step(turn_of(text, number))))
    return context, steps, episode


def call(name, **arguments):
    """A call as Qwen writes it."""
    import json

    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
