"""When an episode is over, and how many tokens its next turn may have."""

import numpy as np
import pytest

from dapo_jax.dapo.episode_limits import EpisodeLimits
from dapo_jax.dapo.rollouts import Continuation

LIMITS = EpisodeLimits(max_turns=3, turn_tokens=4, episode_tokens=20, capacity=24)


def said(count, *, anew=False):
    return Continuation(np.zeros(count, np.int32), anew)


@pytest.mark.parametrize(
    ("before", "turns", "drawn", "length", "expected"),
    [
        (said(2), 1, 5, 9, None),
        (None, 1, 5, 9, "stop"),  # the environment says so
        (None, 2, 20, 24, "length"),  # it says so of an episode that has all its tokens: the turn was cut off
        (None, 0, 0, 4, "stop"),  # lost at its beginning
        (said(2), 3, 12, 16, "length"),  # three turns are the most
        (said(7), 1, 12, 16, None),  # 7 of the 8 tokens that are left
        (said(8), 1, 12, 16, "length"),
        (said(4), 1, 5, 19, None),  # a context of 19 + 4 = 23 of 24
        (said(5), 1, 5, 19, "length"),
        (said(5, anew=True), 1, 5, 19, None),  # in place of those 19
        (said(24, anew=True), 1, 0, 19, "length"),
    ],
)
def test_what_ends_an_episode(before, turns, drawn, length, expected):
    assert LIMITS.end(before, turns=turns, drawn=drawn, length=length) == expected


@pytest.mark.parametrize(("count", "length"), [(20, 1), (3, 21)])
def test_an_environment_that_leaves_no_room_for_a_first_turn_is_refused(count, length):
    with pytest.raises(ValueError, match=f"begins with {count} tokens, which leaves no room for a turn"):
        LIMITS.end(said(count), turns=0, drawn=0, length=length)


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
