"""Evaluations to read: JSON lines, one for each problem."""

from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any
from urllib.parse import quote

from dapo_jax.storage import AnyPath, path_of
from dapo_jax.trackers.json_lines import read_lines, write_lines

SCHEMA_VERSION = 1
"""Version of a line's keys; raised when a reader of the older ones could not use a line."""


def write_problems(
    folder: str | PathLike[str], problems: Iterable[Mapping[str, Any]], *, name: str, step: int
) -> AnyPath:
    """Writes one line per problem to FOLDER/NAME.jsonl, whole or not at all, and returns its path.

    In the file's name all but letters, digits and `_.-~` of the dataset's are percent-encoded: `hf:ORG/NAME` becomes
    hf%3AORG%2FNAME.jsonl, so that no two datasets share a file. A file of that name is replaced.

    Args:
        folder: usually RUN_DIR/evaluations/step_000010; created if needed.
        problems: one `dapo_jax.evaluation.problem_record` each, in the order they are to be read.
        name: the dataset's.
        step: what the policy was trained for; 0 is before training, or outside it.

    Raises:
        OSError: it cannot be written; the message names the file.
    """
    path = path_of(folder) / f"{quote(name, safe='')}.jsonl"
    head = {"schema_version": SCHEMA_VERSION, "step": step, "dataset": name}
    write_lines(path, [{**head, **problem} for problem in problems], what="the problems of an evaluation")
    return path


def read_problems(path: str | PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a file that `write_problems` wrote, in order.

    Raises:
        ValueError: a line is not a problem, or is of a newer version; the message names file and line number.
    """
    return read_lines(path_of(path), what="a problem", version=SCHEMA_VERSION, needs="samples")
