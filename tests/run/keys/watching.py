"""What watches a key of the configuration: where its values are seen, and a library that ignores them."""

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest

from dapo_jax.config.section import field_types, leaf_types

READING = []
"""The fields that the library now reads otherwise, see `reading`."""

SEEN = object()
"""For values that need only be seen as different."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watcher:
    """Of one key, at one of the places that it goes to."""

    key: str
    what: str = ""
    """Which of its places, where there are several."""
    see: Callable[[Any], Any]
    """(a `Look` at a configuration) -> plain values that tell what the key is there."""
    values: Sequence[tuple[Any, Any]]
    """(value, what is then seen) for two values or more; the first is what a library that ignored the key would take."""
    also: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Values of other keys without which this one does nothing."""

    def __str__(self) -> str:
        return f"{self.key}, {self.what}" if self.what else self.key


@dataclasses.dataclass(frozen=True)
class Entry:
    """A watcher of one name in the entries of a list: the first entry is `entry` with a value of `name`, `others` follow it."""

    list_key: str
    name: str
    see: Callable[[Any], Any]
    values: Sequence[tuple[Any, Any]]
    _: dataclasses.KW_ONLY
    entry: Mapping[str, Any]
    others: Sequence[Mapping[str, Any]] = ()
    also: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.list_key}[].{self.name}"

    def __str__(self) -> str:
        return self.key


def watch(key, see, *values, what="", also=None):
    """A watcher by what is seen of each value: `(value, seen)` pairs."""
    return Watcher(key=key, what=what, see=see, values=values, also=also or {})


def differs(key, see, *values, what="", also=None):
    """A watcher for whose values there is no telling what will be seen, only that it differs."""
    return watch(key, see, *((value, SEEN) for value in values), what=what, also=also)


def made(schema, values):
    """A configuration of dotted keys; those that are not given keep their defaults."""
    found = {}
    for name, kind in field_types(schema).items():
        if dataclasses.is_dataclass(kind):
            inner = {
                key.removeprefix(f"{name}."): value
                for key, value in values.items()
                if key.startswith(f"{name}.")
            }
            if inner:
                found[name] = made(kind, inner)
        elif name in values:
            found[name] = values[name]
    return schema(**found)


def owner(schema, key):
    """The class whose field the last name of a dotted key is, and that name."""
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
    """Stands before a field of a dataclass: what the library reads is `read(the value it was given)`."""

    def __init__(self, section, name, read):
        self._name, self._read = name, read
        self._default = getattr(section, name, None)  # as the class itself has it

    def __get__(self, config, section=None):
        if config is None:
            return self._default
        given = vars(config)[self._name]
        by_library = sys._getframe(1).f_globals["__name__"].startswith("dapo_jax.")
        return self._read(given) if by_library else given

    def __set__(self, config, value):  # by a frozen dataclass's own __init__
        vars(config)[self._name] = value


@contextmanager
def reading(section, name, read):
    """Within, what the library reads of a field is `read(the value it was given)`. Who else reads it gets what it was given."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(section, name, _Field(section, name, read), raising=False)
        READING.append(name)
        try:
            yield
        finally:
            READING.pop()


@contextmanager
def noting_reads(schema, found):
    """Within, `found` gets the keys of a configuration that the library reads to use them, not only to check or to write them."""

    def noting(key, given):
        reader = sys._getframe(2)
        if not _only_checks(reader.f_globals["__name__"], reader.f_code.co_qualname):
            found.add(key)
        return given

    with ExitStack() as stack:
        for key in leaf_types(schema):
            stack.enter_context(reading(*owner(schema, key), partial(noting, key)))
        yield


def _only_checks(module, function):
    """True for what compares, checks or writes values of a configuration."""
    name = function.rpartition(".")[2]
    inside = module in ("dapo_jax.config.section", "dapo_jax.config.loading")
    checks = module.startswith("dapo_jax.config.") and ("check" in function or name == "__post_init__")
    return inside or checks or name in ("__repr__", "__eq__")


def ignored(schema, key, value):
    """Within, the library reads `value` whatever the key was set to."""
    return reading(*owner(schema, key), lambda given: value)
