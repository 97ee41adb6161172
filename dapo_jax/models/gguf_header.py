"""The size that a GGUF file states for itself, compared with the file before the package `gguf` believes it.

That package goes through a list of 2**40 entries one by one, wherever the file ends. The format is that of
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.

A file of its own: it runs before the package `gguf` is trusted with a file.
"""

import struct
from pathlib import Path
from typing import IO

from dapo_jax.storage import check_file

MOST_ENTRIES = 1 << 22
"""The longest list; the longest is the vocabulary or its merges."""
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value by its type, for numbers and truth values."""
_TEXT, _LIST = 8, 9
_MOST_AXES = 8


def check_header(path: Path) -> None:
    """Goes through names, metadata and the tensors' places, without keeping any.

    Raises:
        ValueError: a length or a place is beyond the file, a list is in a list, or longer than `MOST_ENTRIES`.
        OSError: it is no file, or cannot be read.
    """
    check_file(path)
    with path.open("rb") as file:
        _Header(file, path.stat().st_size).check()


class _Header:
    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self._size, self._order = file, size, "<"

    def check(self) -> None:
        if self._file.read(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        if not self._number(4) & 0xFFFF:  # the version, in the other order
            self._order = ">"
        tensors, entries = self._count("tensors", 24), self._count("metadata", 13)
        for _ in range(entries):
            self._text()
            self._value(self._number(4))
        for _ in range(tensors):
            self._text()
            axes = self._number(4)
            if axes > _MOST_AXES:
                raise ValueError(f"a tensor has {axes} axes")
            self._skip(8 * axes + 4)
            if self._number(8) > self._size:
                raise ValueError("a tensor lies beyond the end of the file")

    def _value(self, kind: int) -> None:
        if kind == _TEXT:
            self._text()
        elif kind == _LIST:
            of = self._number(4)
            count = self._count("entries of a list", _SIZES.get(of, 8))
            if of != _TEXT and of not in _SIZES:
                raise ValueError(
                    f"a list is of the type {of}, which is none of numbers, truth values and texts"
                )
            if count > MOST_ENTRIES:
                raise ValueError(f"a list has {count:,} entries, over {MOST_ENTRIES:,}")
            if of == _TEXT:
                for _ in range(count):
                    self._text()
            else:
                self._skip(count * _SIZES[of])
        elif kind in _SIZES:
            self._skip(_SIZES[kind])
        else:
            raise ValueError(f"a value is of the type {kind}, which is not known")

    def _text(self) -> None:
        self._skip(self._number(8))

    def _count(self, what: str, least: int) -> int:
        """A number of things, each of which takes `least` bytes of what is left of the file."""
        count = self._number(8)
        if count * least > self._size - self._file.tell():
            raise ValueError(f"it says that there are {count:,} {what}, for which it is too short")
        return count

    def _skip(self, length: int) -> None:
        if length > self._size - self._file.tell():
            raise ValueError(
                f"{length:,} bytes are said to follow where it has {self._size - self._file.tell():,}"
            )
        self._file.seek(length, 1)

    def _number(self, size: int) -> int:
        read = self._file.read(size)
        if len(read) < size:
            raise ValueError("it ends in its header")
        return struct.unpack(self._order + {4: "I", 8: "Q"}[size], read)[0]
