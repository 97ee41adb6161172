"""Prints the tables of this page and draws its curves from the stored data: `python docs/results/gsm8k/table.py` (needs matplotlib).

`python docs/results/gsm8k/table.py RUNS` first stores the data of new runs. RUNS contains `eval_MODEL_greedy` and `eval_MODEL_sampled`, which `dapo-jax eval --keep`
wrote, the run folders `run_MODEL`, and `lm_eval_MODEL` with the samples that `lm_eval --log_samples` wrote. `problems.csv` has a row for each test problem: the share of
correct responses of each model, and their mean number of tokens. `steps.csv` has a row for each training step. `responses.txt` has the greedy responses of the warm start and of
DAPO (seed 0) to the first 20 test problems.
"""

import csv
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
MODELS = ("warm_start", "dapo_0", "dapo_1", "all_groups", "grpo")
WAYS = ("greedy", "sampled")
METRICS = (
    "rollout/accuracy", "rollout/mixed_frac", "rollout/prompts", "rollout/response_tokens", "rollout/truncated_frac", "rollout/trained_accuracy",
    "policy/entropy", "update/grad_norm", "time/step_s",
)  # fmt: skip


def read(file: str) -> dict[str, np.ndarray]:
    """Returns the columns of a stored file."""
    with (HERE / file).open() as lines:
        names, *rows = csv.reader(lines)
    return {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def write(file: str, columns: dict[str, np.ndarray]) -> None:
    """Writes columns of equal length."""
    with (HERE / file).open("w", newline="") as lines:
        csv.writer(lines, lineterminator="\n").writerows([columns, *zip(*columns.values(), strict=True)])


def store(runs: Path) -> None:
    """Adds the evaluations and the runs in a folder to the stored files."""
    problems = read("problems.csv") if (HERE / "problems.csv").exists() else {}
    for model in MODELS:
        for way in WAYS:
            for file in (runs / f"eval_{model}_{way}").glob("problems/*.jsonl"):
                rows = [json.loads(line) for line in file.read_text().splitlines()]
                rows.sort(key=lambda row: row["ordinal"])
                problems[f"{model} {way}"] = np.array([row["correct"] / row["samples"] for row in rows])
                problems[f"{model} {way} tokens"] = np.array([row["response_tokens"] for row in rows])
        for file in (runs / f"lm_eval_{model}").glob("samples_*.jsonl"):
            rows = sorted(map(json.loads, file.read_text().splitlines()), key=lambda row: row["doc_id"])
            problems[f"{model} lm-eval"] = np.array([row["exact_match"] for row in rows])
    write("problems.csv", problems)
    steps = read("steps.csv") if (HERE / "steps.csv").exists() else {"run": [], "step": []}
    kept = [model for model in MODELS if not (runs / f"run_{model}").exists()]
    table = {
        name: [value for run, value in zip(steps["run"], column, strict=True) if run in kept]
        for name, column in steps.items()
    }
    for model in (model for model in MODELS if model not in kept):
        for line in map(json.loads, (runs / f"run_{model}" / "metrics.jsonl").read_text().splitlines()):
            if "rollout/prompts" in line:
                row = {"run": model, "step": line["step"]}
                row |= {name: f"{line[name]:.6g}" if name in line else "" for name in METRICS}
                for name, value in row.items():
                    table.setdefault(name, []).append(value)
    if table["run"]:
        write("steps.csv", table)
    answered = [sorted(runs.glob(f"eval_{model}_greedy/gsm8k/*.jsonl")) for model in MODELS[:2]]
    if all(answered):
        before, after = (
            [json.loads(line) for line in files[-1].read_text().splitlines()] for files in answered
        )
        (HERE / "responses.txt").write_text("\n\n".join(pages(before, after)) + "\n")


def pages(before: list[dict], after: list[dict]) -> Iterator[str]:
    """Yields a title, and for each of the first 20 problems its text and the two responses."""
    yield "Greedy responses to the first 20 test problems"
    for number in range(20):
        rows = [next(row for row in model if row["ordinal"] == number) for model in (before, after)]
        yield f"Problem {number + 1}"
        yield block(f"{rows[0]['row']['question']}\n\nAnswer: {rows[0]['answer']}")
        for name, row in zip(("Warm start", "DAPO"), rows, strict=True):
            yield f"{name}, {'correct' if row['correct'] else 'wrong'}:\n\n{block(row['response'])}"


def block(text: str) -> str:
    """Returns the text in indented lines of at most 100 characters."""
    lines = (part for line in text.splitlines() for part in textwrap.wrap(line, 100) or [""])
    return "\n".join(f"    {line}".rstrip() for line in lines)


CURVES = {
    "rollout/accuracy": "accuracy of the sampled responses", "rollout/truncated_frac": "share of responses that are cut off",
    "rollout/response_tokens": "response length, tokens", "policy/entropy": "entropy, nats a token",
}  # fmt: skip


def draw(steps: dict[str, np.ndarray]) -> None:
    """Draws the means over five steps of each run. A step that trains on carried groups has no rollouts."""
    figure, axes = plt.subplots(2, 2, figsize=(9, 5.5), sharex=True, layout="constrained")
    for axis, (metric, title) in zip(axes.flat, CURVES.items(), strict=True):
        for run in dict.fromkeys(steps["run"]):
            rows = (steps["run"] == run) & (steps[metric] != "")
            means = np.convolve(steps[metric][rows].astype(float), np.full(5, 0.2), "valid")
            axis.plot(steps["step"][rows].astype(int)[2:-2], means, label=run)
        axis.set_title(title, fontsize=10)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[1, 1].legend(fontsize=8, ncols=2)
    for axis in axes[1]:
        axis.set_xlabel("step")
    figure.savefig(HERE / "curves.png", dpi=110)


def main() -> None:
    """Stores new data, prints the scores of each model and their differences from the warm start, and draws the curves."""
    if sys.argv[1:]:
        store(Path(sys.argv[1]))
    problems = read("problems.csv")
    print(
        "| model | greedy | temperature 1 | difference, greedy | difference, temperature 1 | tokens (greedy, temperature 1) |"
    )
    print("|---|---|---|---|---|---|")
    for model in MODELS:
        cells, changes, tokens = [], [], []
        for way in WAYS:
            if f"{model} {way}" not in problems:
                cells.append("")
                changes.append("")
                continue
            scores, base = (problems[f"{name} {way}"].astype(float) for name in (model, "warm_start"))
            cells.append(interval(scores))
            changes.append(interval(scores - base))
            tokens.append(f"{problems[f'{model} {way} tokens'].astype(float).mean():.0f}")
        print(f"| {model} | {' | '.join(cells + changes)} | {', '.join(tokens)} |")
    for model in (model for model in MODELS if f"{model} lm-eval" in problems):
        theirs, ours = (problems[f"{model} {name}"].astype(float) for name in ("lm-eval", "greedy"))
        print(f"\n{model} in lm-eval: {interval(theirs)}; {(theirs != ours).sum()} verdicts differ from ours")
    if (HERE / "steps.csv").exists():
        steps = read("steps.csv")
        print(
            "\n| run | sampled prompts | correct responses in updates | steps without a gradient | minutes |",
            end="",
        )
        print(" correct | cut off | tokens |\n|---|---|---|---|---|---|---|---|")
        for run in dict.fromkeys(steps["run"]):
            print(f"| {run} | {' | '.join(training(steps, run))} |")
        draw(steps)


def training(steps: dict[str, np.ndarray], run: str) -> Iterator[str]:
    """Yields the cells of a run: sums over its steps, then means over the first and the last five steps with rollouts."""
    rows = {name: column[steps["run"] == run] for name, column in steps.items()}
    yield f"{rows['rollout/prompts'].astype(float).sum():.0f}"
    yield f"{32 * rows['rollout/trained_accuracy'].astype(float).sum():.0f}"  # 4 groups of 8 responses
    yield f"{(rows['update/grad_norm'].astype(float) == 0).sum()}"
    yield f"{rows['time/step_s'].astype(float).sum() / 60:.0f}"
    for name in ("rollout/accuracy", "rollout/truncated_frac", "rollout/response_tokens"):
        values = rows[name][rows[name] != ""].astype(float)
        yield " to ".join(f"{part.mean():.3g}" for part in (values[:5], values[-5:]))


def interval(values: np.ndarray) -> str:
    """Returns the mean with its 95% interval."""
    return f"{values.mean():.4f} ± {1.96 * values.std(ddof=1) / len(values) ** 0.5:.4f}"


if __name__ == "__main__":
    main()
