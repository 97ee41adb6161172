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
