"""The arithmetic problems: splits, styles, and the text of demonstrations."""

import itertools
from collections import Counter

import pytest

from dapo_jax.data import load_rows
from dapo_jax.data.builders import arithmetic
from dapo_jax.data.builders.arithmetic import (
    demonstrations,
    draw_style,
    response_text,
    split_pairs,
    working_text,
)
from dapo_jax.data.own_builder import named

PAIRS = list(itertools.product(range(10, 100), repeat=2))


def test_splits_are_disjoint_and_together_all_pairs():
    splits = split_pairs()
    assert {name: len(pairs) for name, pairs in splits.items()} == {"train": 7100, "test": 1000}
    assert sorted(splits["train"] + splits["test"]) == PAIRS


def test_working_carries_like_on_paper():
    assert working_text(47, 85) == "7+5=12,1+4+8=13"  # 7 + 5 = 12: carry 1; 1 + 4 + 8 = 13; answer 13|2
    assert working_text(13, 24) == "3+4=07,0+1+2=3"  # no carry is a carry of 0
    assert working_text(99, 99) == "9+9=18,1+9+9=19"


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
        answer = str(left + right)
        whole = len(response) - len(answer)
        assert all(response[:cut].rpartition("=")[2] != answer for cut in range(whole + len(answer)))


def test_styles_come_in_the_shares_of_their_weights():
    """32,400 samples; the largest standard deviation is sqrt(0.25 / 32400) = 0.003; 4 of them allowed."""
    counts = Counter(draw_style(0, pair, draw)[0] for pair in range(8100) for draw in range(4))
    for style, weight in arithmetic.STYLE_WEIGHTS.items():
        assert counts[style] / 32400 == pytest.approx(weight, abs=0.012)


def test_rechecks_halve_in_frequency_with_the_last_taking_the_rest(monkeypatch):
    """Chance of again 1/2, at most 4: 1/2, 1/4, 1/8, and 1/16 + 1/16 = 1/8."""
    monkeypatch.setattr(arithmetic, "STYLE_WEIGHTS", {"rechecked": 1.0})
    counts = Counter(draw_style(0, pair)[1] for pair in range(8100))
    shares = [counts[rechecks] / 8100 for rechecks in (1, 2, 3, 4)]
    assert shares == pytest.approx([0.5, 0.25, 0.125, 0.125], abs=0.02)


def test_rows_on_disk_are_the_generated_ones_in_order(data_dir):
    for split, count in (("train", 4), ("test", 1)):
        rows = load_rows("arithmetic", split, data_dir)
        pairs = split_pairs()[split]
        assert len(rows) == len(pairs)
        for index in (0, 1, 500, len(rows) - 1):
            left, right = pairs[index]
            shown = demonstrations(left, right, count=count)
            assert rows[index] == {
                "prompt": f"{left}+{right}",
                "answer": str(left + right),
                "response": shown[0][1],
                "style": shown[0][0],
                "responses": [response for _, response in shown],
            }


def test_changed_constants_change_the_name_of_the_prepared_dataset():
    """Otherwise a changed mix would silently read stale files."""
    assert named("mix", 1)[0].name != named("mix", 2)[0].name
