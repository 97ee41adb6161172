"""Makes reports of run folders, for `dapo-jax report` and notebooks."""

import html
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from os import PathLike
from typing import Any

import dapo_jax
from dapo_jax.config import ConfigError
from dapo_jax.report.chunks import Laid
from dapo_jax.report.evaluations import lay_out_evaluations
from dapo_jax.report.figures import figures
from dapo_jax.report.page import packed_of, page_of
from dapo_jax.report.panels import Panel, panels_of
from dapo_jax.report.rollouts import lay_out
from dapo_jax.report.runs import RunFiles, read_runs
from dapo_jax.report.tables import AXES, Table, comparable, configurations, table_of
from dapo_jax.storage import AnyPath, path_of, write_whole

MAX_RUNS = 8
"""Number of colours that can be distinguished."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """A report of runs; as the last expression of a notebook's cell it is shown."""

    html: str
    """The page, which is complete and loads nothing."""
    names: Sequence[str]
    """The names of the runs."""
    tables: Sequence[Table]
    panels: Sequence[Panel]

    def save(self, path: str | PathLike[str]) -> AnyPath:
        """Writes the page atomically and returns its path, which may be in a bucket.

        Raises:
            OSError: it cannot be written.
        """
        place = path_of(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, self.html.encode("utf-8"))
        return place

    def save_figures(self, folder: str | PathLike[str]) -> list[AnyPath]:
        """Writes FOLDER/overview.png and a PNG of every panel; returns their paths.

        Raises:
            ConfigError: matplotlib is not installed.
            OSError: a file cannot be written.
        """
        place = path_of(folder)
        place.mkdir(parents=True, exist_ok=True)
        written = []
        for name, content in figures(self.panels, self.names, self.tables):
            write_whole(place / f"{name}.png", content)
            written.append(place / f"{name}.png")
        return written

    def _repr_html_(self) -> str:
        """Returns the page in a frame that may only run the page's own script."""
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" sandbox="allow-scripts" title="{html.escape(title_of(self.names))}" '
            'style="width: 100%; height: 780px; border: 1px solid #8884; border-radius: 6px"></iframe>'
        )


def report(*runs: str | PathLike[str], rollout_steps: int | None = None) -> Report:
    """Makes a report of runs.

    Args:
        runs: run folders, local or in a bucket, of finished or current runs.
        rollout_steps: the largest number of logged steps with rollouts, and of evaluations with responses, evenly spaced; None: all.

    Raises:
        ConfigError: a run does not exist, has no metrics yet or is damaged, or there are too many runs.
    """
    check_count(len(runs))
    if rollout_steps is not None and rollout_steps < 0:
        raise ConfigError(
            f"rollout_steps: found {rollout_steps}, needs 0 or more; leave it out for all steps"
        )
    found = [
        (
            run,
            lay_out(run, steps=rollout_steps),
            lay_out_evaluations(run.evaluations, steps=rollout_steps, by_score=run.by_score),
        )
        for run in read_runs(runs)
    ]
    data, tables, panels = page_data(found)
    packed = packed_of([(rollouts, evaluations) for _, rollouts, evaluations in found])
    names = [run.name for run, _, _ in found]
    return Report(html=page_of(title_of(names), data, packed), names=names, tables=tables, panels=panels)


def check_count(runs: int) -> None:
    """Raises ConfigError if there are more runs than distinguishable colours."""
    if runs > MAX_RUNS:
        raise ConfigError(
            f"found {runs} runs, needs at most {MAX_RUNS}, the number of distinguishable colours"
        )


def page_data(
    found: Sequence[tuple[RunFiles, Laid, Laid]],
) -> tuple[dict[str, Any], Sequence[Table], Sequence[Panel]]:
    """Returns the data that the scripts read at once, of runs with their rollouts and evaluations; and its tables and panels."""
    tables = comparable([table_of(run) for run, _, _ in found])
    panels, zero = panels_of(tables)
    described = [
        {
            "name": run.name,
            "place": str(run.place),
            "status": asdict(run.status),
            "steps": None if run.config is None else run.config.steps,
            "model": None if run.config is None else run.config.model.source,
            "by_score": run.by_score,
            "axes": table.axes,
            "columns": table.columns,
            "rollouts": rollouts.about,
            "evaluations": evaluations.about,
        }
        for (run, rollouts, evaluations), table in zip(found, tables, strict=True)
    ]
    data = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": dapo_jax.__version__,
        "axes": AXES,
        "panels": [asdict(panel) for panel in panels],
        "zero": zero,  # titles of panels that are not shown
        "runs": described,
        "configuration": configurations([run for run, _, _ in found]),
    }
    return data, tables, panels


def title_of(names: Sequence[str]) -> str:
    """Returns the title of the browser's window."""
    return f"{', '.join(names)} · dapo_jax report"
