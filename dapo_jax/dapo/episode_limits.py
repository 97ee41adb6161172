"""The limits of episodes of several turns: whether another turn has room, how many tokens it may have, and why an episode ended."""

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

    def end(self, before: Continuation | None, *, turns: int, drawn: int, length: int) -> FinishReason | None:
        """The reason for which an episode is over; None: its next turn begins behind `before`.

        Args:
            before: what its environment puts before the next turn; None: the environment says that it is over, or it was lost.
            turns: turns so far.
            drawn: tokens so far.
            length: tokens of its present context.

        Raises:
            ValueError: what an environment begins with leaves no room for a first turn.
        """
        has_room = before is not None and self._has_room(before, drawn=drawn, length=length)
        if before is not None and not turns and not has_room:
            raise ValueError(
                f"the environment begins with {len(before.tokens)} tokens, which leaves no room for a turn in an episode of up to {self.episode_tokens} "
                f"and a context of up to {self.capacity}: raise sampling.max_response_tokens, or begin with less"
            )
        if has_room and turns < self.max_turns:
            return None
        whole = (before is None and self.episode_tokens > drawn) or not turns
        return "stop" if whole else "length"

    def turn_end(self, begun: int, *, ahead: int) -> int:
        """The number of the episode's tokens at which the turn behind the first `begun` of them ends at the latest; in its context they have `ahead` more before them."""
        most = begun + (self.turn_tokens or self.episode_tokens)
        return min(self.episode_tokens, most, self.capacity - ahead)

    def _has_room(self, before: Continuation, *, drawn: int, length: int) -> bool:
        """Whether a turn behind `before` could have a token."""
        context = len(before.tokens) + (0 if before.anew else length)
        return len(before.tokens) < self.episode_tokens - drawn and context < self.capacity
