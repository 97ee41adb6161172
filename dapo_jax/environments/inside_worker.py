"""Runs episodes inside an environment worker. All episodes share one event loop, and each sync call runs in a thread."""

import asyncio
import json
import os
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from dapo_jax.environments.by_name import load_environment
from dapo_jax.environments.calls import (
    LostError,
    begun,
    called,
    checked_episode,
    checked_scores,
    ended,
    lost_by,
)
from dapo_jax.environments.protocol import Environment
from dapo_jax.environments.turns_as_json import MOST_BYTES, appended_as_json, step_as_json, turn_of
from dapo_jax.rewards.async_calls import EventLoop
from dapo_jax.workers.inside import Answer, Serve


def load(setup: Mapping[str, Any]) -> tuple[dict[str, Any], Serve]:
    """Loads the environment in the worker. See `dapo_jax.workers.inside` for the interface."""
    environment = load_environment(setup["source"], **setup["options"])
    methods = [name for name in ("group_rewards", "finish") if getattr(environment, name, None) is not None]
    return {"methods": methods}, _Serving(environment, setup["timeout_s"]).serve


class _Serving:
    """Runs the episodes of one worker."""

    def __init__(self, environment: Environment, timeout_s: float) -> None:
        self._environment: Any = environment
        self._called = partial(called, timeout_s=timeout_s)
        self._episodes: dict[int, Any] = {}

    def serve(self, calls: Iterable[dict[str, Any]], answer: Answer) -> None:
        """Answers calls until `calls` is exhausted, then ends the process."""
        loop = EventLoop("a task of an environment raised; the episodes continue")
        try:
            for call in calls:
                loop.submit(self._answer(call, answer))
        finally:
            os._exit(0)

    async def _answer(self, call: Mapping[str, Any], answer: Answer) -> None:
        content: dict[str, Any]
        try:
            content = {"answer": await self._result(call)}
            if (size := len(json.dumps(content))) > MOST_BYTES:
                raise LostError(f"the answer has {size:,} bytes in JSON; the limit is {MOST_BYTES:,}")
        except (Exception, asyncio.CancelledError) as error:
            lost = lost_by(error)
            content = {"lost": lost.lost, "reason": str(lost)}
        if "can't start new thread" in content.get("reason", ""):
            content = {"ended": "it could not start another thread: the environment does not end its threads"}
        answer(call["id"], content)

    async def _result(self, call: Mapping[str, Any]) -> Any:
        episode: Any = self._episodes.get(call.get("episode", -1))
        match call["do"]:
            case "group_rewards":
                compared = [self._episodes[number] for number in call["episodes"]]
                scores = await self._called(self._environment.group_rewards, compared)
                return checked_scores(scores, count=len(compared))
            case "episode":
                created = await self._called(self._environment.episode, call["row"], call["seed"])
                self._episodes[call["episode"]] = checked_episode(created)
            case "start":
                return appended_as_json(await begun(episode, self._called))
            case "step":
                return step_as_json(await self._called(episode.step, turn_of(call["turn"])))
            case "finish":
                return step_as_json(await self._called(self._environment.finish, episode, call["reason"]))
            case "close":
                self._episodes.pop(call["episode"], None)
                await ended(episode, self._called)
        return None
