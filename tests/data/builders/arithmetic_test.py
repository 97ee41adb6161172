"""The arithmetic problems: splits, styles, and the text of demonstrations."""

import itertools

import pytest

from dapo_jax.data import load_rows
from dapo_jax.data.builders import arithmetic
from dapo_jax.data.builders.arithmetic import response_text, split_pairs, working_text

PAIRS = list(itertools.product(range(10, 100), repeat=2))


def test_splits_are_disjoint_and_together_all_pairs():
    splits = split_pairs()
    assert {name: len(pairs) for name, pairs in splits.items()} == {"train": 7100, "test": 1000}
    assert sorted(splits["train"] + splits["test"]) == PAIRS


@pytest.mark.parametrize(
    ("style", "rechecks"), [("direct", 0), ("working", 0), ("rechecked", 1), ("rechecked", 4)]
)
def test_every_response_ends_in_the_right_answer_and_keeps_to_the_alphabet(style, rechecks):
    for left, right in PAIRS:
        response = response_text(left, right, style, rechecks)
        assert response.rpartition("=")[2] == str(left + right)
        assert set(response) <= set(arithmetic.ALPHABET)


def test_every_step_of_the_working_is_true_and_spells_the_answer():
    for left, right in PAIRS:
        units, tens = (step.split("=") for step in working_text(left, right).split(","))
        assert sum(map(int, units[0].split("+"))) == int(units[1])
        assert sum(map(int, tens[0].split("+"))) == int(tens[1])
        assert tens[1] + units[1][-1] == str(left + right)


def test_response_cut_off_before_its_answer_never_ends_in_the_answer():
    """A length cap must not reward a truncated response by accident."""
    for left, right in PAIRS[::7]:
        response = response_text(left, right, "rechecked", 2)
        assert all(response[:cut].rpartition("=")[2] != str(left + right) for cut in range(len(response)))


@pytest.mark.parametrize("split", ["test", pytest.param("train", marks=pytest.mark.slow)])
def test_rows_on_disk_are_the_generated_ones_in_order(split, data_dir):
    rows = arithmetic.Builder(data_dir=data_dir).splits()[split]
    assert [*load_rows("arithmetic", split, data_dir)] == [*rows]
