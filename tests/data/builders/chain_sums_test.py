"""The chains of sums: right answers, disjoint splits, and never right by accident when cut off."""

from collections import Counter

import pytest

from dapo_jax.data.builders.chain_sums import (
    ALPHABET,
    LABELS,
    STYLE_WEIGHTS,
    TERMS,
    answer_text,
    prompt_text,
    response_text,
    split_questions,
)
from dapo_jax.rewards import GRADERS


@pytest.fixture(scope="module")
def splits():
    return split_questions()


def test_every_number_of_terms_has_its_share_of_every_split(splits):
    """Of two terms there are 9 x 9 = 81: 24 held out, 57 to train on, each seven or eight times."""
    counts = {split: Counter(map(len, questions)) for split, questions in splits.items()}
    assert counts["test"] == dict.fromkeys(TERMS, 24)
    assert counts["train"] == dict.fromkeys(TERMS, 400)
    assert counts["warm_start"] == dict.fromkeys(TERMS, 3000)
    times = Counter(splits["train"])
    assert Counter(times[terms] for terms in times if len(terms) == 2) == {7: 56, 8: 1}
    assert {times[terms] for terms in times if len(terms) > 2} == {1}


def test_splits_share_only_sums_of_two_terms_in_training(splits):
    train, warm_start, test = (set(splits[split]) for split in ("train", "warm_start", "test"))
    assert not test & (train | warm_start)
    assert {len(terms) for terms in train & warm_start} == {2}


@pytest.mark.parametrize("style", STYLE_WEIGHTS)
def test_every_style_ends_in_the_right_answer(splits, style):
    for terms in splits["test"]:
        response = response_text(terms, style, repeats=2 * (style == "rambling"))
        assert set(response) | set(prompt_text(terms)) <= set(ALPHABET)
        assert response.endswith("=" + str(eval("+".join(map(str, terms))) % 10))
        assert response.count("=") == 1


def test_the_working_is_a_chain_of_true_additions(splits):
    for terms in splits["test"]:
        steps = response_text(terms, "careful")[1:].split("=")[0].split(",")
        total = terms[0]
        for step, label, term in zip(steps, LABELS[1:], terms[1:], strict=False):
            assert step == f"{label}{total % 10}+{term}>{(total + term) % 10}"
            total += term


def test_a_response_that_is_cut_off_is_wrong(splits):
    grade = GRADERS["exact"]
    for terms in splits["test"][:40]:
        whole = response_text(terms, "rambling", 1)
        for end in range(len(whole) - 1):
            assert not grade(whole[:end], answer_text(terms)).correct


def test_under_48_tokens_careful_working_ends_at_7_terms_and_brief_working_always_fits():
    """Careful: 1 + 7 (n - 1) - 1 characters, `=d` and the end token: 45 for 7 terms, 52 for 8."""

    def tokens(count, style):
        return len(response_text((9,) * count, style)) + 1

    assert (tokens(7, "careful"), tokens(8, "careful")) == (45, 52)
    assert max(tokens(count, "brief") for count in TERMS) == 26
