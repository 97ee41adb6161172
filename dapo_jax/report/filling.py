"""The panels that the metrics of some runs fill. One of which no run has a metric is not there."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dapo_jax.report.panels import HELD_OUT, PANELS, Panel, Series
from dapo_jax.report.tables import Table

OTHER = "Other metrics"
"""The section of what `PANELS` do not name."""

_PARTS = re.compile(r"eval/.+_stderr|eval/.+/problems|time/(?:step|eval)_s")
"""What is drawn as a part of something else, or never changes."""


def panels_of(tables: Sequence[Table]) -> tuple[list[Panel], list[str]]:
    """The panels that these runs fill, with the names of their metrics in place of patterns; and the titles of quiet ones."""
    names = list(dict.fromkeys(name for table in tables for name in table.columns))
    found, zero, used = [], [], set[str]()
    for panel in PANELS:
        series = tuple(_matching(panel.series, names))
        used |= {each.key for each in series}
        there = series
        if panel.quiet:
            there = tuple(each for each in series if any(_any(table, each.key) for table in tables))
        if there:
            found.append(_with(panel, there))
        elif series:
            zero.append(panel.title)
    left = [name for name in names if name not in used and not _PARTS.fullmatch(name)]
    for name in sorted(left):
        if any(_any(table, name) for table in tables):
            found.append(Panel(section=OTHER, title=name, unit="", series=(Series(key=name, label="value"),)))
        else:
            zero.append(name)
    return found, zero


def _any(table: Table, key: str) -> bool:
    """True if a metric is ever not 0."""
    return any(table.columns.get(key, ()))


def _matching(patterns: Sequence[Series], names: Sequence[str]) -> Iterator[Series]:
    for pattern in patterns:
        for name in names:
            if match := re.fullmatch(pattern.key, name):
                band = match.expand(pattern.band)
                yield Series(key=name, label=match.expand(pattern.label), band=band if band in names else "")


def _with(panel: Panel, series: tuple[Series, ...]) -> Panel:
    """Of one dataset alone the name says nothing; of pass@2, pass@4, ... only the last is drawn at first."""
    if panel.series is not HELD_OUT:
        return replace(panel, series=series)
    datasets = {each.key.split("/", 1)[1].rpartition("/")[0] for each in series}
    if len(datasets) == 1:
        only = f" {datasets.pop()}"
        series = tuple(
            Series(key=each.key, label=each.label.removesuffix(only), band=each.band) for each in series
        )
    most: dict[str, Series] = {}
    for each in series:
        kind = each.key.rpartition("@")[0]
        if kind not in most or _count(each) > _count(most[kind]):
            most[kind] = each
    shown = {each.key for kind, each in most.items() if "cons" not in kind.rpartition("/")[2]}
    hidden = tuple(each.key for each in series if each.key not in shown)
    return replace(panel, series=series, hidden=hidden)


def _count(series: Series) -> int:
    return int(series.key.rpartition("@")[2])
