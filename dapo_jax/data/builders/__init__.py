"""Dataset builders: one module each, holding a TFDS builder class named `Builder`.

Every builder writes array_record files and is read through `as_data_source`: neither needs TensorFlow.
Its rows have at least the text fields `prompt` and `answer`.
"""

import contextlib
import difflib
import importlib
import os
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow_datasets as tfds


def builder_names() -> list[str]:
    """The names that `read_split` knows."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def read_split(name: str, split: str, data_dir: str | os.PathLike[str]) -> Sequence[Mapping[str, Any]]:
    """The rows of a split of builder `name`: see `dapo_jax.data.prompts.load_rows`."""
    builder = prepared(name, data_dir)
    try:
        return DecodedRows(builder.as_data_source(split=split))
    except ValueError as error:
        raise ValueError(
            f"dataset {name!r} has no split {split!r}; it has {sorted(builder.info.splits)}, "
            "of which parts are written as train[:100]"
        ) from error


def prepared(name: str, data_dir: str | os.PathLike[str]) -> tfds.core.GeneratorBasedBuilder:
    """A builder whose dataset lies under `data_dir`, generated there if it was not.

    Raises:
        ValueError: no builder of that name.
        RuntimeError: the dataset cannot be written.
    """
    builder_class = _builder_class(name)
    root = os.path.expanduser(data_dir)
    try:
        builder = builder_class(data_dir=root, file_format="array_record")
        if not builder.data_path.exists():
            _prepare(builder)
    except OSError as error:
        raise RuntimeError(
            f"cannot prepare dataset {name!r} under {root}: {error}; set data.data_dir to a folder that can be written"
        ) from error
    # A fresh one reads the description from disk, whoever wrote it.
    return builder_class(data_dir=root, file_format="array_record")


def _prepare(builder: tfds.core.GeneratorBasedBuilder) -> None:
    """Generates the dataset in a temporary folder and renames it into place; a lost race is a success.

    Two processes may find the dataset missing at the same time. Both generate it, one renames first, and the
    other's rename fails because the destination exists: by then the data is there, and it is the same data.
    """
    try:
        tfds.disable_progress_bar()
        with contextlib.redirect_stdout(sys.stderr):  # TFDS announces itself on stdout
            builder.download_and_prepare()
    except OSError:
        if not (builder.data_path / "dataset_info.json").exists():
            raise


def _builder_class(name: str) -> type[tfds.core.GeneratorBasedBuilder]:
    names = builder_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {names}"
        raise ValueError(f"no dataset builder is named {name!r}; {hint}")
    return importlib.import_module(f"{__name__}.{name}").Builder


class DecodedRows(Sequence[Mapping[str, Any]]):
    """A TFDS data source whose text fields come back as `str`; rows are read on access."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of a split of {len(self)} rows")
        return _decoded(self._source[index % len(self)])


def _decoded(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, Mapping):
        return {key: _decoded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    return value
