"""Prompts can be interrupted anywhere and resumed with any number of hosts."""

import random
import threading
import time

import pytest

from dapo_jax.data.prompts import PromptSource, PromptStream
from dapo_jax.text.tokenizers import CharTokenizer

ROWS, EPOCHS = 29, 3  # 29 is a multiple of no number of hosts here
TOTAL = ROWS * EPOCHS
POINTS = sorted(random.Random(0).sample(range(1, TOTAL), 50))
TOKENIZER = CharTokenizer("0123456789+")


def source(**settings):
    rows = [{"prompt": f"{number}+{number}", "answer": str(2 * number)} for number in range(ROWS)]
    return PromptSource(rows, TOKENIZER, seed=3, max_prompt_tokens=8, **settings)


@pytest.fixture(scope="module")
def whole():
    """The sequence of prompts without an interruption."""
    one = source()
    return [(ordinal, one[ordinal].text) for ordinal in range(TOTAL)]


def take(hosts, start, end):
    """The prompts from `start` to `end` that `hosts` hosts take together."""
    streams = [PromptStream(source(), hosts=hosts, ahead=5) for _ in range(hosts)]
    taken = [streams[ordinal % hosts].at(ordinal) for ordinal in range(start, end)]
    return [(prompt.ordinal, prompt.text) for prompt in taken]


@pytest.mark.parametrize(
    ("before", "after", "every"),
    [
        (1, 4, 4),
        *(pytest.param(*hosts, 1, marks=pytest.mark.slow) for hosts in ((1, 4), (4, 1), (1, 1), (4, 4))),
    ],
)
def test_interruptions_do_not_change_the_sequence_of_three_epochs(whole, before, after, every):
    for point in POINTS[::every]:
        assert take(before, 0, point) + take(after, point, TOTAL) == whole


def test_the_stream_continues_after_a_prompt_out_of_turn():
    stream = PromptStream(source())
    assert [stream.at(ordinal).ordinal for ordinal in (40, 41, 7, 8, 60, 61)] == [40, 41, 7, 8, 60, 61]


def test_prompts_are_made_ahead_by_other_threads():
    makers = {}

    class Watched(CharTokenizer):
        def encode_prompt(self, text):
            makers[text] = threading.get_ident()
            return super().encode_prompt(text)

    rows = [{"prompt": str(number), "answer": "1"} for number in range(ROWS)]
    watched = PromptSource(rows, Watched("0123456789"), seed=0, max_prompt_tokens=4, shuffle=False)
    stream = PromptStream(watched, ahead=8)
    stream.at(0)
    deadline = time.monotonic() + 30
    while len(makers) < 9 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert 9 <= len(makers) < ROWS
    assert threading.get_ident() not in makers.values()


def test_a_bad_row_is_named_when_it_is_reached_and_not_before():
    rows = [{"prompt": "1", "answer": "1"}, {"prompt": "x", "answer": "1", "source_row": "own.jsonl, line 2"}]
    stream = PromptStream(PromptSource(rows, TOKENIZER, seed=0, max_prompt_tokens=4, shuffle=False))
    assert stream.at(0).text == "1"
    with pytest.raises(ValueError, match=r"own\.jsonl, line 2: character 'x'"):
        stream.at(1)


def test_a_mixture_is_interrupted_as_well():
    parts = {"parts": [range(9), range(9, ROWS)], "weights": [1.0, 2.0]}
    unbroken = [source(**parts)[ordinal].text for ordinal in range(50)]
    stream, resumed = PromptStream(source(**parts), ahead=3), PromptStream(source(**parts))
    found = [(stream if ordinal < 17 else resumed).at(ordinal).text for ordinal in range(50)]
    assert found == unbroken
