"""The command line as Markdown, from the parsers that read it."""

import argparse
from collections.abc import Iterator

from _made.tables import table
from dapo_jax import cli


def parsers() -> Iterator[argparse.ArgumentParser]:
    """The parser of every command, verbs of commands included, in the order of `--help`."""
    yield from _below(cli._parser())


def actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """What a command takes: arguments, then options, without `--help` and without commands of its own."""
    taken = [
        action
        for action in parser._actions
        if not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
    ]
    return sorted(taken, key=lambda action: bool(action.option_strings))


def markdown() -> str:
    """Every command with everything it takes."""
    return "\n".join(_command(parser) for parser in parsers())


def _below(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    kinds = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not kinds:
        yield parser
    for action in kinds:
        for inner in action.choices.values():
            yield from _below(inner)


def _command(parser: argparse.ArgumentParser) -> str:
    taken = actions(parser)
    usage = " ".join([parser.prog, *(_usage(action) for action in taken)])
    lines = [f"## `{parser.prog}`", "", parser.description or "", "", "```text", usage, "```", ""]
    options = [_option(action) for action in taken]
    return "\n".join([*lines, table(["argument", "what it does"], options) if options else ""])


def _usage(action: argparse.Action) -> str:
    if not action.option_strings:
        name = _value(action)
        return {"*": f"[{name} ...]", "?": f"[{name}]"}.get(str(action.nargs), name)
    word = f"{action.option_strings[-1]} {_value(action)}".strip()
    return word if action.required else f"[{word}]"


def _value(action: argparse.Action) -> str:
    """What stands for the value: the metavar, the choices, or the name in capitals as `--help` has it."""
    if action.nargs == 0:
        return ""
    if action.metavar:
        name = str(action.metavar)
    elif action.choices:
        name = "{" + ",".join(map(str, action.choices)) + "}"
    else:
        name = action.dest.upper()
    return {"+": f"{name} [{name} ...]", "?": f"[{name}]" if action.option_strings else name}.get(
        str(action.nargs), name
    )


def _option(action: argparse.Action) -> list[str]:
    names = ", ".join(action.option_strings) or _value(action)
    value = f" {_value(action)}" if action.option_strings and _value(action) else ""
    said = (action.help or "").strip()
    default = action.default
    plain = default not in (None, argparse.SUPPRESS, False, "") and default != [] and default != {}
    if plain and action.option_strings and "default" not in said:
        said = f"{said} (default {default})".strip()
    if action.required and action.option_strings:
        said = f"{said}; it must be given".removeprefix("; ")
    return [f"`{names}{value}`", said]
