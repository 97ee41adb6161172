"""An examination as a table for people, and as data for programs.

A file of its own: checks find out, and print nothing.
"""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dapo_jax.config.values import without_secrets
from dapo_jax.doctor.check import Finding
from dapo_jax.doctor.examination import verdict
from dapo_jax.terminal import visible

_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}


def show(findings: Sequence[Finding], console: Console, *, configured: bool) -> None:
    """Prints what was found, what to do about it, and the verdict; what a terminal would obey in a prompt or a response is written out."""
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("what was found", overflow="fold")
    for finding in findings:
        said = Text(_shown(finding.found.message))
        if finding.found.remedy:
            said.append(f"\n-> {_shown(finding.found.remedy)}", style="bold")
        table.add_row(finding.name, Text(finding.state, style=_STYLES[finding.state]), said)
    console.print(table)
    details = [line for finding in findings for line in finding.found.details]
    if details:
        console.print()
        for line in details:
            console.print(_shown(line), markup=False, highlight=False)
    console.print()
    good, sentence = verdict(findings, configured=configured)
    console.print(Text(sentence, style="bold green" if good else "bold red"))


def as_data(findings: Sequence[Finding], *, configured: bool) -> dict[str, Any]:
    """The content of `--json`."""
    good, sentence = verdict(findings, configured=configured)
    return {
        "schema_version": 1,
        "can_train": good,
        "verdict": sentence,
        "checks": [
            {
                "name": finding.name,
                "state": finding.state,
                "said": finding.found.message,
                "remedy": finding.found.remedy,
                "details": list(finding.found.details),
                "seconds": round(finding.seconds, 3),
            }
            for finding in findings
        ],
    }


def _shown(text: str) -> str:
    """`text` without tokens and passwords, and without what a terminal would obey."""
    return visible(without_secrets(text))
