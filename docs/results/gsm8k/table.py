"""Prints the tables of this page from the stored data: `python docs/results/gsm8k/table.py`.

`python docs/results/gsm8k/table.py RUNS` first stores the data of new runs. RUNS contains `eval_MODEL_greedy` and `eval_MODEL_sampled`, which `dapo-jax eval --keep`
wrote, and the run folders `run_MODEL`. `problems.csv` has a row for each test problem: the share of correct responses of each model, and their mean number of tokens.
`steps.csv` has a row for each training step.
"""

import csv
import json
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
MODELS = ("warm_start", "dapo_0", "dapo_1", "all_groups", "grpo")
WAYS = ("greedy", "sampled")
METRICS = (
    "rollout/accuracy", "rollout/mixed_frac", "rollout/prompts", "rollout/response_tokens", "rollout/truncated_frac", "policy/entropy",
    "sync/logprob_diff_max", "update/grad_norm", "time/step_s",
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
    write("problems.csv", problems)
    steps = read("steps.csv") if (HERE / "steps.csv").exists() else {"run": [], "step": []}
    kept = [model for model in MODELS if not (runs / f"run_{model}").exists()]
    table = {
        name: [value for run, value in zip(steps["run"], column, strict=True) if run in kept]
        for name, column in steps.items()
    }
    for model in set(MODELS) - set(kept):
        for line in map(json.loads, (runs / f"run_{model}" / "metrics.jsonl").read_text().splitlines()):
            if "rollout/prompts" in line:
                row = {"run": model, "step": line["step"]} | {name: f"{line[name]:.6g}" for name in METRICS}
                for name, value in row.items():
                    table.setdefault(name, []).append(value)
    if table["run"]:
        write("steps.csv", table)


def main() -> None:
    """Stores new data, and prints the scores of each model and their differences from the warm start."""
    if sys.argv[1:]:
        store(Path(sys.argv[1]))
    problems = read("problems.csv")
    print(
        "| model | greedy | temperature 1 | difference, greedy | difference, temperature 1 | tokens (greedy, temperature 1) |"
    )
    print("|---|---|---|---|---|---|")
    for model in MODELS:
        if f"{model} sampled" not in problems:
            continue
        cells, changes, tokens = [], [], []
        for way in WAYS:
            scores, base = (problems[f"{name} {way}"].astype(float) for name in (model, "warm_start"))
            cells.append(interval(scores))
            changes.append(interval(scores - base))
            tokens.append(f"{problems[f'{model} {way} tokens'].astype(float).mean():.0f}")
        print(f"| {model} | {' | '.join(cells + changes)} | {', '.join(tokens)} |")


def interval(values: np.ndarray) -> str:
    """Returns the mean with its 95% interval."""
    return f"{values.mean():.4f} ± {1.96 * values.std(ddof=1) / len(values) ** 0.5:.4f}"


if __name__ == "__main__":
    main()
