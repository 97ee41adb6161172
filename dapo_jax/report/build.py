"""Creates reports of run folders for `dapo-jax report` and notebooks: the page, and PNGs with matplotlib (`report` extra)."""

import html
import importlib
import io
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from os import PathLike
from typing import Any

import dapo_jax
from dapo_jax.config import ConfigError
from dapo_jax.hints import needing
from dapo_jax.report.chunks import Laid
from dapo_jax.report.evaluations import lay_out_evaluations
from dapo_jax.report.page import packed_of, page_of
from dapo_jax.report.panels import OTHER, Panel, panels_of
from dapo_jax.report.rollouts import lay_out
from dapo_jax.report.runs import RunFiles, read_runs
from dapo_jax.report.tables import AXES, Column, Table, about, comparable, configurations, number_of, table_of
from dapo_jax.report.timeline import PHASES, timeline_of, trace_of
from dapo_jax.storage import AnyPath, path_of, write_whole

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#b58900", "#56b4e9", "#882255", "#555555")
"""The colours that distinguish runs in PNGs and on the page, from the colour-blind-safe palettes by Okabe and Ito, and by Tol."""
MAX_RUNS = len(COLOURS)
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (7, 2, 1.5, 2)))
_SHARE_COLOURS = ("#009e73", "#56b4e9", "#d55e00")
_WIDTH, _HEIGHT = 4.4, 2.7
"""Size of a panel in inches."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """A report of runs. A notebook displays it if it is the last expression of a cell."""

    html: str
    """The complete page, which loads no other files."""
    names: Sequence[str]
    """The names of the runs."""
    tables: Sequence[Table]
    panels: Sequence[Panel]
    trace: Mapping[str, Any]
    """The times of all steps as a trace that chrome://tracing and Perfetto open, after conversion to JSON (see `timeline.trace_of`)."""

    def save(self, path: str | PathLike[str]) -> AnyPath:
        """Writes the page atomically and returns its path, which may be in a bucket. Raises OSError if the page cannot be written."""
        file = path_of(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, self.html.encode("utf-8"))
        return file

    def save_figures(self, folder: str | PathLike[str]) -> list[AnyPath]:
        """Writes FOLDER/overview.png and a PNG of every panel, and returns their paths.

        Raises:
            ConfigError: matplotlib is not installed.
            OSError: a file cannot be written.
        """
        target, written = path_of(folder), list[AnyPath]()
        target.mkdir(parents=True, exist_ok=True)
        for name, content in _figures(self):
            written.append(target / f"{name}.png")
            write_whole(written[-1], content)
        return written

    def _repr_html_(self) -> str:
        """Returns the page in a sandboxed frame, which may only run the page's own script."""
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" sandbox="allow-scripts" title="{html.escape(title_of(self.names))}" '
            'style="width: 100%; height: 780px; border: 1px solid #8884; border-radius: 6px"></iframe>'
        )


def report(*runs: str | PathLike[str], rollout_steps: int | None = None) -> Report:
    """Creates a report of runs.

    Args:
        runs: folders of finished or active runs, local or in a bucket.
        rollout_steps: include the texts of at most this many logged steps and this many evaluations, evenly spaced. None includes all texts.

    Raises:
        ConfigError: a run does not exist, has no metrics yet or is damaged, or there are too many runs.
    """
    check_count(len(runs))
    if rollout_steps is not None and rollout_steps < 0:
        raise ConfigError(f"rollout_steps: found {rollout_steps}, needs 0 or more; omit it for all steps")
    laid = []
    for run in read_runs(runs):
        evaluations = lay_out_evaluations(run.evaluations, steps=rollout_steps, by_score=run.by_score)
        laid.append((run, lay_out(run, steps=rollout_steps), evaluations))
    data, tables, panels = page_data(laid)
    packed = packed_of([(rollouts, evaluations) for _, rollouts, evaluations in laid])
    names = [run.name for run, _, _ in laid]
    page, trace = page_of(title_of(names), data, packed), trace_of([run for run, _, _ in laid])
    return Report(html=page, names=names, tables=tables, panels=panels, trace=trace)


def check_count(runs: int) -> None:
    """Raises ConfigError if there are more runs than distinguishable colours."""
    if runs > MAX_RUNS:
        raise ConfigError(f"found {runs} runs; a report shows at most {MAX_RUNS}, each in its own colour")


def page_data(laid: Sequence[tuple[RunFiles, Laid, Laid]]) -> tuple[dict[str, Any], list[Table], list[Panel]]:
    """Returns the page's initial data, its tables and its panels. `laid` contains one (run, rollouts, evaluations) tuple per run."""
    tables = comparable([table_of(run) for run, _, _ in laid])
    panels, zero = panels_of(tables)
    described = [
        {
            "name": run.name,
            "place": str(run.folder),
            "status": asdict(run.status),
            "about": about(run),
            "steps": None if run.config is None else run.config.steps,
            "by_score": run.by_score,
            "axes": table.axes,
            "columns": table.columns,
            "timeline": [[step, *map(number_of, spent.values())] for step, spent in timeline_of(run.rows)],
            "rollouts": rollouts.about,
            "evaluations": evaluations.about,
        }
        for (run, rollouts, evaluations), table in zip(laid, tables, strict=True)
    ]
    data = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": dapo_jax.__version__,
        "axes": AXES,
        "panels": [asdict(panel) for panel in panels],
        "phases": list(PHASES.values()),
        "zero": zero,  # titles of panels that are omitted because all their values are 0
        "runs": described,
        "configuration": configurations([run for run, _, _ in laid]),
    }
    return data, tables, panels


