"""Saved rollouts graded again, without a model: what `dapo-jax score` calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import groupby
from types import UnionType
from typing import Any

import numpy as np

from dapo_jax.config import ConfigError, RewardConfig
from dapo_jax.dapo.rollouts import Verdict
from dapo_jax.rewards.samples_as_json import sample_of
from dapo_jax.run.folders import place_of
from dapo_jax.run.grader_setup import submit_of
from dapo_jax.storage import AnyPath, files_below
from dapo_jax.terminal import visible
from dapo_jax.trackers.rollout_log import read_rollouts

RECORDED = "recorded"
"""The name of the verdicts that the rollouts were written with."""

ABOVE = "above 0"
"""The name of what is counted for a grader that gives numbers: scores above 0. For others it is what they call correct."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The verdicts of several graders on the same responses."""

    rows: Sequence[Mapping[str, Any]]
    """The rollouts, as `read_rollouts` gives them."""
    verdicts: Mapping[str, Sequence[Verdict]]
    """Grader -> one verdict for each row; `recorded` is among them."""

    def accuracy(self, grader: str) -> float:
        """The share of responses that a grader calls correct; of numbers alone, the share above 0."""
        return float(np.mean([verdict.correct for verdict in self.verdicts[grader]]))

    def numbers(self, grader: str) -> list[float]:
        """The scores of a grader; of a plain verdict, or of one that was lost, there is none."""
        return [verdict.score for verdict in self.verdicts[grader] if verdict.score is not None]

    def only_numbers(self, grader: str) -> bool:
        """True if a grader's scores are all that it says, so that `correct` means above 0 and no more; never if it names answers."""
        return bool(self.numbers(grader)) and all(
            verdict.extracted is None and verdict.correct == ((verdict.score or 0.0) > 0.0)
            for verdict in self.verdicts[grader]
        )

    def agreement(self, one: str, other: str) -> float:
        """The share of responses of which two graders say the same."""
        return 1.0 - len(self.disagreements(one, other)) / len(self.rows)

    def disagreements(self, one: str, other: str) -> list[int]:
        """The places of the responses of which two graders do not say the same."""
        pairs = zip(self.verdicts[one], self.verdicts[other], strict=True)
        return [place for place, (a, b) in enumerate(pairs) if a.correct != b.correct]


def score(
    rollouts: str | AnyPath,
    graders: Sequence[str],
    *,
    answer_marker: str = "=",
    workers: int = 2,
    timeout_s: float = 10.0,
) -> Scores:
    """Grades saved rollouts with each of `graders`.

    Args:
        rollouts: a JSONL file, or a folder of them: a run's `rollouts/`, or what `dapo-jax eval --keep` wrote.
        graders: as `reward.grader`.
        answer_marker: of the grader `exact`.
        workers: processes for graders that may hang; 0: this one.
        timeout_s: seconds for one response.

    Raises:
        ConfigError: there are no rollouts, a line is none, or no grader of that name.
    """
    rows = _rows(rollouts)
    groups = [[sample_of(row) for row in group] for _, group in groupby(rows, key=_group)]
    recorded = [
        Verdict(
            correct=row["correct"],
            extracted=row["extracted"],
            reason=row["reason"],
            score=row.get("score"),
        )
        for row in rows
    ]
    verdicts = {RECORDED: recorded}
    for grader in graders:
        config = RewardConfig(
            grader=grader, answer_marker=answer_marker, workers=workers, timeout_s=timeout_s
        )
        submit, close = submit_of(config)
        try:
            futures = [future for group in groups for future in submit(group)]
            verdicts[grader] = [future.result() for future in futures]
        finally:
            if close is not None:
                close()
    return Scores(rows=rows, verdicts=verdicts)


def describe(scores: Scores, *, show: int = 5) -> str:
    """Scores where there are such, what share each grader takes, agreement of each pair of graders, and up to `show` responses that two of them see differently."""
    names = list(scores.verdicts)
    width = max(len(name) for name in names)
    lines = [*_means(scores, names, width), *_shares(scores, names, width)]
    for place, one in enumerate(names):
        for other in names[place + 1 :]:
            lines += _differences(scores, one, other, show)
    return visible("\n".join(lines) + "\n")


def _means(scores: Scores, names: Sequence[str], width: int) -> list[str]:
    lines = []
    for name in names:
        if given := scores.numbers(name):
            mean, without = sum(given) / len(given), len(scores.rows) - len(given)
            beside = f"; {without} of {len(scores.rows)} responses have none" if without else ""
            lines.append(
                f"{name:{width}}  mean score {mean:.4g}, from {min(given):.4g} to {max(given):.4g}{beside}"
            )
    return [*lines, ""] if lines else []


