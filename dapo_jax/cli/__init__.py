"""The command line: parses the arguments and calls the command's function. Each module of this package defines a group of related commands.

Exit status: 0 for success; 2 for a usage or configuration error, reported in one message; 75 for a training run that was stopped (SIGTERM, SIGINT, SIGHUP)
and can be resumed; 1 otherwise. If the reading end of a pipe closes (`| head`), further output is dropped and the command continues.
"""

import argparse
import errno
import os
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from dapo_jax import __version__
from dapo_jax.cli import data, generation, planning, training
from dapo_jax.cli.arguments import printable
from dapo_jax.config import ConfigError, TrainConfig
from dapo_jax.config.section import leaf_types
from dapo_jax.health.stopping import STOPPED, StoppedError, stopped_by_signals
from dapo_jax.hints import nearest
from dapo_jax.parallel import gpu_settings, processes
from dapo_jax.parallel.libtpu import keep_quiet
from dapo_jax.terminal import lasting_streams

TOGETHER = ("train",)
"""Commands that can run as several processes."""

ALONE = ("doctor", "sft", "eval", "sample", "serve", "convert")
"""Commands that use a model and run as a single process. Commands that are neither here nor in `TOGETHER` do not use JAX devices."""

LASTING = ("train", "sft", "serve")
"""Long-running commands. They print a message once the reading end of their output is closed."""

NO_BACKEND = "Unable to initialize backend"
"""Beginning of JAX's error message if no requested platform has a device."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status. With several processes, a failure ends the Python process immediately, without returning."""
    words = sys.argv[1:] if argv is None else list(argv)
    with lasting_streams(lambda stream: _report_gone(stream, next(iter(words), ""))):
        arguments = _parsed(words)
        if arguments.name not in TOGETHER:
            return _run(arguments)
        with stopped_by_signals(processes.end) as arguments.stop:
            return _run(arguments)


def _report_gone(stream: str, name: str) -> None:
    message = f"dapo-jax {name}: {stream} has no reader any more; the command continues, and its files will be complete\n"
    with suppress(OSError):
        if name in LASTING:
            os.write(2, message.encode())  # bypasses sys.stderr, which may be the stream that failed


def _run(arguments: argparse.Namespace) -> int:
    name, joined = arguments.name, False
    try:
        if name in TOGETHER + ALONE:
            gpu_settings.apply()
        if name in TOGETHER + ALONE and processes.wanted():
            if name in ALONE:
                raise ConfigError(
                    "the environment variables describe a multi-process run, but only "
                    f"{', '.join(TOGETHER)} can run as multiple processes; set DAPO_JAX_DISTRIBUTED=0 to run this command as a single process"
                )
            processes.start(stop=arguments.stop)
            joined = True
        if name in ALONE and sys.stderr.isatty():
            print(f"dapo-jax {name}: loading", file=sys.stderr, flush=True)
        if name in TOGETHER + ALONE:
            keep_quiet()
        status = arguments.command(arguments)
        sys.stdout.flush()  # raises write errors, such as a full disk, here, where they are handled
        processes.leave()
        return status
    except StoppedError as error:
        print(f"dapo-jax {name}: {_noted(f'stopped by {error}', error)}", file=sys.stderr)
        processes.leave()
        return STOPPED
    except BaseException as error:
        outcome = _outcome(error, name)
        status, shown = (
            (1, traceback.format_exc()) if outcome is None else (outcome[0], printable(outcome[1]))
        )
        if joined:
            processes.fail(status, processes.described(error), shown=shown, by_all=outcome is not None)
        if outcome is None:
            raise
        print(shown, file=sys.stderr)
        return status


def _outcome(error: BaseException, name: str) -> tuple[int, str] | None:
    """Returns the exit status and the message for an error that needs no traceback, or None for any other error."""
    if isinstance(error, ConfigError):
        return 2, f"dapo-jax {name}: {error}"
    if missing := _without_devices(error):
        platforms = os.environ.get("JAX_PLATFORMS")
        return 2, f"dapo-jax {name}: {f'JAX_PLATFORMS={platforms}: ' if platforms else ''}{missing}"
    if isinstance(error, KeyboardInterrupt):
        return 1, f"dapo-jax {name}: interrupted"
    if isinstance(error, SystemExit):
        last = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{last.filename}, line {last.lineno}, called sys.exit({error.code!r})"
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        message = f"{error}: free some space; the files written so far are complete"
    elif isinstance(error, RuntimeError) and type(error).__module__.startswith("dapo_jax."):
        message = str(error)  # the library's own errors contain a remedy
    else:
        return None
    return 1, f"dapo-jax {name}: {_noted(message, error)}"


