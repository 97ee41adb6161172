"""Configuration sections: dataclasses that check their values when they are created, whether from a file or in Python."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, ClassVar, NoReturn, TypeVar, cast, get_type_hints

from dapo_jax.config.keys import Rules, check_value, needed, refuse, rules_of
from dapo_jax.hints import nearest

_Entry = TypeVar("_Entry")


class Section:
    """Base class of sections and of complete configurations."""

    place: ClassVar[str] = ""
    """Dotted name of the section. Empty for a complete configuration."""

    def __init_subclass__(cls, *, at: str | None = None) -> None:
        """Sets `place` to `at`, the dotted name of the section."""
        super().__init_subclass__()
        if at is not None:
            cls.place = at

    def __post_init__(self) -> None:
        """Raises ConfigError if a value has the wrong type, is out of range, or contradicts another value."""
        kinds = field_types(type(self))
        for field in dataclasses.fields(cast(Any, self)):
            name, expected, value = field.name, kinds[field.name], getattr(self, field.name)
            if not dataclasses.is_dataclass(expected):
                check_value(f"{self.place}.{name}".lstrip("."), value, expected, rules_of(field))
            elif not isinstance(value, cast(type, expected)):
                kind = cast(type, expected).__name__
                refuse(name, value, f"a {kind}", f"write {name}={kind}(...)")
        self.check_together()

    def check_together(self) -> None:
        """Checks rules that involve more than one value. Sections with such rules override this method."""

    def check_effects(self) -> None:
        """Raises ConfigError if a key is changed but has no effect, because the key that it depends on (`Rules.only_with`) is not set."""
        rules = rules_by_key(type(self))
        for key in leaf_types(type(self)):
            section, _, name = key.rpartition(".")
            needs = rules[key].only_with or (rules[section].only_with if section else "")
            if not needs or needs == key or attrgetter(needs)(self):
                continue
            holder = attrgetter(section)(self)
            if getattr(holder, name) != getattr(type(holder)(), name):
                remedy = f"set {needs}, or leave it out"
                self.refuse(key, f"a value of {needs}, without which it has no effect", remedy)

    def refuse(self, key: str, needs: str, remedy: str) -> NoReturn:
        """Raises ConfigError for the value of `key`, which is a dotted name relative to this section."""
        refuse(f"{self.place}.{key}".lstrip("."), attrgetter(key)(self), needs, remedy)


def due(step: int, every: int) -> bool:
    """Returns True if an action that runs every `every` steps (or never, if 0) is due after step number `step`, counted from 1."""
    return every > 0 and step % every == 0


@cache
def field_types(section: type) -> dict[str, Any]:
    """Returns a mapping from the fields of a configuration class to their annotations."""
    hints = get_type_hints(section)
    return {field.name: hints[field.name] for field in dataclasses.fields(section)}


def leaf_types(schema: type, prefix: str = "") -> dict[str, Any]:
    """Returns a mapping from the dotted keys of a configuration class to their annotations. Sections themselves are not included."""
    leaves = {}
    for name, kind in field_types(schema).items():
        key = prefix + name
        leaves |= leaf_types(kind, f"{key}.") if dataclasses.is_dataclass(kind) else {key: kind}
    return leaves


def rules_by_key(schema: type, prefix: str = "") -> dict[str, Rules]:
    """Returns a mapping from the dotted keys of a configuration class to their rules. Sections themselves are included."""
    kinds, found = field_types(schema), {}
    for field in dataclasses.fields(schema):
        key = prefix + field.name
        found[key] = rules_of(field)
        if dataclasses.is_dataclass(kinds[field.name]):
            found |= rules_by_key(kinds[field.name], f"{key}.")
    return found


def entry(where: str, value: Mapping[str, Any], schema: type[_Entry]) -> _Entry:
    """Converts the mapping at `where` to an object of class `schema`. Raises ConfigError if a name is unknown or missing, or a value has the wrong type or is
    out of range. The message names the key."""
    hints = get_type_hints(schema)
    fields = {field.name: field for field in dataclasses.fields(cast(Any, schema))}
    for name, item in value.items():
        if name not in fields:
            near = "".join(f"did you mean {each}? " for each in nearest(name, fields)[:1])
            remedy = f"{near}its names are {', '.join(fields)}"
            refuse(f"{where}.{name}", item, "a known name", remedy)
        check_value(f"{where}.{name}", item, hints[name], rules_of(fields[name]))
    for name, field in fields.items():
        if needed(field) and name not in value:
            refuse(where, dict(value), f"a {name}", f"write {name}: ... in it")
    return schema(**{name: float(item) if hints[name] is float else item for name, item in value.items()})


def entries(key: str, values: Sequence[Mapping[str, Any]], schema: type[_Entry]) -> list[_Entry]:
    """Converts the mappings in the list `key` to objects of class `schema`. Raises the errors of `entry`."""
    return [entry(f"{key}[{place}]", value, schema) for place, value in enumerate(values)]
