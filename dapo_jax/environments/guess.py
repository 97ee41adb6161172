"""Guess a number: the policy asks, and hears whether the number is higher or lower.

A small task with all that episodes have: the answer depends on every turn before, the fewest turns need a search that no
single turn shows, and the reward comes at the end.
"""

import re
from collections.abc import Mapping
from typing import Any

from dapo_jax.environments.protocol import Step, Turn

HIGHER, LOWER = ">", "<"
"""Answers to a guess: the number is higher, or it is lower."""


HIGHEST = 99
"""Guesses have two digits at most: more of them would name no number, and yet be answered."""


class GuessTheNumber:
    """Each row's `answer` is the number, from 0 to 99; a turn is a guess, such as `31`, which an end token or a stop string ends."""

    def episode(self, row: Mapping[str, Any], seed: int) -> "GuessEpisode":
        """The search for one number.

        Raises:
            ValueError: the answer is no number from 0 to 99.
        """
        if not 0 <= (number := int(row["answer"])) <= HIGHEST:
            raise ValueError(f"the answer is {number}, needs a number from 0 to {HIGHEST}")
        return GuessEpisode(number)


class GuessEpisode:
    """The search for one number."""

    def __init__(self, number: int) -> None:
        self._number = number

    async def step(self, turn: Turn) -> Step:
        """Right: 1, and over. A guess that is no number ends the search."""
        found = re.fullmatch(r"[0-9]{1,2}", turn.text)
        if found is None or turn.finish_reason == "length":
            return Step(done=True, correct=False, metrics={"guesses": turn.number + 1.0, "malformed": 1.0})
        guess, seen = int(turn.text), {"guesses": turn.number + 1.0, "malformed": 0.0}
        if guess == self._number:
            return Step(reward=1.0, done=True, correct=True, metrics=seen)
        return Step(append=HIGHER if guess < self._number else LOWER, correct=False, metrics=seen)
