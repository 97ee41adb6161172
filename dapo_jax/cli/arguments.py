"""Arguments that several commands share."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from dapo_jax.config import ConfigError
from dapo_jax.config.values import without_secrets
from dapo_jax.terminal import visible

LONGEST_MESSAGE = 1800
"""Characters: a message quotes what was found, and a file may hold anything."""

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

CONFIG = "a YAML file, or the name of a configuration that comes with the package, such as quickstart"

MODEL = "preset:NAME, shipped:NAME, hf:ORG/NAME, a model folder, or a run folder; folders are local or gs://BUCKET/FOLDER"


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


def write_json(where: str, content: Any) -> None:
    """Writes `content` to the file `where`, or to standard output if that is `-`.

    Raises:
        ConfigError: the file cannot be written.
    """
    text = json.dumps(content, indent=1) + "\n"
    if where == "-":
        sys.stdout.write(text)
        return
    # Imported late: usage errors answer without loading etils.
    from dapo_jax.storage import write_whole

    try:
        write_whole(Path(where).expanduser(), text.encode())
    except OSError as error:
        raise ConfigError(f"--json {where}: it cannot be written: {error.strerror or error}") from error


def printable(message: str) -> str:
    """A message without tokens and passwords, without what a terminal would obey, and without its middle if it is very long.

    The place stands at a message's beginning, the remedy at its end.
    """
    message = visible(without_secrets(message))
    if len(message) <= LONGEST_MESSAGE:
        return message
    half = LONGEST_MESSAGE // 2
    return f"{message[:half]} [{len(message) - 2 * half} characters left out] {message[-half:]}"
