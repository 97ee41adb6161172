"""Configuration keys. A key is a dataclass field with a default and with rules. This module checks values against these rules. The docstring below the field documents the key."""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field
from types import NoneType, UnionType
from typing import Any, NamedTuple, NoReturn, cast, get_args, get_origin

from dapo_jax.hints import nearest


class ConfigError(ValueError):
    """The configuration is invalid. The message names the key, the value and the remedy."""


class Range(NamedTuple):
    """A range of allowed numbers, as a description for messages and as a predicate."""

    needs: str
    holds: Callable[[float], bool]


SIZE = Range("1 or more", lambda v: v >= 1)
NOT_NEGATIVE = Range("0 or more", lambda v: v >= 0)
POSITIVE = Range("more than 0", lambda v: v > 0)
SEED = Range("0 or more and less than 2**32 = 4294967296", lambda v: 0 <= v < 2**32)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Rules for the value of a key, in addition to its type."""

    range: Range | None = NOT_NEGATIVE
    """Range of allowed numbers. If None, any number is allowed. Values that are not numbers are not affected."""
    choices: Sequence[str] = ()
    """Allowed strings. If empty, any string is allowed."""
    options: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """For a key that accepts `{NAME: {OPTION: value}}`, the options of each known name."""
    not_empty: bool = False
    """Whether an empty string is an error."""
    aliases: str = ""
    """Names of the key in verl, TRL or open-instruct, separated by spaces. `other_libraries.NOTES` has notes on them."""
    may_change: bool = False
    """Whether the value may change on `--resume`. Such a key affects the training result only by rounding, if at all."""
    only_with: str = ""
    """Another key that must be set, because this key has no effect without it. For a section, this applies to all of its other keys."""


_NO_RULES = Rules()


def key(default: Any = MISSING, *, default_factory: Any = MISSING, **rules: Any) -> Any:
    """Creates a configuration key: a dataclass field with rules for its value.

    Args:
        default: the default value. If neither `default` nor `default_factory` is given, the key is required.
        default_factory: function that creates the default list, mapping or section.
        rules: the fields of `Rules`. `may_change` on a section applies to all of its keys.
    """
    metadata = {"rules": Rules(**rules)}
    return cast(Any, field)(default=default, default_factory=default_factory, metadata=metadata)


def rules_of(one: "Field[Any]") -> Rules:
    """Returns the rules of a field."""
    return one.metadata.get("rules", Rules())


def needed(one: "Field[Any]") -> bool:
    """Returns True if the field has no default."""
    return one.default is MISSING and one.default_factory is MISSING


_PLACES = ("run_dir", "source", "path")
"""Names, without the section, of the keys whose value is a folder, a file or a model."""
_PASSWORD = re.compile(r"(://[^/\s:@]*:)[^/\s@]+@")

SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY")
"""Environment variables whose values are never printed."""


def without_secrets(text: str) -> str:
    """Returns `text` with the values of `SECRETS` replaced by their names, and without passwords in URLs."""
    for name in SECRETS:
        if len(value := os.environ.get(name, "")) >= 8:  # a shorter value could occur in ordinary words
            text = text.replace(value, f"${name}")
    return _PASSWORD.sub(r"\1...@", text)


def refuse(key: str, value: object, needs: str, remedy: str) -> NoReturn:
    """Raises a ConfigError whose message contains the value found, the requirement (`needs`) and the remedy."""
    raise ConfigError(f"{key}: found {shown(value)}, needs {needs}; {remedy}")


@contextmanager
def prefixed(place: object, *kinds: type[Exception]) -> Iterator[None]:
    """If the block raises a ValueError or an error of `kinds`, raises a ConfigError instead, whose message begins with `place` (unless it is empty)."""
    try:
        yield
    except (ValueError, *kinds) as error:
        cause = None if isinstance(error, ConfigError) else error
        raise ConfigError(f"{place}: {error}" if place else str(error)) from cause


def shown(value: object) -> str:
    """Formats a value for a message as in YAML, truncated to 80 characters."""
    text = {"True": "true", "False": "false", "None": "null"}.get(repr(value), repr(value))
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_value(key: str, value: object, expected: Any, rules: Rules = _NO_RULES) -> None:
    """Checks the type of a value, then its range or choices. Raises ConfigError if the value is not allowed. The message names the key, the value and the
    remedy."""
    if isinstance(value, list):
        expected = next((kind for kind in get_args(expected) if get_origin(kind) is list), expected)
    if get_origin(expected) is UnionType and takes_mapping(expected) and isinstance(value, dict):
        value = _checked_name(key, value, expected, rules.options)
    elif get_origin(expected) is list:
        [kind] = get_args(expected)
        if not isinstance(value, list):
            noun = {str: "text", int: "whole numbers", float: "numbers"}.get(kind, "mappings")
            remedy = "write [] for none" if value is None else f"put it in brackets: [{value}]"
            refuse(key, value, f"a list of {noun}", remedy)
        for place, item in enumerate(value):
            check_value(f"{key}[{place}]", item, kind)
    elif get_origin(expected) is dict:
        _check_mapping(key, value)
    else:
        _check_type(key, value, expected)
    if rules.range and isinstance(value, int | float) and not rules.range.holds(value):
        refuse(key, value, rules.range.needs, "change it, or leave the key out to keep its default")
    if rules.choices and isinstance(value, str) and value not in rules.choices:
        near = nearest(str(value), rules.choices)
        remedy = f"did you mean {near[0]}?" if near else "write one of them"
        refuse(key, value, " or ".join(rules.choices), remedy)
    if rules.not_empty and not str(value).strip():
        refuse(key, value, "a name", "write one")


def takes_mapping(expected: Any) -> bool:
    """Returns whether a value of an annotated type may be a mapping."""
    return any(get_origin(kind) is dict for kind in (expected, *get_args(expected)))


class Named(NamedTuple):
    """The value of a key that accepts `NAME` and `{NAME: {OPTION: value}}`."""

    name: str
    options: dict[str, Any]


def named(value: str | Mapping[str, Any]) -> Named:
    """Returns a name with its options.

    >>> named({"cispo": {"cap": 5}})
    Named(name='cispo', options={'cap': 5})
    """
    [(name, options)] = {value: {}}.items() if isinstance(value, str) else value.items()
    return Named(name, options)


def _checked_name(key: str, value: dict[str, Any], expected: Any, known: Mapping[str, Sequence[str]]) -> str:
    """Checks that a mapping has the form `{NAME: {OPTION: value}}`, or `{NAME: value}` for values of another type, and returns the name."""
    _check_mapping(key, value)
    if len(value) != 1:
        refuse(
            key, value, "one name with its value", f"write one entry: {{{next(iter(value), 'NAME')}: ...}}"
        )
    [(name, options)] = value.items()
    [(_, kind)] = [get_args(other) for other in get_args(expected) if get_origin(other) is dict]
    if kind is not Any:
        check_value(f"{key}.{name}", options, kind, _NO_RULES)
    elif not isinstance(options, dict) or not options:
        alone = f"write the name alone: {key}={name}"
        holder, option = next(((each, name) for each in known if name in known[each]), (name, "OPTION"))
        remedy = f"name the option: {{{holder}: {{{option}: {options}}}}}" if options else alone
        refuse(f"{key}.{name}", options, "options", remedy)
    return name


def _check_type(key: str, value: object, expected: Any) -> None:
    """Checks that the value has the annotated type. A float key also accepts an integer, but there are no other conversions."""
    optional = NoneType in get_args(expected)
    kind = next(arg for arg in get_args(expected) or (expected,) if arg is not NoneType)
    needs = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]
    needs += " or null" if optional else ""
    if value is None:
        if not optional:
            quotes = ", in quotes if it begins with one of ~ ! & #" if kind is str else ""
            refuse(key, value, needs, f"write one{quotes}, or leave the key out if it has a default")
    elif isinstance(value, dict | list | tuple):
        noun = "section" if isinstance(value, dict) else "list"
        refuse(key, value, needs, f"{key} is one value, not a {noun}: write the value itself")
    elif kind is str:
        if isinstance(value, bool):
            remedy = "unquoted yes, no, on and off are true and false in YAML: quote the word"
            refuse(key, value, needs, remedy)
        if not isinstance(value, str):
            refuse(key, value, needs, f"quote it: '{value}'" if type(value) is int else "quote it as it is")
        if key.rpartition(".")[2] in _PLACES and _PASSWORD.search(value):
            remedy = "the password would be written to config.yaml and sent to trackers: leave it out"
            refuse(key, _PASSWORD.sub(r"\1...@", value), "a place without a password", remedy)
    elif kind is bool and not isinstance(value, bool):
        refuse(key, value, needs, "write true or false, unquoted (1 and 0 are not accepted)")
    elif kind in (int, float) and (isinstance(value, bool) or not isinstance(value, int | kind)):
        refuse(key, value, needs, _number_remedy(value, kind))
    elif isinstance(value, float) and not math.isfinite(value):
        refuse(key, value, f"a finite number{' or null' if optional else ''}", "write a number such as 1e-6")


def _check_mapping(key: str, value: object) -> None:
    if not isinstance(value, dict):
        refuse(key, value, "a mapping", "write `name: value` lines under it, or {} for none")
    try:
        plain = json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError):
        plain = False
    if not plain:
        needs = "text names, and JSON values: text, finite numbers, true, false, null, lists or mappings"
        refuse(key, value, needs, "quote other names and values")


def _number_remedy(value: object, kind: type) -> str:
    """Returns the remedy for a value that is not of the required type `kind`, which is int or float."""
    if isinstance(value, float) and math.isfinite(value):
        near = dict.fromkeys(f"{bound}" for bound in (math.floor(value), math.ceil(value)))
        return f"write {' or '.join(near)}"
    if not isinstance(value, str):
        return "write a number: true and false are not accepted as 1 and 0"
    if value.lower() in ("none", "off", "false", ""):
        return "write null to switch off a key that allows it"
    try:
        if re.match(r"[-+]?0\d", value):
            return f"some versions of YAML read a leading 0 as octal: write {kind(value)}"
        return f"remove the quotes: {value}" if math.isfinite(kind(value)) else "write a finite number"
    except ValueError:
        return "write a number, unquoted"
