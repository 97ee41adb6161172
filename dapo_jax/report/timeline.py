"""Computes how a run's time is divided among the phases of its steps, for the page and for a trace that chrome://tracing and Perfetto open."""

from collections.abc import Mapping, Sequence
from typing import Any

from dapo_jax.report.runs import RunFiles

PHASES = {
    "sample": "sampling", "grade": "grading", "wait": "waiting for other processes", "logprobs": "log-probabilities",
    "update": "updates", "eval": "evaluation", "checkpoint": "checkpoint", "rest": "rest",
}  # fmt: skip
"""Titles of the phases of a step in their order. Grading and waiting occur between parts of the sampling, and are shown after it."""


def timeline_of(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, dict[str, float]]]:
    """Returns (step, seconds in each phase of `PHASES`) for each line of metrics.jsonl. Phases that were not logged take 0 seconds."""
    times = []
    for row, following in zip(rows, [*rows[1:], {}], strict=False):
        spent = {phase: float(row.get(f"time/{phase}_s") or 0.0) for phase in PHASES}
        spent["sample"] = max(0.0, spent["sample"] - spent["grade"] - spent["wait"])
        spent["update"] = max(0.0, spent["update"] - spent["logprobs"])
        # The next step logs the time since this step. If the run was resumed in between, it is 0.
        spent["checkpoint"] = following.get("time/checkpoint_s") or 0.0
        between = following.get("time/between_s") or 0.0
        spent["rest"] = max(0.0, between - spent["eval"] - spent["checkpoint"])
        times.append((row["step"], spent))
    return times


def trace_of(runs: Sequence[RunFiles]) -> dict[str, Any]:
    """Returns a trace in Chrome's Trace Event Format, with one process per run. Times are in microseconds, without the time between a stop and a resume."""
    events: list[dict[str, Any]] = []
    for process, run in enumerate(runs):
        track, at = {"pid": process, "tid": 0}, 0
        events.append({"name": "process_name", "ph": "M", **track, "args": {"name": run.name}})
        for step, spent in timeline_of(run.rows):
            spans = {PHASES[phase]: round(1e6 * seconds) for phase, seconds in spent.items()}
            events.append({"name": f"step {step}", "ph": "X", "ts": at, "dur": sum(spans.values()), **track})
            for name, span in spans.items():
                if span:
                    events.append({"name": name, "ph": "X", "ts": at, "dur": span, **track})
                    at += span
    return {"traceEvents": events, "displayTimeUnit": "ms"}
