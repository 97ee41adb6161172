"""A run's evaluations as a browser opens them: for every problem how many responses were right each time, and compressed chunks of text.

A chunk holds either prompts and answers of problems, or what one evaluation says of each problem of a dataset.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dapo_jax.report.checked_lines import check_kinds, read_checked
from dapo_jax.report.index import compressed
from dapo_jax.report.questions import question_key
from dapo_jax.report.rollouts import Laid, as_float, heads, spaced
from dapo_jax.storage import AnyPath
from dapo_jax.trackers.rollout_log import read_problems

ABSENT = 0xFFFF
"""Where an evaluation did not ask a problem."""

_LONGEST = ABSENT - 1
_KINDS = {"step": int, "dataset": str, "prompt": str, "answer": str, "correct": int, "samples": int}


@dataclass
class _Dataset:
    """The evaluations of one dataset, in the order of their steps."""

    keys: list[str] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    places: dict[tuple[str, int], int] = field(default_factory=dict)
    """(question, how often it came before in the evaluation) -> its place among all problems."""
    texts: list[tuple[int, int]] = field(default_factory=list)
    """(chunk, problems): of which chunk the texts of the next problems are."""
    evaluations: list[tuple[int, int, dict[int, tuple[int, int]]]] = field(default_factory=list)
    """(step, chunk, place -> (correct, samples))."""
    rewards: list[dict[int, float]] = field(default_factory=list)
    """For each evaluation: place -> mean reward, NaN where it is not on file."""


def lay_out_evaluations(
    files: Sequence[AnyPath], *, steps: int | None = None, by_score: bool = False
) -> Laid:
    """Reads a run's evaluations.

    Args:
        files: of problems, in the order of their steps.
        steps: how many of them at most, evenly spaced, the first and the last among them; None: all.
        by_score: rewards and scores are laid out, too.

    Raises:
        ConfigError: a file is damaged; names it and the line.
    """
    laying = Evaluations(by_score=by_score)
    for folder in spaced(list(dict.fromkeys(file.parent for file in files)), steps):
        for file in files:
            if file.parent == folder:
                laying.add(file)
    return laying.laid(logged=len(files))


class Evaluations:
    """Evaluations of one run, one after the other, on their way to a page."""

    def __init__(self, *, by_score: bool = False) -> None:
        self._by_score = by_score
        self._datasets: dict[str, _Dataset] = {}
        self._chunks: list[bytes] = []

    def add(self, file: AnyPath) -> None:
        """Reads the problems of one evaluation of one dataset.

        Raises:
            ConfigError: the file is damaged; names it and the line.
        """
        problems = read_checked(file, read_problems, _check, what="problem")
        if not problems:
            return
        name, step = problems[0]["dataset"], problems[0]["step"]
        dataset = self._datasets.setdefault(name, _Dataset())
        before, seen = len(dataset.keys), Counter[str]()
        places, new = [], []
        for problem in problems:
            key = question_key(problem["prompt"], problem["answer"])
            identity = key, seen[key]
            seen[key] += 1
            if identity not in dataset.places:
                dataset.places[identity] = len(dataset.keys)
                dataset.keys.append(key)
                dataset.prompts.append(problem["prompt"])
                new.append([problem["prompt"], problem["answer"], problem.get("place")])
            places.append(dataset.places[identity])
        if new:
            dataset.texts.append((self._chunk(new), len(dataset.keys) - before))
        said = {place: self._record(problem) for place, problem in zip(places, problems, strict=True)}
        numbers = {
            place: (problem["correct"], problem["samples"])
            for place, problem in zip(places, problems, strict=True)
        }
        dataset.evaluations.append((step, self._chunk(said), numbers))
        dataset.rewards.append(
            {place: as_float(problem.get("reward")) for place, problem in zip(places, problems, strict=True)}
        )

    def laid(self, *, logged: int) -> Laid:
        """All that was read so far; `logged` is how many evaluations the run has on file. A chunk that was handed out stays as it is."""
        about = {"datasets": self._about(), "logged": logged}
        return Laid(about=about, index=self._index(), chunks=tuple(self._chunks))

    def _about(self) -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "heads": heads(dataset.prompts),
                "keys": [*dataset.keys],
                "texts": [*dataset.texts],
                "evaluations": [[step, chunk] for step, chunk, _ in dataset.evaluations],
            }
            for name, dataset in self._datasets.items()
        ]

    def _index(self) -> bytes:
        """For each dataset [evaluations, problems] of how many responses were correct and the same of samples, `ABSENT` where there are none:
        two bytes each, one after the other, compressed. With `by_score` the mean rewards follow, four bytes each, NaN where there is none."""
        arrays = []
        for dataset in self._datasets.values():
            numbers = np.full((2, len(dataset.evaluations), len(dataset.keys)), ABSENT, dtype="<u2")
            for line, (_, _, found) in enumerate(dataset.evaluations):
                for place, pair in found.items():
                    numbers[:, line, place] = pair
            arrays.append(numbers.tobytes())
            if self._by_score:
                rewards = np.full(numbers.shape[1:], np.nan, dtype="<f4")
                for line, of_places in enumerate(dataset.rewards):
                    rewards[line, list(of_places)] = list(of_places.values())
                arrays.append(rewards.tobytes())
        return compressed(b"".join(arrays))

    def _record(self, problem: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "extracted": [
                [each.get("answer"), each.get("count"), each.get("correct")]
                for each in _objects(problem.get("extracted"))
            ],
            "responses": [
                {
                    "text": each["response"],
                    "correct": bool(each.get("correct")),
                    "extracted": each.get("extracted"),
                    "reason": each.get("reason") or "",
                    "tokens": each.get("response_tokens"),
                    "finish": each.get("finish_reason"),
                    **({"score": each.get("score")} if self._by_score else {}),
                }
                for each in _objects(problem.get("responses"))
                if isinstance(each.get("response"), str)
            ],
        }

    def _chunk(self, value: Any) -> int:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        self._chunks.append(compressed(text.encode("utf-8", errors="replace")))
        return len(self._chunks) - 1


def _objects(value: Any) -> Sequence[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _check(problem: Mapping[str, Any], where: str) -> None:
    check_kinds(problem, _KINDS, where)
    if not 0 <= problem["correct"] <= problem["samples"] <= _LONGEST:
        raise ValueError(
            f"{where}: 'correct' is {problem['correct']!r:.60} of {problem['samples']!r:.60} samples; it must be 0 or more and at most "
            f"these, and these at most {_LONGEST}"
        )
