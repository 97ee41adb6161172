"""Sizes of a parquet file's pages, read from their headers, so that a page is refused before it is decompressed.

A file's footer has the size of a column's part of a row group, but not of its pages, and what a few bytes stand for is decided there: a
page may hold one text of a gigabyte, or a million repetitions of an entry of the dictionary. A header is a struct in Thrift's compact
protocol: https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift.

A file of its own: it reads a format byte by byte, and decodes nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedIOBase
from typing import Any

_DATA, _DICTIONARY, _DATA_V2 = 5, 7, 8
"""Fields of a page's header that are the headers of its kinds; the first field of each is the number of its values."""
_DEEPEST = 8
"""Structs inside one another; a page's header has three."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """One page of a column."""

    uncompressed: int
    """Bytes."""
    values: int
    """Entries, nulls included; of a column of lists, the entries of all lists."""
    dictionary: bool
    """True if it holds the dictionary, which the column's other pages refer to."""


def pages(file: BufferedIOBase, chunk: Any) -> Iterator[Page]:
    """The pages of one column of one row group.

    Args:
        file: the parquet file.
        chunk: pyarrow's `ColumnChunkMetaData`.

    Raises:
        ValueError: a header cannot be read.
    """
    place, left = chunk.data_page_offset, chunk.num_values
    if chunk.has_dictionary_page and chunk.dictionary_page_offset is not None:
        place = min(place, chunk.dictionary_page_offset)
    while left > 0:
        file.seek(place)
        header = _struct(file)
        try:
            uncompressed, compressed = header[2], header[3]
            kind = next((kind for kind in (_DATA, _DICTIONARY, _DATA_V2) if kind in header), None)
            values = 0 if kind is None else header[kind][1]
        except (KeyError, TypeError) as error:
            raise ValueError(f"the page at byte {place} has no sizes") from error
        if min(uncompressed, compressed, values) < 0:
            raise ValueError(f"the page at byte {place} has a negative size")
        yield Page(uncompressed=uncompressed, values=values, dictionary=kind == _DICTIONARY)
        place = file.tell() + compressed
        left -= 0 if kind == _DICTIONARY else values


def _struct(file: BufferedIOBase, depth: int = 0) -> dict[int, Any]:
    """The integers and structs of a struct, by the numbers of their fields; the rest is skipped."""
    if depth > _DEEPEST:
        raise ValueError("a page's header has too many structs inside one another")
    found: dict[int, Any] = {}
    number = 0
    while head := _byte(file):
        number = number + (head >> 4) if head >> 4 else _integer(file)
        found[number] = _value(file, head & 15, depth)
    return found


def _value(file: BufferedIOBase, kind: int, depth: int) -> Any:
    if kind in (1, 2):  # true and false, which have no bytes of their own
        return kind == 1
    if kind in (4, 5, 6):
        return _integer(file)
    if kind == 12:
        return _struct(file, depth + 1)
    if kind == 8:  # bytes behind their length
        file.seek(_varint(file), 1)
    elif kind in (3, 7):
        file.seek(1 if kind == 3 else 8, 1)
    else:  # lists, sets and maps are in no header of a page
        raise ValueError(f"a page's header has a field of the type {kind}")
    return None


def _integer(file: BufferedIOBase) -> int:
    found = _varint(file)
    return (found >> 1) ^ -(found & 1)


def _varint(file: BufferedIOBase) -> int:
    found = shift = 0
    while (byte := _byte(file)) & 128:
        found |= (byte & 127) << shift
        shift += 7
        if shift > 63:
            raise ValueError("a page's header has a number of more than 64 bits")
    return found | byte << shift


def _byte(file: BufferedIOBase) -> int:
    read = file.read(1)
    if not read:
        raise ValueError("a page's header lies behind the end of the file")
    return read[0]
