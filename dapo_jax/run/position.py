"""Where a run stands between two steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dapo_jax.dapo.dynamic_sampling import InformativeShare
from dapo_jax.dapo.in_flight import InFlight
from dapo_jax.dapo.rollouts import Group


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run stands between two steps: all that a checkpoint needs beside the train state."""

    step: int = 0
    """Steps done."""
    cursor: int = 0
    """The ordinal of the next prompt."""
    carry: Sequence[Group] = ()
    """Informative groups left over from earlier steps."""
    share: InformativeShare = field(default_factory=InformativeShare)
    """Counts of the groups sampled lately, and of the informative ones among them."""
    in_flight: InFlight | None = None
    """The rollouts that go on; None: none do, or none have begun."""
