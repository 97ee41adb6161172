"""One key of a configuration: a dataclass field with its default and the rules for its value. The text below the field documents it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast


class ConfigError(ValueError):
    """The configuration cannot be run. The message names the key, the value and the remedy."""

    def __init__(self, message: str, *, key: str = "") -> None:
        """`key` is the dotted name if a single value is wrong by itself, else empty."""
        super().__init__(message)
        self.key = key


class Range(NamedTuple):
    """A set of numbers that a key may hold, in words and as a predicate."""

    needs: str
    holds: Callable[[float], bool]


SIZE = Range("1 or more", lambda v: v >= 1)
NOT_NEGATIVE = Range("0 or more", lambda v: v >= 0)
POSITIVE = Range("more than 0", lambda v: v > 0)
BETA = Range("0 or more and less than 1", lambda v: 0 <= v < 1)
TOP_P = Range("more than 0 and at most 1 (1: off)", lambda v: 0 < v <= 1)
TOP_K = Range("1 to 2**31 - 1, or 0 or -1 (both: off)", lambda v: -1 <= v < 2**31)
TEMPERATURE = Range("0 (greedy), or 0.001 to 1000", lambda v: v == 0 or 1e-3 <= v <= 1e3)
ROUNDS = Range("0 to 1000", lambda v: 0 <= v <= 1000)
AXIS = Range(
    "1 or more devices, or -1 for all devices that the other axes leave", lambda v: v >= 1 or v == -1
)
SEED = Range("0 or more and less than 2**32 = 4294967296", lambda v: 0 <= v < 2**32)
STEPS = Range("0 or more (0: evaluate only)", lambda v: v >= 0)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules for the value of one key, in addition to its type."""

    range: Range | None = None
    """Allowed numbers."""
    choices: Sequence[str] = ()
    """Allowed texts."""
    not_empty: bool = False
    """Refuse an empty text."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Name in verl, TRL or open-instruct -> a note if it is not the same quantity, or is easily confused with another."""
    may_change: bool = False
    """True if `--resume` accepts another value, because the key does not affect the training result."""


def key(
    default: Any = dataclasses.MISSING,
    *,
    default_factory: Any = dataclasses.MISSING,
    aliases: str | Mapping[str, str] = "",
    **rules: Any,
) -> Any:
    """Makes a field of a configuration's dataclass with the rules for its value.

    Args:
        default: the default value. Without it and `default_factory` the key is required.
        default_factory: makes the default of a list, a mapping or a section.
        aliases: names of other libraries for the key, separated by spaces; or a mapping from such names to a note.
        rules: the other fields of `Rules`; `may_change` of a section is for all of its keys.
    """
    noted = {aliases: ""} if isinstance(aliases, str) else aliases
    notes = {name: note for names, note in noted.items() for name in names.split()}
    options: dict[str, Any] = {"default": default, "default_factory": default_factory}
    given = {name: value for name, value in options.items() if value is not dataclasses.MISSING}
    return cast(Any, field)(**given, metadata={"rules": Rules(aliases=notes, **rules)})


def rules_of(one: "dataclasses.Field[Any]") -> Rules:
    """Returns the rules of a field."""
    return one.metadata.get("rules", Rules())


def needed(one: "dataclasses.Field[Any]") -> bool:
    """Returns True if the field has no default."""
    return one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
