"""Draws a run's metrics.jsonl: `python docs/results/plot.py METRICS OUT.png` (needs matplotlib)."""

import json
import re
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

PANELS = [
    (
        "accuracy",
        {"rollout/accuracy": "sampled in training", r"eval/.*/avg@\d+": "held out, average of 8"},
        (0, 1),
    ),
    ("shares of groups", {"rollout/mixed_frac": "mixed", "rollout/all_correct_frac": "all correct"}, (0, 1)),
    ("entropy, nats a token", {"policy/entropy": "policy"}, None),
    ("response length, tokens", {"rollout/response_tokens": "mean"}, None),
]
"""Title, pattern of a metric's name -> its label, limits of the axis."""


def main() -> None:
    """Reads, draws, writes."""
    source, out = map(Path, sys.argv[1:])
    lines = [json.loads(line) for line in source.read_text().splitlines()]
    figure, axes = plt.subplots(2, 2, figsize=(9, 5.5), sharex=True, layout="constrained")
    for axis, (title, metrics, limits) in zip(axes.flat, PANELS, strict=True):
        for metric, label in metrics.items():
            points = [(line["step"], value) for line in lines if (value := _value(line, metric)) is not None]
            axis.plot(
                *zip(*points, strict=True), marker="o" if len(points) < len(lines) else None, label=label
            )
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
        if limits:
            axis.set_ylim(*limits)
        if len(metrics) > 1:
            axis.legend(fontsize=8)
    for axis in axes[1]:
        axis.set_xlabel("step")
        axis.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(out, dpi=110)


def _value(line: dict[str, float], metric: str) -> float | None:
    return next((value for name, value in line.items() if re.fullmatch(metric, name)), None)


if __name__ == "__main__":
    main()
