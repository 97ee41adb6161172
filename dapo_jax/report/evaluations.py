"""Lays out a run's evaluations for the browser: an index of correct responses per problem and evaluation, and chunks of text.

A chunk contains either the prompts and answers of problems, or the results of one evaluation on all problems of a dataset.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dapo_jax.report.chunks import Laid, compressed, compressed_json, heads, key_of, read_checked, spaced
from dapo_jax.storage import AnyPath
from dapo_jax.trackers.rollout_log import read_problems

ABSENT = 0xFFFF
"""Value in the index for problems that an evaluation did not include."""


@dataclass
class _Dataset:
    """The evaluations of one dataset, in the order of their steps."""

    prompts: list[str] = field(default_factory=list)
    indices: dict[tuple[str, int], int] = field(default_factory=dict)
    """(question key, number of earlier occurrences in the same evaluation) -> the problem's index, in the order of the indices."""
    texts: list[tuple[int, int]] = field(default_factory=list)
    """(chunk, count) pairs: each chunk contains the texts of the next `count` problems."""
    evaluations: list[tuple[int, int, dict[int, tuple[int, int, float | None]]]] = field(default_factory=list)
    """One (step, chunk, results) per evaluation. Results map a problem's index to (correct, samples, mean reward)."""


def lay_out_evaluations(
    files: Sequence[AnyPath], *, steps: int | None = None, by_score: bool = False
) -> Laid:
    """Loads a run's evaluations from `files`, which must be in step order. At most `steps` evaluations are loaded (see `spaced`).

    If `by_score` is set, rewards and scores are included. A damaged file raises ConfigError.
    """
    laying = Evaluations(by_score=by_score)
    for folder in spaced(list(dict.fromkeys(file.parent for file in files)), steps):
        for file in files:
            if file.parent == folder:
                laying.add(file)
    return laying.laid(logged=len(files))


class Evaluations:
    """Lays out the evaluations of one run for the page. `add` is called once per file."""

    def __init__(self, *, by_score: bool = False) -> None:
        self._by_score = by_score
        self._datasets: dict[str, _Dataset] = {}
        self._chunks: list[bytes] = []

    def add(self, file: AnyPath) -> None:
        """Adds the results for each problem from one evaluation on one dataset. Raises ConfigError if a file is damaged."""
        problems = read_checked(file, read_problems)
        if not problems:
            return
        dataset = self._datasets.setdefault(problems[0]["dataset"], _Dataset())
        seen = Counter[str]()
        indexed, new = dict[int, Mapping[str, Any]](), []
        for problem in problems:
            key = key_of(problem["prompt"], problem["answer"])
            identity = key, seen[key]
            seen[key] += 1
            if identity not in dataset.indices:
                dataset.indices[identity] = len(dataset.indices)
                dataset.prompts.append(problem["prompt"])
                new.append([problem["prompt"], problem["answer"], problem.get("place")])
            indexed[dataset.indices[identity]] = problem
        if new:
            dataset.texts.append((self._chunk(new), len(new)))
        chunk = self._chunk({index: self._record(problem) for index, problem in indexed.items()})
        numbers = {
            index: (problem["correct"], problem["samples"], problem.get("reward"))
            for index, problem in indexed.items()
        }
        dataset.evaluations.append((problems[0]["step"], chunk, numbers))

    def laid(self, *, logged: int) -> Laid:
        """Returns the layout of all added files. `logged` is the run's number of evaluation files. Later calls only append chunks."""
        about = [
            {
                "name": name,
                "heads": heads(dataset.prompts),
                "keys": [key for key, _ in dataset.indices],
                "texts": [*dataset.texts],
                "evaluations": [[step, chunk] for step, chunk, _ in dataset.evaluations],
            }
            for name, dataset in self._datasets.items()
        ]
        whole = {"datasets": about, "logged": logged}
        return Laid(about=whole, index=self._index(), chunks=tuple(self._chunks))

    def _index(self) -> bytes:
        """Returns the numbers of correct responses and of samples for each dataset, as two-byte arrays [evaluations, problems].

        `ABSENT` marks problems that an evaluation did not include. If `by_score` is set, a four-byte array of mean rewards follows,
        with NaN for unknown values.
        """
        arrays = []
        for dataset in self._datasets.values():
            numbers = np.full((3, len(dataset.evaluations), len(dataset.indices)), np.nan)
            for line, (_, _, results) in enumerate(dataset.evaluations):
                numbers[:, line, list(results)] = np.array(list(results.values()), np.float64).T
            counts = np.where(np.isnan(numbers[:2]), ABSENT, numbers[:2]).astype("<u2")
            arrays.append(counts.tobytes())
            if self._by_score:
                arrays.append(numbers[2].astype("<f4").tobytes())
        return compressed(b"".join(arrays))

    def _record(self, problem: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "extracted": [[row["answer"], row["count"], row["correct"]] for row in problem["extracted"]],
            "responses": [
                {
                    "text": row["response"],
                    "correct": bool(row.get("correct")),
                    "extracted": row.get("extracted"),
                    "reason": row.get("reason") or "",
                    "tokens": row.get("response_tokens"),
                    "finish": row.get("finish_reason"),
                    **({"score": row.get("score")} if self._by_score else {}),
                }
                for row in problem["responses"]
            ],
        }

    def _chunk(self, value: Any) -> int:
        self._chunks.append(compressed_json(value))
        return len(self._chunks) - 1
