"""When an episode is over, and how many tokens its next turn may have."""

import numpy as np
import pytest

from dapo_jax.dapo.episode_limits import EpisodeLimits
from dapo_jax.dapo.rollouts import Continuation

LIMITS = EpisodeLimits(max_turns=3, turn_tokens=4, episode_tokens=20, capacity=24)


def said(count, *, anew=False):
    return Continuation(np.zeros(count, np.int32), anew)


@pytest.mark.parametrize(
    ("before", "reasons", "drawn", "length", "expected"),
    [
        (said(2), ["stop"], 5, 9, None),
        (None, ["stop"], 5, 9, "stop"),  # the environment says so
        (
            None,
            ["length"],
            5,
            9,
            "stop",
        ),  # the turn was cut off by its own limit, which the environment took for an end
        (None, ["stop", "length"], 20, 24, "length"),  # the limit of the episode cut off its last turn
        (
            None,
            ["length", "stop"],
            20,
            24,
            "stop",
        ),  # the last turn ended with the last token, as a response may
        (None, [], 0, 4, "stop"),  # lost at its beginning
        (said(2), ["stop"] * 3, 12, 16, "length"),  # three turns are the most
        (said(2), ["stop"], 20, 24, "length"),  # it goes on, and has no room
        (said(7), ["stop"], 12, 16, None),  # 7 of the 8 tokens that are left
        (said(8), ["stop"], 12, 16, "length"),
        (said(4), ["stop"], 5, 19, None),  # a context of 19 + 4 = 23 of 24
        (said(5), ["stop"], 5, 19, "length"),
        (said(5, anew=True), ["stop"], 5, 19, None),  # in place of those 19
        (said(24, anew=True), ["stop"], 0, 19, "length"),
        (said(20), [], 0, 1, "stop"),  # no room for a first turn: the episode is over at once
        (said(3), [], 0, 21, "stop"),
        (said(24, anew=True), [], 0, 1, "stop"),
    ],
)
def test_what_ends_an_episode(before, reasons, drawn, length, expected):
    assert LIMITS.end(before, reasons=reasons, drawn=drawn, length=length) == expected


@pytest.mark.parametrize(
    ("begun", "ahead", "expected"),
    [
        (0, 4, 4),  # a turn of four
        (18, 4, 20),  # the episode's 20
        (18, 5, 19),  # 5 + 19 = 24 of a context
        (18, -10, 20),  # the context began with token 10
    ],
)
def test_a_turn_ends_at_the_nearest_limit(begun, ahead, expected):
    assert LIMITS.turn_end(begun, ahead=ahead) == expected


def test_turns_without_a_limit_of_their_own_have_what_is_left():
    limits = EpisodeLimits(max_turns=3, turn_tokens=0, episode_tokens=20, capacity=40)
    assert limits.turn_end(7, ahead=5) == 20
