"""Arguments shared by several commands."""

import argparse
import json
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any, TypeAlias

from dapo_jax.config import ConfigError
from dapo_jax.config.keys import without_secrets
from dapo_jax.terminal import visible

LONGEST_MESSAGE = 1800
"""Maximum number of characters to print of an error message. Messages that quote a file can be longer, and are shortened."""

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

CONFIG = "a YAML file, or the name of a configuration in the package, for example quickstart"

MODEL = "preset:NAME, shipped:NAME, hf:ORG/NAME, a model folder, or a run folder; a folder is local or gs://BUCKET/FOLDER"


def command(commands: Commands, name: str, function: Callable[..., int]) -> argparse.ArgumentParser:
    """Adds a command that calls `function` with the parsed arguments. The docstring of `function` is the help text."""
    parser = commands.add_parser(name, help=function.__doc__, description=function.__doc__)
    parser.set_defaults(command=function)
    return parser


def option(
    parser: argparse.ArgumentParser, name: str, text: str, metavar: str | None = None, **options: Any
) -> None:
    """Adds an option, which is a flag if neither `metavar` nor `how` is given. If the default is a number, values are converted to its type."""
    settings: dict[str, Any] = (
        {"metavar": metavar, **options} if metavar or options else {"action": "store_true"}
    )
    if (default := options.get("default")) not in (None, "", [], {}):
        text += f" (default {f'{default:g}' if isinstance(default, float) else default})"
    if isinstance(default, int | float):
        settings["type"] = type(default)
    parser.add_argument(name, help=text, **settings)


def add_config(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments `CONFIG key=value ...`."""
    parser.add_argument("config", help=CONFIG)
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments `key=value ...`."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override of a configuration key")


def add_conversation(parser: argparse.ArgumentParser) -> None:
    """Adds the options that turn a prompt into a conversation."""
    option(parser, "--chat", "format each prompt as a user message, with the chat template")
    option(parser, "--system-prompt", "system message of every conversation", "TEXT", default="")
    kwargs = {"type": json_object, "default": {}}
    option(parser, "--chat-template-kwargs", "additional variables for the chat template", "JSON", **kwargs)


def passed(function: Callable[..., Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments that are set and have the names of parameters of `function`."""
    values = {name: value for name, value in vars(arguments).items() if value is not None}
    return {name: values[name] for name in signature(function).parameters if name in values}


def json_object(text: str) -> dict[str, Any]:
    """Parses an argument that must be a JSON object."""
    try:
        if isinstance(read := json.loads(text), dict):
            return read
        problem = 'is not a JSON object such as {"enable_thinking": false}'
    except ValueError as error:
        problem = f"is not JSON: {error}"
    raise argparse.ArgumentTypeError(f"{printable(repr(text))} {problem}")


def write_json(where: str, content: Any, *, flag: str = "--json") -> None:
    """Writes `content` to the file `where`, or to standard output if `where` is `-`. `flag` is the option, for error messages. Raises ConfigError if the file
    cannot be written."""
    text = json.dumps(content, indent=1) + "\n"
    if where == "-":
        sys.stdout.write(text)
        return
    # Imported here so that usage errors do not import etils.
    from dapo_jax.storage import write_whole

    try:
        write_whole(Path(where).expanduser(), text.encode())
    except OSError as error:
        raise ConfigError(f"{flag} {where}: it cannot be written: {error.strerror or error}") from error


def printable(message: str) -> str:
    """Removes secrets and control characters from a message, and the middle of a very long message.

    The beginning and the end are kept, because they usually contain the location of the error and the remedy.
    """
    message = visible(without_secrets(message))
    if len(message) <= LONGEST_MESSAGE:
        return message
    half = LONGEST_MESSAGE // 2
    return f"{message[:half]} [{len(message) - 2 * half} characters left out] {message[-half:]}"
