"""The TFDS builder of files that a user names; a dataset's own module says what its question and its answer are.

Reading, checking and de-duplication come first, so that a bad row is said before anything is written. The prepared rows are
kept under a name made from the files' bytes and the options: another file, or other options, is another dataset.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import tensorflow_datasets as tfds

from dapo_jax.data.builder_info import OwnInfo
from dapo_jax.data.files import data_files, file_rows
from dapo_jax.data.rows import checked_row

ON_BAD_ROW = ("error", "skip")
"""The consequences of a row that cannot be used: it ends the preparation, or it is left out and counted."""
FORMAT = 1
"""The format of the prepared rows; another number prepares anew."""
SHOWN = 5
"""Skipped rows that are named; the others are only counted."""

_SPLITS = {"train": "train", "test": "test", "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation"}  # fmt: skip
_SPLIT = re.compile(rf"({'|'.join(_SPLITS)})(?![a-z])", re.IGNORECASE)


@dataclass
class SplitExamples:
    """The rows of a split's files, checked and counted."""

    rows: list[dict[str, str]] = field(default_factory=list)
    """Prepared rows, in the files' order."""
    total: int = 0
    """Rows of the files, bad and repeated ones included."""
    skipped: list[str] = field(default_factory=list)
    """Place and problem of each row that was left out."""
    repeated: int = 0
    """Rows whose prompt came before."""
    conflicting: int = 0
    """The number of these whose answer is another."""
    answers: dict[str, str] = field(default_factory=dict)
    """Prompt -> answer of the rows so far."""

    def add(self, row: Mapping[str, Any], *, deduplicate: bool) -> None:
        """Takes a row, unless it asks what another one asked before.

        Raises:
            ValueError: it holds a text that is not UTF-8.
        """
        asked = row["prompt"] if isinstance(row["prompt"], str) else json.dumps(row["prompt"])
        if deduplicate and asked in self.answers:
            self.repeated += 1
            self.conflicting += self.answers[asked] != row["answer"]
        else:
            self.rows.append({"row": _json(row)})
            self.answers[asked] = row["answer"]

    @property
    def counts(self) -> dict[str, Any]:
        """For the metadata of the prepared dataset."""
        return {
            "rows": self.total,
            "skipped": len(self.skipped),
            "skipped_rows": self.skipped[:SHOWN],
            "repeated": self.repeated,
            "conflicting": self.conflicting,
        }


class FileBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Rows with `prompt`, `answer`, their place in the files, and all fields that the files have."""

    VERSION = tfds.core.Version("1.0.0")
    SPLIT: ClassVar[str] = "train"
    """The split of a file whose name begins with none."""
    OPTIONS: ClassVar[tuple[str, ...]] = ()
    """Names that `options` may have."""

    def __init__(
        self,
        *,
        path: Path,
        options: Mapping[str, Any],
        on_bad_row: str,
        deduplicate: bool,
        data_dir: str,
        file_format: str,
    ) -> None:
        """Finds the files and reads their bytes for the dataset's name; no row is looked at yet.

        Raises:
            ValueError: no such file or folder, or none of a known kind.
        """
        self._files = data_files(path)
        self._options, self._on_bad_row, self._deduplicate = options, on_bad_row, deduplicate
        self._found: dict[str, SplitExamples] | None = None
        told = json.dumps([FORMAT, dict(options), on_bad_row, deduplicate], sort_keys=True)
        name = f"{re.sub(r'[^A-Za-z0-9_-]', '_', path.stem)[:40]}_{_digest(self._files, told)}"
        super().__init__(config=_config(name), data_dir=data_dir, file_format=file_format)

    @classmethod
    def get_builder_config(cls, name: str, version: Any = None) -> tfds.core.BuilderConfig:
        """The configuration of one content of the files: there is no list of them to look it up in."""
        return _config(name)

    def example(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """A row's `prompt`, `answer` and whatever else its fields do not have yet.

        Raises:
            ValueError: a field is missing or of another type.
        """
        raise NotImplementedError

    def examples(self) -> dict[str, SplitExamples]:
        """The rows of each split; they are read once.

        Raises:
            ValueError: a file is damaged, a row is bad and rows are not to be skipped, or no row is left.
        """
        if self._found is None:
            found: dict[str, SplitExamples] = {}
            for file in self._files:
                self._read(file, found.setdefault(_split_of(file, self.SPLIT), SplitExamples()))
            self._found = {split: examples for split, examples in found.items() if examples.rows}
            if not self._found:
                bad = [problem for examples in found.values() for problem in examples.skipped]
                first = f"; all of its rows are bad, the first: {bad[0]}" if bad else ""
                raise ValueError(f"{', '.join(file.name for file in self._files)}: no rows{first}")
        return self._found

    def _read(self, file: Path, into: SplitExamples) -> None:
        for row in file_rows(file):
            into.total += 1
            try:
                if row.problem:
                    raise ValueError(row.problem)
                made = checked_row({**row.fields, **self.example(row.fields)})
                whole = {**made, "source_name": self.name, "source_row": row.place}
                into.add(whole, deduplicate=self._deduplicate)
            except ValueError as error:
                if self._on_bad_row == "error":
                    raise ValueError(
                        f"{row.place}: {error} (data.on_bad_row=skip leaves such rows out and counts them)"
                    ) from error
                into.skipped.append(f"{row.place}: {error}")

    def _info(self) -> tfds.core.DatasetInfo:
        return OwnInfo(
            builder=self,
            description="Questions and answers of files, one JSON object a row.",
            features=tfds.features.FeaturesDict({"row": tfds.features.Text()}),
            metadata=tfds.core.MetadataDict(),
            disable_shuffling=True,  # the files' order
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, str]]]]:
        found = self.examples()
        self.info.metadata.update({split: examples.counts for split, examples in found.items()})
        return {split: enumerate(examples.rows) for split, examples in found.items()}

    def _generate_examples(self, *_: Any) -> Iterator[tuple[int, dict[str, str]]]:
        raise NotImplementedError  # the base class wants the name; the splits' rows are there already


def field_of(fields: Mapping[str, Any], name: str) -> Any:
    """A field by its name; `reward_model.ground_truth` is a field inside a field.

    Raises:
        ValueError: it is missing.
    """
    value: Any = fields
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ValueError(f"no field {name!r}; the row's fields are {sorted(map(str, fields))}")
        value = value[part]
    return value


def text_of(fields: Mapping[str, Any], name: str) -> str:
    """A field that is text and not blank.

    Raises:
        ValueError: it is missing, empty, or of another type.
    """
    value = field_of(fields, name)
    if not isinstance(value, str):
        raise ValueError(f"{name!r} must be text; got {value!r:.60} ({type(value).__name__})")
    if not value.strip():
        raise ValueError(f"{name!r} is empty")
    return value


def _split_of(file: Path, default: str) -> str:
    """`train-00000-of-00002.parquet` is of the train split; a name that begins with no split's is of the default one."""
    found = _SPLIT.match(file.name)
    return _SPLITS[found[1].lower()] if found else default


@cache
def _config(name: str) -> tfds.core.BuilderConfig:
    return tfds.core.BuilderConfig(name=name)


def _digest(files: list[Path], told: str) -> str:
    hashed = hashlib.blake2b(told.encode(), digest_size=8)
    for file in files:
        hashed.update(f"\n{file.name} {file.stat().st_size}\n".encode())
        with file.open("rb") as content:
            while block := content.read(1 << 20):
                hashed.update(block)
    return hashed.hexdigest()


def _json(row: Mapping[str, Any]) -> str:
    """A row as JSON; dates and the like, which a parquet file may hold, as their text."""
    try:
        text = json.dumps(row, ensure_ascii=False, default=str)
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"a text holds half a surrogate pair ({error.object[error.start]!r}), which is not UTF-8"
        ) from error
    return text
