"""The panels that the metrics of some runs fill. One of which no run has a metric is not there."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dapo_jax.report.panels import HELD_OUT, KNOWN, Panel, Series, panels_for
from dapo_jax.report.tables import Table

OTHER = "Other metrics"
"""The section of what no panel is for."""

_PARTS = re.compile(r"eval/.+_stderr|eval/.+/problems|time/(?:step|eval)_s")
"""Metrics that are drawn as a part of something else, or never change."""


def panels_of(tables: Sequence[Table]) -> tuple[list[Panel], list[str]]:
    """The panels that these runs fill, with the names of their metrics in place of patterns; and the titles of quiet ones."""
    names = list(dict.fromkeys(name for table in tables for name in table.columns))
    found, zero = [], []
    for panel in panels_for([table.by_score for table in tables]):
        series = tuple(_matching(panel.series, names))
        there = series
        if panel.quiet:
            there = tuple(each for each in series if any(_any(table, each.key) for table in tables))
        if there:
            found.append(
                _held_out(panel, there, tables) if panel.series is HELD_OUT else replace(panel, series=there)
            )
        elif series:
            zero.append(panel.title)
    known = {series.key for series in _matching(KNOWN, names)}
    left = [name for name in names if name not in known and not _PARTS.fullmatch(name)]
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


def _held_out(panel: Panel, series: tuple[Series, ...], tables: Sequence[Table]) -> Panel:
    """Leaves out the name of the only dataset, which says nothing; of pass@2, pass@4, ... only the last that all evaluations have is drawn at first."""
    if len({_dataset(each) for each in series}) == 1:
        only = f" {_dataset(series[0])}"
        series = tuple(
            Series(key=each.key, label=each.label.removesuffix(only), band=each.band) for each in series
        )
    drawn, fell_back = set[str](), set[str]()
    for dataset, kind in dict.fromkeys((_dataset(each), _kind(each)) for each in series):
        counted = [each for each in series if (_dataset(each), _kind(each)) == (dataset, kind)]
        lines = [(table.columns, line) for table in tables for line in range(len(table.axes["step"]))]
        there = [
            {each.key for each in counted if each.key in columns and columns[each.key][line] is not None}
            for columns, line in lines
        ]
        common = set.intersection(*(keys for keys in there if keys))
        if kind == "cons" or not common:
            continue
        most = max(common, key=_count)
        drawn.add(most)
        if most != max((each.key for each in counted), key=_count):
            fell_back.add(most.rpartition("/")[2])
    hidden = tuple(each.key for each in series if each.key not in drawn)
    panel = replace(panel, series=series, hidden=hidden)
    if not fell_back:
        return panel
    at = ", ".join(sorted(fell_back))
    return replace(
        panel,
        title=f"{panel.title}, {at}",
        note=f"{panel.note}; evaluations differ in k: {at} is the largest that all have, and avg@k has the same mean for every k",
    )


def _dataset(series: Series) -> str:
    return series.key.removeprefix("eval/").rpartition("/")[0]


def _kind(series: Series) -> str:
    return series.key.rpartition("/")[2].partition("@")[0]


def _count(key: str) -> int:
    """The k of a metric; that of avg@k, which stands for all, is 0."""
    count = key.rpartition("@")[2]
    return int(count) if count.isdecimal() else 0
