"""Converts turns and steps to JSON and back, for messages to and from environment workers.

Appended values are not checked here, but in `Rendering`, so that the errors are the same with and without workers.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dapo_jax.environments.calls import LostError, checked_step
from dapo_jax.environments.protocol import Context, Step, Turn
from dapo_jax.rewards.sample import plain, read_only

MOST_BYTES = 1 << 24
"""Maximum size of a worker's answer in bytes. Even the longest text that can be appended fits if all of its characters are escaped."""

_FIELDS = ("reward", "done", "correct", "metrics")


def turn_as_json(turn: Turn) -> dict[str, Any]:
    """Returns a turn as a JSON-serializable dict."""
    return {**vars(turn), "tokens": turn.tokens.tolist(), "logprobs": turn.logprobs.tolist()}


def turn_of(found: Mapping[str, Any]) -> Turn:
    """Converts a dict from `turn_as_json` back to a turn."""
    tokens, logprobs = np.array(found["tokens"], np.int32), np.array(found["logprobs"], np.float32)
    fields: dict[str, Any] = {**found, "tokens": read_only(tokens), "logprobs": read_only(logprobs)}
    return Turn(**fields)


def step_as_json(step: Any) -> dict[str, Any]:
    """Returns a step as a JSON-serializable dict, without the appended value if the episode is over.

    Raises:
        LostError: `step` is not a valid step, or it appends a value that JSON cannot represent.
    """
    checked = checked_step(step)
    follows = {} if checked.done else appended_as_json(step.append if step.context is None else step.context)
    return {**{name: getattr(checked, name) for name in _FIELDS}, **follows}


def step_of(found: Mapping[str, Any]) -> Step:
    """Converts a dict from `step_as_json` back to a step."""
    follows = appended_of(found)
    name = "context" if isinstance(follows, Context) else "append"
    return Step(**{name: found[name] for name in _FIELDS}, **{name: follows})


def appended_as_json(given: Any) -> dict[str, Any]:
    """Returns the value from an episode's `start`, or the value appended after a turn, as a JSON-serializable dict.

    Raises:
        LostError: JSON cannot represent the value.
    """
    try:
        if isinstance(given, Context):
            return {"contents": plain(given.contents), "tools": plain(given.tools)}
        return {"append": plain(given)}
    except TypeError as error:
        reason = f"{error} cannot be appended: environment workers answer in JSON, which cannot represent it"
        raise LostError(reason) from error
    except RecursionError as error:
        raise LostError("the appended value is nested too deeply, or contains itself") from error


def appended_of(found: Mapping[str, Any]) -> Any:
    """Converts a dict from `appended_as_json` back to a Context or another value to append."""
    if "contents" not in found:
        return found.get("append", "")
    return Context(found["contents"], found["tools"])
