"""OpenEnv's environments, with a double of its client."""

import asyncio
from types import SimpleNamespace

import pytest

from dapo_jax.environments import load_environment
from tests.environments.playing import played

ROW = {"prompt": [{"role": "user", "content": "Make it say 12."}], "answer": "12"}


class Client:
    """A session without a server."""

    open = 0

    async def connect(self):
        Client.open += 1

    async def reset(self, seed):
        self.seed = seed
        return SimpleNamespace(observation={"text": "ready"}, reward=None, done=False)

    async def step(self, action):
        if action.get("break") == "invalid":
            raise RuntimeError("Server error: Invalid message (code: VALIDATION_ERROR)")
        if action.get("break"):
            raise RuntimeError("Server error: out of memory (code: EXECUTION_ERROR)")
        done, observation = action["say"] == "12", {"said": action["say"], "ü": [1]}
        return SimpleNamespace(observation=observation, reward=1.0 if done else None, done=done)

    async def close(self):
        Client.open -= 1


def test_a_turn_is_an_action_in_json_for_a_client_without_a_schema():
    environment = load_environment(f"openenv:{__name__}:Client")
    turns = ['{"say": "1"}', "say 12", "[1]", '{"break": "invalid"}', '{"say": "12"}']
    context, steps, episode = played(environment, ROW, *turns, seed=5)
    assert context.contents == [{"role": "user", "content": "Make it say 12.\n\nready"}]
    assert episode._client.seed == 5
    assert steps[0].append == [{"role": "user", "content": '{"said": "1", "ü": [1]}'}]
    for step, count in zip(steps[1:4], (1.0, 2.0, 3.0), strict=True):
        assert step.append[0]["content"].startswith("error: this is not an action: ")
        assert (step.done, step.reward, step.metrics) == (False, 0.0, {"action_errors": count})
    assert (steps[4].done, steps[4].reward) == (True, 1.0)
    before = Client.open
    asyncio.run(episode.close())
    assert Client.open == before - 1


def test_an_error_of_the_servers_own_is_raised():
    with pytest.raises(RuntimeError, match="out of memory"):
        played(load_environment(f"openenv:{__name__}:Client"), ROW, '{"break": "memory"}')
