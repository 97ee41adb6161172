"""Rows of parquet files, of which none, and no page, is decoded that would fill the memory.

Parquet keeps repeated values once, so a file of two kilobytes may stand for gigabytes. Texts stay references to their dictionary until
the sizes of their rows are known, and then as many rows are decoded at once as fit `MAX_ROW_BYTES`.
"""

from collections.abc import Iterator, Mapping
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from dapo_jax.data.parquet_pages import pages

MAX_ROW_BYTES = 64 << 20
"""The largest row."""
_MAX_PAGE_BYTES = 4 * MAX_ROW_BYTES
"""The largest page, which is decompressed as a whole; writers end a page at about 1 MiB."""
_MAX_LIST_BYTES = 16 * MAX_ROW_BYTES
"""The largest sum of entries of lists in one column of a row group: where a list ends is not known before they are decoded."""
_ENTRY_BYTES = 8
"""The least size of a number, a reference to a dictionary or a text's place."""
_MOST_ROWS = 4096
"""Rows that are read at once."""


def parquet_rows(path: Path) -> Iterator[Mapping[str, Any] | Exception]:
    """The rows of a parquet file; in the place of one that Python cannot hold, or is no text, the reason.

    Raises:
        ValueError: the file is damaged, or a row or a page is too large.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        with path.open("rb") as raw:
            metadata = parquet.read_metadata(path)
            columns = [metadata.schema.column(place) for place in range(metadata.num_columns)]
            texts = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
            dense = parquet.read_schema(path)
            file = parquet.ParquetFile(path, read_dictionary=texts)
            for group in range(metadata.num_row_groups):
                rows = _rows_at_once(raw, metadata.row_group(group), columns)
                for batch in file.iter_batches(batch_size=rows, row_groups=[group], use_threads=False):
                    yield from _decoded(batch, dense)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(str(error)) from error


def _rows_at_once(raw: BufferedIOBase, group: Any, columns: list[Any]) -> int:
    """The largest number of rows of a row group that can be read at once, texts as references.

    Raises:
        ValueError: a page, a row or a list is too large.
    """
    row_bytes = 1
    for place, column in enumerate(columns):
        chunk = group.column(place)
        width = max(_ENTRY_BYTES, column.length if column.physical_type == "FIXED_LEN_BYTE_ARRAY" else 0)
        where = f"the column {chunk.path_in_schema!r}"
        densest = 0
        for page in pages(raw, chunk):
            if page.uncompressed > _MAX_PAGE_BYTES:
                raise ValueError(f"{where} has a page of {page.uncompressed:,} bytes; {_REMEDY}")
            if not page.dictionary:
                densest = max(densest, page.uncompressed // max(page.values, 1) + width)
        if densest > MAX_ROW_BYTES:
            raise ValueError(f"{where} has values of {densest:,} bytes; {_REMEDY}")
        if column.max_repetition_level and chunk.num_values * width > _MAX_LIST_BYTES:
            raise ValueError(
                f"{where} has {chunk.num_values:,} entries of lists in one row group; write it in smaller row groups"
            )
        row_bytes += densest * -(-chunk.num_values // max(group.num_rows, 1))
    return max(1, min(_MOST_ROWS, MAX_ROW_BYTES // row_bytes))


_REMEDY = f"a row may have {MAX_ROW_BYTES:,}, a page {_MAX_PAGE_BYTES:,}: leave the column out, or write smaller rows and pages"


def _decoded(batch: Any, schema: Any) -> Iterator[Mapping[str, Any] | Exception]:
    """The rows of a record batch, decoded a few at a time.

    Raises:
        ValueError: one is larger than `MAX_ROW_BYTES`.
    """
    sizes = sum((_sizes(column) for column in batch.columns), np.zeros(batch.num_rows, np.int64))
    if (large := sizes > MAX_ROW_BYTES).any():
        raise ValueError(f"the row has {sizes[large][0]:,} bytes; {_REMEDY}")
    ends = np.cumsum(sizes)
    start = 0
    while start < batch.num_rows:
        before = ends[start - 1] if start else 0
        end = int(np.searchsorted(ends, before + MAX_ROW_BYTES, side="right"))
        yield from _rows(batch.slice(start, end - start), schema)
        start = end


def _rows(batch: Any, schema: Any) -> Iterator[Mapping[str, Any] | Exception]:
    """The rows of a small record batch; one that is no text, or a date beyond all calendars, in its own place."""
    try:
        yield from _values(batch, schema)  # all at once is much faster
        return
    except (ValueError, OverflowError):
        pass
    for place in range(batch.num_rows):
        try:
            yield from _values(batch.slice(place, 1), schema)
        except (ValueError, OverflowError) as error:
            yield error


def _values(batch: Any, schema: Any) -> list[Mapping[str, Any]]:
    import pyarrow

    columns = [column.cast(field.type) for column, field in zip(batch.columns, schema, strict=True)]
    return pyarrow.RecordBatch.from_arrays(columns, names=batch.schema.names).to_pylist()


def _sizes(column: Any) -> Int64[np.ndarray, " entries"]:
    """Bytes of each entry of an Arrow array, once it is decoded."""
    from pyarrow import compute, types

    kind = column.type
    if types.is_dictionary(kind):
        places = column.indices.fill_null(0).to_numpy(zero_copy_only=False)
        return (
            np.append(_sizes(column.dictionary), 0)[places]
            if len(column.dictionary)
            else np.zeros(len(column), np.int64)
        )
    if types.is_struct(kind):
        return sum((_sizes(field) for field in column.flatten()), np.full(len(column), _ENTRY_BYTES))
    if types.is_map(kind) or types.is_list(kind) or types.is_large_list(kind):
        entries = _sizes(column.keys) + _sizes(column.items) if types.is_map(kind) else _sizes(column.values)
        return np.diff(np.append(0, np.cumsum(entries))[column.offsets.to_numpy()]) + _ENTRY_BYTES
    if types.is_fixed_size_list(kind):
        return _sizes(column.values).reshape(len(column), kind.list_size).sum(axis=1)
    if types.is_fixed_size_binary(kind):
        return np.full(len(column), kind.byte_width)
    if (
        types.is_binary(kind)
        or types.is_string(kind)
        or types.is_large_binary(kind)
        or types.is_large_string(kind)
    ):
        lengths = compute.call_function("binary_length", [column]).fill_null(0).to_numpy(zero_copy_only=False)
        return lengths.astype(np.int64) + _ENTRY_BYTES
    return np.full(len(column), _ENTRY_BYTES)
