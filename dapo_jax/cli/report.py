"""`report`: a page for looking into runs."""

import argparse
import errno

from dapo_jax.cli.arguments import Commands, command, option
from dapo_jax.config import ConfigError

LARGE_BYTES = 100_000_000
"""Size above which a page opens slowly."""


def add_to(commands: Commands) -> None:
    """Adds the command."""
    text = "Make one HTML page of runs: curves, rollouts, configuration. It needs no network."
    made = command(commands, "report", report, text)
    made.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder, finished or live")
    option(made, "--out", "file of the page (default RUN/report.html of the first run)", "FILE")
    option(made, "--png", "also write the figures as PNGs (extra report)", "FOLDER")
    text = "show the rollouts of at most N logged steps and the responses of at most N evaluations, evenly spaced (default all)"
    option(made, "--rollout-steps", text, "N", type=int)
    text = "serve the page to this machine's browser instead, and update it while the runs are live"
    option(made, "--watch", text)
    option(made, "--port", "with --watch: the port of 127.0.0.1 (default a free one)", "N", type=int)


def report(arguments: argparse.Namespace) -> int:
    """Makes the page and prints its path, or serves it."""
    if arguments.watch:
        return _watch(arguments)
    if arguments.port is not None:
        raise ConfigError(f"--port {arguments.port} goes with --watch; a page in a file has no port")
    from dapo_jax.report import report
    from dapo_jax.storage import path_of

    made = report(*arguments.runs, rollout_steps=arguments.rollout_steps)
    try:
        out = made.save(arguments.out or path_of(arguments.runs[0]) / "report.html")
        size = len(made.html.encode())
        print(f"{out}: {size / 1e6:.1f} MB")
        if size > LARGE_BYTES:
            limit = f"{LARGE_BYTES / 1e6:.0f} MB"
            print(f"    over {limit} it opens slowly; --rollout-steps shows fewer steps' rollouts")
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


def _watch(arguments: argparse.Namespace) -> int:
    """Serves the page until it is interrupted."""
    from dapo_jax.report.server import watch

    for name in ("out", "png", "rollout_steps"):
        if getattr(arguments, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} {getattr(arguments, name)} is for a page in a file, and --watch writes none: leave out one of the two"
            )
    watch(*arguments.runs, port=arguments.port or 0)
    return 0
