"""OpenEnv's environments: a double of its client, and the package's own server and client over loopback where they are installed."""

import asyncio
import socket
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from dapo_jax.environments import load_environment
from tests.environments.playing import played, playing

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


@contextmanager
def serving():
    """The package's own server with a small environment: it repeats the action, and ends at 12."""
    pytest.importorskip("openenv.core", reason="openenv is not installed")
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Say(Action):
        message: str

    class Heard(Observation):
        echoed: str = ""

    class Echo(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            super().__init__()
            self.count = 0

        def reset(self, seed=None, episode_id=None, **rest):
            return Heard(echoed=f"ready {seed}", done=False, reward=0.0)

        def step(self, action):
            self.count += 1
            done = action.message == "12"
            return Heard(echoed=action.message, done=done, reward=1.0 if done else -0.1 * self.count)

        @property
        def state(self):
            return State(episode_id="e", step_count=self.count)

    app = create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=2)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [held]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join(10)


def test_a_server_of_the_package_is_played_with_texts():
    async def play(url):
        environment = load_environment(f"openenv:{url}")
        episodes = [await playing(environment, ROW, "1", "12", seed=seed) for seed in (1, 2)]
        for _, _, episode in episodes:
            await episode.close()
        # There is room for two sessions, so those before were ended.
        _, _, third = await playing(environment, ROW, "12", seed=3)
        await third.close()
        return episodes

    with serving() as url:
        episodes = asyncio.run(play(url))
    for seed, (context, steps, _) in zip((1, 2), episodes, strict=True):
        assert context.contents[-1]["content"] == f"Make it say 12.\n\nready {seed}"
        assert [step.append[0]["content"] for step in steps] == ["1", "12"]
        assert [step.reward for step in steps] == pytest.approx([-0.1, 1.0])
        assert [step.done for step in steps] == [False, True]
