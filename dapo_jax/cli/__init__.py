"""The command line: arguments to one function per command. A module here holds the commands of one kind.

Exit status: 0 done; 2 for a usage or configuration error, said in one message; 1 otherwise.
"""

import argparse
import sys
from collections.abc import Sequence

from dapo_jax.cli import data, inference, models, planning, training
from dapo_jax.config import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status."""
    arguments = _parsed(argv)
    # Imported late: `dapo-jax config` and usage errors answer without loading jax.
    try:
        return arguments.command(arguments)
    except ConfigError as error:
        print(f"dapo-jax {arguments.name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"dapo-jax {arguments.name}: interrupted", file=sys.stderr)
        return 1
    except (RuntimeError, OSError) as error:
        if not _is_ours(error):
            raise
        print(f"dapo-jax {arguments.name}: {error}", file=sys.stderr)
        return 1


def _is_ours(error: Exception) -> bool:
    """True if the error's own message says all there is: a traceback would only hide it."""
    from dapo_jax.filtering import ShortfallError
    from dapo_jax.rewards.functions import RewardError

    return isinstance(error, ShortfallError | RewardError)


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
    for kind in (training, planning, inference, data, models):
        kind.add_to(commands)
    return parser
