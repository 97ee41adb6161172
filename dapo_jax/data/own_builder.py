"""The base class of this library's TFDS builders, and reproducible random numbers for generated datasets."""

import bisect
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, ClassVar

import tensorflow_datasets as tfds


class OwnInfo(tfds.core.DatasetInfo):
    """Dataset information that is loaded from the prepared dataset only, never from the network."""

    def initialize_from_bucket(self) -> None:
        """Does nothing. TFDS itself would search Google's published datasets, and each search would create a temporary folder."""


class OwnBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Base class for datasets with text fields and lists of texts. Rows keep their order."""

    VERSION = tfds.core.Version("1.0.0")
    DESCRIPTION: ClassVar[str]
    TEXTS: ClassVar[tuple[str, ...]] = ("prompt", "answer")
    """Names of the fields that are texts."""
    LISTS: ClassVar[tuple[str, ...]] = ()
    """Names of the fields that are lists of texts."""

    def splits(self) -> Mapping[str, Iterable[Mapping[str, Any]]]:
        """Returns a mapping from the name of each split to its rows."""
        raise NotImplementedError

    @cached_property
    def rows(self) -> Mapping[str, Iterable[Mapping[str, Any]]]:
        """The rows of each split. Errors in the user's files are raised when this property is first read, before anything is written."""
        return self.splits()

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text()
        fields = dict.fromkeys(self.TEXTS, text) | dict.fromkeys(self.LISTS, tfds.features.Sequence(text))
        return OwnInfo(
            builder=self,
            description=self.DESCRIPTION,
            features=tfds.features.FeaturesDict(fields),
            metadata=tfds.core.MetadataDict(),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, Mapping[str, Any]]]]:
        return {split: enumerate(rows) for split, rows in self.rows.items()}

    def _generate_examples(self, *_: Any) -> Iterator[tuple[int, dict[str, str]]]:
        raise NotImplementedError  # abstract in TFDS, but never called here


def uniform(*key: str | int) -> float:
    """Returns a pseudorandom number in [0, 1). It depends only on `key`, such as ("split", seed, row), and not on any library version.

    >>> uniform("split", 0, 1) == uniform("split", 0, 1) != uniform("split", 0, 2)
    True
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def chosen(weights: Mapping[str, float], luck: float) -> str:
    """Returns a name, chosen with probability proportional to its weight. `luck` is a uniform random number in [0, 1).

    >>> [chosen({"a": 1.0, "b": 3.0}, luck) for luck in (0.0, 0.24, 0.25, 0.99)]
    ['a', 'a', 'b', 'b']
    """
    edges = [*itertools.accumulate(weights.values())]
    index = bisect.bisect(edges, luck * edges[-1])
    return [*weights][min(index, len(edges) - 1)]  # rounding may yield the last edge


def named(kind: str, *constants: Any) -> list[tfds.core.BuilderConfig]:
    """Returns a generated dataset's only configuration. Its name contains a hash of the constants, so changing a constant prepares a new dataset."""
    digest = hashlib.blake2b(json.dumps(constants).encode(), digest_size=4).hexdigest()
    return [tfds.core.BuilderConfig(name=f"{kind}_{digest}")]
