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
from dapo_jax.environments.protocol import Step
from dapo_jax.rewards.functions import MAX_SCORE

_PACKAGE = Path(__file__).parents[1]


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
    done, _ = await asyncio.wait([task], timeout=timeout_s)
    if not done:
        task.cancel()
        raise too_late(timeout_s)
    return result(*task.result())


async def outcome(call: Callable[..., Any], *arguments: Any) -> tuple[Any, BaseException | None]:
    """Returns the result of an environment's function, async or not, or the exception that it raised."""
    try:
        # A function that is not async may block, so it runs in a thread.
        is_async = inspect.iscoroutinefunction(call)
        found = call(*arguments) if is_async else await asyncio.to_thread(call, *arguments)
        return await found if inspect.isawaitable(found) else found, None
    except BaseException as error:  # SystemExit among them, which would end the loop
        return None, error


def result(found: Any, error: BaseException | None) -> Any:
    """Returns the result of an outcome.

    Raises:
        LostError: the outcome is an error.
    """
    if isinstance(error, LostError):
        raise error
    if error is not None:
        place = place_of(traceback.walk_tb(error.__traceback__))
        raise LostError("raised", f"{type(error).__name__}: {error!s:.500}{place}")
    return found


def place_of(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Returns file and line of the environment's innermost frame, in parentheses, or an empty text without such a frame. `frames` begin with the outermost one.

    Frames of this package and of the standard library are left out, and frames of installed packages if there are others.
    """
    files = [(Path(frame.f_code.co_filename), line) for frame, line in frames]
    places = [place for place in files if not place[0].is_relative_to(_PACKAGE)]
    installed = [place for place in places if _is_in(place[0], "purelib", "platlib")]
    standard = [place for place in places if _is_in(place[0], "stdlib", "platstdlib")]
    own = [place for place in places if place not in [*standard, *installed]]
    theirs = own or installed
    return f" ({theirs[-1][0].name}, line {theirs[-1][1]})" if theirs else ""


def _is_in(file: Path, *libraries: str) -> bool:
    return any(file.is_relative_to(sysconfig.get_path(name)) for name in libraries)


def too_late(timeout_s: float) -> LostError:
    """Returns the error of a call that exceeds its time limit."""
    return LostError("timeout", f"no answer of the environment within {timeout_s:g} s")


def answer_raises(error: Exception) -> LostError:
    """Returns the error of an answer whose fields or text raise when they are read."""
    return LostError("raised", f"the environment's answer raises {type(error).__name__}")


def checked_episode(made: Any) -> Any:
    """Returns the episode that an environment made, if it can be one.

    Raises:
        LostError: it cannot.
    """
    if not callable(getattr(made, "step", None)):
        said = f"{made!r:.200} ({type(made).__name__}) has no method step(turn), which answers a turn"
        raise LostError("raised", said)
    return made


def checked_step(step: Any) -> Step:
    """Returns a step with checked fields, except for what it appends, which the rendering checks.

    Raises:
        LostError: a field has a wrong type or value.
    """
    if not isinstance(step, Step):
        raise LostError("raised", f"the episode answered {step!r:.200} ({type(step).__name__}), needs a Step")
    if not isinstance(step.metrics, Mapping):
        raise LostError(
            "raised", f"a step has metrics={step.metrics!r:.200}, needs a mapping of names to numbers"
        )
    if not (step.correct is None or isinstance(step.correct, bool | np.bool_)) or not isinstance(
        step.done, bool | np.bool_
    ):
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


def _number(value: Any, said: str) -> float:
    try:
        number = as_float(value)
    except ValueError:
        number = math.nan
    if not abs(number) <= MAX_SCORE:
        raise LostError(
            "nonfinite", f"{said} {value!r:.80}, needs a finite number of at most {MAX_SCORE:g} in size"
        )
    return number
