"""One worker of an environment: `python -m dapo_jax.environments.worker SETUP`, a process of its own with a bound on its memory.

It reads a call a line and answers each with a line, both JSON with the call's number (`dapo_jax.rewards.worker_process`), in any order: many episodes are under way at a
time, on one event loop and in a thread for each function that is not async.
"""

import asyncio
import inspect
import json
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from dapo_jax.environments.calls import (
    LostError,
    answer_raises,
    checked_episode,
    checked_scores,
    outcome,
    result,
)
from dapo_jax.environments.loading import load_environment
from dapo_jax.environments.messages import MOST_BYTES, appended_as_json, step_as_json, turn_of
from dapo_jax.environments.protocol import Environment
from dapo_jax.rewards.async_calls import DaemonThreads, run_until
from dapo_jax.rewards.worker_process import bound_memory, private_pipes, say, setup_of_worker
from dapo_jax.terminal import lasting_streams

THREADS = 4
"""Threads that an open episode may have of its own."""

_MOMENT_S = 0.1
"""Seconds that a call which is given up has to end by itself."""


def main() -> None:
    """Answers calls until the pipe they come from ends."""
    calls, answers = private_pipes()
    with lasting_streams():  # an environment that prints is not at fault where nobody reads it any more
        setup = setup_of_worker()
        try:
            environment = load_environment(setup["source"])
        except ValueError as error:
            say(answers, 0, {"failed": str(error)})
            return
        bound_memory(setup["memory_mb"])
        serving = _Serving(environment, answers)
        threading.Thread(target=serving.read, args=(calls,), daemon=True).start()
        say(answers, 0, {"compares": getattr(environment, "group_rewards", None) is not None})
        serving.run()


class _ExhaustedError(Exception):
    """This process can start no further thread."""


def _result(found: Any, error: BaseException | None) -> Any:
    if type(error) is RuntimeError and error.args == ("can't start new thread",):
        raise _ExhaustedError("it could start no further thread: the environment leaves threads behind")
    return result(found, error)


class _Serving:
    """The event loop, and the episodes on it."""

    def __init__(self, environment: Environment, answers: int) -> None:
        self._environment: Any = environment
        self._answers, self._process = answers, os.getpid()
        self._episodes: dict[int, Any] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._blocking: set[int] = set()
        """Calls whose function is in a thread."""
        self._given_up: set[int] = set()
        self._own_threads = threading.active_count() + 1  # and `read`
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(DaemonThreads())

    def read(self, calls: int) -> None:
        """Takes calls, in a thread of its own; the process ends with their pipe."""
        try:
            with os.fdopen(calls, "rb") as lines:
                for line in lines:
                    self._loop.call_soon_threadsafe(self._begin, json.loads(line))
        finally:
            os._exit(0)

    def run(self) -> None:
        """Runs the loop, whatever ends it in between."""
        asyncio.set_event_loop(self._loop)
        said = "a task of an environment raised; the episodes go on"
        run_until(self._loop, lambda: False, said=said)

    def _begin(self, call: Mapping[str, Any]) -> None:
        number = call["id"]
        task = self._tasks[number] = self._loop.create_task(self._answer(number, call))
        task.add_done_callback(lambda _: self._tasks.pop(number))

    async def _answer(self, number: int, call: Mapping[str, Any]) -> None:
        try:
            answer = {"answer": await self._answered(number, call)}
            if (size := len(json.dumps(answer))) > MOST_BYTES:
                said = f"the environment's answer has {size:,} bytes in JSON; {MOST_BYTES:,} are the most"
                raise LostError("raised", said)
        except LostError as error:
            answer = {"lost": error.lost, "reason": str(error)}
        except asyncio.CancelledError:
            answer = {"lost": "raised", "reason": "the environment's task was cancelled"}
        except _ExhaustedError as error:
            answer = {"ended": str(error)}
        except Exception as error:
            answer = {"lost": "raised", "reason": str(answer_raises(error))}
        if os.getpid() != self._process:
            os._exit(0)  # a child that the environment forked, and that came back from there
        say(self._answers, number, answer)

    async def _answered(self, number: int, call: Mapping[str, Any]) -> Any:
        async def called(function: Callable[..., Any], *arguments: Any) -> Any:
            return await self._called(number, function, *arguments)

        match call["do"]:
            case "answer":
                return None
            case "give up":
                return await self._give_up(call["call"])
            case "group_rewards":
                kept = [self._episodes[each] for each in call["episodes"]]
                return checked_scores(await called(self._environment.group_rewards, kept), count=len(kept))
            case "episode":
                made = await called(self._environment.episode, call["row"], call["seed"])
                self._episodes[call["episode"]] = checked_episode(made)
                return None
        episode: Any = self._episodes.get(call["episode"])
        match call["do"]:
            case "start":
                start = getattr(episode, "start", None)
                found = "" if start is None else await called(start)
                return appended_as_json("" if found is None else found)
            case "step":
                return step_as_json(await called(episode.step, turn_of(call["turn"])))
            case "close":
                self._episodes.pop(call["episode"], None)
                if callable(end := getattr(episode, "close", None)):
                    await called(end)
                return self._left_threads()
        return None

    def _left_threads(self) -> int:
        """Threads that episodes which were closed have left behind, where each open episode may have `THREADS` of its own."""
        own = self._own_threads + len(self._blocking) + THREADS * len(self._episodes)
        return threading.active_count() - own

    async def _called(self, number: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of somebody else's function.

        Raises:
            LostError: it raised.
            _ExhaustedError: this process can start no further thread.
        """
        if inspect.iscoroutinefunction(function):
            return _result(*await outcome(function, *arguments))

        def blocking(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            finally:
                self._blocking.discard(number)

        self._blocking.add(number)
        return _result(*await outcome(blocking, *arguments))

    async def _give_up(self, number: int) -> int:
        """Cancels a call; the number of those that were given up and go on all the same."""
        self._given_up.add(number)
        if (task := self._tasks.get(number)) is not None:
            task.cancel()
            await asyncio.wait([task], timeout=_MOMENT_S)
        self._given_up &= self._blocking | self._tasks.keys()
        return len(self._given_up)


if __name__ == "__main__":
    main()
