"""Environments of tinker-cookbook's convention."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from dapo_jax.environments import Context, load_environment
from tests.environments.playing import TOKENIZER, playing, turn_of

ROW = {"prompt": "2+2?", "answer": "4"}


class Ids:
    """As tinker's ModelInput."""

    def __init__(self, ids):
        self.ids = list(ids)

    def to_ints(self):
        return self.ids


class Asking:
    """Asks again until the answer comes; `forgetful`: with a new context."""

    def __init__(self, row, forgetful):
        self.row, self.forgetful, self.heard = row, forgetful, []

    async def initial_observation(self):
        self.context = [7, *TOKENIZER.encode(self.row["prompt"]).tolist()]
        return Ids(self.context), [TOKENIZER.eos_id]

    async def step(self, action, *, extra=None):
        self.heard.append((action, extra))
        text = text_of(action)
        done = text == self.row["answer"]
        begins = [7] if self.forgetful else [*self.context, *action]
        self.context = [*begins, *TOKENIZER.encode(" Again.").tolist()]
        metrics = {"correct": float(done), "text": text, "turns": 1}
        after = Ids([] if done else self.context)
        return SimpleNamespace(reward=1.0 * done, episode_done=done, next_observation=after, metrics=metrics)


def text_of(ids):
    """Of a turn, which ends with an end token."""
    return TOKENIZER.decode(np.array(ids[:-1], np.int32))


class Builder:
    """Makes two environments at a time, and prefers the shortest answers."""

    made, cleaned, seen = 0, 0, None
    forgetful = False

    def __init__(self, row):
        self.row = row
        Builder.made += 1

    async def make_envs(self):
        return [Asking(self.row, self.forgetful) for _ in range(2)]

    async def compute_group_rewards(self, trajectory_group, env_group):
        Builder.seen = trajectory_group, env_group
        return [(-0.1 * len(one.transitions), {}) for one in trajectory_group]

    async def cleanup(self):
        Builder.cleaned += 1


class Forgetful(Builder):
    forgetful = True


class Overlong(Builder):
    async def make_envs(self):
        async def initial_observation():
            return SimpleNamespace(reward=-1.0)

        return [SimpleNamespace(initial_observation=initial_observation)]


def test_an_observation_that_continues_is_appended():
    environment = load_environment(f"tinker:{__name__}:Builder")
    context, steps, episode = asyncio.run(playing(environment, ROW, "5", "4"))
    assert context == Context([7, *TOKENIZER.encode("2+2?").tolist()])
    assert (steps[0].append, steps[0].context) == (TOKENIZER.encode(" Again.").tolist(), None)
    assert (steps[0].correct, steps[1].correct) == (False, True)
    assert (steps[1].done, steps[1].reward) == (True, 1.0)
    assert steps[1].metrics == {"correct": 1.0, "turns": 1.0}
    assert episode.env.heard[0] == (turn_of("5").tokens.tolist(), {"stop_reason": "stop"})


def test_an_observation_that_begins_differently_is_a_new_context():
    environment = load_environment(f"tinker:{__name__}:Forgetful")
    _, [step], _ = asyncio.run(playing(environment, ROW, "5"))
    assert step.context == Context([7, *TOKENIZER.encode(" Again.").tolist()])


def test_the_responses_to_a_prompt_share_a_builder_that_compares_them():
    async def group():
        environment = load_environment(f"tinker:{__name__}:Builder")
        made, cleaned = Builder.made, Builder.cleaned
        turns = [["4"], ["5", "4"], ["5"]]
        episodes = [(await playing(environment, ROW, *texts, seed=1))[2] for texts in turns]
        other = (await playing(environment, ROW, "4", seed=2))[2]
        assert Builder.made == made + 2
        rewards = await environment.group_rewards(episodes)
        for episode in episodes:
            assert Builder.cleaned == cleaned
            await episode.close()
        assert Builder.cleaned == cleaned + 1
        await other.close()
        return rewards, episodes

    rewards, episodes = asyncio.run(group())
    assert rewards == pytest.approx([1.0 - 0.1, 1.0 - 0.2, -0.1])
    assert len({id(episode.env) for episode in episodes}) == 3, "each has an environment of its own"
    trajectories, envs = Builder.seen
    assert envs == [episode.env for episode in episodes]
    first = trajectories[1].transitions[0]
    assert (first.ac.tokens, first.reward, first.episode_done) == (turn_of("5").tokens.tolist(), 0.0, False)
    assert first.ac.maybe_logprobs == [-0.5, -0.5]
    assert first.ob.to_ints()[0] == 7


def test_a_first_observation_that_would_be_too_long_is_an_error():
    with pytest.raises(ValueError, match="no first observation"):
        asyncio.run(playing(load_environment(f"tinker:{__name__}:Overlong"), ROW, "5"))


def test_an_empty_group_has_no_rewards():
    assert asyncio.run(load_environment(f"tinker:{__name__}:Builder").group_rewards([])) == []
