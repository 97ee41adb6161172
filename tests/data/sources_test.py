"""Datasets are prepared at first use, once, by two processes at a time, and without TensorFlow."""

import hashlib
import importlib
import json
import re
import subprocess
import sys

import pytest

from dapo_jax.data import load_rows
from dapo_jax.data.builders import arithmetic


def test_unknown_builders_splits_and_rows_are_answered_with_the_known_ones(data_dir):
    with pytest.raises(ValueError, match="named 'aritmetic'; did you mean 'arithmetic'"):
        load_rows("aritmetic", "train", data_dir)
    with pytest.raises(IndexError, match="row 3 is not in a split of 3 rows"):
        load_rows("arithmetic", "train[:3]", data_dir)[3]
    with pytest.raises(
        ValueError, match=r"no split 'valid'; it has \['test', 'train'\], with 1,000 and 7,100 rows"
    ):
        load_rows("arithmetic", "valid", data_dir)


@pytest.mark.parametrize(
    "split", ["test[5:5]", "test[7:5]", "test[:0]", "test[1000:]", "test[:0]+train[:0]", "test[5000:6000]"]
)
def test_a_slice_without_rows_is_named_with_the_sizes_of_the_splits(split, data_dir):
    with pytest.raises(ValueError, match=rf"{re.escape(repr(split))}; it has .*, with 1,000 and 7,100 rows"):
        load_rows("arithmetic", split, data_dir)


def test_prepared_dataset_is_reused(data_dir, monkeypatch):
    def never(*_):
        raise AssertionError("generated again")

    monkeypatch.setattr(arithmetic, "split_pairs", never)
    assert len(load_rows("arithmetic", "test", data_dir)) == 1000


def test_folder_that_cannot_be_written_is_named_with_the_remedy(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RuntimeError, match=r"'arithmetic' under .*file.*TFDS_DATA_DIR"):
        load_rows("arithmetic", "train", tmp_path / "file")


def small_splits():
    return {"train": [(10, 11)], "test": [(12, 13)]}


def test_failed_preparation_leaves_no_half_dataset(tmp_path, monkeypatch):
    def failing():
        raise RuntimeError("generation failed")

    monkeypatch.setattr(arithmetic, "split_pairs", failing)
    with pytest.raises(RuntimeError, match="generation failed"):
        load_rows("arithmetic", "train", tmp_path)
    monkeypatch.setattr(arithmetic, "split_pairs", small_splits)
    assert len(load_rows("arithmetic", "train", tmp_path)) == 1


def test_the_loser_of_a_race_reads_the_files_of_the_winner(tmp_path, monkeypatch):
    """The other process finishes while this one still generates: this one's rename then fails."""

    made = arithmetic.demonstrations

    def overtaken(*pair, count):
        monkeypatch.setattr(arithmetic, "demonstrations", made)
        load_rows("arithmetic", "train", tmp_path)
        return made(*pair, count=count)

    monkeypatch.setattr(arithmetic, "split_pairs", small_splits)
    monkeypatch.setattr(arithmetic, "demonstrations", overtaken)
    assert [row["prompt"] for row in load_rows("arithmetic", "train", tmp_path)] == ["10+11"]
    assert not list(tmp_path.rglob("*incomplete*"))


def test_two_processes_prepare_at_once_without_tensorflow_and_print_nothing(tmp_path):
    code = (
        "import sys\n"
        "from dapo_jax.data import load_rows\n"
        f"rows = load_rows('arithmetic', 'train', {str(tmp_path)!r})\n"
        "print(len(rows), rows[0]['prompt'], 'tensorflow' in sys.modules)\n"
    )
    start = [sys.executable, "-c", code]
    both = [
        subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    results = [(process.communicate(timeout=120), process.returncode) for process in both]
    left, right = arithmetic.split_pairs()["train"][0]
    for (out, err), code in results:
        assert code == 0, err
        assert out == f"7100 {left}+{right} False\n"


@pytest.mark.parametrize(
    ("name", "prepared", "digests"),
    [
        ("arithmetic", "mix_00f26ee6", {"train": "ec2def303cb4", "test": "20b4ffb7f656"}),
        pytest.param(  # Slow: writes 30,000 responses. tests/data/builders/chain_sums_test.py checks the questions of all splits.
            "chain_sums", "mix_a4dc584d", {"warm_start": "d13a677f3bf4", "train": "a29746da532e", "test": "3c8605615562"}, marks=pytest.mark.slow,
        ),
        ("guess_number", "range_9b29ccfe", {"train": "d2b093d5d691", "test": "566cc7d02b33", "demonstrations": "3c37c7def913"}),
        ("one_digit_arithmetic", "seed_0_test_100", {"train": "d6f8e7215375", "test": "22a0ef62f7fd"}),
    ],
)  # fmt: skip
def test_the_rows_and_names_of_generated_datasets_are_those_of_the_published_results(
    tmp_path, name, prepared, digests
):
    module = importlib.import_module(f"dapo_jax.data.builders.{name}")
    builder = module.Builder(data_dir=tmp_path, file_format="array_record")
    assert builder.builder_config.name == prepared
    rows = {split: json.dumps(list(rows)).encode() for split, rows in builder.splits().items()}
    assert {split: hashlib.sha256(text).hexdigest()[:12] for split, text in rows.items()} == digests