def _noted(message: str, error: BaseException) -> str:
    """Returns the message, followed by the notes that the run added to the error, for example the checkpoint to resume from."""
    return "; ".join([message, *getattr(error, "__notes__", ())])


def _without_devices(error: BaseException) -> str:
    """Returns an error message if JAX found no device for the requested platforms, or an empty string for any other error."""
    missing = gpu_settings.missing_plugin() if gpu_settings.asked() else ""
    if isinstance(error, RuntimeError) and str(error).startswith(NO_BACKEND):
        return f"{NO_BACKEND}: {missing}" if missing else str(error)
    where = traceback.extract_tb(error.__traceback__)
    if isinstance(error, AssertionError) and where and where[-1].filename.endswith("xla_bridge.py"):
        # If CUDA is requested but there is no GPU, JAX skips this platform and later fails an assertion.
        return f"{NO_BACKEND}: {missing or 'there is no device of this platform; set JAX_PLATFORMS=cpu, or unset it'}"
    return ""


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments. `key=value` arguments may also follow options, which argparse itself does not support."""
    parser = _parser()
    arguments, left = parser.parse_known_args(words)
    strange = [text for text in left if text.startswith("-") or "=" not in text]
    if strange or (left and not hasattr(arguments, "overrides")):
        hint = _meant(strange[0], arguments, words) if strange else ""
        parser.error(f"unrecognized arguments: {' '.join(strange or left)}{hint}")
    if left:
        arguments.overrides = [*arguments.overrides, *left]
    if getattr(arguments, "json", None) in ("/dev/stdout", "/dev/fd/1"):
        arguments.json = "-"  # so that tables go to standard error
    return arguments


def _meant(option: str, arguments: argparse.Namespace, words: Sequence[str]) -> str:
    """Returns the remedy for an unknown option of a command that accepts overrides, for example `steps=5` for `--steps 5`."""
    name, equals, value = option.partition("=")
    if (arguments.name, name) == ("serve", "--http"):
        return "; HTTP is the default: leave --http out"
    if not hasattr(arguments, "overrides") or not name.startswith("--") or name == "--":
        return ""
    if not equals:
        follow = words[words.index(option) + 1 :]
        value = follow[0] if follow and not follow[0].startswith("-") else "VALUE"
    last = name.lstrip("-").replace("-", "_")
    named = [key for key in leaf_types(TrainConfig) if f".{key}".endswith(f".{last}")]
    return f"; a key is given without dashes: {f'{named[0]}={value}' if len(named) == 1 else 'KEY=VALUE'}"


class _Parser(argparse.ArgumentParser):
    """An argument parser that suggests the most similar valid choice if a choice is invalid, and accepts option values that begin with a dash."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Joins each long option to its value (`--prompt=-5+3`), because argparse mistakes a separate value such as `-5+3` for an option."""
        words, known = list(args), self._option_string_actions
        for at in reversed(range(len(words) - 1)):
            takes_value = words[at].startswith("--") and words[at] in known and known[words[at]].nargs is None
            if takes_value and words[at + 1].partition("=")[0] not in (*known, "--"):
                words[at : at + 2] = [f"{words[at]}={words[at + 1]}"]
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        message = message.replace(", key=value", "")  # optional, but argparse lists it as a missing argument
        if invalid := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            similar = nearest(invalid[1], re.findall(r"[\w-]+", invalid[2]))
            message += f"; did you mean {similar[0]!r}?" if similar else ""
        super().error(printable(message))


def _parser() -> argparse.ArgumentParser:
    text = "Reinforcement learning of language models with DAPO, in JAX."
    parser: argparse.ArgumentParser = _Parser(prog="dapo-jax", description=text)
    parser.add_argument("--version", action="version", version=f"dapo-jax {__version__}")
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")
    for kind in (training, planning, generation, data):
        kind.add_to(commands)
    return parser
