"""One key of a configuration: its default and the rules for its value, which stand at its field; the text below the field says what it does."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast


class ConfigError(ValueError):
    """A configuration that cannot be run; the message names the key, the value and the remedy."""

    def __init__(self, message: str, *, key: str = "") -> None:
        """`key` is the one whose value alone is wrong; empty if it is several, or none."""
        super().__init__(message)
        self.key = key


class Range(NamedTuple):
    """Numbers that a key may hold."""

    needs: str
    holds: Callable[[float], bool]


SIZE = Range("1 or more", lambda v: v >= 1)
NOT_NEGATIVE = Range("0 or more", lambda v: v >= 0)
POSITIVE = Range("more than 0", lambda v: v > 0)
BETA = Range("0 or more and less than 1", lambda v: 0 <= v < 1)
TOP_P = Range("more than 0 and at most 1 (1: off)", lambda v: 0 < v <= 1)
TOP_K = Range("1 to 2**31 - 1, or 0 or -1 (both: off)", lambda v: -1 <= v < 2**31)
TEMPERATURE = Range("0 (greedy), or 0.001 to 1000", lambda v: v == 0 or 1e-3 <= v <= 1e3)
FRACTION = Range("from 0 to 1", lambda v: 0 <= v <= 1)
ROUNDS = Range(
    "0 to 1000: responses that wait pass these rounds one by one, though nothing may be left to sample",
    lambda v: 0 <= v <= 1000,
)
AXIS = Range("1 or more devices, or -1 for those that the other axes leave", lambda v: v >= 1 or v == -1)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules for the value of one key, beside its type."""

    range: Range | None = None
    choices: tuple[str, ...] = ()
    not_empty: bool = False
    aliases: Mapping[str, str] = field(default_factory=dict)
    """A name of verl, TRL or open-instruct -> what else to know where it is not the same quantity, or easily taken for another."""
    may_change: bool = False
    """True if `--resume` may go on with another value: what the run learns does not depend on it."""


_RULES = "rules"


def key(
    default: Any = dataclasses.MISSING,
    *,
    default_factory: Any = dataclasses.MISSING,
    range: Range | None = None,
    choices: Iterable[str] = (),
    not_empty: bool = False,
    aliases: Iterable[str] | Mapping[str, str] = (),
    may_change: bool = False,
) -> Any:
    """A field of a configuration's dataclass, with the rules for its value.

    Args:
        default: its value unless one is given; without it and `default_factory` it must be given.
        default_factory: makes the default of a list, a mapping or a section.
        range: numbers that it may hold.
        choices: texts that it may hold.
        not_empty: whether it may not be an empty text.
        aliases: other libraries' names for it, or each with what else to know of it.
        may_change: whether `--resume` may go on with another value; of a section, for all keys in it.
    """
    notes = dict(aliases) if isinstance(aliases, Mapping) else dict.fromkeys(aliases, "")
    rules = Rules(
        range=range, choices=tuple(choices), not_empty=not_empty, aliases=notes, may_change=may_change
    )
    options: dict[str, Any] = {"default": default, "default_factory": default_factory}
    given = {name: value for name, value in options.items() if value is not dataclasses.MISSING}
    return cast(Any, field)(**given, metadata={_RULES: rules})


def rules_of(one: "dataclasses.Field[Any]") -> Rules:
    """The rules that stand at a field."""
    return one.metadata.get(_RULES, Rules())


def needed(one: "dataclasses.Field[Any]") -> bool:
    """True if a value must be given."""
    return one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
