"""OpenEnv environments, which run on servers. The name is `openenv:URL`, or `openenv:PLACE:function` with a function that creates a client.

In OpenEnv 0.10, a client has a WebSocket session with `reset` and `step`, and actions and observations are objects. If the only required
field of the server's action schema is a string, the turn's text becomes that field. Otherwise the turn must be the action as JSON. Each
episode has its own session, so `max_concurrent_envs` of the server must be at least the number of concurrent episodes.
"""

import importlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from dapo_jax.environments.protocol import Context, Step, Turn
from dapo_jax.environments.tools import conversation
from dapo_jax.hints import needing
from dapo_jax.rewards.functions import load_function
from dapo_jax.text.plain_json import read_numbers


class OpenEnvironment:
    """Creates a client session for each response."""

    def __init__(self, place: str) -> None:
        """Stores the server's URL, or loads the function that creates a client. Raises ValueError if it or the package is missing."""
        self._url = place if place.startswith(("http://", "https://")) else ""
        self._field: str | None = None if self._url else ""
        with needing("openenv", f"openenv:{place} needs a package"):
            core = importlib.import_module("openenv.core") if self._url else None
        make = load_function(place) if core is None else partial(core.GenericEnvClient, base_url=place)
        self._client: Callable[[], Any] = make

    async def episode(self, row: Mapping[str, Any], seed: int) -> "OpenEpisode":
        """Creates the episode for a response. The first call fetches the server's action schema."""
        if self._field is None:
            self._field = await _text_field(self._url)
        return OpenEpisode(self._client(), self._field, row, seed)


class OpenEpisode:
    """Adapts an OpenEnv client session to the `Episode` interface."""

    def __init__(self, client: Any, field: str, row: Mapping[str, Any], seed: int) -> None:
        self._client, self._field, self._row, self._seed = client, field, row, seed
        self._errors = 0

    async def start(self) -> Context:
        """Returns the row's conversation, with the first observation added to the last message."""
        await self._client.connect()
        first = await self._client.reset(seed=self._seed)
        return Context(conversation(self._row, f"\n\n{_text_of(first.observation)}"))

    async def step(self, turn: Turn) -> Step:
        """Returns the answer to a turn. For an invalid action, the answer is an error message, and the metric `action_errors` is incremented."""
        try:
            action = {self._field: turn.text} if self._field else read_numbers(turn.text)
            if not isinstance(action, dict):
                raise ValueError("it is not a JSON object")
            result = await self._client.step(action)
            text, reward, done = _text_of(result.observation), result.reward or 0.0, bool(result.done)
        except (ValueError, RuntimeError) as error:
            if type(error) is RuntimeError and "VALIDATION_ERROR" not in str(error):
                raise  # an error of the server, not of the action
            self._errors += 1
            text, reward, done = f"error: this is not an action: {error!s:.500}", 0.0, False
        metrics = {"action_errors": float(self._errors)}
        return Step(reward=reward, done=done, append=[{"role": "user", "content": text}], metrics=metrics)

    async def close(self) -> None:
        """Ends the client session, which frees its slot on the server."""
        await self._client.close()


async def _text_field(url: str) -> str:
    """Fetches the action schema. Returns the name of its only required field if this field is a string, or else an empty string."""
    async with importlib.import_module("httpx").AsyncClient() as http:
        action = (await http.get(f"{url.rstrip('/')}/schema")).raise_for_status().json()["action"]
    required = action.get("required", [])
    is_text = len(required) == 1 and action["properties"][required[0]].get("type") == "string"
    return required[0] if is_text else ""


def _text_of(observation: Any) -> str:
    """Returns an observation as text. If it has several fields, they are encoded as JSON."""
    if isinstance(observation, Mapping):
        fields = {name: value for name, value in observation.items() if name != "metadata"}
        observation = next(iter(fields.values())) if len(fields) == 1 else fields
    if isinstance(observation, str):
        return observation
    return json.dumps(observation, ensure_ascii=False, default=str)
