"""Arranges a run's metrics as columns, computes the horizontal axes, and compares configurations."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from dapo_jax.config import TrainConfig
from dapo_jax.config.algorithms import algorithm_name
from dapo_jax.config.loading import leaf_values
from dapo_jax.report.runs import RunFiles

Column = list[float | int | None]

AXES = {
    "step": "step",
    "updates": "optimizer updates",
    "sampled_tokens": "sampled tokens",
    "clock_s": "time in steps and evaluations",
}
"""Titles of the horizontal axes. A step's value on an axis is the total from the beginning of the run to the end of this step."""

_AVERAGE = re.compile(r"(eval/.+/)avg@(\d+)((?:_stderr)?)")

REST = "time/rest_s"
"""Time per step outside sampling and updates, mostly evaluation."""

EQUAL = "rollout/scores_equal_frac"
"""The share of groups whose scores are all equal, for runs with `by_score`."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """The metrics of a run. A column has one value per line of metrics.jsonl, or None where the line lacks the metric."""

    axes: Mapping[str, Column]
    """The axes in `AXES` for which the run has values. `step` is always present."""
    columns: Mapping[str, Column]
    """The columns for all metrics with at least one numeric value."""
    by_score: bool = False
    """Whether groups are judged by their scores instead of verdicts."""


def table_of(run: RunFiles) -> Table:
    """Returns a run's metrics as columns, and adds the computed columns `REST` and `EQUAL`."""
    rows = [dict(row) for row in run.rows]
    for row in rows:
        if row.get("time/step_s") is not None:
            inside = sum(row.get(name) or 0.0 for name in ("time/sample_s", "time/update_s"))
            row[REST] = max(row["time/step_s"] - inside, 0.0) + (row.get("time/eval_s") or 0.0)
        if run.by_score and (differ := row.get("rollout/scores_differ_frac")) is not None:
            row[EQUAL] = 1.0 - differ
    names = dict.fromkeys(name for row in rows for name in row if name != "step")
    columns = {name: [number_of(row.get(name)) for row in rows] for name in names}
    return Table(
        axes=_axes(rows, run.config),
        columns={name: values for name, values in columns.items() if any(v is not None for v in values)},
        by_score=run.by_score,
    )


def comparable(tables: Sequence[Table]) -> list[Table]:
    """Renames avg@4, avg@8, ... to avg@k if evaluations of a dataset differ in k, because the expected value is the same for every k."""
    of_dataset: dict[str, set[str]] = {}
    for match in (match for table in tables for name in table.columns if (match := _AVERAGE.fullmatch(name))):
        of_dataset.setdefault(match[1], set()).add(match[2])
    differing = {dataset for dataset, counts in of_dataset.items() if len(counts) > 1}

    def renamed(name: str) -> str:
        match = _AVERAGE.fullmatch(name)
        return f"{match[1]}avg@k{match[3]}" if match and match[1] in differing else name

    renamed_tables = []
    for table in tables:
        columns: dict[str, Column] = {}
        for name, values in table.columns.items():
            # Columns with the same new name never have values in the same row.
            before = columns.get(renamed(name), [None] * len(values))
            columns[renamed(name)] = [a if b is None else b for a, b in zip(before, values, strict=True)]
        renamed_tables.append(replace(table, columns=columns))
    return renamed_tables


def configurations(runs: Sequence[RunFiles]) -> list[dict[str, Any]]:
    """Returns {key, default, values, departs, differs} for each configuration key in the order of the schema.

    `default` and the runs' `values` are texts, or None for a run without config.yaml. `departs` is true if any run differs from the default, and `differs` if the
    runs differ.
    """
    default = leaf_values(TrainConfig(run_dir="RUN"))
    leaves = [None if run.config is None else leaf_values(run.config) for run in runs]
    rows = []
    for key, usual in default.items():
        known, has_default = [values[key] for values in leaves if values is not None], key != "run_dir"
        rows.append(
            {
                "key": key,
                "default": _shown(usual) if has_default else "",
                "values": [None if values is None else _shown(values[key]) for values in leaves],
                "departs": has_default and any(value != usual for value in known),
                "differs": any(value != known[0] for value in known),
            }
        )
    return rows


def about(run: RunFiles) -> dict[str, str]:
    """Returns the algorithm and the seed of a run, and the command line, the machine and the versions of its last process."""
    if run.config is None:
        return dict(run.status.process)
    return {"algorithm": algorithm_name(run.config), "seed": str(run.config.seed), **run.status.process}


def _shown(value: Any) -> str:
    """Formats a value on one line, as in a configuration file."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, default=str)


def _axes(rows: Sequence[Mapping[str, Any]], config: TrainConfig | None) -> dict[str, Column]:
    def of(name: str) -> list[float | int]:
        return [row.get(name) or 0 for row in rows]

    axes: dict[str, Column] = {"step": [row["step"] for row in rows]}
    if config is not None:
        batch, tokens = config.batch, of("rollout/response_tokens")
        updates = [math.ceil(groups / batch.groups_per_update) for groups in of("rollout/trained_groups")]
        responses = [prompts * batch.group_size for prompts in of("rollout/prompts")]
        axes["updates"] = _sums(updates)
        axes["sampled_tokens"] = _sums([round(a * b) for a, b in zip(responses, tokens, strict=True)])
    if any("time/step_s" in row for row in rows):
        axes["clock_s"] = _sums([a + b for a, b in zip(of("time/step_s"), of("time/eval_s"), strict=True)])
    return axes


def _sums(values: Sequence[float | int]) -> Column:
    return [number_of(total) for total in accumulate(values)]


def number_of(value: Any) -> float | int | None:
    """Rounds to six significant digits. Returns None for values that are not finite numbers."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    short = float(f"{value:.6g}")
    return int(short) if short.is_integer() and abs(short) < 2**53 else short
