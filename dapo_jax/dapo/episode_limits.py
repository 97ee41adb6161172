"""The limits of episodes of several turns: whether another turn has room, how many tokens it may have, and why an episode ended."""

from collections.abc import Sequence
from dataclasses import dataclass

from dapo_jax.dapo.rollouts import Continuation, FinishReason


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """The most turns and tokens of an episode. A turn begins where an environment has put tokens before it and there is room for one more."""

    max_turns: int
    turn_tokens: int
    """The most tokens of a turn; 0: as many as the episode may have."""
    episode_tokens: int
    """The most tokens of an episode, the environment's among them."""
    capacity: int
    """The most tokens of a context."""

    def end(
        self, before: Continuation | None, *, reasons: Sequence[FinishReason], drawn: int, length: int
    ) -> FinishReason | None:
        """The reason for which an episode is over; None: its next turn begins behind `before`.

        An episode that its environment ends is cut off if its last turn was, at the last token that the episode may have; as a response without an environment is. One that
        leaves no room for a first turn is over at once.

        Args:
            before: what its environment puts before the next turn; None: the environment says that it is over, or it was lost.
            reasons: the reason for which each turn so far has ended.
            drawn: tokens so far.
            length: tokens of its present context.
        """
        if before is None:
            cut = drawn >= self.episode_tokens and bool(reasons) and reasons[-1] == "length"
            return "length" if cut else "stop"
        if self._has_room(before, drawn=drawn, length=length):
            return None if len(reasons) < self.max_turns else "length"
        return "length" if reasons else "stop"

    def turn_end(self, begun: int, *, ahead: int) -> int:
        """The number of the episode's tokens at which the turn behind the first `begun` of them ends at the latest; in its context they have `ahead` more before them."""
        most = begun + (self.turn_tokens or self.episode_tokens)
        return min(self.episode_tokens, most, self.capacity - ahead)

    def _has_room(self, before: Continuation, *, drawn: int, length: int) -> bool:
        """Whether a turn behind `before` could have a token."""
        context = len(before.tokens) + (0 if before.anew else length)
        return len(before.tokens) < self.episode_tokens - drawn and context < self.capacity
