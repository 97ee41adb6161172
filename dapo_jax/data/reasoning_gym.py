"""Questions that the package `reasoning-gym` makes up: `data.source: reasoning_gym:TASK`, through the extra of that name.

Nothing is downloaded. A task makes its question number i from the seed `seed + i`, so two splits with seeds of their own
would share nearly all questions. Here the splits are two stretches of one sequence, the test split first; questions
that repeat are dropped, and from the train split those that the test split asks.
"""

import importlib
import inspect
import re
from collections.abc import Mapping
from typing import Any

from dapo_jax.extras import how_to_install
from dapo_jax.nearest import nearest

PREFIX = "reasoning_gym:"
TRAIN_QUESTIONS, TEST_QUESTIONS = 4096, 256
_TRIES = 4
"""Questions made for each that is wanted; a task that repeats itself more often gives fewer."""
_OURS = ("seed", "train_questions", "test_questions")
"""Options that say which questions are asked; all others are the task's own."""
_SPLIT = re.compile(r"(train|test)(?:\[:([0-9]+)\])?")


def reasoning_gym_rows(task: str, split: str, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a task's split: `prompt`, `answer`, and the `task`, `options` and `entry` that a grader needs.

    Args:
        task: a name of the package, such as `letter_counting`.
        split: `train`, `test`, or the first rows of one: `train[:100]`.
        options: the task's own options, such as `min_words`; and `seed` (0), `train_questions` (4096) and
            `test_questions` (256), which say which questions there are and how many at most.

    Raises:
        ValueError: the extra is not installed, no task, split or option of that name, an option that the task refuses,
            or too few different questions.
    """
    matched = _SPLIT.fullmatch(split)
    if not matched:
        raise ValueError(f"no split {split!r}; there are train and test, and their first rows as train[:100]")
    seed, train, test = (
        _whole(options, name, default)
        for name, default in zip(_OURS, (0, TRAIN_QUESTIONS, TEST_QUESTIONS), strict=True)
    )
    own = {name: value for name, value in options.items() if name not in _OURS}
    dataset = make_dataset(task, seed=seed, size=_TRIES * (train + test), options=own)
    held_out = _distinct(dataset, range(_TRIES * test), wanted=test, without=set())
    if matched[1] == "test":
        found = held_out
    else:
        places = range(_TRIES * test, _TRIES * (test + train))
        found = _distinct(dataset, places, wanted=train, without=set(held_out))
    if not found:
        raise ValueError(
            f"{task} makes only {len(held_out)} different questions with these options, and the test split has them all; "
            "lower data.source_options.test_questions, or give options that make more"
        )
    rows = [
        {"prompt": text, "answer": str(entry["answer"]), "task": task, "options": own, "entry": entry}
        for text, entry in found.items()
    ]
    return rows[: int(matched[2])] if matched[2] else rows


def make_dataset(task: str, *, seed: int, size: int, options: Mapping[str, Any]) -> Any:
    """The package's dataset of a task: `dataset[i]` is an entry, `dataset.score_answer(text, entry)` grades.

    Raises:
        ValueError: as `reasoning_gym_rows`.
    """
    try:
        package, factory = (
            importlib.import_module(name) for name in ("reasoning_gym", "reasoning_gym.factory")
        )
    except ImportError as error:
        raise ValueError(
            f"the task {task!r} is of the package reasoning-gym, which cannot be imported ({error}); install it by "
            f"{how_to_install('reasoning-gym')}"
        ) from error
    if task not in factory.DATASETS:
        raise ValueError(f"reasoning-gym has no task {task!r}; {_near(task, factory.DATASETS)}")
    known = set(inspect.signature(factory.DATASETS[task][1]).parameters) - {"seed", "size"}
    for name in options:
        if name not in known:
            raise ValueError(
                f"task {task} has no option {name!r}; {_near(name, sorted(known | set(_OURS)))}. Set it in data.source_options"
            )
    try:
        return package.create_dataset(task, seed=seed, size=size, **options)
    except Exception as error:  # each task checks its options in its own way, many by assert
        raise ValueError(
            f"task {task} refuses data.source_options={dict(options)}: {type(error).__name__}: {error}"
        ) from error


def _distinct(dataset: Any, places: range, *, wanted: int, without: set[str]) -> dict[str, dict[str, Any]]:
    """The first `wanted` different questions that are not in `without`, each with its entry; fewer if there are no more."""
    found: dict[str, dict[str, Any]] = {}
    for entry in (dataset[place] for place in places):
        if len(found) == wanted:
            break
        if entry["question"] not in without:
            found.setdefault(entry["question"], entry)
    return found


def _whole(options: Mapping[str, Any], name: str, default: int) -> int:
    value, least = options.get(name, default), 0 if name == "seed" else 1
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(
            f"data.source_options.{name} must be a whole number of at least {least}; got {value!r}"
        )
    return value


def _near(name: str, known: Any) -> str:
    near = nearest(name, known, count=3)
    return (
        f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(sorted(known))}"
    )
