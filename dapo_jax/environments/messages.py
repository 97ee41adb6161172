"""Messages between an environment's workers and the run, as JSON: turns on the way there, steps on the way back.

What is appended crosses as it is, nonsense that JSON has a name for included, so that the rendering says what is wrong with it as it does without workers.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dapo_jax.environments.calls import LostError, checked_step
from dapo_jax.environments.protocol import Context, Step, Turn
from dapo_jax.rewards.calls import plain
from dapo_jax.rewards.sample import read_only

MOST_BYTES = 1 << 24
"""The longest answer: the longest text that can be appended fits, whatever its characters are."""


def turn_as_json(turn: Turn) -> dict[str, Any]:
    """A turn for the way there."""
    return {
        "tokens": turn.tokens.tolist(),
        "logprobs": turn.logprobs.tolist(),
        "text": turn.text,
        "finish_reason": turn.finish_reason,
        "number": turn.number,
    }


def turn_of(said: Mapping[str, Any]) -> Turn:
    """The turn that `turn_as_json` wrote."""
    return Turn(
        tokens=read_only(np.array(said["tokens"], np.int32)),
        logprobs=read_only(np.array(said["logprobs"], np.float32)),
        text=said["text"],
        finish_reason=said["finish_reason"],
        number=said["number"],
    )


def step_as_json(step: Any) -> dict[str, Any]:
    """A step for the way back; what it appends is left out if the episode is over.

    Raises:
        LostError: it is none, or appends what cannot be said in JSON.
    """
    checked = checked_step(step)
    told = {"reward": checked.reward, "done": checked.done, "correct": checked.correct}
    follows = {} if checked.done else appended_as_json(step.append if step.context is None else step.context)
    return {**told, "metrics": checked.metrics, **follows}


def step_of(said: Mapping[str, Any]) -> Step:
    """The step that `step_as_json` wrote."""
    follows = appended_of(said)
    field = "context" if isinstance(follows, Context) else "append"
    names = ("reward", "done", "correct", "metrics")
    return _with(Step(**{name: said[name] for name in names}), **{field: follows})


def appended_as_json(given: Any) -> dict[str, Any]:
    """The beginning of an episode, or what follows a turn, for the way back.

    Raises:
        LostError: it cannot be said in JSON.
    """
    try:
        if isinstance(given, Context):
            return {"contents": plain(given.contents), "tools": plain(given.tools)}
        return {"append": plain(given)}
    except TypeError as error:
        raise LostError(
            "raised", f"{error} cannot be appended: workers answer in JSON, which has no name for it"
        ) from error
    except RecursionError as error:
        raise LostError("raised", "what was appended is nested too deep, or in itself") from error


def appended_of(said: Mapping[str, Any]) -> Any:
    """A Context, or what is to be appended, as `appended_as_json` wrote it."""
    if "contents" in said:
        return _with(Context(""), contents=said["contents"], tools=said["tools"])
    return said.get("append", "")


def _with(made: Any, **fields: Any) -> Any:
    """The dataclass with fields that nobody has checked yet."""
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made
