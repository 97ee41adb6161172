"""Loads the study's runs as arrays, stores their metrics in one CSV file, and defines the measures of a run."""

import csv
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dapo_jax.trackers import read_metrics

GROUP_SIZE, GROUPS_PER_UPDATE = 16, 2
"""The values in the configurations of the studies. A test checks that they are the same."""
ACCURACY = "eval/avg@4"
"""The held-out accuracy. The metrics of a run contain the dataset's name too."""
METRICS = (
    ACCURACY,
    "rollout/prompts",
    "rollout/trained_groups",
    "rollout/accuracy",
    "rollout/response_tokens",
    "rollout/drawn_tokens",
    "rollout/age_mean",
    "rollout/truncated_frac",
    "rollout/all_correct_frac",
    "rollout/all_wrong_frac",
    "reward/mean",
    "policy/entropy",
    "policy/sampled_prob",
    "policy/clip_high_frac",
    "policy/clip_low_frac",
    "policy/clipped_high_prob",
    "update/grad_norm",
    "time/step_s",
)
"""The metrics that are stored for every step."""
SMOOTHED = 3
"""Number of evaluations to average. A single evaluation has a standard error of about 0.01 (264 x 4 responses to `chain_sums`)."""


@dataclass(frozen=True)
class Run:
    """One run, with a value of each metric for each step. Step 0 is the evaluation before training."""

    values: dict[str, np.ndarray]
    token_budget: float = np.inf
    """The largest number of sampled tokens that every run of the study reaches."""

    def __getitem__(self, metric: str) -> np.ndarray:
        return self.values[metric]

    @property
    def updates(self) -> np.ndarray:
        """Number of optimizer updates until the end of each step."""
        return np.cumsum(np.ceil(np.nan_to_num(self["rollout/trained_groups"]) / GROUPS_PER_UPDATE))

    @property
    def tokens(self) -> np.ndarray:
        """Number of response tokens sampled for training until the end of each step. With rollouts in flight, this is the logged number;
        otherwise, it is computed from the number of groups and the mean response length."""
        sampled = self["rollout/prompts"] * GROUP_SIZE * self["rollout/response_tokens"]
        drawn = self["rollout/drawn_tokens"]
        return np.cumsum(np.nan_to_num(np.where(np.isnan(drawn), sampled, drawn)))

    @property
    def seconds(self) -> np.ndarray:
        """Wall-clock seconds spent in steps until the end of each step, without evaluations."""
        return np.cumsum(np.nan_to_num(self["time/step_s"]))

    @property
    def evaluated(self) -> np.ndarray:
        """The indices of the steps with an evaluation."""
        return np.flatnonzero(~np.isnan(self[ACCURACY]))

    @property
    def accuracy(self) -> np.ndarray:
        """Held-out avg@4 at the steps in `evaluated`, averaged over this evaluation and up to two earlier evaluations."""
        raw = self[ACCURACY][self.evaluated]
        return np.array([raw[max(0, i - SMOOTHED + 1) : i + 1].mean() for i in range(len(raw))])


def final_accuracy(run: Run) -> float:
    """Returns the mean held-out avg@4 over the last three evaluations."""
    return float(run.accuracy[-1])


def mean_accuracy(run: Run) -> float:
    """Returns the mean held-out avg@4 over all evaluations during training. It is higher for a run that learns faster."""
    return float(run[ACCURACY][run.evaluated[1:]].mean())


def accuracy_at_tokens(run: Run) -> float:
    """Returns the held-out avg@4 at the point where the run has sampled `token_budget` tokens."""
    return float(np.interp(run.token_budget, run.tokens[run.evaluated], run.accuracy))


def whole(metric: str) -> Callable[[Run], float]:
    """Returns a function that averages a metric over all steps that have it."""
    return lambda run: float(np.nanmean(run[metric][1:]))


def late(metric: str) -> Callable[[Run], float]:
    """Returns a function that averages a metric over the last third of the steps."""

    def measure(run: Run) -> float:
        values = run[metric][1:]
        return float(np.nanmean(values[-(len(values) // 3) :]))

    return measure


def collect(folder: Path, rows: Iterable[str], seeds: Iterable[int], target: Path) -> None:
    """Writes the metrics of the runs in `folder` to one CSV file, one line per step. Other runs that are already in the file are kept."""
    names, numbers = list(rows), list(seeds)
    kept: list[dict[str, str]] = []
    if target.exists():
        with target.open(newline="") as file:
            made = {(row, str(seed)) for row in names for seed in numbers}
            kept = [line for line in csv.DictReader(file) if (line["row"], line["seed"]) not in made]
    with target.open("w", newline="") as file:
        written = csv.writer(file, lineterminator="\n")
        header = ["row", "seed", "step", *METRICS]
        written.writerow(header)
        written.writerows([line.get(name, "") for name in header] for line in kept)
        for row in names:
            for seed in numbers:
                for line in read_metrics(folder / f"{row}_{seed}" / "metrics.jsonl"):
                    scores = (value for name, value in line.items() if name.endswith("/avg@4"))
                    values = [
                        next(scores, None) if metric == ACCURACY else line.get(metric) for metric in METRICS
                    ]
                    written.writerow([row, seed, line["step"], *map(_short, values)])


def load(path: Path) -> dict[tuple[str, int], Run]:
    """Loads the runs that `collect` wrote, by (row, seed).

    Raises:
        ValueError: the runs do not all have the same number of steps.
    """
    lines: dict[tuple[str, int], list[dict[str, str]]] = {}
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            lines.setdefault((line["row"], int(line["seed"])), []).append(line)
    steps = {len(found) for found in lines.values()}
    if len(steps) != 1:
        raise ValueError(f"{path}: runs have {sorted(steps)} lines; all must have the same number")
    runs = {
        key: Run({metric: np.array([_number(line.get(metric, "")) for line in found]) for metric in METRICS})
        for key, found in lines.items()
    }
    budget = min(run.tokens[-1] for run in runs.values())
    return {key: Run(run.values, budget) for key, run in runs.items()}


def _short(value: float | int | None) -> str:
    return "" if value is None else f"{value:.5g}"


def _number(text: str) -> float:
    return float(text) if text else np.nan
