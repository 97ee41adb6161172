"""Datasets by name: made up by a builder, read from the user's files, or made up by a reasoning-gym task."""

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from dapo_jax.data.reasoning_gym import PREFIX, reasoning_gym_rows


class LoadedRows(Sequence[Mapping[str, Any]]):
    """The rows of a dataset's split, read on access, and what is to be said of them."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], note: str = "") -> None:
        self._rows = rows
        self.note = note
        """A remark on what preparing them left out, for people; empty if they were made up."""

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]


def load_rows(
    source_name: str,
    split: str,
    data_dir: str | os.PathLike[str],
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    path: str = "",
    on_bad_row: str = "error",
    deduplicate: bool = True,
    or_only: bool = False,
) -> LoadedRows:
    """The rows of a dataset, text as `str`, read from disk on access.

    A builder's dataset is prepared under `data_dir` at first use and found there afterwards: for files of the user's, once for each
    content of theirs. A task's questions are made up at each use, the same ones from the same options.

    Args:
        source_name: a module of `dapo_jax.data.builders`, or `reasoning_gym:TASK`.
        split: a split such as `train`, or a part of one: `train[:100]`.
        data_dir: folder of prepared datasets; `~` is expanded.
        options: of a task, see `reasoning_gym_rows`, or of the builder `jsonl`.
        path: the file or folder that a builder of files reads.
        on_bad_row: what a row of a file that cannot be used does: `error`, or `skip`.
        deduplicate: keep the first of a file's rows that ask the same.
        or_only: of a dataset that has one split only take that one, whatever `split` says.

    Raises:
        ValueError: no builder, task or split of that name; options or a path that do not fit; files that cannot be used, with
            the place of the first bad row.
        RuntimeError: the dataset cannot be written to `data_dir`.
    """
    if source_name.startswith(PREFIX):
        if path:
            raise ValueError(f"dataset {source_name!r} reads no file; leave data.path={path!r} out")
        return LoadedRows(reasoning_gym_rows(source_name.removeprefix(PREFIX), split, options))
    from dapo_jax.data.builders import Files, read_split  # loads TensorFlow Datasets

    files = Files(path=path, options=options, on_bad_row=on_bad_row, deduplicate=deduplicate)
    found = read_split(source_name, split, data_dir, files, or_only=or_only)
    return LoadedRows(found, _note(source_name, found.counts))


def dataset_splits(
    source_name: str,
    data_dir: str | os.PathLike[str],
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    path: str = "",
    on_bad_row: str = "error",
    deduplicate: bool = True,
) -> list[str]:
    """The splits of a dataset, which is prepared if it was not; arguments and errors as `load_rows`."""
    if source_name.startswith(PREFIX):
        return ["test", "train"]
    from dapo_jax.data.builders import Files, prepared

    files = Files(path=path, options=options, on_bad_row=on_bad_row, deduplicate=deduplicate)
    return sorted(prepared(source_name, data_dir, files).info.splits)


def _note(name: str, counts: Mapping[str, Any]) -> str:
    """`gsm8k: 7,473 prompts of 7,480 rows (7 repeated, 2 of them with another answer)`."""
    if not counts:
        return ""
    left_out = []
    if counts["repeated"]:
        another = f", {counts['conflicting']:,} of them with another answer" if counts["conflicting"] else ""
        left_out.append(f"{counts['repeated']:,} repeated{another}")
    if counts["skipped"]:
        left_out.append(f"{counts['skipped']:,} bad: {'; '.join(counts['skipped_rows'])}")
    why = f" ({'; '.join(left_out)})" if left_out else ""
    kept = counts["rows"] - counts["repeated"] - counts["skipped"]
    return f"{name}: {kept:,} prompts of {counts['rows']:,} rows{why}"
