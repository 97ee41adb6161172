"""Tinker-cookbook environments. In `tinker:PLACE:Builder`, `Builder` is a function or class that creates an `EnvGroupBuilder` from a row.

In tinker-cookbook 0.6.1, actions are token ids, and `to_ints()` returns the token ids of an observation. So no chat template is used, and
neither tinker nor torch is imported. If an observation begins with the previous context and the model's last turn, only the tokens after them are appended to the context.
Otherwise, the observation becomes a new context. The environment's stop conditions are ignored: a turn ends at an end token or at `sampling.stop`.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

from dapo_jax.environments.protocol import Context, Step, Turn
from dapo_jax.rewards.functions import load_function


class TinkerEnvironment:
    """Creates a builder for each prompt. The builder creates the environments for the prompt's responses."""

    def __init__(self, place: str) -> None:
        """Loads the builder function or class, `PLACE:Builder`. Raises ValueError if it cannot be loaded."""
        self._make: Callable[[Mapping[str, Any]], Any] = load_function(place)
        self._groups: WeakValueDictionary[int, _BuilderEpisodes] = WeakValueDictionary()

    async def episode(self, row: Mapping[str, Any], seed: int) -> "TinkerEpisode":
        """Creates the episode for a response. All responses to a prompt have the same seed and share one builder."""
        group = self._groups.get(seed)
        if group is None:
            group = self._groups[seed] = _BuilderEpisodes(self._make(row))
        async with group.making:
            group.free = group.free or list(await group.builder.make_envs())
            group.held += 1
            return TinkerEpisode(group.free.pop(0), group)

    async def group_rewards(self, episodes: Sequence["TinkerEpisode"]) -> list[float]:
        """Returns each episode's reward, which is the sum of its turn rewards and of its group reward from the builder."""
        if not episodes:
            return []
        played = [SimpleNamespace(transitions=episode.turns, final_ob=episode.last) for episode in episodes]
        envs = [episode.env for episode in episodes]
        rewards = await episodes[0].group.builder.compute_group_rewards(played, envs)
        pairs = zip(episodes, rewards, strict=True)
        return [sum(turn.reward for turn in episode.turns) + reward for episode, (reward, _) in pairs]


class _BuilderEpisodes:
    """A prompt's builder, and the environments that the builder created for episodes that have not started yet."""

    def __init__(self, builder: Any) -> None:
        self.builder, self.making, self.held = builder, asyncio.Lock(), 0
        self.free: list[Any] = []


class TinkerEpisode:
    """Adapts a Tinker-cookbook `Env` to the `Episode` interface."""

    def __init__(self, env: Any, group: _BuilderEpisodes) -> None:
        self.env, self.group, self.last = env, group, None
        self.turns: list[Any] = []
        self._context: list[int] = []

    async def start(self) -> Context:
        """Returns the first observation, which replaces the row's prompt. Raises ValueError if there is no observation."""
        first = await self.env.initial_observation()
        if not isinstance(first, tuple):
            raise ValueError(f"the environment returned no first observation: {first!r:.300}")
        self.last, self._context = first[0], first[0].to_ints()
        return Context(self._context)

    async def step(self, turn: Turn) -> Step:
        """Returns the answer to a turn. The metric `correct`, if present, decides whether the episode is correct."""
        tokens = turn.tokens.tolist()
        result = await self.env.step(tokens, extra={"stop_reason": turn.finish_reason})
        done, before = bool(result.episode_done), [*self._context, *tokens]
        action = SimpleNamespace(tokens=tokens, maybe_logprobs=turn.logprobs.tolist())
        self.turns.append(SimpleNamespace(ob=self.last, ac=action, **vars(result)))
        metrics = {
            name: float(value) for name, value in result.metrics.items() if isinstance(value, int | float)
        }
        correct = bool(metrics["correct"]) if "correct" in metrics else None
        self.last = result.next_observation
        self._context = [] if done else self.last.to_ints()
        follows = self._context[: len(before)] == before
        return Step(
            reward=result.reward,
            done=done,
            append=self._context[len(before) :] if follows else "",
            context=None if follows or done else Context(self._context),
            correct=correct,
            metrics=metrics,
        )

    async def close(self) -> None:
        """Calls the builder's `cleanup` after closing the prompt's last episode."""
        self.group.held -= 1
        if self.group.held == 0 and hasattr(self.group.builder, "cleanup"):
            await self.group.builder.cleanup()
