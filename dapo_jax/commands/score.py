"""Grades saved rollouts again, without loading a model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import combinations, groupby
from typing import Any

import numpy as np

from dapo_jax.config import ConfigError, RewardConfig, WorkersConfig
from dapo_jax.config.keys import prefixed
from dapo_jax.dapo.rollouts import Verdict
from dapo_jax.rewards.sample import sample_of
from dapo_jax.run.grader_setup import submit_of
from dapo_jax.run.run_dir import checked_folder
from dapo_jax.storage import AnyPath, files_below
from dapo_jax.terminal import visible
from dapo_jax.trackers.rollout_log import read_rollouts

RECORDED = "recorded"
"""Name of the pseudo-grader for the verdicts that were saved with the rollouts."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The verdicts of several graders on the same responses."""

    rows: Sequence[Mapping[str, Any]]
    """The rollouts, as `read_rollouts` returns them."""
    verdicts: Mapping[str, Sequence[Verdict]]
    """Maps each grader to its verdicts, one per row. The saved verdicts are included under the name `recorded`."""

    def accuracy(self, grader: str) -> float:
        """Returns the fraction of responses that a grader judges correct. A score above 0 counts as correct."""
        return float(np.mean([verdict.correct for verdict in self.verdicts[grader]]))

    def numbers(self, grader: str) -> list[float]:
        """Returns the scores from a grader. Verdicts without a score, including lost verdicts, are left out."""
        return [verdict.score for verdict in self.verdicts[grader] if verdict.score is not None]

    def agreement(self, grader: str, other: str) -> float:
        """Returns the fraction of responses on which two graders return the same verdict."""
        return 1.0 - len(self.disagreements(grader, other)) / len(self.rows)

    def disagreements(self, grader: str, other: str) -> list[int]:
        """Returns the indices of the responses on which two graders return different verdicts."""
        pairs = zip(self.verdicts[grader], self.verdicts[other], strict=True)
        return [index for index, (a, b) in enumerate(pairs) if a.correct != b.correct]


def score(
    rollouts: str | AnyPath,
    graders: Sequence[str],
    *,
    answer_marker: str = "=",
    workers: int = 2,
    timeout_s: float = 10.0,
) -> Scores:
    """Grades saved rollouts again, with each grader in `graders`.

    Args:
        rollouts: a JSONL file, or a folder with files `step_*.jsonl`: a run's `rollouts/`, or the folder of `dapo-jax eval --keep`.
        graders: the graders to apply, each in the same format as `reward.grader`.
        answer_marker: answer marker for the grader `exact`.
        workers: number of processes for graders that may hang. 0 means that all graders run in this process.
        timeout_s: time limit in seconds for one response.

    Raises:
        ConfigError: there are no rollouts, a line is not a rollout, or there is no such grader.
    """
    rows = _rows(rollouts)
    try:
        # Two datasets of `dapo-jax eval --keep` may have the same step and ordinal one after the other.
        by_prompt = groupby(rows, key=lambda row: (row["step"], row["ordinal"], row["prompt"]))
        groups = [[sample_of(row) for row in group] for _, group in by_prompt]
        known = ("correct", "extracted", "reason", "score")
        verdicts = {RECORDED: [Verdict(**{name: row[name] for name in known}) for row in rows]}
    except KeyError as error:
        raise ConfigError(f"{rollouts} contains a rollout without {error}") from error
    limits = WorkersConfig(count=workers, timeout_s=timeout_s).of_graders
    for grader in graders:
        submit, close = submit_of(RewardConfig(grader=grader, answer_marker=answer_marker), workers=limits)
        try:
            futures = [submit(group) for group in groups]
            verdicts[grader] = [verdict for future in futures for verdict in future.result()]
        finally:
            close()
    return Scores(rows=rows, verdicts=verdicts)


def describe(scores: Scores, *, show: int = 5) -> str:
    """Formats the mean score and accuracy of each grader, and the agreement and the first `show` disagreements of each pair of graders."""
    names, count = list(scores.verdicts), len(scores.rows)
    width = max(len(name) for name in names)
    lines = []
    for name in names:
        if numbers := scores.numbers(name):
            missing = (
                f"; {count - len(numbers)} of {count} responses have none" if len(numbers) < count else ""
            )
            means = (
                f"mean score {sum(numbers) / len(numbers):.4g}, from {min(numbers):.4g} to {max(numbers):.4g}"
            )
            lines.append(f"{name:{width}}  {means}{missing}")
    lines += [""] * bool(lines) + _shares(scores, names, width)
    for pair in combinations(names, 2):
        if differing := scores.disagreements(*pair):
            lines += _differences(scores, pair, differing, show)
    return visible("\n".join(lines) + "\n")


def _shares(scores: Scores, names: Sequence[str], width: int) -> list[str]:
    """Returns a table with each grader's accuracy and its agreement with every grader."""
    columns = ["correct", *names]
    lines = [
        f"{len(scores.rows)} responses; each row contains the share that a grader judges correct (score above 0), and its agreement with each grader",
        "",
        "  ".join([" " * width, *(f"{name:>7}" for name in columns)]),
    ]
    for grader in names:
        shares = [scores.accuracy(grader), *(scores.agreement(grader, other) for other in names)]
        cells = [f"{share:.1%}".rjust(max(7, len(name))) for name, share in zip(columns, shares, strict=True)]
        lines.append("  ".join([f"{grader:{width}}", *cells]))
    return lines


def _differences(scores: Scores, pair: tuple[str, str], differing: list[int], show: int) -> list[str]:
    """Formats the disagreements between two graders: how often only one of them judges a response correct, and the first `show` such responses."""
    only = [
        f"correct only for {name}: {sum(scores.verdicts[name][index].correct for index in differing)}"
        for name in pair
    ]
    lines = ["", f"{' and '.join(pair)} differ on {len(differing)} of {len(scores.rows)}; {', '.join(only)}"]
    for index in differing[:show]:
        row = scores.rows[index]
        asked = row["row"].get("source_row", f"prompt {row['ordinal']}")
        response = f"response {row.get('index')}, answer {row['answer']!r}: ...{' '.join(row['response'][-120:].split())}"
        lines.append(f"  step {row['step']}, {asked}, {response}")
        for name in pair:
            verdict = scores.verdicts[name][index]
            judged = "correct" if verdict.correct else "wrong"
            judged = judged if verdict.score is None else f"score {verdict.score:.4g}"
            lines.append(f"    {name}: {judged}; {verdict.reason}")
    return lines


def _rows(named: str | AnyPath) -> list[dict[str, Any]]:
    path = checked_folder(named, key="rollouts", write=False)
    with prefixed("cannot read rollouts", OSError):
        files = files_below(path) if path.is_dir() else [path]
        files = [file for file in files if file == path or fnmatch(file.name, "step_*.jsonl")]
        rows = [row for file in files for row in read_rollouts(file)]
    if not rows:
        raise ConfigError(
            f"{named} contains no rollouts; specify a run's rollouts/ folder, a JSONL file in it, or the folder of dapo-jax eval --keep"
        )
    return rows
