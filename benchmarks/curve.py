"""Trains the same model on the same task with TRL and with this library, and compares the curves: `python -m benchmarks.curve`.

benchmarks/README.md states which settings are equal, and what counts as the same result.
"""

import argparse
import csv
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from scipy import stats

mpl.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.report import table, with_table
from benchmarks.systems import DEFAULT_PEERS
from dapo_jax import train
from dapo_jax.commands.inference import evaluate
from dapo_jax.config import TrainConfig, evaluation_of, load_config, to_yaml
from dapo_jax.run.policy import find_policy
from dapo_jax.run.prompt_sets import training_prompts
from dapo_jax.trackers import read_metrics

RESULTS = Path("docs/results/trl")
MODEL = Path("dapo_jax/assets/quickstart")
COLUMNS = ("system", "seed", "step", "seconds", "accuracy")
SAME = (
    "optimizer.warmup_steps=0",
    "optimizer.weight_decay=0",
    "eval.every_steps=10",
    "eval.prompts=0",
    "checkpoint.every_steps=0",
)
"""The changes of the configuration: TRL has no weight decay for norms, and another warm-up. All held-out problems are evaluated."""
SYSTEMS = {
    "trl": ("TRL", "#d55e00"),
    "ours": ("this library, no dynamic sampling", "#0072b2"),
    "dynamic": ("this library, dynamic sampling", "#009e73"),
}
GOAL = 0.9


def configuration(
    system: str, folder: Path, seed: int, extra: Sequence[str] = (), name: str = "quickstart"
) -> TrainConfig:
    """Returns the configuration of one of our runs. The run of TRL has the configuration of `ours`."""
    dynamic = [] if system == "dynamic" else ["dynamic_sampling.enabled=false"]
    run_dir = f"run_dir={folder / f'{system}_{seed}'}"
    return load_config(name, [*SAME, *dynamic, *extra, f"seed={seed}", run_dir])


def settings(config: TrainConfig) -> dict[str, Any]:
    """Returns the settings of a TRL run with this configuration, and its prompts in the order in which our run uses them."""
    policy = find_policy(config.model.source)
    source = training_prompts(config.data, policy.tokenizer, seed=config.seed).training
    ordinals = range(config.steps * config.batch.prompts_per_step)
    prompts = [source[ordinal] for ordinal in ordinals]
    overlong, shipped = config.reward.overlong, config.model.source.startswith("shipped:")
    # TRL has no stop strings, so a stop string of one token is its end token.
    ends = [policy.tokenizer.encode(text) for text in config.sampling.stop] or [[policy.tokenizer.eos_id]]
    ((end,),) = ends
    return {
        "model": str((MODEL if shipped else Path(config.model.source)).resolve()),
        "end": int(end),
        "answer_marker": config.reward.answer_marker,
        "folder": config.run_dir,
        "threads": len(os.sched_getaffinity(0)),
        "prompt_ids": [prompt.tokens.tolist() for prompt in prompts],
        "answers": [prompt.answer for prompt in prompts],
        "steps": config.steps,
        "every_steps": config.eval.every_steps,
        "prompts_per_step": config.batch.prompts_per_step,
        "group_size": config.batch.group_size,
        "groups_per_update": config.batch.groups_per_update,
        "max_response_tokens": config.sampling.max_response_tokens,
        "buffer_tokens": overlong.buffer_tokens if overlong.enabled else 0,
        "learning_rate": config.optimizer.learning_rate,
        "adam": [config.optimizer.beta1, config.optimizer.beta2, config.optimizer.epsilon],
        "max_grad_norm": config.optimizer.max_grad_norm,
        "clip": [config.loss.clip_ratio_low, config.loss.clip_ratio_high],
        "seed": config.seed,
    }


def run(system: str, config: TrainConfig, peers: Path) -> None:
    """Trains one run and writes its curve to `curve.json`, unless the run already has one."""
    folder = Path(config.run_dir)
    asked = to_yaml(replace(config, run_dir=folder.name))
    accuracy = f"eval/{config.data.source}/avg@{config.eval.samples_per_prompt}"
    if (folder / "curve.json").exists():
        if (folder / "asked.yaml").read_text() != asked:
            raise SystemExit(f"{folder} has another configuration: choose another folder with --runs")
        return
    shutil.rmtree(folder, ignore_errors=True)
    print(folder.name, flush=True)
    if system != "trl":
        train(config)
        points, seconds = [], 0.0
        for line in read_metrics(folder / "metrics.jsonl"):
            seconds += line.get("time/step_s", 0.0)
            if accuracy in line:
                points.append((line["step"], seconds, line[accuracy]))
    else:
        folder.mkdir(parents=True)
        file = folder / "settings.json"
        file.write_text(json.dumps(settings(config)))
        python = peers.expanduser() / "trl" / "bin" / "python"
        offline = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        with (folder / "log.txt").open("w") as log:
            command = [python, "-m", "benchmarks.peers.trl_curve", file]
            subprocess.run(command, check=True, env=offline, stdout=log, stderr=log)
        taken = json.loads((folder / "seconds.json").read_text())
        scored = evaluation_of(config)
        points = []
        for step, seconds in zip(taken["steps"], taken["seconds"], strict=True):
            model = str(folder / f"step_{step}")
            points.append((step, seconds, evaluate(model, scored).scores[accuracy]))
    (folder / "asked.yaml").write_text(asked)
    (folder / "curve.json").write_text(json.dumps(points))


