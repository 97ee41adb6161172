"""Environments of tinker-cookbook: `tinker:PLACE:Builder`, a function or class that makes an `EnvGroupBuilder` from a row.

Its convention, as of 0.6.1: actions are ids and observations have `to_ints()`, so nothing is rendered here, and neither tinker nor torch
is imported. An observation that begins with the context and the turn appends the rest; any other is a new context. Its stop conditions
are ignored: a turn ends with the model's end tokens, or with `sampling.stop`.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

from dapo_jax.environments.protocol import Context, Step, Turn
from dapo_jax.rewards.functions import load_function


class TinkerEnvironment:
    """Makes the environments of a prompt's responses with the prompt's builder."""

    def __init__(self, place: str) -> None:
        """Loads `PLACE:Builder`.

        Raises:
            ValueError: it cannot be loaded.
        """
        self._make: Callable[[Mapping[str, Any]], Any] = load_function(place)
        self._groups: WeakValueDictionary[int, _BuilderEpisodes] = WeakValueDictionary()

    async def episode(self, row: Mapping[str, Any], seed: int) -> "TinkerEpisode":
        """Returns the episode of a response. Responses of a prompt have the same seed and share a builder."""
        group = self._groups.get(seed)
        if group is None:
            group = self._groups[seed] = _BuilderEpisodes(self._make(row))
        async with group.making:
            group.free = group.free or list(await group.builder.make_envs())
            group.held += 1
            return TinkerEpisode(group.free.pop(0), group)

    async def group_rewards(self, episodes: Sequence["TinkerEpisode"]) -> list[float]:
        """Returns the sums of the rewards of the turns and the builder's reward of the whole."""
        played = [SimpleNamespace(transitions=each.turns, final_ob=each.last) for each in episodes]
        envs = [each.env for each in episodes]
        given = await episodes[0].group.builder.compute_group_rewards(played, envs) if episodes else []
        return [
            sum(turn.reward for turn in each.turns) + reward
            for each, (reward, _) in zip(episodes, given, strict=True)
        ]


class _BuilderEpisodes:
    """A prompt's builder, and its environments that are not used yet."""

    def __init__(self, builder: Any) -> None:
        self.builder, self.making, self.held = builder, asyncio.Lock(), 0
        self.free: list[Any] = []


class TinkerEpisode:
    """An `Env`, as an episode."""

    def __init__(self, env: Any, group: _BuilderEpisodes) -> None:
        self.env, self.group, self.last = env, group, None
        self.turns: list[Any] = []
        self._context: list[int] = []

    async def start(self) -> Context:
        """Returns the first observation, which replaces the row's prompt. Raises ValueError if it would be too long."""
        given = await self.env.initial_observation()
        if not isinstance(given, tuple):
            raise ValueError(f"the environment returned no first observation: {given!r:.300}")
        self.last, self._context = given[0], given[0].to_ints()
        return Context(self._context)

    async def step(self, turn: Turn) -> Step:
        """Returns the answer to a turn. A metric `correct` marks a correct episode."""
        tokens = turn.tokens.tolist()
        given = await self.env.step(tokens, extra={"stop_reason": turn.finish_reason})
        action = SimpleNamespace(tokens=tokens, maybe_logprobs=turn.logprobs.tolist())
        self.turns.append(SimpleNamespace(ob=self.last, ac=action, **vars(given)))
        metrics = {name: float(one) for name, one in given.metrics.items() if isinstance(one, int | float)}
        correct = bool(metrics["correct"]) if "correct" in metrics else None
        before, self.last = [*self._context, *tokens], given.next_observation
        self._context = [] if given.episode_done else self.last.to_ints()
        follows = self._context[: len(before)] == before
        return Step(
            reward=given.reward,
            done=bool(given.episode_done),
            append=self._context[len(before) :] if follows else "",
            context=None if follows or given.episode_done else Context(self._context),
            correct=correct,
            metrics=metrics,
        )

    async def close(self) -> None:
        """Calls the builder's `cleanup` when the last episode is closed."""
        self.group.held -= 1
        if self.group.held == 0 and hasattr(self.group.builder, "cleanup"):
            await self.group.builder.cleanup()
