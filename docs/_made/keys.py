"""The keys of a configuration as Markdown, from the dataclasses and the text below each of their fields."""

import ast
import dataclasses
import inspect
import itertools
import json
import re
import sys
import textwrap
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from _made.tables import table
from dapo_jax import config
from dapo_jax.config.data_schema import ExampleConfig
from dapo_jax.config.keys import Rules, rules_of

ENTRIES: dict[str, type] = {
    "data.few_shot": ExampleConfig,
    "data.mixture": config.SourceConfig,
    "eval.datasets": config.SourceConfig,
    "reward.grader": config.GraderConfig,
}
"""Keys that hold a list of mappings -> what each mapping may have."""

PAPER = re.compile(r"Eq\. \d+|Section \d(?:\.\d)?|Algorithm \d")
WORDS = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true or false",
    type(None): "null",
    Any: "anything",
}


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of a configuration."""

    name: str
    """Dotted; `data.mixture[].weight` is one of the entries of a list."""
    kind: str
    default: str
    """As it is written in YAML; empty: it must be given."""
    text: str
    paper: tuple[str, ...]
    """Equations and sections of the paper."""
    rules: Rules
    """The rules for its value."""

    @property
    def needs(self) -> str:
        """What the value must be, beyond its type."""
        if self.rules.choices:
            return "One of " + ", ".join(f"`{written(choice)}`" for choice in self.rules.choices) + "."
        is_number = self.kind.startswith(("integer", "number"))
        return f"Must be {self.rules.range.needs}." if self.rules.range and is_number else ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """The keys of one dataclass at one place of a configuration."""

    name: str
    schema: type
    keys: tuple[Key, ...]


def sections(schema: type, name: str = "", default: Mapping[str, Any] | None = None) -> Iterator[Section]:
    """The keys of a configuration class, its own first, then those of each section in it."""
    hints, default = get_type_hints(schema), default or _defaults(schema)
    yield Section(name=name, schema=schema, keys=tuple(_keys(schema, name, default)))
    for field in dataclasses.fields(schema):
        inner = f"{name}.{field.name}".lstrip(".")
        if dataclasses.is_dataclass(hints[field.name]):
            yield from sections(hints[field.name], inner, vars(default[field.name]))
        elif inner in ENTRIES:
            entry = ENTRIES[inner]
            yield Section(
                name=f"{inner}[]", schema=entry, keys=tuple(_keys(entry, f"{inner}[]", _defaults(entry)))
            )


def all_keys(schema: type) -> dict[str, Key]:
    """Every key of a configuration class by its dotted name."""
    return {key.name: key for section in sections(schema) for key in section.keys}


def markdown(schema: str) -> str:
    """All keys of a configuration class, each with its type, its default and what is said below its field."""
    return "\n".join(_section(section) for section in sections(getattr(config, schema)))


def markdown_beside(schema: str) -> str:
    """The keys of another configuration class than `TrainConfig`: those that are its own at length, the others by their name."""
    known = all_keys(config.TrainConfig)
    lines = []
    for section in sections(getattr(config, schema)):
        own = [
            key for key in section.keys if known.get(key.name, key).text != key.text or key.name not in known
        ]
        shared = [key for key in section.keys if key not in own]
        if own:
            lines.append(_section(dataclasses.replace(section, keys=tuple(own))))
        if shared:
            head = f"**`{section.name}`**, as" if section.name and not own else "As"
            lines.append(
                f"{head} in training: {', '.join(_beside(key, known[key.name]) for key in shared)}.\n"
            )
    return "\n".join(lines)


def _beside(key: Key, known: Key) -> str:
    shown = f"`{key.name}`"
    return shown if key.default == known.default else f"{shown} (here `{key.default}`)"


def _section(section: Section) -> str:
    said = inspect.getdoc(section.schema) or ""
    title = f"### `{section.name}`\n\n" if section.name else ""
    each = f" Each entry of `{section.name[:-2]}` has these keys." if section.name.endswith("[]") else ""
    rows = [[f"`{key.name}`", key.kind, _default(key), _meaning(key)] for key in section.keys]
    return f"{title}{said}{each}\n\n{table(['key', 'type', 'default', 'meaning'], rows)}"


def _default(key: Key) -> str:
    return f"`{key.default}`" if key.default else "none (required)"


def _meaning(key: Key) -> str:
    paper = f"Paper: {', '.join(key.paper)}." if key.paper else ""
    return " ".join(filter(None, [key.text, key.needs, paper]))


def _keys(schema: type, section: str, default: Mapping[str, Any]) -> Iterator[Key]:
    hints, said = get_type_hints(schema), texts(schema)
    for field in dataclasses.fields(schema):
        if dataclasses.is_dataclass(hints[field.name]):
            continue
        text = said.get(field.name, "")
        missing = default[field.name] is dataclasses.MISSING
        yield Key(
            name=f"{section}.{field.name}".lstrip("."),
            kind=kind_of(hints[field.name]),
            default="" if missing else written(default[field.name]),
            text=text,
            paper=tuple(dict.fromkeys(PAPER.findall(text))),
            rules=rules_of(field),
        )


def _defaults(schema: type) -> dict[str, Any]:
    found = {}
    for field in dataclasses.fields(schema):
        made = field.default_factory
        found[field.name] = field.default if made is dataclasses.MISSING else made()
    return found


@cache
def texts(schema: type) -> dict[str, str]:
    """Field -> the text below it in the source, also of the classes that `schema` inherits from."""
    inherited = [base for base in schema.__bases__ if dataclasses.is_dataclass(base)]
    found = {name: text for base in inherited for name, text in texts(base).items()}
    tree = ast.parse(textwrap.dedent(inspect.getsource(schema)))
    [body] = [node.body for node in tree.body if isinstance(node, ast.ClassDef)]
    return found | {
        field.target.id: inspect.cleandoc(below.value.value)
        for field, below in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }


def kind_of(hint: Any) -> str:
    """A type in words."""
    if hint in WORDS:
        return WORDS[hint]
    origin, inside = get_origin(hint), get_args(hint)
    if origin is types.UnionType:
        return " or ".join(kind_of(one) for one in inside)
    if origin is list:
        plural = {"text": "texts", "mapping": "mappings", "integer": "integers", "number": "numbers"}
        return f"list of {plural[kind_of(inside[0])]}"
    if origin is dict:
        return "mapping"
    raise TypeError(f"{hint} has no words in {sys.modules[__name__].__file__}")


def written(value: Any) -> str:
    """A default as it is written in YAML."""
    return value if isinstance(value, str) and value.isprintable() and value else json.dumps(value)