def collect(folder: Path, systems: Sequence[str], seeds: Sequence[int], target: Path) -> None:
    """Writes the curves of the runs to one CSV file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(COLUMNS)
        for system in systems:
            for seed in seeds:
                for step, seconds, accuracy in json.loads(
                    (folder / f"{system}_{seed}/curve.json").read_text()
                ):
                    lines.writerow([system, seed, step, f"{seconds:.1f}", f"{accuracy:.5f}"])


def load(path: Path) -> dict[str, np.ndarray]:
    """Returns the curves of each system: an array [seeds, evaluations, (step, seconds, accuracy)]."""
    found: dict[str, dict[str, list[list[float]]]] = {}
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            point = [float(line[name]) for name in COLUMNS[2:]]
            found.setdefault(line["system"], {}).setdefault(line["seed"], []).append(point)
    return {system: np.array(list(runs.values())) for system, runs in found.items()}


def difference(first: np.ndarray, second: np.ndarray) -> tuple[float, float, float]:
    """Returns the mean of `second` - `first` over seeds, and its 95% interval (Student's t)."""
    differences = second - first
    middle = float(differences.mean())
    half = float(stats.t.ppf(0.975, len(differences) - 1) * stats.sem(differences))
    return middle, middle - half, middle + half


def seconds_to(curve: np.ndarray, goal: float = GOAL) -> float:
    """Returns the seconds until a run [evaluations, 3] reaches an accuracy, interpolated between evaluations. NaN if it does not.

    >>> round(seconds_to(np.array([[0, 0.0, 0.4], [10, 20.0, 0.8], [20, 40.0, 1.0]])), 6)
    30.0
    """
    reached = np.flatnonzero(curve[:, 2] >= goal)
    if not len(reached) or not reached[0]:
        return float("nan")
    (_, start, low), (_, end, high) = curve[reached[0] - 1], curve[reached[0]]
    return float(start + (end - start) * (goal - low) / (high - low))


def summary(curves: dict[str, np.ndarray]) -> str:
    """Returns a table with one row per system. Spreads and intervals need more than one seed."""
    rows = []
    for system, runs in curves.items():
        cells = []
        for measure in (lambda curve: curve[:, -1, 2], lambda curve: curve[:, 1:, 2].mean(1)):
            values, against = measure(runs), ""
            if system != "trl" and len(runs) > 1:
                middle, low, high = difference(measure(curves["trl"]), values)
                against = f"{middle:+.4f} [{low:+.4f}, {high:+.4f}]"
            spread = f" ± {values.std(ddof=1):.4f}" if len(runs) > 1 else ""
            cells += [f"{values.mean():.4f}{spread}", against]
        seconds = np.array([seconds_to(run) for run in runs])
        reached = seconds[~np.isnan(seconds)]
        times = f"{reached.mean():.0f} ({min(reached):.0f}-{max(reached):.0f})" if len(reached) else "never"
        cells.append(f"{np.mean(runs[:, -1, 1]):.0f}")
        cells.append(
            times if len(reached) in (0, len(runs)) else f"{times}, {len(reached)} of {len(runs)} runs"
        )
        rows.append([SYSTEMS[system][0], *cells])
    compared = "difference to TRL [95%]"
    header = [
        "",
        "final avg@8",
        compared,
        "mean of the run",
        compared,
        "seconds, all steps",
        f"seconds to {GOAL}",
    ]
    return table(header, rows)


def draw(curves: dict[str, np.ndarray], target: Path) -> None:
    """Draws accuracy against updates and against seconds. Bands show one standard deviation over the seeds."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout="constrained")
    for system, runs in curves.items():
        title, colour = SYSTEMS[system]
        middle, spread = runs[..., 2].mean(0), runs[..., 2].std(0, ddof=1 if len(runs) > 1 else 0)
        for axis, places in zip(axes, (runs[0, :, 0], runs[..., 1].mean(0)), strict=True):
            axis.plot(places, middle, color=colour, label=title, marker=".")
            axis.fill_between(places, middle - spread, middle + spread, color=colour, alpha=0.2, linewidth=0)
    for axis, label in zip(axes, ("step", "seconds of training"), strict=True):
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("held-out avg@8")
    axes[0].legend(frameon=False)
    figure.savefig(target, dpi=120)
    plt.close(figure)


def show(folder: Path, name: str) -> None:
    """Prints the table of the comparison `name`, inserts it into the page in `folder`, and draws the figure."""
    curves, page = load(folder / f"{name}.csv"), folder / "README.md"
    made = summary(curves)
    print(made)
    draw(curves, folder / f"{name}.png")
    page.write_text(with_table(page.read_text() if page.exists() else "", name, made))


def main() -> None:
    """Trains the missing runs by turns, stores their curves, and shows the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.curve")
    parser.add_argument("--runs", type=Path, default=Path("runs/curve"), help="folder of the runs")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--systems", nargs="+", choices=tuple(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--peers", type=Path, default=DEFAULT_PEERS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--name", default="curve", help="name of the comparison on its page")
    parser.add_argument("--config", default="quickstart", help="the configuration of our runs")
    parser.add_argument("changes", nargs="*", help="other keys of all runs, such as steps=20")
    given = parser.parse_args()
    for seed in given.seeds:
        for system in given.systems:
            run(system, configuration(system, given.runs, seed, given.changes, given.config), given.peers)
    collect(given.runs, given.systems, given.seeds, given.results / f"{given.name}.csv")
    show(given.results, given.name)


if __name__ == "__main__":
    main()
