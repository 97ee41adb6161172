"""Dataset builders: one module each, holding a TFDS builder class named `Builder`.

Every builder writes array_record files and is read through `as_data_source`: neither needs TensorFlow.
Its rows have at least the text fields `prompt` and `answer`.
"""

import contextlib
import importlib
import io
import json
import os
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from dapo_jax.data.file_builder import FileBuilder
from dapo_jax.nearest import nearest


@dataclass(frozen=True, kw_only=True)
class Files:
    """The options of a builder that reads files."""

    path: str = ""
    """A parquet or JSON-lines file, or a folder of them."""
    options: Mapping[str, Any] = field(default_factory=dict)
    on_bad_row: str = "error"
    """`error`, or `skip`: leave bad rows out and count them."""
    deduplicate: bool = True
    """Keep the first of the rows of a split that ask the same."""


def builder_names() -> list[str]:
    """The names that `read_split` knows."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def read_split(
    name: str,
    split: str,
    data_dir: str | os.PathLike[str],
    files: Files | None = None,
    *,
    or_only: bool = False,
) -> "PreparedRows":
    """The rows of a split of builder `name`: see `dapo_jax.data.sources.load_rows`.

    Raises:
        ValueError: no such builder or split, files for a builder that reads none, or files that cannot be used.
        RuntimeError: the dataset cannot be written.
    """
    builder = prepared(name, data_dir, files)
    there = sorted(builder.info.splits)
    if or_only and len(there) == 1:
        [split] = there
    try:
        source = builder.as_data_source(split=split)
    except ValueError as error:
        raise ValueError(
            f"dataset {name!r} has no split {split!r}; it has {there}. To hold rows of one back, such as 100, write "
            f"{there[0]}[:100] for those (data.eval_split) and {there[0]}[100:] for the others (data.train_split)"
        ) from error
    counts = (builder.info.metadata or {}).get(split.partition("[")[0], {})
    return PreparedRows(source, counts)


def prepared(
    name: str, data_dir: str | os.PathLike[str], files: Files | None = None
) -> tfds.core.GeneratorBasedBuilder:
    """A builder whose dataset lies under `data_dir`, generated there if it was not.

    Raises:
        ValueError: no builder of that name, or files that cannot be used.
        RuntimeError: the dataset cannot be written.
    """
    root = os.path.expanduser(data_dir)
    try:
        builder = _builder(name, root, files)
        if builder.data_path.exists():
            return builder
        if isinstance(builder, FileBuilder):
            builder.examples()  # what is wrong with the files is said before anything is written
        _prepare(builder)
    except OSError as error:
        raise RuntimeError(
            f"cannot prepare dataset {name!r} under {root}: {error}; set data.data_dir to a folder that can be written"
        ) from error
    # A fresh one reads the description from disk, whoever wrote it.
    return _builder(name, root, files)


def _builder(name: str, root: str, files: Files | None) -> tfds.core.GeneratorBasedBuilder:
    cls = _builder_class(name)
    if not issubclass(cls, FileBuilder):
        if files is not None and (files.path or files.options):
            raise ValueError(f"dataset {name!r} reads no files and takes no options; leave them out")
        return cls(data_dir=root, file_format="array_record")
    if files is None or not files.path:
        raise ValueError(f"dataset {name!r} is read from a file or folder of yours: name it in data.path")
    for option in files.options:
        if option not in cls.OPTIONS:
            known = f"there are {', '.join(cls.OPTIONS)}" if cls.OPTIONS else "it has none"
            raise ValueError(f"dataset {name!r} has no option {option!r}; {known}")
        if not isinstance(field := files.options[option], str) or not field:
            raise ValueError(
                f"dataset {name!r}: the option {option!r} is {field!r:.60}; it must be a field's name, a text"
            )
    return cls(
        path=Path(files.path).expanduser(),
        options=files.options,
        on_bad_row=files.on_bad_row,
        deduplicate=files.deduplicate,
        data_dir=root,
        file_format="array_record",
    )


def _prepare(builder: tfds.core.GeneratorBasedBuilder) -> None:
    """Generates the dataset in a temporary folder and renames it into place; a lost race is a success.

    Two processes may find the dataset missing at the same time. Both generate it, one renames first, and the
    other's rename fails because the destination exists: by then the data is there, and it is the same data.
    """
    try:
        tfds.disable_progress_bar()
        with contextlib.redirect_stdout(io.StringIO()):  # TFDS speaks of a download, and there is none
            builder.download_and_prepare()
    except OSError:
        if not (builder.data_path / "dataset_info.json").exists():
            raise


def _builder_class(name: str) -> type[tfds.core.GeneratorBasedBuilder]:
    names = builder_names()
    if name not in names:
        near = nearest(name, names)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {names}"
        raise ValueError(f"no dataset builder is named {name!r}; {hint}")
    return importlib.import_module(f"{__name__}.{name}").Builder


class PreparedRows(Sequence[Mapping[str, Any]]):
    """A TFDS data source with text as `str`, and with the counts of its preparation; rows are read on access."""

    def __init__(self, source: Any, counts: Mapping[str, Any]) -> None:
        self._source = source
        self.counts = dict(counts)
        """Counts of a split read from files, see `SplitExamples.counts`; else empty."""

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of a split of {len(self)} rows")
        row = _decoded(self._source[index % len(self)])
        return json.loads(row["row"]) if row.keys() == {"row"} else row


def _decoded(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, Mapping):
        return {key: _decoded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    return value
