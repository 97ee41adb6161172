"""Trains the quickstart with each algorithm by name, and tabulates held-out accuracy: `python -m benchmarks.algorithms`.

Each run is one `dapo-jax train` of 20 steps.
"""

import argparse
import csv
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.report import table, with_table
from dapo_jax.config import ALGORITHMS
from dapo_jax.trackers import read_metrics

RESULTS = Path("docs/results/algorithms")
METRICS_FILE = "metrics.csv"
COLUMNS = ("algorithm", "seed", "before", "after", "tokens", "seconds")
ACCURACY = "eval/arithmetic/avg@8"
STEPS = 20
TEACHER = "teacher_0"


def overrides(name: str, folder: Path) -> list[str]:
    """Returns the keys of a run that the algorithm's name does not set."""
    graders = "reward.grader=[{grader: exact}, {grader: kimi_length, weight: 0.5}]"
    given = {
        "score_centering": ["loss.center=17"],
        "gdpo": [graders],
        "opd": [f"teacher.source={folder / TEACHER / 'model'}"],
        "teacher": [],
    }
    return [*([] if name == "teacher" else [f"algorithm={name}"]), *given.get(name, [])]


def run(name: str, seed: int, folder: Path, *more: str) -> None:
    """Trains one run, unless `folder` already contains it."""
    target = folder / f"{name}_{seed}"
    if not (target / "model").exists():
        print(f"{target.name}", flush=True)
        changes = [*overrides(name, folder), *more, f"seed={seed}", f"run_dir={target}"]
        command = [sys.executable, "-m", "dapo_jax.cli", "train", "quickstart", *changes]
        subprocess.run(command, check=True, capture_output=True)


def collect(folder: Path, seeds: Iterable[int], target: Path) -> None:
    """Writes one line per run to a CSV file: accuracy before and after, sampled tokens of all steps, and the median time of a step."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(COLUMNS)
        for name in ALGORITHMS:
            for seed in seeds:
                before, *steps = read_metrics(folder / f"{name}_{seed}" / "metrics.jsonl")
                tokens = sum(step["speed/sampled_tokens_per_s"] * step["time/sample_s"] for step in steps)
                seconds = statistics.median(step["time/step_s"] for step in steps)
                accuracies = [f"{line[ACCURACY]:.4f}" for line in (before, steps[-1])]
                lines.writerow([name, seed, *accuracies, round(tokens), f"{seconds:.2f}"])


def summary(path: Path) -> str:
    """Returns a table with one row per algorithm."""
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    rows = []
    for name in dict.fromkeys(line["algorithm"] for line in lines):
        of_name = [line for line in lines if line["algorithm"] == name]
        after = [float(line["after"]) for line in of_name]
        tokens = statistics.mean(int(line["tokens"]) for line in of_name)
        each = ", ".join(f"{value:.3f}" for value in after)
        seconds = min(float(line["seconds"]) for line in of_name)
        rows.append(
            [f"`{name}`", f"{statistics.mean(after):.3f}", each, f"{tokens / 1e6:.2f}", f"{seconds:.1f}"]
        )
    return table(["algorithm", "avg@8", "by seed", "sampled tokens, millions", "s per step"], rows)


def show(folder: Path) -> None:
    """Prints the table, and inserts it into `folder`/README.md."""
    made, page = summary(folder / METRICS_FILE), folder / "README.md"
    print(made)
    page.write_text(with_table(page.read_text(), "algorithms", made))


def main() -> None:
    """Trains the runs that are missing, stores their results and shows the table."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.algorithms")
    parser.add_argument("--runs", type=Path, default=Path("runs/algorithms"), help="folder of the runs")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    run("teacher", 0, given.runs)
    for seed in given.seeds:
        for name in ALGORITHMS:
            run(name, seed, given.runs, f"steps={STEPS}")
    collect(given.runs, given.seeds, given.results / METRICS_FILE)
    show(given.results)


if __name__ == "__main__":
    main()