def title_of(names: Sequence[str]) -> str:
    """Returns the title of the browser window."""
    return f"{', '.join(names)} · dapo_jax report"


def _figures(made: Report) -> Iterator[tuple[str, bytes]]:
    """Yields (name, PNG) pairs: the sheet `overview` with all panels except `OTHER`, if any, then each panel. Needs matplotlib."""
    with needing("report", "PNGs need matplotlib", ConfigError):
        figure_class = importlib.import_module("matplotlib.figure").Figure
    overview = [panel for panel in made.panels if panel.section != OTHER]
    sheets = {"overview": (overview, 3, 1.0)} if overview else {}
    for panel in made.panels:
        name = re.sub(r"[^\w@]+", "_", panel.title.lower()).strip("_")
        while name in sheets:  # titles may differ only in signs
            name += "_2"
        sheets[name] = ([panel], 1, 1.4)
    for name, (shown, columns, size) in sheets.items():
        lines, file = math.ceil(len(shown) / columns), io.BytesIO()
        figure = figure_class(figsize=(columns * size * _WIDTH, lines * size * _HEIGHT), layout="constrained")
        for index, panel in enumerate(shown, 1):
            _draw(figure.add_subplot(lines, columns, index), panel, made.names, made.tables)
        figure.savefig(file, format="png", dpi=130)
        yield name, file.getvalue()


def _draw(axis: Any, panel: Panel, names: Sequence[str], tables: Sequence[Table]) -> None:
    shown = [series for series in panel.series if series.key not in panel.hidden] or panel.series
    several = len(names) > 1
    for number, (name, table) in enumerate(zip(names, tables, strict=True)):
        if panel.stacked and several:
            _line(axis, table, shown[0].key, f"{name}: {shown[0].label}", COLOURS[number], "-")
            continue
        if panel.stacked:
            _stack(axis, table, [(series.key, series.label) for series in shown])
            continue
        for index, series in enumerate(shown):
            colour = COLOURS[number if several else index % len(COLOURS)]
            dash = _DASHES[index % len(_DASHES)] if several else "-"
            _line(axis, table, series.key, "" if several else series.label, colour, dash, band=series.band)
    if several and not panel.stacked:
        keys = [{"color": colour, "label": name} for colour, name in zip(COLOURS, names, strict=False)]
        for series, dash in zip(shown, itertools.cycle(_DASHES), strict=False):
            keys += [{"color": "black", "linestyle": dash, "label": series.label}] if shown[1:] else []
        for key in keys:
            axis.plot([], [], linewidth=1.3, **key)
    axis.set_title(panel.title, fontsize=9, loc="left", fontweight="bold")
    axis.set_ylabel("" if panel.unit == "share" else panel.unit, fontsize=8)
    axis.set_xlabel("step", fontsize=8)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    if panel.log:
        axis.set_yscale("log")
    if panel.unit == "share":
        axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    if (labels := len(axis.get_legend_handles_labels()[1])) > 1:
        axis.legend(fontsize=6.5, framealpha=0.7, ncols=math.ceil(labels / 10)).set_in_layout(False)


def _line(axis: Any, table: Table, key: str, label: str, colour: str, dash: Any, *, band: str = "") -> None:
    points = _points(table.axes["step"], table.columns.get(key, []))
    if not points:
        return
    steps, values = zip(*points, strict=True)
    marker = "o" if len(points) <= 40 else ""
    style = {"color": colour, "linestyle": dash, "linewidth": 1.3, "marker": marker, "markersize": 2.2}
    axis.plot(steps, values, label=label, **style)
    if band in table.columns:
        error = dict(_points(table.axes["step"], table.columns[band]))
        low, high = ([value + sign * error.get(step, 0.0) for step, value in points] for sign in (-1, 1))
        axis.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)


def _stack(axis: Any, table: Table, layers: Sequence[tuple[str, str]]) -> None:
    known = {label: table.columns[key] for key, label in layers if key in table.columns}
    rows = [
        (step, *(value or 0.0 for value in values))
        for step, *values in zip(table.axes["step"], *known.values(), strict=True)
        if any(value is not None for value in values)
    ]
    steps, *values = zip(*rows, strict=True)
    axis.stackplot(steps, *values, labels=list(known), colors=_SHARE_COLOURS, alpha=0.75, step="mid")


def _points(steps: Column, values: Column) -> list[tuple[float | int, float | int]]:
    pairs = zip(steps, values, strict=False)
    return [(step, value) for step, value in pairs if step is not None and value is not None]
