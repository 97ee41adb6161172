"""The inside of an environment's worker: many episodes on one event loop, and a thread for each call that is not async."""

import asyncio
import inspect
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dapo_jax.environments.by_name import load_environment
from dapo_jax.environments.calls import (
    LostError,
    answer_raises,
    checked_episode,
    checked_scores,
    outcome,
    result,
    too_late,
)
from dapo_jax.environments.protocol import Environment
from dapo_jax.environments.turns_as_json import MOST_BYTES, appended_as_json, step_as_json, turn_of
from dapo_jax.rewards.async_calls import DaemonThreads, ends_in_time, run_until
from dapo_jax.workers.inside import Answer, Serve

CALLS_LEFT = 8
"""Number of given-up calls that still run, such as functions that block, at which a worker is replaced."""

THREADS_LEFT = 64
"""Number of threads left by closed episodes at which a worker is replaced, before it can start no further thread."""

EPISODE_THREADS = 4
"""Number of threads that an open episode may have."""

_MOMENT_S = 0.1
"""Seconds that a call which was given up has to end by itself."""


def load(setup: Mapping[str, Any]) -> tuple[dict[str, Any], Serve]:
    """Loads the environment, see `dapo_jax.workers.inside`.

    Raises:
        ValueError: it cannot be loaded.
    """
    environment = load_environment(setup["source"])
    compares = getattr(environment, "group_rewards", None) is not None
    return {"compares": compares}, _Serving(environment, setup["timeout_s"]).serve


class _ExhaustedError(Exception):
    """This process can start no further thread."""


class _Serving:
    """The event loop and the episodes on it."""

    def __init__(self, environment: Environment, timeout_s: float) -> None:
        self._environment: Any = environment
        self._timeout_s = timeout_s
        self._episodes: dict[int, Any] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._blocking: set[int] = set()
        """Calls whose function runs in a thread."""
        self._given_up: dict[int, asyncio.Task[Any]] = {}
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(DaemonThreads())

    def serve(self, calls: Iterable[dict[str, Any]], answer: Answer) -> None:
        """Answers calls until there are no more, when the process ends."""

        def read() -> None:
            try:
                for call in calls:
                    self._loop.call_soon_threadsafe(begin, call)
            finally:
                os._exit(0)

        def begin(call: dict[str, Any]) -> None:
            task = self._loop.create_task(self._answer(call, answer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        threading.Thread(target=read, daemon=True).start()
        self._own_threads = threading.active_count()
        asyncio.set_event_loop(self._loop)
        run_until(self._loop, lambda: False, said="a task of an environment raised; the episodes continue")

    async def _answer(self, call: Mapping[str, Any], answer: Answer) -> None:
        number, may_wear_out = call["id"], call["do"] == "close"
        task = self._loop.create_task(self._result(number, call))
        found: dict[str, Any]
        try:
            if not await ends_in_time(task, self._timeout_s):
                await self._give_up(number, task)
                may_wear_out = True
                raise too_late(self._timeout_s)
            found = {"answer": task.result()}
            if (size := len(json.dumps(found))) > MOST_BYTES:
                raise LostError(
                    "raised",
                    f"the environment's answer has {size:,} bytes in JSON, needs at most {MOST_BYTES:,}",
                )
        except LostError as error:
            found = {"lost": error.lost, "reason": str(error)}
        except asyncio.CancelledError:
            found = {"lost": "raised", "reason": "the environment's task was cancelled"}
        except _ExhaustedError as error:
            found = {"ended": str(error)}
        except Exception as error:
            found = {"lost": "raised", "reason": str(answer_raises(error))}
        answer(number, {**found, "worn_out": may_wear_out and self._is_worn_out()})

    async def _result(self, number: int, call: Mapping[str, Any]) -> Any:
        async def called(function: Callable[..., Any], *arguments: Any) -> Any:
            return await self._called(number, function, *arguments)

        episode: Any = self._episodes.get(call.get("episode", -1))
        match call["do"]:
            case "group_rewards":
                compared = [self._episodes[each] for each in call["episodes"]]
                scores = await called(self._environment.group_rewards, compared)
                return checked_scores(scores, count=len(compared))
            case "episode":
                made = await called(self._environment.episode, call["row"], call["seed"])
                self._episodes[call["episode"]] = checked_episode(made)
            case "start":
                start = getattr(episode, "start", None)
                begins = "" if start is None else await called(start)
                return appended_as_json("" if begins is None else begins)
            case "step":
                return step_as_json(await called(episode.step, turn_of(call["turn"])))
            case "close":
                self._episodes.pop(call["episode"], None)
                if callable(end := getattr(episode, "close", None)):
                    await called(end)
        return None

    async def _called(self, number: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the result of the user's function.

        Raises:
            LostError: it raised.
            _ExhaustedError: this process can start no further thread.
        """

        def blocking(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            finally:
                self._blocking.discard(number)

        if inspect.iscoroutinefunction(function):
            found, error = await outcome(function, *arguments)
        else:
            self._blocking.add(number)
            found, error = await outcome(blocking, *arguments)
        if type(error) is RuntimeError and error.args == ("can't start new thread",):
            raise _ExhaustedError("it could start no further thread: the environment leaves threads behind")
        return result(found, error)

    async def _give_up(self, number: int, task: "asyncio.Task[Any]") -> None:
        task.cancel()
        self._given_up[number] = task
        await asyncio.wait([task], timeout=_MOMENT_S)

    def _is_worn_out(self) -> bool:
        """Returns whether given-up calls or closed episodes left too much behind in this process."""
        for number, task in [*self._given_up.items()]:
            if task.done() and number not in self._blocking:
                del self._given_up[number]
        own = self._own_threads + len(self._blocking) + EPISODE_THREADS * len(self._episodes)
        return len(self._given_up) >= CALLS_LEFT or threading.active_count() - own >= THREADS_LEFT
