"""The command line: arguments to one function per command. A module here holds the commands of one kind.

Exit status: 0 done; 2 for a usage or configuration error, said in one message; 75 for a training run that was told to stop
(SIGTERM, SIGINT, SIGHUP) and can be resumed; 1 otherwise. Output that nobody reads any more (`| head`) is dropped, and the command
goes on.
"""

import argparse
import errno
import os
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from dapo_jax.cli import data, doctor, generation, models, planning, report, training
from dapo_jax.cli.arguments import printable
from dapo_jax.config import ConfigError, TrainConfig
from dapo_jax.config.section import leaf_types
from dapo_jax.health.stopping import STOPPED, StoppedError, stopped_by_signals
from dapo_jax.nearest import nearest
from dapo_jax.parallel import processes
from dapo_jax.parallel.libtpu import keep_quiet
from dapo_jax.terminal import lasting_streams

TOGETHER = ("train",)
"""Commands that several processes run together."""

ALONE = ("doctor", "sft", "eval", "sample", "serve", "convert")
"""Commands with a model that one process runs; the others need no devices and do not ask."""

LASTING = ("train", "sft", "serve")
"""Commands that go on for long, so that it is said when nobody reads their output any more."""


NO_BACKEND = "Unable to initialize backend"
"""The beginning of JAX's error where there is no device of the platforms it was told to use."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status. One of several processes that fails ends there and then."""
    words = sys.argv[1:] if argv is None else list(argv)
    with lasting_streams(lambda stream: _say_gone(stream, next(iter(words), ""))):
        arguments = _parsed(words)
        if arguments.name not in TOGETHER:
            return _run(arguments)
        with stopped_by_signals(processes.end) as arguments.stop:
            return _run(arguments)


def _say_gone(stream: str, name: str) -> None:
    if name in LASTING:
        message = f"dapo-jax {name}: nobody reads {stream} any more; it goes on without, and what it writes to files is complete\n"
        with suppress(OSError):
            os.write(2, message.encode())  # past the streams, of which one has just failed


def _run(arguments: argparse.Namespace) -> int:
    joined = False
    # Imported late: `dapo-jax config` and usage errors answer without loading jax.
    try:
        if arguments.name in TOGETHER + ALONE and processes.wanted():
            _check_together(arguments.name)
            processes.start(stop=arguments.stop)
            joined = True
        if arguments.name in ALONE and sys.stderr.isatty():
            print(f"dapo-jax {arguments.name}: loading", file=sys.stderr, flush=True)
        if arguments.name in TOGETHER + ALONE:
            keep_quiet()
        status = arguments.command(arguments)
        sys.stdout.flush()  # where a full disk is still said
        processes.leave()
        return status
    except StoppedError as error:
        print(f"dapo-jax {arguments.name}: {_noted(f'stopped by {error}', error)}", file=sys.stderr)
        processes.leave()
        return STOPPED
    except BaseException as error:
        found = _outcome(error, arguments.name)
        status, shown = (1, traceback.format_exc()) if found is None else (found[0], printable(found[1]))
        if joined:
            processes.fail(status, processes.described(error), shown=shown, by_all=found is not None)
        if found is None:
            raise
        print(shown, file=sys.stderr)
        return status


def _check_together(name: str) -> None:
    if name in ALONE:
        raise ConfigError(
            "the environment says that this is one of several processes, and it needs to be the only one: only "
            f"{', '.join(TOGETHER)} runs as several; start one, with DAPO_JAX_DISTRIBUTED=0"
        )


