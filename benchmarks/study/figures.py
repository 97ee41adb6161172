"""Draws the paper's figures from the study's runs: means over seeds, with bands of one standard deviation."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from benchmarks.study.curves import Run
from benchmarks.study.ladder import Row

Runs = dict[tuple[str, int], Run]
COLOURS = {
    "grpo": "#7f7f7f",
    "overlong_filtering": "#cc79a7",
    "clip_higher": "#0072b2",
    "soft_punishment": "#e69f00",
    "token_level": "#009e73",
    "dynamic_sampling": "#d55e00",
    "in_flight": "#0072b2",
    "no_overlong_filtering": "#cc79a7",
    "no_clip_higher": "#0072b2",
    "no_soft_punishment": "#e69f00",
    "no_token_level": "#56b4e9",
}
"""The colour of each row, from Okabe and Ito's palette for colour-blind readers."""
HELD_OUT = "held-out accuracy (avg@4)"

Curve = Callable[[Run], tuple[np.ndarray, np.ndarray]]
"""Maps a run to positions on the x axis and values."""


def against_updates(metric: str) -> Curve:
    """Returns the curve of a training metric over optimizer updates."""
    return lambda run: (run.updates[1:], run[metric][1:])


def accuracy(axis: str) -> Curve:
    """Returns the curve of the smoothed held-out accuracy over `updates`, `tokens` or `seconds`."""
    return lambda run: (getattr(run, axis)[run.evaluated], run.accuracy)


def draw_all(runs: Runs, seeds: Sequence[int], ladder: Sequence[Row], folder: Path) -> list[Path]:
    """Draws the figures of a ladder as PNGs in `folder`, and returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    before, after = "overlong_filtering", "clip_higher"
    level, dynamic = "token_level", "dynamic_sampling"
    figures = {
        "fig2_clip_higher": [
            ([before, after], accuracy("updates"), HELD_OUT, "optimizer updates"),
            *(
                ([before, after], against_updates(metric), label, "optimizer updates")
                for metric, label in (
                    ("policy/entropy", "entropy (nats a token)"),
                    ("policy/clip_high_frac", "share of tokens clipped from above"),
                    ("policy/clipped_high_prob", "probability of up-clipped tokens"),
                )
            ),
        ],
        "fig3_clipped_and_all_correct": [
            (
                [before],
                against_updates("policy/clipped_high_prob"),
                "probability of up-clipped tokens",
                "optimizer updates",
            ),
            (
                [level],
                against_updates("rollout/all_correct_frac"),
                "share of prompts all correct",
                "optimizer updates",
            ),
        ],
        "fig4_token_level": [
            (
                ["soft_punishment", level],
                against_updates("policy/entropy"),
                "entropy (nats a token)",
                "optimizer updates",
            ),
            (
                ["soft_punishment", level],
                against_updates("rollout/response_tokens"),
                "response length (tokens)",
                "optimizer updates",
            ),
        ],
        "fig5_overlong_filtering": [
            (["grpo", before], accuracy("updates"), HELD_OUT, "optimizer updates"),
            (
                ["grpo", before],
                against_updates("policy/entropy"),
                "entropy (nats a token)",
                "optimizer updates",
            ),
        ],
        "fig6_dynamic_sampling": [
            ([level, dynamic], accuracy("updates"), HELD_OUT, "optimizer updates"),
            ([level, dynamic], accuracy("seconds"), HELD_OUT, "seconds of training"),
        ],
        "fig7_one_run": [
            ([dynamic], against_updates(metric), label, "optimizer updates")
            for metric, label in (
                ("rollout/response_tokens", "response length (tokens)"),
                ("reward/mean", "reward"),
                ("policy/entropy", "entropy (nats a token)"),
                ("policy/sampled_prob", "mean probability of sampled tokens"),
            )
        ],
    }
    titles = {row.name: row.title for row in ladder}
    return [
        draw_accuracy(runs, seeds, ladder, folder / "ladder.png"),
        *(_draw(runs, seeds, titles, panels, folder / f"{name}.png") for name, panels in figures.items()),
    ]


def draw_accuracy(runs: Runs, seeds: Sequence[int], rows: Sequence[Row], path: Path) -> Path:
    """Draws the accuracy of several rows against updates and tokens as a PNG, and returns its path."""
    titles = {row.name: row.title for row in rows}
    panels = [
        ([*titles], accuracy("updates"), HELD_OUT, "optimizer updates"),
        ([*titles], accuracy("tokens"), HELD_OUT, "sampled tokens"),
    ]
    return _draw(runs, seeds, titles, panels, path)


def _draw(
    runs: Runs,
    seeds: Sequence[int],
    titles: Mapping[str, str],
    panels: Sequence[tuple[list[str], Curve, str, str]],
    path: Path,
) -> Path:
    columns = 2
    figure, grid = plt.subplots(
        len(panels) // columns,
        columns,
        figsize=(10, 3.6 * (len(panels) // columns)),
        layout="constrained",
        squeeze=False,
    )
    shown: list[str] = []
    for axis, (names, curve, label, below) in zip(grid.flat, panels, strict=True):
        for name in names:
            _band(axis, [curve(runs[name, seed]) for seed in seeds], COLOURS[name], titles[name])
        axis.set(ylabel=label, xlabel=below)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.xaxis.set_major_locator(MaxNLocator(6))
        if names != shown:
            axis.legend(fontsize=8, frameon=False)
            shown = names
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _band(axis: Axes, curves: Sequence[tuple[np.ndarray, np.ndarray]], colour: str, title: str) -> None:
    """Draws the mean and standard deviation over seeds, in the range that all seeds cover."""
    end = min(places[-1] for places, _ in curves)
    start = max(places[0] for places, _ in curves)
    shared = np.linspace(start, end, 200)
    values = np.array([_interpolated(shared, *curve) for curve in curves])
    mean, deviation = np.nanmean(values, axis=0), np.nanstd(values, axis=0)
    axis.plot(shared, mean, color=colour, label=title, linewidth=1.8)
    axis.fill_between(shared, mean - deviation, mean + deviation, color=colour, alpha=0.15, linewidth=0)


def _interpolated(shared: np.ndarray, places: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Interpolates the values at the positions `shared`. Skips steps without the metric, for example if no token was clipped."""
    known = ~np.isnan(values)
    return np.interp(shared, places[known], values[known])
