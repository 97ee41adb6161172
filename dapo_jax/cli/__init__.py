"""The command line: arguments to one function per command. A module here holds the commands of one kind.

Exit status: 0 done; 2 for a usage or configuration error, said in one message; 75 for a training run that was told to stop
(SIGTERM, SIGINT) and can be resumed; 1 otherwise.
"""

import argparse
import errno
import sys
import traceback
from collections.abc import Sequence

from dapo_jax.cli import data, doctor, inference, models, planning, report, training
from dapo_jax.cli.arguments import printable
from dapo_jax.config import ConfigError
from dapo_jax.parallel import processes
from dapo_jax.stopping import STOPPED, StoppedError, stopped_by_signals

TOGETHER = ("train",)
"""Commands that several processes run together."""

ALONE = ("doctor", "sft", "eval", "sample", "serve", "convert")
"""Commands with a model that one process runs; the others need no devices and do not ask."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status. One of several processes that fails ends there and then."""
    arguments = _parsed(argv)
    if arguments.name not in TOGETHER:
        return _run(arguments)
    with stopped_by_signals(processes.end) as arguments.stop:
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    joined = False
    # Imported late: `dapo-jax config` and usage errors answer without loading jax.
    try:
        if arguments.name in TOGETHER + ALONE and processes.wanted():
            _check_together(arguments.name)
            processes.start(stop=arguments.stop)
            joined = True
        status = arguments.command(arguments)
        processes.leave()
        return status
    except StoppedError as error:
        print(f"dapo-jax {arguments.name}: stopped by {error}; --resume goes on from there", file=sys.stderr)
        processes.leave()
        return STOPPED
    except (Exception, KeyboardInterrupt) as error:
        found = _outcome(error, arguments.name)
        if joined:
            status, shown = found or (1, traceback.format_exc())
            processes.fail(status, processes.described(error), shown=shown, by_all=found is not None)
        if found is None:
            raise
        print(printable(found[1]), file=sys.stderr)
        return found[0]


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
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return 1, f"dapo-jax {name}: {error}: make room; what was written before is whole"
    if isinstance(error, RuntimeError | OSError) and _is_ours(error):
        return 1, f"dapo-jax {name}: {error}"
    return None


def _is_ours(error: Exception) -> bool:
    """True for what the pipe says of data and graders, and what is said of checkpoints."""
    from dapo_jax.checkpoint_files import CheckpointError
    from dapo_jax.filtering import ShortfallError
    from dapo_jax.rewards.functions import RewardError
    from dapo_jax.run.guard import GuardError

    return isinstance(error, ShortfallError | RewardError | CheckpointError | GuardError)


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; `key=value` may stand behind an option, which argparse alone does not take."""
    parser = _parser()
    arguments, left = parser.parse_known_args(argv)
    strange = [text for text in left if text.startswith("-") or "=" not in text]
    if strange or (left and not hasattr(arguments, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(strange or left)}")
    if left:
        arguments.overrides = [*arguments.overrides, *left]
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dapo-jax", description="DAPO reinforcement learning of language models in JAX."
    )
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")
    for kind in (training, planning, doctor, report, inference, data, models):
        kind.add_to(commands)
    return parser
