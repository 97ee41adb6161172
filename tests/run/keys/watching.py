"""Watchers of the keys of the configuration, and a way to note which keys the library reads."""

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from dapo_jax.config.section import field_types, leaf_types

SEEN = object()
"""Matches any result that differs from the results of the other values."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watcher:
    """A watcher of one key at one place of its use."""

    key: str
    what: str = ""
    """The place, where there are several."""
    see: Callable[[Any], Any]
    """(a `Look` at a configuration) -> plain values that depend on the key."""
    values: Sequence[tuple[Any, Any]]
    """(value, expected result) for two values or more."""
    also: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Values of other keys that this one needs."""

    def __str__(self) -> str:
        return f"{self.key}, {self.what}" if self.what else self.key


def watch(key, see, *values, what="", also=None):
    """A watcher with a (value, expected result) pair for each value."""
    return Watcher(key=key, what=what, see=see, values=values, also=also or {})


def echoes(key, see, *values, what="", also=None):
    """A watcher that sees each value itself."""
    return watch(key, see, *((value, value) for value in values), what=what, also=also)


def differs(key, see, *values, what="", also=None):
    """A watcher that only checks that the results differ."""
    return watch(key, see, *((value, SEEN) for value in values), what=what, also=also)


def made(schema, values):
    """A configuration of dotted keys, without those that the schema does not have."""
    found, kinds = {}, field_types(schema)
    for key, value in values.items():
        name, _, rest = key.partition(".")
        if rest:
            found.setdefault(name, {})[rest] = value
        else:
            found[name] = value
    return schema(
        **{
            name: made(kinds[name], value) if dataclasses.is_dataclass(kinds[name]) else value
            for name, value in found.items()
            if name in kinds
        }
    )


def owner(schema, key):
    """(section class, field name) of a dotted key."""
    *sections, name = key.split(".")
    for section in sections:
        schema = field_types(schema)[section]
    return schema, name


def default_of(schema, key):
    """The default of a dotted key; `dataclasses.MISSING` if it has none."""
    section, name = owner(schema, key)
    field = section.__dataclass_fields__[name]
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


class _Field:
    """A descriptor for a field of a dataclass, which notes reads by the library beyond checking or writing it."""

    def __init__(self, section, name, key, found):
        self._name, self._key, self._found = name, key, found
        self._default = getattr(section, name, None)

    def __get__(self, config, section=None):
        if config is None:
            return self._default
        reader = sys._getframe(1)
        module = reader.f_globals["__name__"]
        if module.startswith("dapo_jax.") and not _only_checks(module, reader.f_code.co_qualname):
            self._found.add(self._key)
        return vars(config)[self._name]

    def __set__(self, config, value):  # by a frozen dataclass's own __init__
        vars(config)[self._name] = value


@contextmanager
def noting_reads(schema, found):
    """Within, collects in `found` the keys that the library uses."""
    with pytest.MonkeyPatch.context() as patch:
        for key in leaf_types(schema):
            section, name = owner(schema, key)
            patch.setattr(section, name, _Field(section, name, key, found), raising=False)
        yield


def _only_checks(module, function):
    """True for functions that only compare, check or write values of a configuration."""
    name = function.rpartition(".")[2]
    inside = module in ("dapo_jax.config.section", "dapo_jax.config.loading")
    checks = module.startswith("dapo_jax.config.") and ("check" in function or name == "__post_init__")
    return inside or checks or name in ("__repr__", "__eq__")