def _outcome(error: BaseException, name: str) -> tuple[int, str] | None:
    """Exit status and message of an error whose own message says all there is: a traceback would only hide it."""
    if isinstance(error, ConfigError):
        return 2, f"dapo-jax {name}: {error}"
    if isinstance(error, KeyboardInterrupt):
        return 1, f"dapo-jax {name}: interrupted"
    if isinstance(error, SystemExit):
        last = traceback.extract_tb(error.__traceback__)[-1]
        return (
            1,
            f"dapo-jax {name}: {_noted(f'{last.filename}, line {last.lineno}, called sys.exit({error.code!r})', error)}",
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return 1, f"dapo-jax {name}: {_noted(f'{error}: make room; what was written before is whole', error)}"
    if said := _without_devices(error):
        told = os.environ.get("JAX_PLATFORMS")
        return 2, f"dapo-jax {name}: {f'JAX_PLATFORMS={told}: ' if told else ''}{said}"
    if isinstance(error, RuntimeError | OSError) and _is_ours(error):
        return 1, f"dapo-jax {name}: {_noted(str(error), error)}"
    return None


def _noted(message: str, error: BaseException) -> str:
    """The message, and what a run has noted on the error: what there is to resume from."""
    return "; ".join([message, *getattr(error, "__notes__", ())])


def _without_devices(error: BaseException) -> str:
    """JAX's own message where it finds no device of the platforms it was told to use; empty for another error."""
    if isinstance(error, RuntimeError) and str(error).startswith(NO_BACKEND):
        return str(error)
    where = traceback.extract_tb(error.__traceback__)
    if isinstance(error, AssertionError) and where and where[-1].filename.endswith("xla_bridge.py"):
        # JAX passes over CUDA where there is no GPU, and then asserts that it has found something.
        return f"{NO_BACKEND}: no device of this platform is here; set JAX_PLATFORMS=cpu, or nothing, for what there is"
    return ""


def _is_ours(error: Exception) -> bool:
    """True for what the pipe says of data and graders, and what is said of checkpoints."""
    from dapo_jax.checkpoints.manifest import CheckpointError
    from dapo_jax.dapo.dynamic_sampling import ShortfallError
    from dapo_jax.locks import LockLostError
    from dapo_jax.rewards.functions import RewardError
    from dapo_jax.run.guard import GuardError

    return isinstance(error, ShortfallError | RewardError | CheckpointError | GuardError | LockLostError)


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; `key=value` may stand behind an option, which argparse alone does not take."""
    parser = _parser()
    arguments, left = parser.parse_known_args(argv)
    strange = [text for text in left if text.startswith("-") or "=" not in text]
    if strange or (left and not hasattr(arguments, "overrides")):
        hint = _meant(strange[0], parser, arguments, argv) if strange else ""
        parser.error(f"unrecognized arguments: {' '.join(strange or left)}{hint}")
    if left:
        arguments.overrides = [*arguments.overrides, *left]
    return arguments


def _meant(
    option: str, parser: argparse.ArgumentParser, arguments: argparse.Namespace, argv: Sequence[str] | None
) -> str:
    """The remedy for an option that is not known: `--steps 5` was meant as `steps=5`, `--Resume` as `--resume`."""
    name = option.partition("=")[0]
    if not name.startswith("--") or name == "--":
        return ""
    keyed = hasattr(arguments, "overrides")
    key = _key_of(name) if keyed else ""
    words = [arguments.name, getattr(arguments, "verb", "")]
    if not key and (near := nearest(name.removeprefix("--"), _options(parser, words))):
        return f"; did you mean --{near[0]}?"
    return _as_key(option, key, argv) if keyed else ""


def _options(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """The long options, without their dashes, of the command that `words` name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return _options(next(action.choices[word] for word in words if word in action.choices), words)
    names = [option for action in parser._actions for option in action.option_strings]
    return [name.removeprefix("--") for name in names if name.startswith("--")]


def _key_of(name: str) -> str:
    """The key that an option names, whole or by its last part if only one key ends so; empty if there is none."""
    key = name.lstrip("-").replace("-", "_")
    keys = leaf_types(TrainConfig)
    named = [known for known in keys if known == key or known.endswith(f".{key}")]
    return key if key in keys else named[0] if len(named) == 1 else ""


def _as_key(option: str, key: str, argv: Sequence[str] | None) -> str:
    _, equals, value = option.partition("=")
    if not equals:
        told = list(sys.argv[1:] if argv is None else argv)
        follow = told[told.index(option) + 1 :]
        value = follow[0] if follow and not follow[0].startswith("-") else "VALUE"
    return f"; a key is given without dashes: {f'{key}={value}' if key else 'KEY=VALUE'}"


class _Parser(argparse.ArgumentParser):
    """One whose error for a word that it does not know says which it knows that is like it."""

    def error(self, message: str) -> NoReturn:
        if "are required: " in message:
            # argparse counts what may be given any number of times among what is missing.
            message = message.replace(", key=value", "")
        if found := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            near = nearest(found[1], re.findall(r"[\w-]+", found[2]))
            message += f"; did you mean {near[0]!r}?" if near else ""
        super().error(printable(message))


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        prog="dapo-jax", description="DAPO reinforcement learning of language models in JAX."
    )
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")
    for kind in (training, planning, doctor, report, generation, data, models):
        kind.add_to(commands)
    return parser
