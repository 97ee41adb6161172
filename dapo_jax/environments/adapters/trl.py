"""Environments written for TRL's `environment_factory`: `trl:PLACE:Class`, or `trl:PLACE:Class+function` with a reward function.

In TRL 1.16, the class is instantiated without arguments. `reset(**row)` returns None, or a text to append to the last message. The method
`get_reward()` returns a reward, and all other public methods are tools. A reward function receives the instances as `environments`. The
episode's reward is the sum of the rewards from both.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from dapo_jax.environments.protocol import Context, Message, Step, Turn
from dapo_jax.environments.tool_calls import ToolCall, tool_calls
from dapo_jax.environments.tools import ToolEpisode, Tools, conversation
from dapo_jax.rewards.adapters import named_arguments
from dapo_jax.rewards.functions import load_function


class TrlEnvironment:
    """Creates an instance of the TRL class for each response."""

    def __init__(self, place: str) -> None:
        """Loads the class, and the reward function if `place` contains one. Raises ValueError if a class or its reward is missing."""
        named, _, reward = place.partition("+")
        self._class = load_function(named)
        self._function = load_function(f"{named.rpartition(':')[0]}:{reward}") if reward else None
        if not callable(getattr(self._class, "reset", None)):
            raise ValueError(f"trl:{place}: there is no method reset(**row)")
        if self._function is None and not hasattr(self._class, "get_reward"):
            remedy = f"write a method get_reward(), or name a reward function in the same file: trl:{named}+function"
            raise ValueError(f"trl:{place}: there is no reward: {remedy}")

    def episode(self, row: Mapping[str, Any], seed: int) -> "TrlEpisode":
        """Creates the episode for a response."""
        return TrlEpisode(self._class(), row)

    async def group_rewards(self, episodes: Sequence["TrlEpisode"]) -> list[float]:
        """Returns the sum of the rewards from `get_reward` and from the reward function for each episode, including truncated episodes."""
        methods = [getattr(episode.instance, "get_reward", None) for episode in episodes]
        totals = [0.0 if method is None else float(await _result(method())) for method in methods]
        if self._function is None or not episodes:
            return totals
        columns = {name: [value] * len(episodes) for name, value in episodes[0].row.items()} | {
            "prompts": [episode.asked for episode in episodes],
            "completions": [episode.answers for episode in episodes],
            "completion_ids": [episode.tokens for episode in episodes],
            "environments": [episode.instance for episode in episodes],
            **dict.fromkeys(("log_metric", "log_extra"), lambda name, value: None),
        }
        columns.pop("prompt", None)
        scores = await _result(self._function(**named_arguments(self._function, columns)))
        # A reward function may return None for an episode, as in TRL, if it does not apply to that episode.
        return [total + float(score or 0.0) for total, score in zip(totals, scores, strict=True)]


class TrlEpisode(ToolEpisode):
    """A tool episode whose tools are the public methods of a TRL environment."""

    def __init__(self, instance: Any, row: Mapping[str, Any]) -> None:
        methods = [name for name, _ in inspect.getmembers(type(instance), inspect.isfunction)]
        tools = [name for name in methods if name[0] != "_" and name not in ("reset", "get_reward")]
        super().__init__(Tools([getattr(instance, name) for name in tools]), row)
        self.instance = instance
        self.asked: list[Message] = []
        self.answers: list[Message] = []
        self.tokens: list[int] = []

    async def start(self) -> Context:
        """Returns the row's conversation, with the text from `reset` added to the last message."""
        observed = await _result(self.instance.reset(**self.row))
        if not (observed is None or isinstance(observed, str)):
            raise ValueError(f"reset returned {observed!r:.200}; it must return a text or None")
        self.asked = conversation(self.row, observed or "")
        return Context(self.asked, tools=self.tools.schemas)

    async def step(self, turn: Turn) -> Step:
        """Returns the results of the turn's tool calls. If there are no calls, ends the episode."""
        parsed = tool_calls(turn.marked_text or turn.text, self.tools.schemas)
        made = [{"name": c.name, "arguments": c.arguments} for c in parsed if isinstance(c, ToolCall)]
        calls = [{"type": "function", "function": function} for function in made]
        fields = {"tool_calls": calls} if calls else {}
        self.answers.append({"role": "assistant", "content": turn.text, **fields})
        self.tokens += turn.tokens.tolist()
        step = await super().step(turn)
        messages = [] if step.done else step.append
        self.answers += [message for message in messages if isinstance(message, Mapping)]
        return step

    async def finish(self, turn: Turn) -> Step:
        """Returns a step without a reward, because the reward comes from `group_rewards` later."""
        return Step()


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
