"""Rows of files: every row has its place, and a bad row has a problem."""

import gzip
import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from dapo_jax.data.files import data_files, file_rows


def rows_of(path):
    return [
        (row, str(fields) if isinstance(fields, Exception) else fields) for row, fields in file_rows(path)
    ]


def test_lines_are_counted_as_an_editor_counts_them(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"x": 1}\n\n  \n{"x": 2}', encoding="utf-8-sig")  # a byte order mark is ignored
    assert rows_of(file) == [("a.jsonl, line 1", {"x": 1}), ("a.jsonl, line 4", {"x": 2})]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"x": 1', "not JSON: Expecting ',' delimiter: line 1 column 8 (char 7)"),
        (b"[1, 2]", "not a JSON object: a list"),
        (
            b'{"answer": "1", "answer": "2"}',
            "the key 'answer' occurs twice in one object; keep one of the two",
        ),
        (b'{"a": {"b": 1, "b": 1}}', "the key 'b' occurs twice in one object; keep one of the two"),
    ],
)
def test_a_bad_line_has_a_problem_and_the_next_is_read(tmp_path, line, problem):
    file = tmp_path / "a.jsonl"
    file.write_bytes(line + b'\n{"x": 2}\n')
    assert rows_of(file) == [("a.jsonl, line 1", problem), ("a.jsonl, line 2", {"x": 2})]


def test_zipped_lines_are_lines(tmp_path):
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"x": 1}\n{"x": 2}\n'))
    assert rows_of(file)[1] == ("a.jsonl.gz, line 2", {"x": 2})


@pytest.mark.parametrize("damage", [lambda packed: packed[:-12], lambda packed: b"no gzip"])
def test_a_damaged_zip_is_named_with_the_last_whole_line(tmp_path, damage):
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(damage(gzip.compress(b'{"x": 1}\n' * 1000)))
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz cannot be read after line \d+"):
        rows_of(file)


def test_parquet_rows_are_python_values_in_order(tmp_path):
    file = tmp_path / "a.parquet"
    deep = [{"answer": [str(number), None]} for number in range(3000)]
    table = pa.table({"q": [f"{number}+0" for number in range(3000)], "deep": deep})
    parquet.write_table(table, file, row_group_size=1100)  # more than one batch per row group
    found = rows_of(file)
    assert [fields for _, fields in found] == table.to_pylist()
    assert [place for place, _ in found] == [f"a.parquet, row {number}" for number in range(1, 3001)]


def test_memory_is_bounded_by_row_groups(tmp_path):
    """Arrow's memory while 30 row groups of 1 MB are read: at most a few of them at a time."""
    file, texts = tmp_path / "a.parquet", [f"{number}{'x' * 1000}" for number in range(30_000)]
    plain = {"use_dictionary": False, "compression": "none"}
    parquet.write_table(pa.table({"q": texts}), file, row_group_size=1000, **plain)
    before = pa.total_allocated_bytes()
    assert max(pa.total_allocated_bytes() - before for _ in file_rows(file)) < 6_000_000


def test_a_parquet_text_that_is_not_utf8_is_one_bad_row(tmp_path):
    file = tmp_path / "a.parquet"
    texts = pa.array([b"fine", b"\xff\xfe", b"fine too"]).cast(pa.string(), safe=False)
    parquet.write_table(pa.table({"q": texts}), file)
    first, second, third = rows_of(file)
    assert (first[1], third[1]) == ({"q": "fine"}, {"q": "fine too"})
    assert second[0] == "a.parquet, row 2"
    assert "utf-8" in second[1]


@pytest.mark.parametrize("kept", [0, 20, 3000])
def test_a_half_written_parquet_file_is_named(tmp_path, kept):
    file = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"q": [str(number) for number in range(3000)]}), file)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read as parquet after row 0"):
        rows_of(file)


def test_a_folder_is_its_data_files_by_name(tmp_path):
    for name in ("b.jsonl", "a.parquet", "README.md", "c.jsonl.gz"):
        (tmp_path / name).write_text(json.dumps({}))
    assert [file.name for file in data_files(tmp_path)] == ["a.parquet", "b.jsonl", "c.jsonl.gz"]


def test_a_folder_without_files_is_its_only_folder_with_files(tmp_path):
    """As the hub stores datasets: data/train-00000-of-00001.parquet next to README.md and .git."""
    for name in ("data/b.jsonl", "data/a.parquet", ".git/config", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert [file.name for file in data_files(tmp_path)] == ["a.parquet", "b.jsonl"]
    (tmp_path / "main").mkdir()
    (tmp_path / "main" / "c.jsonl").write_text("{}")
    with pytest.raises(ValueError, match="folders data, main"):
        data_files(tmp_path)
    (tmp_path / "d.jsonl").write_text("{}")
    assert [file.name for file in data_files(tmp_path)] == ["d.jsonl"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.jsonl", r"nowhere\.jsonl"),
        ("table.csv", r"table\.csv .*\.parquet, \.jsonl"),
        ("empty", r"folder .*empty .*\.parquet"),
    ],
)
def test_paths_without_data_are_refused(tmp_path, name, message):
    (tmp_path / "table.csv").write_text("a,b")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=message):
        data_files(tmp_path / name)
