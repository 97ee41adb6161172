"""What a terminal would obey is shown instead."""

import pytest

from dapo_jax.visible import visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("a\rb", "a\\rb"),
        ("\x9b31m", "\\x9b31m"),  # CSI in one character
        ("abc\u202edcba", "abc\\u202edcba"),  # what follows would run from right to left
        ("a\u2028b", "a\\u2028b"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),  # a tag that nothing shows
    ],
)
def test_control_characters_and_marks_of_direction_are_written_out(text, shown):
    assert visible(text) == shown


@pytest.mark.parametrize("text", ["", "plain", "two\n\tlines", "é ∑ 中文 שלום", "क\u200dष", "👩\u200d🔬"])
def test_other_text_is_as_it_was(text):
    assert visible(text) == text
