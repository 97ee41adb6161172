"""Studies the effect of DAPO's techniques at a small scale: `python -m benchmarks.study runs`, then `... results`. README.md describes the design."""

import argparse
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.report import machine, table, with_table
from benchmarks.study.claims import IN_FLIGHT, QUESTIONS, REMOVED, Verdict, judge
from benchmarks.study.curves import (
    Run,
    accuracy_at_tokens,
    collect,
    final_accuracy,
    late,
    load,
    mean_accuracy,
    whole,
)
from benchmarks.study.figures import draw_accuracy, draw_all
from benchmarks.study.ladder import PICKED_SUMS, STUDIES, Row, Study
from benchmarks.study.runs import make_runs

SEEDS = range(8)
METRICS_FILE = "metrics.csv"
IN_FLIGHT_RUNS = "in_flight"
"""Results folder of the row `in_flight` and the two rows with which it is compared. These runs share a base model."""


def main() -> None:
    """Trains the runs, or creates tables and figures from their metrics."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.study")
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("runs", help="train missing runs, and store their metrics")
    runs.add_argument("--runs", type=Path, help="folder of the runs, by default one below runs/")
    runs.add_argument("--rows", nargs="+", help="names of rows; all rows by default")
    runs.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    runs.add_argument("--cores", nargs="+", type=int, default=[0, 1], help="cores, with one run on each")
    results = commands.add_parser("results", help="tables, tests and figures from stored metrics")
    for command in (runs, results):
        command.add_argument("--study", choices=tuple(STUDIES), default="sums")
        command.add_argument("--results", type=Path, help="folder of the page and the metrics")
    arguments = parser.parse_args()
    study: Study = STUDIES[arguments.study]
    folder: Path = arguments.results or study.results
    if arguments.command == "results":
        return show(study, folder)
    made = arguments.runs or Path("runs") / study.results.name
    rows = arguments.rows or [row.name for row in study.rows]
    make_runs(study, made, rows, arguments.seeds, cores=arguments.cores)
    folder.mkdir(parents=True, exist_ok=True)
    collect(made, rows, arguments.seeds, folder / METRICS_FILE)
    took = [
        json.loads((made / f"{row}_{seed}" / "took.json").read_text())["wall_s"]
        for row in rows
        for seed in arguments.seeds
    ]
    about = {"runs": len(took), "run_hours": round(sum(took) / 3600, 2), "machine": machine()}
    (folder / "made.json").write_text(json.dumps(about, indent=1) + "\n")
    if (config := made / f"{study.ladder[-1].name}_{arguments.seeds[0]}" / "config.yaml").exists():
        shutil.copy(config, folder)
    return None


def show(study: Study, folder: Path) -> None:
    """Prints the tables, inserts them into `folder`/README.md, and saves the figures in `folder`."""
    runs = load(folder / METRICS_FILE)
    seeds = sorted({seed for _, seed in runs})
    page = folder / "README.md"
    text = page.read_text() if page.exists() else ""
    tables = {
        "ladder": _ladder(runs, seeds, ACCURACY_AND_COST, study.ladder),
        "behaviour": _ladder(runs, seeds, BEHAVIOUR, study.ladder),
        "claims": _claims(judge(runs, seeds)),
    }
    figures = draw_all(runs, seeds, study.ladder, folder)
    if study is PICKED_SUMS:
        compared = (study.ladder[-1], *study.further, study.ladder[-2])
        tables["removed"] = _ladder(runs, seeds, ACCURACY_AND_COST, compared)
        tables["removed_behaviour"] = _ladder(runs, seeds, BEHAVIOUR, compared)
        tables["removed_claims"] = _claims(judge(runs, seeds, REMOVED))
        figures.append(draw_accuracy(runs, seeds, compared, folder / "removed.png"))
    else:
        tables["probes"] = _claims(judge(runs, seeds, QUESTIONS))
        further = load(folder / IN_FLIGHT_RUNS / METRICS_FILE)
        compared = (*study.ladder[-2:], study.further[0])
        figures.append(draw_accuracy(further, seeds, compared, folder / "in_flight.png"))
        tables["in_flight"] = _ladder(further, seeds, (*ACCURACY_AND_COST, AGE), compared)
        tables["in_flight_claims"] = _claims(judge(further, seeds, IN_FLIGHT))
    for name, made in tables.items():
        print(f"{made}\n")
        text = with_table(text, name, made)
    page.write_text(text)
    for path in figures:
        print(path)


Measures = Sequence[tuple[str, Callable[[Run], float], str]]
"""(column name, function that measures a run, number format) tuples."""
ACCURACY_AND_COST: Measures = (
    ("equal updates", final_accuracy, "{:.3f}"),
    ("equal tokens", accuracy_at_tokens, "{:.3f}"),
    ("mean of run", mean_accuracy, "{:.3f}"),
    ("million tokens", lambda run: run.tokens[-1] / 1e6, "{:.2f}"),
    ("minutes", lambda run: run.seconds[-1] / 60, "{:.1f}"),
)
AGE = ("age in steps", whole("rollout/age_mean"), "{:.2f}")
BEHAVIOUR: Measures = (
    ("late length", late("rollout/response_tokens"), "{:.1f}"),
    ("late entropy", late("policy/entropy"), "{:.3f}"),
    ("late truncated", late("rollout/truncated_frac"), "{:.3f}"),
    ("late all correct", late("rollout/all_correct_frac"), "{:.3f}"),
    ("clipped from above", whole("policy/clip_high_frac"), "{:.4f}"),
)


def _ladder(
    runs: dict[tuple[str, int], Run], seeds: Sequence[int], measures: Measures, of_rows: Sequence[Row]
) -> str:
    rows = []
    for row in of_rows:
        cells = []
        for _, measure, form in measures:
            values = [measure(runs[row.name, seed]) for seed in seeds]
            mean = sum(values) / len(values)
            spread = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
            cells.append(f"{form.format(mean)}\u00a0±\u00a0{form.format(spread)}")
        rows.append([row.title, *cells])
    return table(["row", *(name for name, _, _ in measures)], rows)


def _claims(verdicts: Sequence[Verdict]) -> str:
    rows = [
        [
            verdict.claim.technique,
            f"{verdict.claim.measure} {'up' if verdict.claim.up else 'down'}",
            verdict.claim.source,
            f"{verdict.before:.3f}",
            f"{verdict.after:.3f}",
            f"{verdict.difference:+.3f} [{verdict.low:+.3f}, {verdict.high:+.3f}]",
            f"{verdict.effect:+.2f}",
            f"{verdict.p:.4f}",
            f"{verdict.corrected_p:.4f}" if verdict.claim.primary else "",
            verdict.words,
        ]
        for verdict in verdicts
    ]
    header = ["technique", "claim", "paper", "before", "after", "difference [95%]", "d", "p", "Holm", "here"]
    return table(header, rows)


if __name__ == "__main__":
    main()
