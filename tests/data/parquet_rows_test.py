"""Parquet keeps repeated values once; rows of it are read without holding what they would be written out."""

import io
import subprocess
import sys
from datetime import date
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from dapo_jax.data.files import file_rows
from dapo_jax.data.parquet_pages import pages
from dapo_jax.data.parquet_rows import MAX_ROW_BYTES, parquet_rows

LARGE = 10_000_000

PEAK = """
import resource, sys
from pathlib import Path
import pyarrow, pyarrow.compute
from pyarrow import parquet
from dapo_jax.data.files import file_rows

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before, rows = peak(), 0
try:
    for row in file_rows(Path(sys.argv[1])):
        rows += 1
except ValueError as error:
    print(error)
print(rows, peak() - before)
"""


def repeated(entry, times):
    """A column that repeats one text, as a writer finds it: one entry of a dictionary and `times` references to it."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(times, np.int32)), pa.array([entry]))


def read_alone(path):
    """What a process of its own says that reads the file: its error, the number of rows, and the memory that took."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, path], capture_output=True, text=True, timeout=120, check=True
    )
    *said, last = done.stdout.splitlines()
    rows, taken = map(int, last.split())
    return " ".join(said), rows, taken


def test_a_text_that_stands_700_times_in_a_small_file_is_never_there_700_times(tmp_path):
    """7 GB, of 1.5 kB. At once there are the dictionary, what it was decompressed from and one portion of rows, each of them as
    Arrow's bytes and as Python's text: some times 64 MiB."""
    file = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"q": repeated("a" * LARGE, 700)}), file, compression="zstd")
    assert file.stat().st_size < 3000
    said, rows, taken = read_alone(file)
    assert (said, rows) == ("", 700)
    assert taken < 8 * MAX_ROW_BYTES


def test_a_list_of_one_large_text_many_times_is_refused_as_a_row_too_large(tmp_path):
    """300 MB in one row; the dictionary inside the list is not written out to find that."""
    file = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"m": pa.array([["y" * 1_000_000] * 300])}), file, compression="zstd")
    said, rows, taken = read_alone(file)
    assert rows == 0
    assert "a.parquet cannot be read as parquet behind row 0: the row has 300," in said
    assert "a row may have 67,108,864" in said
    assert taken < 4 * MAX_ROW_BYTES


@pytest.mark.parametrize("before", [0, 1000])
def test_one_text_that_is_too_large_is_refused_by_its_page(tmp_path, before):
    """Also behind many that are small: the page is not decompressed."""
    file = tmp_path / "a.parquet"
    texts = pa.array(["short"] * before + ["a" * (5 * MAX_ROW_BYTES)])
    parquet.write_table(
        pa.table({"q": texts}), file, compression="zstd", use_dictionary=False, write_statistics=False
    )
    said, rows, taken = read_alone(file)
    assert rows == 0
    assert "the column 'q' has a page of 335,5" in said
    assert taken < MAX_ROW_BYTES


@pytest.mark.slow  # 600 MB; one large row is refused, and many repeated ones are read, above
def test_large_rows_among_many_small_ones_are_read_one_by_one(tmp_path):
    """10 rows of 60 MB, 600 MB, behind 4,000 of a few bytes: the average row says nothing of them."""
    file = tmp_path / "a.parquet"
    texts = ["short"] * 4000 + [f"{number}" + "a" * (6 * LARGE) for number in range(10)]
    how = {"use_dictionary": False, "write_statistics": False, "write_batch_size": 1}
    parquet.write_table(pa.table({"q": texts}), file, compression="zstd", **how)
    del texts
    said, rows, taken = read_alone(file)
    assert (said, rows) == ("", 4010)
    assert taken < 6 * MAX_ROW_BYTES


def test_a_list_whose_entries_take_no_bytes_is_refused(tmp_path):
    """200 million nulls are runs: a few bytes for 1.6 GB of entries, whose lists end only where they are decoded."""
    file = tmp_path / "a.parquet"
    entries = pa.nulls(200_000_000, pa.int8())
    rows = pa.ListArray.from_arrays(pa.array([0, len(entries)], pa.int32()), entries)
    parquet.write_table(pa.table({"m": rows}), file)
    del entries, rows
    with pytest.raises(ValueError, match=r"'m\.list\.element' has (a page|200,000,000 entries of lists)"):
        list(parquet_rows(file))


def test_values_of_every_kind_come_as_pyarrow_gives_them(tmp_path):
    file = tmp_path / "a.parquet"
    table = pa.table(
        {
            "text": ["one", None, "one", ""],
            "messages": [[{"role": "user", "content": "x"}], [], None, [{"role": None, "content": "é"}] * 2],
            "deep": [{"a": [["u"], None], "b": 1}, None, {"a": None, "b": None}, {"a": [], "b": 2}],
            "map": pa.array([[("k", 1)], [], None, [("a", 2), ("b", 3)]], pa.map_(pa.string(), pa.int64())),
            "bytes": [b"\x00", b"", None, b"abc"],
            "fixed": pa.array([b"ab", b"cd", None, b"ef"], pa.binary(2)),
            "pairs": pa.array([[1, 2], None, [3, 4], [5, 6]], pa.list_(pa.int32(), 2)),
            "large": pa.array(["a", "b", None, "a"], pa.large_string()),
            "category": pa.array(["a", "b", None, "a"]).dictionary_encode(),
            "number": [1.5, None, 2.5, 0.0],
            "flag": [True, False, None, True],
            "day": [date(2024, 1, 1), None, date(1, 1, 1), date(2024, 1, 2)],
            "exact": [Decimal("1.25"), None, Decimal("2.50"), Decimal("0.00")],
            "nothing": pa.nulls(4),
        }
    )
    parquet.write_table(table, file, row_group_size=3)
    assert list(parquet_rows(file)) == table.to_pylist()
    for version in ("1.0", "2.0"):
        for codec in ("none", "snappy", "gzip", "zstd"):
            parquet.write_table(
                table, file, data_page_version=version, compression=codec, use_dictionary=codec != "gzip"
            )
            assert list(parquet_rows(file)) == table.to_pylist()
    assert [row.place for row in file_rows(file)] == [f"a.parquet, row {number}" for number in (1, 2, 3, 4)]


def test_pages_have_the_sizes_that_were_written(tmp_path):
    """3 rows: the texts a, b, a are a dictionary of two entries, 4 bytes of length and 1 of text each."""
    file = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"q": ["a", "b", "a"]}), file)
    with file.open("rb") as raw:
        first, second = pages(raw, parquet.read_metadata(file).row_group(0).column(0))
    assert (first.dictionary, first.values, first.uncompressed) == (True, 2, 10)
    assert (second.dictionary, second.values) == (False, 3)


@pytest.mark.parametrize(
    "content", [b"", b"\x15", b"\x15\x80", b"\x19" * 4, b"\x1c" * 40, b"\x15" + b"\xff" * 12, b"\x00" * 9]
)
def test_headers_that_are_none_are_refused(content):
    class Chunk:
        data_page_offset, num_values, has_dictionary_page, dictionary_page_offset = 0, 1, False, None

    with pytest.raises(ValueError, match=r"a page's header|has no sizes"):
        list(pages(io.BytesIO(content), Chunk()))
