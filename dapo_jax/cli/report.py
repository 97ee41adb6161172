"""`report`: a page to look into runs with."""

import argparse
import errno

from dapo_jax.cli.arguments import Commands, command
from dapo_jax.config import ConfigError

LARGE_BYTES = 100_000_000
"""A page over this is slow to open."""


def add_to(commands: Commands) -> None:
    """Adds the command."""
    made = command(
        commands,
        "report",
        report,
        "Make one HTML page of runs: curves, rollouts, configuration. It needs no network.",
    )
    made.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder, finished or going on")
    made.add_argument(
        "--out", metavar="FILE", help="where the page goes (default RUN/report.html of the first run)"
    )
    made.add_argument("--png", metavar="FOLDER", help="write the figures as PNGs too (extra report)")
    made.add_argument(
        "--rollout-steps",
        metavar="N",
        type=int,
        help="show the rollouts of at most N logged steps, evenly spaced (default all)",
    )


def report(arguments: argparse.Namespace) -> int:
    """Makes the page and says where it is."""
    from dapo_jax.report import report
    from dapo_jax.storage import path_of

    made = report(*arguments.runs, rollout_steps=arguments.rollout_steps)
    try:
        out = made.save(arguments.out or path_of(arguments.runs[0]) / "report.html")
        size = len(made.html.encode())
        print(f"{out}: {size / 1e6:.1f} MB")
        if size > LARGE_BYTES:
            print(
                f"    over {LARGE_BYTES / 1e6:.0f} MB it opens slowly; --rollout-steps shows fewer steps' rollouts"
            )
        if arguments.png:
            written = made.save_figures(arguments.png)
            print(f"{arguments.png}: {len(written)} PNGs")
    except ConfigError:
        raise
    except ValueError as error:  # a path that is neither local nor in a bucket
        raise ConfigError(str(error)) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ConfigError(f"cannot write the report: {error}") from error
    return 0
