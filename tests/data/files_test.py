"""Reading rows of files: every row has its place, and what is wrong with it is said rather than raised."""

import gzip
import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from dapo_jax.data.files import data_files, file_rows


def rows_of(path):
    return [(row.place, dict(row.fields), row.problem) for row in file_rows(path)]


def test_lines_are_counted_as_an_editor_counts_them(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"x": 1}\n\n  \n{"x": 2}', encoding="utf-8")
    assert rows_of(file) == [("a.jsonl, line 1", {"x": 1}, ""), ("a.jsonl, line 4", {"x": 2}, "")]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"x": 1', "not JSON: Expecting ',' delimiter at column 8"),
        (b'{"x": "\xff"}', "byte 8 of the line is not UTF-8: invalid start byte"),
        (b"[1, 2]", "needs a JSON object; this is a list"),
        (b"17", "needs a JSON object; this is a int"),
        (
            b"[" * 100_000,
            "cannot be read: maximum recursion depth exceeded while decoding a JSON array from a unicode string",
        ),
    ],
)
def test_a_bad_line_has_a_problem_and_the_next_is_read(tmp_path, line, problem):
    file = tmp_path / "a.jsonl"
    file.write_bytes(line + b'\n{"x": 2}\n')
    assert rows_of(file) == [("a.jsonl, line 1", {}, problem), ("a.jsonl, line 2", {"x": 2}, "")]


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"x": 1}\n')
    assert rows_of(file) == [("a.jsonl, line 1", {"x": 1}, "")]


def test_zipped_lines_are_lines(tmp_path):
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"x": 1}\n{"x": 2}\n'))
    assert rows_of(file)[1] == ("a.jsonl.gz, line 2", {"x": 2}, "")


@pytest.mark.parametrize("damage", [lambda packed: packed[:-12], lambda packed: b"no gzip"])
def test_a_damaged_zip_is_named_with_the_last_whole_line(tmp_path, damage):
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(damage(gzip.compress(b'{"x": 1}\n' * 1000)))
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz cannot be read behind line \d+"):
        rows_of(file)


def test_parquet_rows_are_python_values(tmp_path):
    file = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"q": ["1+1"], "deep": [{"answer": ["2"]}]}), file)
    assert rows_of(file) == [("a.parquet, row 1", {"q": "1+1", "deep": {"answer": ["2"]}}, "")]


def test_a_parquet_text_that_is_no_utf8_is_one_bad_row(tmp_path):
    file = tmp_path / "a.parquet"
    texts = pa.array([b"fine", b"\xff\xfe", b"fine too"]).cast(pa.string(), safe=False)
    parquet.write_table(pa.table({"q": texts}), file)
    problems = [(row.place, row.problem) for row in file_rows(file)]
    assert problems == [
        ("a.parquet, row 1", ""),
        ("a.parquet, row 2", "a text is not UTF-8: invalid start byte"),
        ("a.parquet, row 3", ""),
    ]


def test_a_damaged_parquet_file_is_named(tmp_path):
    file = tmp_path / "a.parquet"
    file.write_bytes(b"PAR1 and nothing of the kind")
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read as parquet behind row 0"):
        rows_of(file)


def test_a_folder_is_its_data_files_by_name(tmp_path):
    for name in ("b.jsonl", "a.parquet", "README.md", "c.jsonl.gz"):
        (tmp_path / name).write_text(json.dumps({}))
    assert [file.name for file in data_files(tmp_path)] == ["a.parquet", "b.jsonl", "c.jsonl.gz"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.jsonl", r"there is no file or folder .*nowhere\.jsonl"),
        ("table.csv", r"table\.csv is of no known kind; data files end in \.parquet, \.jsonl"),
        ("empty", r"the folder .*empty has no file of the kinds \.parquet"),
    ],
)
def test_what_cannot_be_data_is_named(tmp_path, name, message):
    (tmp_path / "table.csv").write_text("a,b")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=message):
        data_files(tmp_path / name)
