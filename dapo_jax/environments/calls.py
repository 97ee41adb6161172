"""Calls of an environment, which is foreign code: time limits, and checks of its answers."""

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
"""Folders of files that are not the user's."""


class LostError(Exception):
    """The episode is lost; the message is the reason."""

    def __init__(self, lost: Lost, reason: str) -> None:
        super().__init__(reason)
        self.lost: Lost = lost


async def called(call: Callable[..., Any], *arguments: Any, timeout_s: float) -> Any:
    """Returns the result of an environment's function, async or not, within the time limit.

    Raises:
        LostError: it raised, or took too long.
    """
    task = asyncio.ensure_future(outcome(call, *arguments))
    if not await ends_in_time(task, timeout_s):
        task.cancel()
        raise too_late(timeout_s)
    found, error = task.result()
    if isinstance(error, LostError):
        raise error
    if error is not None:
        place = place_of(traceback.walk_tb(error.__traceback__))
        raise LostError("raised", f"{type(error).__name__}: {error!s:.500}{place}")
    return found


async def outcome(call: Callable[..., Any], *arguments: Any) -> tuple[Any, BaseException | None]:
    """Returns the result of an environment's function, async or not, or the exception that it raised."""
    try:
        # A function that is not async may block, so it runs in a thread.
        is_async = inspect.iscoroutinefunction(call)
        found = call(*arguments) if is_async else await asyncio.to_thread(call, *arguments)
        return await found if inspect.isawaitable(found) else found, None
    except BaseException as error:  # including SystemExit, which would end the loop
        return None, error


def place_of(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Returns file and line of the environment's innermost frame, in parentheses, or an empty text without such a frame.

    Frames of this package, of the standard library and of installed packages are left out. `frames` begin with the outermost one.
    """
    places = [(Path(frame.f_code.co_filename), line) for frame, line in frames]
    own = [place for place in places if not any(map(place[0].is_relative_to, _OTHERS))]
    return f" ({own[-1][0].name}, line {own[-1][1]})" if own else ""


def too_late(timeout_s: float) -> LostError:
    """Returns the error of a call that exceeds its time limit."""
    return LostError("timeout", f"no answer of the environment within {timeout_s:g} s")


def lost_by(error: BaseException) -> LostError:
    """Returns the loss of an episode by an exception. The fields of an answer may raise any exception when they are read."""
    if isinstance(error, LostError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return LostError("raised", "the environment's task was cancelled")
    return LostError("raised", f"the environment's answer raises {type(error).__name__}")


def checked_episode(made: Any) -> Any:
    """Returns the episode that an environment made, if it can be one.

    Raises:
        LostError: it cannot.
    """
    if not callable(getattr(made, "step", None)):
        raise LostError(
            "raised", f"{made!r:.200} ({type(made).__name__}) has no method step(turn), which answers a turn"
        )
    return made


def checked_step(step: Any) -> Step:
    """Returns a step with checked fields, except for what it appends, which the rendering checks.

    Raises:
        LostError: a field has a wrong type or value.
    """
    if not isinstance(step, Step):
        raise LostError("raised", f"the episode answered {step!r:.200} ({type(step).__name__}), needs a Step")
    if not isinstance(step.context, Context | None):
        raise LostError("raised", f"a step has context={step.context!r:.200}, needs a Context or None")
    if not isinstance(step.metrics, Mapping):
        raise LostError(
            "raised", f"a step has metrics={step.metrics!r:.200}, needs a mapping of names to numbers"
        )
    flags = [step.done] if step.correct is None else [step.done, step.correct]
    if not all(isinstance(flag, bool | np.bool_) for flag in flags):
        raise LostError(
            "raised",
            f"a step has correct={step.correct!r:.80} and done={step.done!r:.80}, needs True or False",
        )
    return Step(
        reward=_number(step.reward, "a step has the reward"),
        done=bool(step.done),
        correct=None if step.correct is None else bool(step.correct),
        metrics={
            str(name): _number(value, f"a step has the metric {name!r}:")
            for name, value in step.metrics.items()
        },
    )


def checked_scores(given: Any, *, count: int) -> list[float]:
    """Returns the rewards of `group_rewards`, if there is one for each of `count` episodes.

    Raises:
        LostError: there is not, or one of them cannot be a reward.
    """
    if not isinstance(given, Sequence | np.ndarray):
        raise LostError("raised", f"group_rewards returned {given!r:.200}, needs a reward for each episode")
    scores = [_number(score, "group_rewards returned") for score in given]
    if len(scores) != count:
        raise LostError("raised", f"group_rewards returned {len(scores)} rewards for {count} episodes")
    return scores


def _number(value: Any, found: str) -> float:
    try:
        number = as_float(value)
    except ValueError:
        number = math.nan
    if not abs(number) <= MAX_SCORE:
        raise LostError(
            "nonfinite", f"{found} {value!r:.80}, needs a finite number of at most {MAX_SCORE:g} in size"
        )
    return number