def _shares(scores: Scores, names: Sequence[str], width: int) -> list[str]:
    """A row for each grader: the share that it calls correct, or scores above 0, and its agreement with each one."""
    numbers = any(scores.only_numbers(name) for name in names)
    calls = "calls correct, or where it gives numbers scores above 0," if numbers else "calls correct,"
    column = "share" if numbers else "correct"
    head = "  ".join(
        [*([" " * len(ABOVE)] if numbers else []), column.rjust(7), *(f"{name:>7}" for name in names)]
    )
    lines = [
        f"{len(scores.rows)} responses; the share that a grader {calls} and of which two say the same",
        "",
        f"{'':{width}}  {head}",
    ]
    for one in names:
        shares = [scores.accuracy(one), *(scores.agreement(one, other) for other in names)]
        columns = zip([column, *names], shares, strict=True)
        cells = [f"{share:.1%}".rjust(max(7, len(name))) for name, share in columns]
        of = [f"{ABOVE if scores.only_numbers(one) else 'correct':{len(ABOVE)}}"] if numbers else []
        lines.append("  ".join([f"{one:{width}}", *of, *cells]))
    return lines


def _differences(scores: Scores, one: str, other: str, show: int) -> list[str]:
    differing = scores.disagreements(one, other)
    if not differing:
        return []
    says = ["scores above 0" if scores.only_numbers(name) else "says correct" for name in (one, other)]
    also = "" if says[0] == says[1] else f" {says[1]}"
    first_right = sum(scores.verdicts[one][place].correct for place in differing)
    counts = f"{len(differing)} of {len(scores.rows)}; only {one} {says[0]}: {first_right}"
    lines = ["", f"{one} and {other} differ on {counts}, only {other}{also}: {len(differing) - first_right}"]
    for found in differing[:show]:
        lines += _shown(scores, found, (one, other))
    return lines


def _shown(scores: Scores, place: int, names: Sequence[str]) -> list[str]:
    row = scores.rows[place]
    ending = " ".join(row["response"][-120:].split())
    asked = row["row"].get("source_row", f"prompt {row['ordinal']}")
    lines = [f"  step {row['step']}, {asked}, response {row['index']}, answer {row['answer']!r}: ...{ending}"]
    for name in names:
        verdict = scores.verdicts[name][place]
        judged = "correct" if verdict.correct else "wrong"
        lines.append(
            f"    {name}: {judged if verdict.score is None else f'score {verdict.score:.4g}'}; {verdict.reason}"
        )
    return lines


def _group(row: Mapping[str, Any]) -> tuple[int, int]:
    """The key that the responses of one group share; they stand one behind the other."""
    return row["step"], row["ordinal"]


_FIELDS: dict[str, type | UnionType] = {
    "step": int,
    "ordinal": int,
    "index": int,
    "prompt": str,
    "answer": str,
    "response": str,
    "correct": bool,
    "extracted": str | None,
    "reason": str,
    "finish_reason": str,
    "row": dict,
    "prompt_token_ids": list,
    "response_token_ids": list,
}
"""The fields of a rollout that are read."""

_SCORE = int | float | None
"""The types of a rollout's score, which older ones lack."""


def checked_rollout(row: Mapping[str, Any], file: AnyPath, number: int) -> dict[str, Any]:
    """A rollout as it was read, if it has what grading needs.

    Raises:
        ValueError: a field is missing or of another type; names the file and the rollout.
    """
    for name, kind in _FIELDS.items():
        if name not in row or not isinstance(row[name], kind):
            found = f"{row[name]!r:.60}" if name in row else "nothing"
            raise ValueError(
                f"{file}, rollout {number}: {name!r} is {found}; it must be {getattr(kind, '__name__', kind)}"
            )
    if not isinstance(row.get("score"), _SCORE):
        raise ValueError(f"{file}, rollout {number}: 'score' is {row['score']!r:.60}; it must be {_SCORE}")
    for name in ("prompt_token_ids", "response_token_ids"):
        if not all(isinstance(token, int) and 0 <= token < 1 << 31 for token in row[name]):
            raise ValueError(f"{file}, rollout {number}: {name!r} must hold token ids; got {row[name]!r:.60}")
    return dict(row)


def _rows(named: str | AnyPath) -> list[dict[str, Any]]:
    path = place_of(named, key="rollouts", write=False)
    try:
        files = files_below(path) if path.is_dir() else [path]
        files = [file for file in files if file == path or fnmatch(file.name, "step_*.jsonl")]
        rows = [
            checked_rollout(row, file, number)
            for file in files
            for number, row in enumerate(read_rollouts(file), 1)
        ]
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read rollouts: {error}") from error
    if not rows:
        raise ConfigError(
            f"{named} holds no rollouts; give a run's rollouts/ folder, one of its JSONL files, or what eval --keep wrote"
        )
    return rows
