"""Draws the runs of this page and prints its table: `python docs/results/distillation/plot.py RUNS` (needs matplotlib).

RUNS contains teacher, distillation_SEED and distillation_sft_SEED. The data is stored in curves.json next to this file. Without RUNS, the stored data is used.
"""

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
SEEDS, ACCURACY, KL = (0, 1, 2), "eval/arithmetic/avg@8", "teacher/reverse_kl"


def curve(run: Path, metric: str) -> list[tuple[int, float]]:
    """Returns (step, value) for each step that has the metric."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line[metric]) for line in lines if line.get(metric) is not None]


def collect(runs: Path) -> dict[str, list[list[tuple[int, float]]]]:
    """Returns the curves of each kind of run, one per seed."""
    students = [runs / f"distillation_{seed}" for seed in SEEDS]
    supervised = [runs / f"distillation_sft_{seed}" for seed in SEEDS]
    return {
        "teacher": [curve(runs / "teacher", ACCURACY)],
        "student": [curve(run, ACCURACY) for run in students],
        "reverse KL": [curve(run, KL) for run in students],
        "supervised": [curve(run, ACCURACY) for run in supervised],
    }


def main() -> None:
    """Reads, draws, prints."""
    stored = HERE / "curves.json"
    if sys.argv[1:]:
        stored.write_text(json.dumps(collect(Path(sys.argv[1])), indent=0) + "\n")
    curves = json.loads(stored.read_text())
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for name, colour in (("student", "#0072b2"), ("supervised", "#d55e00")):
        for seed, points in enumerate(curves[name]):
            ends = [(60, points[-1][1])] if name == "supervised" else points
            left.plot(*zip(*ends, strict=True), "o-", color=colour, label=None if seed else name)
    left.axhline(curves["teacher"][0][-1][1], color="#009e73", linestyle="--", label="teacher")
    left.set(title="held-out avg@8", xlabel="step (supervised: same number of responses)", ylim=(0.3, 1.0))
    left.legend(fontsize=8)
    for points in curves["reverse KL"]:
        right.plot(*zip(*points, strict=True), color="#0072b2")
    right.set(title="reverse KL, nats per token", xlabel="step", yscale="log")
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.savefig(HERE / "distillation.png", dpi=110)
    for seed, (student, supervised) in enumerate(zip(curves["student"], curves["supervised"], strict=True)):
        accuracies = " | ".join(f"{value:.3f}" for _, value in student)
        print(f"| {seed} | {accuracies} | {supervised[-1][1]:.3f} |")


if __name__ == "__main__":
    main()
