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

FIELDS = ("reward", "done", "correct", "metrics", "forget")
"""The fields of a step that do not decide what follows the turn."""


def turn_as_json(turn: Turn) -> dict[str, Any]:
    """Returns a turn as a JSON-serializable dict."""
    return {**vars(turn), "tokens": turn.tokens.tolist(), "logprobs": turn.logprobs.tolist()}


def turn_of(fields: Mapping[str, Any]) -> Turn:
    """Converts a dict from `turn_as_json` back to a turn."""
    tokens, logprobs = np.array(fields["tokens"], np.int32), np.array(fields["logprobs"], np.float32)
    arrays: dict[str, Any] = {"tokens": read_only(tokens), "logprobs": read_only(logprobs)}
    return Turn(**{**fields, **arrays})


def step_as_json(step: Any) -> dict[str, Any]:
    """Returns a step as a JSON-serializable dict, without the appended value if the episode is over. Raises LostError if it is invalid."""
    checked = checked_step(step)
    follows = {} if checked.done else appended_as_json(step.append if step.context is None else step.context)
    return {**{name: getattr(checked, name) for name in FIELDS}, **follows}


def step_of(fields: Mapping[str, Any]) -> Step:
    """Converts a dict from `step_as_json` back to a step."""
    follows = appended_of(fields)
    name = "context" if isinstance(follows, Context) else "append"
    return Step(**{name: fields[name] for name in FIELDS}, **{name: follows})


def appended_as_json(value: Any) -> dict[str, Any]:
    """Returns the value that an episode appends as a JSON-serializable dict. Raises LostError if JSON cannot represent the value."""
    try:
        if isinstance(value, Context):
            contents, tools = plain(value.contents), plain(value.tools)
            return {
                "contents": contents,
                "tools": tools,
                "after": value.after,
                "max_tokens": value.max_tokens,
            }
        return {"append": plain(value)}
    except TypeError as error:
        reason = f"{error} cannot be appended: environment workers answer in JSON, which cannot represent it"
        raise LostError(reason) from error
    except RecursionError as error:
        raise LostError("the appended value is nested too deeply, or contains itself") from error


def appended_of(fields: Mapping[str, Any]) -> Any:
    """Converts a dict from `appended_as_json` back to a Context or another value to append."""
    if "contents" not in fields:
        return fields.get("append", "")
    return Context(fields["contents"], fields["tools"], fields["after"], fields["max_tokens"])
