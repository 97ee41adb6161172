"""A response on its way: its spans and turns, when an episode is over, and how many tokens its next turn may have."""

import numpy as np
import pytest

from dapo_jax.dapo.rollouts import ContextSpan, Continuation, Prompt, Span
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.sampling.requests import EpisodeLimits, Request

LIMITS = EpisodeLimits(max_turns=3, turn_tokens=4, episode_tokens=20, capacity=24)


def request(prompt_tokens=4, *, version=0):
    prompt = Prompt(ordinal=0, tokens=np.full(prompt_tokens, 7, np.int32), text="", answer="")
    return Request(prompt, 0, 20, version=version)


def appended(made, *tokens):
    made.append(Tokens(tokens, logprobs=-np.array(tokens)))
    return made


def before(count, *, new_context=False):
    return Continuation(np.full(count, 9, np.int32), new_context)


@pytest.mark.parametrize(
    ("answer", "reasons", "drawn", "length", "expected"),
    [
        (before(2), ["stop"], 5, 9, None),
        (None, ["stop"], 5, 9, "stop"),  # the environment ends it
        (None, ["stop", "length"], 20, 24, "length"),  # the limit of the episode cut off its last turn
        (None, ["length", "stop"], 20, 24, "stop"),  # the last turn ended with the last token
        (None, [], 0, 4, "stop"),  # lost at its beginning
        (before(2), ["stop"] * 3, 12, 16, "length"),  # three turns are the most
        (before(7), ["stop"], 12, 16, None),  # 7 of the 8 tokens that are left
        (before(8), ["stop"], 12, 16, "length"),
        (before(4), ["stop"], 5, 19, None),  # a context of 19 + 4 = 23 of 24
        (before(5), ["stop"], 5, 19, "length"),
        (before(5, new_context=True), ["stop"], 5, 19, None),  # in place of those 19
        (before(24, new_context=True), ["stop"], 0, 19, "length"),
        (before(20), [], 0, 1, "stop"),  # no room for a first turn: the episode is over at once
    ],
)
def test_when_an_episode_is_over(answer, reasons, drawn, length, expected):
    made = request(length - drawn)
    appended(made, *range(drawn))
    for reason in reasons:
        made.end_turn(reason)
    assert LIMITS.end(made, answer) == expected


@pytest.mark.parametrize(
    ("begun", "prompt_tokens", "turn_tokens", "expected"),
    [
        (0, 4, 4, 4),  # a turn of four
        (18, 4, 4, 20),  # the episode's 20
        (18, 5, 4, 19),  # 5 + 19 = 24 of a context
        (7, 4, 0, 20),  # without a limit of its own a turn has everything that is left
    ],
)
def test_a_turn_ends_at_the_nearest_limit(begun, prompt_tokens, turn_tokens, expected):
    made = request(prompt_tokens)
    made.begun = begun
    limits = EpisodeLimits(max_turns=3, turn_tokens=turn_tokens, episode_tokens=20, capacity=24)
    assert limits.turn_end(made) == expected


def test_the_present_context_is_the_last_one_that_began():
    """Contexts of two and three tokens replace everything from tokens 1 and 4 on; one token follows the second: four."""
    made = request()
    for token, context in ((5, 2), (6, 3)):
        appended(made, token).end_turn("stop")
        made.take_answer(before(context, new_context=True), LIMITS)
    appended(made, 7)
    assert made.record.ids.tolist() == [5, 9, 9, 6, 9, 9, 9, 7]
    assert made.contexts == (ContextSpan(1, 3), ContextSpan(4, 7))
    assert made.turns == ((0, 1), (3, 4))
    assert made.context.ids.tolist() == [9, 9, 9, 7]
    assert (made.length, len(made.turns), made.begun, made.context_start) == (4, 2, 7, 4)


def test_spans_begin_where_the_version_changes_and_only_with_a_token():
    made = appended(appended(request(version=4), 1), 2)
    assert made.spans == (Span(0, 4),)
    made.version = 5
    assert appended(made).spans == (Span(0, 4),)
    made.version = 6
    appended(made, 3)
    made.finish_reason = "stop"
    assert made.response().spans == (Span(0, 4), Span(2, 6))
    lost = request()
    lost.finish_reason = "stop"
    assert lost.response(version=5).spans == (Span(0, 5),)


def test_a_copy_at_rest_shares_nothing():
    made = appended(request(), 1, 2)
    made.row, made.prefix, made.order = 3, "prefix", 0
    rest = made.rest()
    appended(made, 3)
    assert (rest.row, rest.prefix, rest.order, rest.drawn) == (None, None, -1, 2)
    assert rest.record.ids.tolist() == [1, 2]
