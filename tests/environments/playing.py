"""Plays an episode without a sampler, with given turns."""

import asyncio
import json

import numpy as np

from dapo_jax.dapo.rollouts import DrawnTurn
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.environments import Turn
from dapo_jax.rewards.sample import Sample
from dapo_jax.text.tokenizers import ByteTokenizer

TOKENIZER = ByteTokenizer()


def turn_of(text, number=0, finish_reason="stop"):
    tokens = np.append(TOKENIZER.encode(text), TOKENIZER.eos_id).astype(np.int32)
    logprobs = np.full(len(tokens), -0.5, np.float32)
    return Turn(tokens=tokens, logprobs=logprobs, text=text, finish_reason=finish_reason, number=number)


def drawn(text, tokenizer=TOKENIZER):
    """A turn as the sampler returns it, without an end token."""
    tokens = tokenizer.encode(text)
    logprobs = np.linspace(-3.1, -0.1, len(tokens)).astype(np.float32)
    return DrawnTurn(record=Tokens(tokens, logprobs=logprobs), finish_reason="stop")


def verdicts_of(episodes, prompt, count=1):
    """The verdicts on the episodes of a prompt."""
    empty = Sample(prompt=prompt, response="", tokens=np.zeros(0, np.int32), finish_reason="stop")
    return episodes.verdicts([empty] * count).result(60)


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
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
