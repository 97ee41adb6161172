"""Lists of small mappings in a configuration, such as the datasets of a mixture: each becomes an object of a dataclass."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast, get_type_hints

from dapo_jax.config.values import check_value, refuse
from dapo_jax.nearest import nearest

_Entry = TypeVar("_Entry")


def entries(key: str, values: Sequence[Mapping[str, Any]], schema: type[_Entry]) -> list[_Entry]:
    """The mappings that a list key holds, as objects of `schema`.

    Ranges, choices and names that may not be empty are looked up as `KEY[].NAME`.

    Raises:
        ConfigError: an unknown or missing name, or a value of the wrong type or out of its range; says which entry.
    """
    return [_entry(f"{key}[{place}]", value, schema, f"{key}[]") for place, value in enumerate(values)]


def _entry(key: str, value: Mapping[str, Any], schema: type[_Entry], rules: str) -> _Entry:
    hints = get_type_hints(schema)
    fields = {field.name: field for field in dataclasses.fields(cast(Any, schema))}
    for name, item in value.items():
        if name not in fields:
            near = nearest(name, fields)
            remedy = f"did you mean {near[0]}?" if near else f"its names are {', '.join(fields)}"
            refuse(f"{key}.{name}", item, "a name that is known there", remedy)
        check_value(f"{key}.{name}", item, hints[name], rules=f"{rules}.{name}")
    for name, field in fields.items():
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if needed and name not in value:
            refuse(key, dict(value), f"a {name}", f"write {name}: ... in it")
    # An integer stands for a number, as everywhere in a configuration.
    return schema(**{name: float(item) if hints[name] is float else item for name, item in value.items()})
