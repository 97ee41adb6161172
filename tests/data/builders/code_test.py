"""The dataset `code` reads rows of other projects, and refuses rows without usable tests."""

import json

import pytest

from dapo_jax.data.sources import load_rows
from dapo_jax.text import code_tests
from tests.rewards.code_grader_test import rows


@pytest.fixture
def load(tmp_path, monkeypatch):
    """(rows, options) -> the rows of the dataset."""
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "prepared"))

    def loaded(given, **options):
        path = tmp_path / "problems.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in given))
        return load_rows("code", "train", path=str(path), **options)

    return loaded


def test_rows_of_all_formats_keep_their_tests(load):
    given = [{**row["row"], "number": number} for number, row in enumerate(rows("formats"))]
    found = load(given, deduplicate=False)
    assert [row["number"] for row in found] == [*range(len(given))]
    for row, before in zip(found, given, strict=True):
        tests = code_tests.tests_of("", before)
        assert code_tests.tests_of(row["answer"], row) == tests
        assert row["answer"] == f"{tests.count} tests"
        assert row["prompt"]


def test_a_row_without_tests_is_bad(load):
    right = {"q": "Print 1.", "input_output": {"inputs": [""], "outputs": ["1"]}}
    bad = {"q": "Print 2.", "input_output": {"inputs": [], "outputs": []}}
    options = {"options": {"prompt": "q"}}
    with pytest.raises(ValueError, match="field 'input_output' has no tests; remove the row"):
        load([right, bad], **options)
    assert [row["prompt"] for row in load([right, bad], on_bad_row="skip", **options)] == ["Print 1."]


@pytest.mark.parametrize(
    ("time_limit", "memory_limit", "limits"),
    [
        ("2.0 seconds", "256.0 megabytes", (2.0, 256.0)),
        ("1500 ms", "1 GB", (1.5, 1024.0)),
        ("1sec", "512 KB", (1.0, 0.5)),
        (2, 64, (2.0, 64.0)),
        (None, "268435456 bytes", (0.0, 256.0)),
    ],
)
def test_limits_have_units(time_limit, memory_limit, limits):
    row = {"input_output": {"inputs": [""], "outputs": ["1"]}, "time_limit": time_limit}
    tests = code_tests.tests_of("", {**row, "memory_limit": memory_limit})
    assert (tests.cpu_s, tests.memory_mb) == limits


def test_a_limit_with_an_unknown_unit_is_refused():
    row = {"input_output": {"inputs": [""], "outputs": ["1"]}, "time_limit": "2 fortnights"}
    with pytest.raises(ValueError, match="'2 fortnights' has an unknown unit"):
        code_tests.tests_of("", row)
