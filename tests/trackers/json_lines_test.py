"""JSON lines are written whole, and a line that is none of them is named."""

import os

import pytest

from dapo_jax.trackers.json_lines import read_lines, write_lines


def read(path):
    return read_lines(path, what="a fruit", version=2, needs="seeds")


def test_rows_come_back_in_their_order(tmp_path):
    rows = [{"schema_version": 1, "seeds": 4}, {"schema_version": 2, "seeds": None}]
    path = tmp_path / "new" / "fruits.jsonl"
    write_lines(path, rows, what="fruits")
    assert read(path) == rows
    assert [file.name for file in path.parent.iterdir()] == ["fruits.jsonl"]  # nothing temporary stays


def test_a_number_that_json_lacks_leaves_the_old_file_as_it_was(tmp_path):
    path = tmp_path / "fruits.jsonl"
    write_lines(path, [{"schema_version": 1, "seeds": 4}], what="fruits")
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_lines(path, [{"schema_version": 1, "seeds": float("nan")}], what="fruits")
    assert read(path) == [{"schema_version": 1, "seeds": 4}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"schema_version": 3}', "has schema_version 3; this version of dapo_jax reads up to 2"),
        ('{"schema_version": 2, "legs": 4}', r"is not a fruit \(KeyError\('seeds'\)\)"),
        ('{"schema_version": "2", "seeds": 4}', r"is not a fruit \(TypeError"),
        ('{"seeds": 4}', r"is not a fruit \(KeyError\('schema_version'\)\)"),
        ("[1]", "is not a fruit"),
        ('{"schema_version": 1, "see', "is not a fruit"),
    ],
)
def test_a_line_that_is_no_such_row_is_named(tmp_path, line, message):
    path = tmp_path / "fruits.jsonl"
    write_lines(path, [{"schema_version": 1, "seeds": 4}], what="fruits")
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=rf"fruits\.jsonl, line 2 {message}"):
        read(path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fruits.jsonl")
    with pytest.raises(OSError, match="it is no file"):
        read(tmp_path / "fruits.jsonl")
