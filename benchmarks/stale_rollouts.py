"""Measures how stale tokens affect training, with the default importance weights and without them: `python -m benchmarks.stale_rollouts`.

The study provides the task and the base model (`configs/study/dapo.yaml`). So many rollouts are in flight that a group's first token is about three
steps (48 updates) old when it is trained on. A normal run refuses to omit the weights. This script bypasses the check, to show why it exists.
"""

import argparse
import csv
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.report import table, with_table
from dapo_jax import train
from dapo_jax.config import TrainConfig, load_config
from dapo_jax.config.loss_schema import Correction
from dapo_jax.trackers import read_metrics

RESULTS = Path("docs/results/stale_rollouts")
METRICS_FILE = "metrics.csv"
CONFIG = "configs/study/dapo.yaml"
COMMON = ("eval.every_steps=2",)
FLIGHT = ("rollout.in_flight=2560", "rollout.round_tokens=8", "rollout.max_staleness=4")
ACCURACY = "eval/chain_sums/avg@4"
METRICS = (
    ACCURACY,
    "rollout/accuracy",
    "rollout/age_mean",
    "rollout/newest_age_mean",
    "rollout/earlier_tokens_frac",
    "policy/entropy",
    "sync/sampler_trainer_kl",
    "importance/ess_frac",
    "importance/weight",
    "update/grad_norm",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train on old tokens."""

    name: str
    title: str
    changes: tuple[str, ...]
    colour: str
    refused: bool = False
    """Whether the importance weights are omitted, which no configuration allows."""


WAYS = (
    Way(name="waves", title="waves: nothing is old", changes=(), colour="#7f7f7f"),
    Way(name="truncate", title="the default: weights of at most 2", changes=FLIGHT, colour="#009e73"),
    Way(
        name="bypass",
        title="ratio to the sampler",
        changes=(*FLIGHT, "loss.old_logprobs=sampler"),
        colour="#0072b2",
    ),
    Way(name="none", title="no correction", changes=FLIGHT, colour="#d55e00", refused=True),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithoutWeights(TrainConfig):
    """A configuration that never uses importance weights, whatever its keys are."""

    @property
    def correction(self) -> Correction:
        """No importance weights: each token is treated as if the current policy had sampled it."""
        return Correction("none", 0.0, math.inf)


def configuration(way: Way, folder: Path, seed: int, extra: Sequence[str] = ()) -> TrainConfig:
    """Returns the configuration of one run."""
    changes = [*COMMON, *way.changes, *extra, f"seed={seed}", f"run_dir={folder / f'{way.name}_{seed}'}"]
    config = load_config(CONFIG, changes)
    if not way.refused:
        return config
    return WithoutWeights(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})


def make(folder: Path, seeds: Sequence[int], names: Sequence[str], extra: Sequence[str]) -> None:
    """Trains the runs that are missing in `folder`."""
    for seed in seeds:
        for way in WAYS:
            config = configuration(way, folder, seed, extra)
            if way.name in names and not (Path(config.run_dir) / "model").exists():
                print(f"{way.title}, seed {seed}", flush=True)
                train(config, overwrite=Path(config.run_dir).exists())


def collect(folder: Path, seeds: Sequence[int], target: Path) -> None:
    """Writes `METRICS` for each step of each run to one CSV file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(["way", "seed", "step", *METRICS])
        for way in WAYS:
            for seed in seeds:
                for step in read_metrics(folder / f"{way.name}_{seed}" / "metrics.jsonl"):
                    values = (step.get(metric) for metric in METRICS)
                    kept = ["" if value is None else f"{value:.5g}" for value in values]
                    lines.writerow([way.name, seed, step["step"], *kept])


Curves = dict[tuple[str, int], dict[str, np.ndarray]]
"""Maps (way, seed) to the values of each metric by step, NaN if unknown. Step 0 is the evaluation before training."""


def load(path: Path) -> Curves:
    """Loads the file that `collect` wrote."""
    found: dict[tuple[str, int], list[dict[str, str]]] = {}
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            found.setdefault((line["way"], int(line["seed"])), []).append(line)
    return {
        key: {name: np.array([float(line[name] or "nan") for line in lines]) for name in ("step", *METRICS)}
        for key, lines in found.items()
    }


PANELS = (
    (ACCURACY, "held-out accuracy (avg@4)"),
    ("policy/entropy", "entropy, nats a token"),
    ("update/grad_norm", "norm of the gradient"),
    ("rollout/age_mean", "age of a group's first token, steps"),
)


def draw(curves: Curves, target: Path) -> None:
    """Draws one panel per metric, with a line for each run and a colour for each way."""
    figure, axes = plt.subplots(2, 2, figsize=(10, 6.4), sharex=True, layout="constrained")
    for axis, (metric, label) in zip(axes.flat, PANELS, strict=True):
        for way in WAYS:
            runs = [run for (name, _), run in curves.items() if name == way.name]
            for index, run in enumerate(runs):
                there, label_once = ~np.isnan(run[metric]), None if index else way.title
                places, values = run["step"][there], run[metric][there]
                axis.plot(places, values, color=way.colour, linewidth=1.4, label=label_once)
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[1, 0].set_yscale("log")
    for axis in axes[1]:
        axis.set_xlabel("step")
    axes[0, 0].legend(fontsize=8)
    figure.savefig(target, dpi=130)


def summary(curves: Curves) -> str:
    """Returns a table of the mean over the runs of each way. For the final accuracy, it also shows the lowest and the highest run, if there are several."""
    rows = []
    for way in WAYS:
        runs = [run for (name, _), run in curves.items() if name == way.name]
        last = [run[ACCURACY][~np.isnan(run[ACCURACY])][-3:].mean() for run in runs]
        spread = f" ({min(last):.3f} to {max(last):.3f})" if len(last) > 1 else ""
        means = [
            _mean(runs, metric)
            for metric in ("rollout/age_mean", "rollout/earlier_tokens_frac", "importance/ess_frac")
        ]
        best = np.mean([np.nanmax(run[ACCURACY]) for run in runs])
        rows.append([way.title, f"{np.mean(last):.3f}{spread}", f"{best:.3f}", *means])
    header = ["way", "accuracy at the end", "at its best", "age", "earlier tokens", "effective share"]
    return table(header, rows)


def _mean(runs: Sequence[dict[str, np.ndarray]], metric: str) -> str:
    """Returns the mean over all steps of all runs, or an empty string if no run has the metric."""
    values = np.concatenate([run[metric][1:] for run in runs])
    return f"{np.nanmean(values):.2f}" if np.isfinite(values).any() else ""


def main() -> None:
    """Trains the runs that are missing, stores their metrics, prints the table and draws the figure."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.stale_rollouts")
    names = [way.name for way in WAYS]
    parser.add_argument("overrides", nargs="*", help="section.key=value for every run")
    parser.add_argument("--runs", type=Path, default=Path("runs/stale_rollouts"), help="folder of the runs")
    parser.add_argument("--ways", nargs="+", choices=names, default=names, help="ways to train; default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--only-draw", action="store_true", help="use the metrics stored in --results")
    arguments = parser.parse_args()
    if not arguments.only_draw:
        make(arguments.runs, arguments.seeds, arguments.ways, arguments.overrides)
        if set(arguments.ways) != set(names):
            return
        collect(arguments.runs, arguments.seeds, arguments.results / METRICS_FILE)
    show(arguments.results)


def show(folder: Path) -> None:
    """Prints the table, inserts it into `folder`/README.md, and saves the figure in `folder`."""
    curves, page = load(folder / METRICS_FILE), folder / "README.md"
    made = summary(curves)
    print(made)
    if page.exists():
        page.write_text(with_table(page.read_text(), "ways", made))
    draw(curves, folder / "stale_rollouts.png")


if __name__ == "__main__":
    main()
