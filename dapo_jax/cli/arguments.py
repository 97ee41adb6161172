"""What the commands' arguments have in common."""

import argparse
import json
import os
from collections.abc import Callable
from typing import Any, TypeAlias

from dapo_jax.config.values import without_password

LONGEST_MESSAGE = 1800
"""Characters: a message quotes what was found, and a file may hold anything."""

SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY")
"""Variables of the environment whose values are never printed, whoever put them into a message."""
SHORTEST_SECRET = 8
"""Characters; a shorter value would be found in ordinary words."""

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

MODEL = "preset:NAME, shipped:NAME, hf:ORG/NAME, a model folder, or a run folder"


def command(
    commands: Commands, name: str, function: Callable[..., int], text: str
) -> argparse.ArgumentParser:
    """Adds a command that calls `function` with the parsed arguments."""
    made = commands.add_parser(name, help=text, description=text)
    made.set_defaults(command=function)
    return made


def add_overrides(made: argparse.ArgumentParser) -> None:
    """Adds `key=value ...`."""
    made.add_argument("overrides", nargs="*", metavar="key=value", help="replaces a key of the configuration")


def add_conversation(made: argparse.ArgumentParser) -> None:
    """Adds how a prompt becomes a conversation."""
    made.add_argument(
        "--chat", action="store_true", help="a prompt is a user's message, through the chat template"
    )
    made.add_argument("--system-prompt", default="", metavar="TEXT", help="of every conversation")
    made.add_argument("--chat-template-kwargs", type=json_object, default={}, metavar="JSON")


def json_object(text: str) -> dict[str, Any]:
    """A JSON object as an argument's value."""
    try:
        read = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{printable(repr(text))} is not JSON: {error}") from error
    if not isinstance(read, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is no JSON object such as {{"enable_thinking": false}}')
    return read


def printable(message: str) -> str:
    """A message without tokens and passwords, and without its middle if it is very long.

    The place stands at a message's beginning, the remedy at its end.
    """
    for name in SECRETS:
        if len(value := os.environ.get(name, "")) >= SHORTEST_SECRET:
            message = message.replace(value, f"${name}")
    message = without_password(message)
    if len(message) <= LONGEST_MESSAGE:
        return message
    half = LONGEST_MESSAGE // 2
    return f"{message[:half]} [{len(message) - 2 * half} characters left out] {message[-half:]}"
