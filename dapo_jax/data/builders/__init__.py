"""Dataset builders: each module has a TFDS builder class named `Builder`.

Builders write array_record files and are read through `as_data_source`, which works without TensorFlow.
Their rows have at least the text fields `prompt` and `answer`.
"""

import contextlib
import importlib
import io
import json
import os
import pkgutil
from collections.abc import Mapping
from typing import Any

import tensorflow_datasets as tfds

from dapo_jax.data.file_builder import FileBuilder, Files
from dapo_jax.data.rows import LoadedRows
from dapo_jax.hints import nearest


def builder_names() -> list[str]:
    """Returns the names of all builders."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def read_split(
    name: str,
    split: str,
    data_dir: str | os.PathLike[str],
    files: Files | None = None,
    *,
    or_only: bool = False,
) -> LoadedRows:
    """Returns the rows of a split of builder `name`, see `dapo_jax.data.sources.load_rows`."""
    builder = prepared(name, data_dir, files)
    there = sorted(builder.info.splits)
    if or_only and len(there) == 1:
        [split] = there
    try:
        source = builder.as_data_source(split=split)
    except ValueError as error:
        raise ValueError(
            f"dataset {name!r} has no split {split!r}; it has {there}. To hold back rows of a split, such as 100, write "
            f"{there[0]}[:100] for these (data.eval_split) and {there[0]}[100:] for the others (data.train_split)"
        ) from error
    counts = (builder.info.metadata or {}).get(split.partition("[")[0], {})
    return LoadedRows(source, _note(name, counts), _row)


def prepared(
    name: str, data_dir: str | os.PathLike[str], files: Files | None = None
) -> tfds.core.GeneratorBasedBuilder:
    """Returns a builder whose dataset is under `data_dir`, where it is generated if necessary.

    Raises:
        ValueError: there is no builder of that name, or the files cannot be used.
        RuntimeError: the dataset cannot be written.
    """
    root = os.path.expanduser(data_dir)
    try:
        builder = _builder(name, root, files)
        if builder.data_path.exists():
            return builder
        if isinstance(builder, FileBuilder):
            builder.examples()  # raises errors of the files before anything is written
        _prepare(builder)
    except OSError as error:
        raise RuntimeError(
            f"cannot prepare dataset {name!r} under {root}: {error}; set data.data_dir to a folder that can be written"
        ) from error
    # A new builder reads the description from disk, whichever process wrote it.
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
        if not isinstance(name_of := files.options[option], str) or not name_of:
            raise ValueError(
                f"dataset {name!r}: the option {option!r} is {name_of!r:.60}; it must be a field's name, a text"
            )
    return cls(files, data_dir=root, file_format="array_record")


def _prepare(builder: tfds.core.GeneratorBasedBuilder) -> None:
    """Generates the dataset in a temporary folder and renames it.

    If two processes do so at the same time, the second rename fails because the destination exists. By then the same data
    is there.
    """
    try:
        tfds.disable_progress_bar()
        with contextlib.redirect_stdout(io.StringIO()):  # TFDS prints about a download
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


def _row(stored: Mapping[str, Any]) -> Mapping[str, Any]:
    row = _decoded(stored)
    return json.loads(row["row"]) if row.keys() == {"row"} else row


def _decoded(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, Mapping):
        return {key: _decoded(item) for key, item in value.items()}
    return [_decoded(item) for item in value] if isinstance(value, list) else value


def _note(name: str, counts: Mapping[str, Any]) -> str:
    """Returns a text such as `gsm8k: 7,473 prompts of 7,480 rows (7 repeated, 2 of them with another answer)`."""
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
