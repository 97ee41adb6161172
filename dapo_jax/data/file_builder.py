"""Base class of the TFDS builders that load rows from files. Subclasses select the question and the answer from each row.

All rows are read, checked and deduplicated first, so a bad row is reported before anything is written. The name of the prepared
dataset contains a hash of the files' bytes and of the options, so a new dataset is prepared if either changes.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import tensorflow_datasets as tfds

from dapo_jax.data.files import Files, data_files, file_rows
from dapo_jax.data.own_builder import OwnBuilder
from dapo_jax.data.rows import checked_row

FORMAT = 2
"""Format version of prepared rows. If the version changes, all datasets are prepared again."""
SHOWN = 5
"""The note about a dataset lists at most this many skipped rows. Further skipped rows are only counted."""

_SPLITS = {"train": "train", "test": "test", "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation"}  # fmt: skip
_SPLIT = re.compile(rf"({'|'.join(_SPLITS)})(?![a-z])", re.IGNORECASE)


@dataclass
class SplitRows:
    """The checked rows of one split, and their statistics."""

    rows: list[dict[str, str]] = field(default_factory=list)
    """Prepared rows, in the order of the files."""
    answers: dict[bytes, str] = field(default_factory=dict)
    """Maps the digest of each prompt that has been loaded so far, or of the fields `Files.deduplicate`, to its answer."""
    counts: dict[str, Any] = field(
        default_factory=lambda: {"rows": 0, "skipped": 0, "skipped_rows": [], "repeated": 0, "conflicting": 0}
    )
    """Metadata of the prepared dataset: the number of rows, of bad rows, of repeated prompts, and of repeated prompts with a different answer."""


class FileBuilder(OwnBuilder, skip_registration=True):
    """A dataset that is loaded from files. Each row has `prompt`, `answer`, its position in the files, and all fields from the file."""

    DESCRIPTION = "Questions and answers from files, one JSON object per row."
    TEXTS = ("row",)
    SPLIT: ClassVar[str] = "train"
    """The split for files whose name does not begin with a split name."""
    QUESTION: ClassVar[str] = "prompt"
    """The field with the question."""
    OPTIONS: ClassVar[tuple[str, ...]] = ()
    """Names of the options that `data.source_options` may set."""

    def __init__(self, files: Files, *, data_dir: str, file_format: str) -> None:
        """Finds the files (see `data_files` for the errors), and computes the hash of their bytes for the dataset's name."""
        path = Path(files.path).expanduser()
        self._files, self._settings, self._options = data_files(path), files, files.options
        settings = [FORMAT, dict(files.options), files.on_bad_row, [*files.deduplicate]]
        digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8)
        for file in self._files:
            digest.update(f"\n{file.name} {file.stat().st_size}\n".encode())
            with file.open("rb") as content:
                hashlib.file_digest(content, lambda: digest)
        name = f"{re.sub(r'[^A-Za-z0-9_-]', '_', path.stem)[:40]}_{digest.hexdigest()}"
        super().__init__(config=name, data_dir=data_dir, file_format=file_format)

    @classmethod
    def get_builder_config(cls, name: str, version: Any = None) -> tfds.core.BuilderConfig:
        """Returns a configuration with any name. TFDS itself only accepts names from a fixed list."""
        return tfds.core.BuilderConfig(name=name)

    def example(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Returns `prompt`, `answer` and any other fields to add to a row. `fields` are the row's fields in the file. Raises ValueError if one is missing."""
        return {"prompt": field_of(fields, self.QUESTION), "answer": field_of(fields, "answer")}

    def splits(self) -> dict[str, list[dict[str, str]]]:
        """Reads and checks the rows of each split. Raises ValueError if a file is damaged, a row is bad and not to be skipped, or no rows remain."""
        splits: dict[str, SplitRows] = {}
        for file in self._files:
            # A file's name may begin with its split, for example `train-00000-of-00002.parquet`.
            match = _SPLIT.match(file.name)
            split = _SPLITS[match[1].lower()] if match else self.SPLIT
            self._read(file, splits.setdefault(split, SplitRows()))
        kept = {split: read for split, read in splits.items() if read.rows}
        if not kept:
            bad = [problem for read in splits.values() for problem in read.counts["skipped_rows"]]
            why = f"all rows are bad. The first bad row: {bad[0]}" if bad else "no rows"
            raise ValueError(f"{', '.join(file.name for file in self._files)}: {why}")
        self.info.metadata.update({split: read.counts for split, read in kept.items()})
        return {split: read.rows for split, read in kept.items()}

    def _read(self, file: Path, into: SplitRows) -> None:
        """Adds the rows of a file to its split, except rows that the split already contains, see `Files.deduplicate`."""
        counts, compared = into.counts, self._settings.deduplicate
        for where, fields in file_rows(file):
            counts["rows"] += 1
            try:
                if isinstance(fields, Exception):
                    raise ValueError(fields)
                row = checked_row({**fields, **self.example(fields)})
                row |= {"source_name": self.name, "source_row": where}
                values = json.dumps([row.get(name) for name in compared], sort_keys=True, default=str)
                digest = hashlib.blake2b(values.encode(), digest_size=16).digest()
                if compared and digest in into.answers:
                    counts["repeated"] += 1
                    counts["conflicting"] += into.answers[digest] != row["answer"]
                else:
                    into.rows.append({"row": _json(row)})
                    into.answers[digest] = row["answer"]
            except ValueError as error:
                problem, remedy = (
                    f"{where}: {error}",
                    "(data.on_bad_row=skip leaves such rows out and counts them)",
                )
                if self._settings.on_bad_row == "error":
                    raise ValueError(f"{problem} {remedy}") from error
                counts["skipped"] += 1
                counts["skipped_rows"] += [problem] if len(counts["skipped_rows"]) < SHOWN else []


def field_of(fields: Mapping[str, Any], name: str) -> Any:
    """Returns a field by its name, such as `reward_model.ground_truth` for a nested field. Raises ValueError if the field is missing."""
    value: Any = fields
    for key in name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"no field {name!r}; the row's fields are {sorted(map(str, fields))}")
        value = value[key]
    return value


def _json(row: Mapping[str, Any]) -> str:
    """Returns a row as JSON. Parquet values that JSON does not support, such as dates, are converted to text."""
    try:
        text = json.dumps(row, ensure_ascii=False, default=str)
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"a text contains a lone surrogate ({error.object[error.start]!r}), which is not valid UTF-8"
        ) from error
    return text
