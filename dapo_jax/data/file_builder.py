"""The TFDS builder of the user's files; each dataset's module picks question and answer of a row.

Rows are read, checked and de-duplicated first, so that a bad row is reported before anything is written. The name of the prepared
dataset depends on the files' bytes and the options: other files or other options are another dataset.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import tensorflow_datasets as tfds

from dapo_jax.data.files import Files, data_files, file_rows
from dapo_jax.data.own_builder import OwnBuilder
from dapo_jax.data.rows import checked_row

FORMAT = 1
"""Version of the format of prepared rows; a new number prepares all datasets again."""
SHOWN = 5
"""Number of skipped rows in the note; the others are only counted."""

_SPLITS = {"train": "train", "test": "test", "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation"}  # fmt: skip
_SPLIT = re.compile(rf"({'|'.join(_SPLITS)})(?![a-z])", re.IGNORECASE)


@dataclass
class SplitRows:
    """The rows of a split's files, checked and counted."""

    rows: list[dict[str, str]] = field(default_factory=list)
    """Prepared rows, in the files' order."""
    answers: dict[str, str] = field(default_factory=dict)
    """The answer of each prompt so far."""
    counts: dict[str, Any] = field(
        default_factory=lambda: {"rows": 0, "skipped": 0, "skipped_rows": [], "repeated": 0, "conflicting": 0}
    )
    """The metadata of the prepared dataset: all rows, bad ones, repeated ones, and repeated ones with another answer."""


class FileBuilder(OwnBuilder, skip_registration=True):
    """Rows with `prompt`, `answer`, their place in the files, and all fields of the files."""

    DESCRIPTION = "Questions and answers of files, one JSON object a row."
    TEXTS = ("row",)
    SPLIT: ClassVar[str] = "train"
    """The split of a file whose name does not begin with a split."""
    OPTIONS: ClassVar[tuple[str, ...]] = ()
    """Names of the options."""

    def __init__(self, files: Files, *, data_dir: str, file_format: str) -> None:
        """Finds the files and hashes their bytes for the dataset's name.

        Raises:
            ValueError: there is no such file or folder, or no file of a known kind.
        """
        path = Path(files.path).expanduser()
        self._files, self._settings, self._options = data_files(path), files, files.options
        settings = [FORMAT, dict(files.options), files.on_bad_row, files.deduplicate]
        digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8)
        for file in self._files:
            digest.update(f"\n{file.name} {file.stat().st_size}\n".encode())
            with file.open("rb") as content:
                hashlib.file_digest(content, lambda: digest)
        name = f"{re.sub(r'[^A-Za-z0-9_-]', '_', path.stem)[:40]}_{digest.hexdigest()}"
        super().__init__(config=_config(name), data_dir=data_dir, file_format=file_format)

    @classmethod
    def get_builder_config(cls, name: str, version: Any = None) -> tfds.core.BuilderConfig:
        """Returns the configuration of a name. TFDS would search it in a list."""
        return _config(name)

    def example(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a row's `prompt`, `answer` and any other new fields.

        Raises:
            ValueError: a field is missing or of another type.
        """
        raise NotImplementedError

    def splits(self) -> dict[str, list[dict[str, str]]]:
        """Reads and checks the rows of each split.

        Raises:
            ValueError: a file is damaged, a row is bad and `on_bad_row` is `error`, or no row is left.
        """
        found: dict[str, SplitRows] = {}
        for file in self._files:
            # A split is the beginning of the file's name, such as `train-00000-of-00002.parquet`.
            named = _SPLIT.match(file.name)
            split = _SPLITS[named[1].lower()] if named else self.SPLIT
            self._read(file, found.setdefault(split, SplitRows()))
        kept = {split: one for split, one in found.items() if one.rows}
        if not kept:
            bad = [problem for one in found.values() for problem in one.counts["skipped_rows"]]
            first = f"; all of its rows are bad, the first: {bad[0]}" if bad else ""
            raise ValueError(f"{', '.join(file.name for file in self._files)}: no rows{first}")
        self.info.metadata.update({split: one.counts for split, one in kept.items()})
        return {split: one.rows for split, one in kept.items()}

    def _read(self, file: Path, into: SplitRows) -> None:
        """Adds the rows of a file to its split, without repetitions of earlier prompts."""
        for place, fields in file_rows(file):
            into.counts["rows"] += 1
            try:
                if isinstance(fields, Exception):
                    raise ValueError(fields)
                row = checked_row({**fields, **self.example(fields)})
                row |= {"source_name": self.name, "source_row": place}
                asked = row["prompt"] if isinstance(row["prompt"], str) else json.dumps(row["prompt"])
                if self._settings.deduplicate and asked in into.answers:
                    into.counts["repeated"] += 1
                    into.counts["conflicting"] += into.answers[asked] != row["answer"]
                else:
                    into.rows.append({"row": _json(row)})
                    into.answers[asked] = row["answer"]
            except ValueError as error:
                if self._settings.on_bad_row == "error":
                    raise ValueError(
                        f"{place}: {error} (data.on_bad_row=skip leaves such rows out and counts them)"
                    ) from error
                into.counts["skipped"] += 1
                if len(into.counts["skipped_rows"]) < SHOWN:
                    into.counts["skipped_rows"].append(f"{place}: {error}")


def field_of(fields: Mapping[str, Any], name: str) -> Any:
    """Returns a field by its name; `reward_model.ground_truth` is a nested field. A missing field is a ValueError."""
    value: Any = fields
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ValueError(f"no field {name!r}; the row's fields are {sorted(map(str, fields))}")
        value = value[part]
    return value


def text_of(fields: Mapping[str, Any], name: str) -> str:
    """Returns a field, which must be a text that is not blank; anything else is a ValueError."""
    value = field_of(fields, name)
    if not isinstance(value, str):
        raise ValueError(f"{name!r} must be text; got {value!r:.60} ({type(value).__name__})")
    if not value.strip():
        raise ValueError(f"{name!r} is empty")
    return value


@cache
def _config(name: str) -> tfds.core.BuilderConfig:
    return tfds.core.BuilderConfig(name=name)


def _json(row: Mapping[str, Any]) -> str:
    """Returns a row as JSON; other values of parquet files, such as dates, become texts."""
    try:
        text = json.dumps(row, ensure_ascii=False, default=str)
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"a text holds half a surrogate pair ({error.object[error.start]!r}), which is not UTF-8"
        ) from error
    return text
