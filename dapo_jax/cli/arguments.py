"""What the commands' arguments have in common."""

import argparse
import json
from collections.abc import Callable
from typing import Any, TypeAlias

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
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(read, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is no JSON object such as {{"enable_thinking": false}}')
    return read
