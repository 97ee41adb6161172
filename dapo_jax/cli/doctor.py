"""`doctor`: checks whether a configuration can train on this machine."""

import argparse
from pathlib import Path

from dapo_jax.cli.arguments import CONFIG, Commands, add_overrides, command, option, write_json
from dapo_jax.config import ConfigError, load_config


def add_to(commands: Commands) -> None:
    """Adds the command."""
    made = command(
        commands, "doctor", doctor, "Find out whether this machine, with this configuration, can train."
    )
    made.add_argument("config", nargs="?", help=f"{CONFIG}; without it only the machine is examined")
    add_overrides(made)
    option(made, "--full", "make the tiny step with the run's own model, however large")
    option(made, "--quick", "leave the tiny step out")
    text = "how a right response is written, for your own grader: '<result>{answer}</result>' (default: several ways are tried)"
    option(made, "--right", text, "TEXT", default="")
    option(made, "--json", "also write JSON; -: to standard output, and the table to standard error", "FILE")


def doctor(arguments: argparse.Namespace) -> int:
    """Makes the checks; returns 1 if training cannot start."""
    if arguments.right and "{answer}" not in arguments.right:
        raise ConfigError(
            f"--right: found {arguments.right!r}, needs {{answer}} in it, in place of the reference answer"
        )
    if arguments.config and "=" in arguments.config and not Path(arguments.config).exists():
        raise ConfigError(
            f"{arguments.config!r} changes a configuration: name its file first, doctor CONFIG {arguments.config}"
        )
    config = load_config(arguments.config, arguments.overrides) if arguments.config else None
    from rich.console import Console

    from dapo_jax.doctor.examination import as_data, examination, show

    console = Console(stderr=arguments.json == "-")
    with console.status("starting") as status:
        findings = examination(
            config,
            full=arguments.full,
            quick=arguments.quick,
            right=arguments.right,
            before=lambda check: status.update(f"{check.name} ..."),
        )
    show(findings, console, configured=config is not None)
    found = as_data(findings, configured=config is not None)
    if arguments.json:
        write_json(arguments.json, found)
    return 0 if found["can_train"] else 1
