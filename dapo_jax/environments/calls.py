"""Calls the user's environment code. Calls have a time limit and their results are checked, because the code may hang or return invalid values."""

import asyncio
import inspect
import math
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from dapo_jax.dapo.rollouts import Lost, as_float
from dapo_jax.environments.protocol import Context, Step
from dapo_jax.rewards.async_calls import ends_in_time
from dapo_jax.rewards.functions import MAX_SCORE

_OTHERS = [
    Path(__file__).parents[1],
    *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
]
"""Folders of this package, the standard library and installed packages, which do not contain the user's code."""


_STEP_FIELDS: tuple[tuple[str, Any, str], ...] = (
    ("context", Context | None, "a Context or None"),
    ("metrics", Mapping, "a mapping of names to numbers"),
    ("done", bool | np.bool_, "True or False"),
    ("correct", bool | np.bool_ | None, "True, False or None"),
    ("forget", bool | np.bool_, "True or False"),
)
"""Name and type of each field of a step, with a description of the type for error messages. `Rendering` checks the field `append`."""

TOO_LATE = "no answer from the environment within {:g} s"
NOT_REPEATED = (
    "after an interruption, the environment's answer before turn {} differs from its first answer, so the turn belongs to another conversation: an environment "
    "must repeat its answers to the same turns"
)


class LostError(Exception):
    """An episode is lost, so it has no reward of its own. The message contains the reason. If `every` is set, it loses all episodes."""

    def __init__(self, reason: str, lost: Lost = "raised", *, every: bool = False) -> None:
        super().__init__(reason)
        self.lost, self.every = lost, every


async def called(call: Callable[..., Any], *arguments: Any, timeout_s: float) -> Any:
    """Calls an environment's sync or async function, and returns its result. Raises LostError if it raises or exceeds the time limit."""
    task = asyncio.ensure_future(outcome(call, *arguments))
    if not await ends_in_time(task, timeout_s):
        task.cancel()
        raise LostError(TOO_LATE.format(timeout_s), "timeout")
    result, error = task.result()
    if error is None:
        return result
    if isinstance(error, LostError):
        raise error
    line = place_of(traceback.walk_tb(error.__traceback__))
    raise LostError(f"{type(error).__name__}: {error!s:.500}{line}")


async def outcome(call: Callable[..., Any], *arguments: Any) -> tuple[Any, BaseException | None]:
    """Calls a sync or async function. Returns `(result, None)`, or `(None, exception)` if it raised an exception."""
    try:
        # A sync function may block, so it runs in a thread.
        is_async = inspect.iscoroutinefunction(call)
        result = call(*arguments) if is_async else await asyncio.to_thread(call, *arguments)
        return await result if inspect.isawaitable(result) else result, None
    except BaseException as error:  # even SystemExit, which would stop the event loop
        return None, error


def place_of(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Returns the file and line of the innermost frame in user code, in parentheses, or an empty string if there is no such frame.

    Frames of this package, the standard library and installed packages are skipped. `frames` must start with the outermost frame.
    """
    files = [(Path(frame.f_code.co_filename), line) for frame, line in frames]
    user_code = [(file, line) for file, line in files if not any(map(file.is_relative_to, _OTHERS))]
    return f" ({user_code[-1][0].name}, line {user_code[-1][1]})" if user_code else ""


def lost_by(error: BaseException) -> LostError:
    """Converts an exception to a LostError. Any exception is possible, because the fields of a user's result may be properties that raise."""
    if isinstance(error, LostError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return LostError("the environment's task was cancelled")
    return LostError(f"reading the environment's answer raised {type(error).__name__}")


async def begun(episode: Any, call: Callable[..., Any]) -> Any:
    """Returns the result of an episode's `start` method, or an empty text if it has none or returns None. `call` runs the method."""
    start = getattr(episode, "start", None)
    begins = None if start is None else await call(start)
    return "" if begins is None else begins


async def ended(episode: Any, call: Callable[..., Any]) -> None:
    """Calls an episode's `close` method, if there is one. `call` runs the method."""
    if callable(close := getattr(episode, "close", None)):
        await call(close)


def checked_episode(episode: Any) -> Any:
    """Returns the episode that an environment created. Raises LostError if it has no `step` method."""
    if not callable(getattr(episode, "step", None)):
        raise LostError(f"{episode!r:.200} ({type(episode).__name__}) has no method step(turn)")
    return episode


def checked_step(step: Any) -> Step:
    """Returns a copy of a step without `append` and `context`, which `Rendering` checks. Raises LostError if another field is invalid."""
    if not isinstance(step, Step):
        raise LostError(f"step() returned {step!r:.200} ({type(step).__name__}); it must return a Step")
    for name, kinds, need in _STEP_FIELDS:
        if not isinstance(value := getattr(step, name), kinds):
            raise LostError(f"a Step has {name}={value!r:.200}; it must be {need}")
    metrics = {str(name): number_of(value, f"the metric {name!r}:") for name, value in step.metrics.items()}
    reward = None if step.reward is None else number_of(step.reward, "a Step has the reward")
    correct = None if step.correct is None else bool(step.correct)
    done, forget = bool(step.done), bool(step.forget)
    return Step(reward=reward, done=done, correct=correct, metrics=metrics, forget=forget)


def checked_scores(result: Any, *, count: int) -> list[float]:
    """Returns the result of `group_rewards` as a list. Raises LostError if it does not consist of `count` valid rewards."""
    if not isinstance(result, Sequence | np.ndarray):
        raise LostError(f"group_rewards returned {result!r:.200}; it must return a reward for each episode")
    scores = [number_of(score, "group_rewards returned") for score in result]
    if len(scores) != count:
        raise LostError(f"group_rewards returned {len(scores)} rewards for {count} episodes")
    return scores


def number_of(value: Any, source: str) -> float:
    """Returns a number as a float. Raises LostError if it is not finite or too large. `source` begins the message."""
    try:
        number = as_float(value)
    except ValueError:
        number = math.nan
    if not abs(number) <= MAX_SCORE:
        reason = f"{source} {value!r:.80}; it must be a finite number of magnitude at most {MAX_SCORE:g}"
        raise LostError(reason, "nonfinite")
    return number
