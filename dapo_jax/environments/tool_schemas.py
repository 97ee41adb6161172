"""Creates JSON schemas of Python functions for chat templates, and validates calls against the schemas.

The schemas have the tool format of the OpenAI API and transformers. Types come from the annotations, and descriptions from the docstring.
"""

import inspect
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_TYPES: dict[Any, str] = {
    str: "string", int: "integer", float: "number", bool: "boolean", list: "array", tuple: "array", dict: "object", type(None): "null"
}  # fmt: skip
_SECTION = re.compile(r"^(Args|Arguments|Returns|Raises|Yields|Examples?|Notes?):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^( +)\*{0,2}(\w+)(?: *\([^()\n]*\))?:(.*(?:\n\1 +.*|\n *(?=\n))*)", re.MULTILINE)


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the schema of a function: `{"type": "function", "function": {"name", "description", "parameters"}}`.

    The docstring up to its first section becomes the description, and its `Args:` section describes the arguments.

    Raises:
        ValueError: an argument has no annotation, has a type without a JSON equivalent, or is positional-only.

    >>> def add(a: int, b: int = 0) -> int:
    ...     '''Adds.
    ...
    ...     Args:
    ...         a: the first one
    ...     '''
    >>> schema_of(add)["function"]["parameters"]["properties"]
    {'a': {'type': 'integer', 'description': 'the first one'}, 'b': {'type': 'integer'}}
    """
    name = getattr(function, "__name__", type(function).__name__)
    try:
        hints = get_type_hints(function)
    except Exception as error:  # user annotations can raise any exception
        raise ValueError(f"tool {name}: its annotations cannot be evaluated: {error}") from error
    description, described = _docstring(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    required = []
    for argument in inspect.signature(function).parameters.values():
        if argument.kind not in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY):
            raise ValueError(f"tool {name}: {argument} must be a parameter that can be passed by name")
        if argument.name not in hints:
            raise ValueError(f"tool {name}: argument {argument.name} has no annotation; annotate its type")
        properties[argument.name] = _schema(hints[argument.name], f"tool {name}: argument {argument.name}")
        if argument.name in described:
            properties[argument.name]["description"] = described[argument.name]
        if argument.default is argument.empty:
            required.append(argument.name)
    parameters = {"type": "object", "properties": properties} | ({"required": required} if required else {})
    function_schema = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function_schema}


def what_is_wrong(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> str:
    """Validates a call's arguments against the schema's `parameters`. Returns the first error, or an empty string if they are valid."""
    known = parameters["properties"]
    for name in arguments:
        if name not in known:
            return f"unknown argument {name!r:.80}; the arguments are {sorted(known)}"
    for name in parameters.get("required", ()):
        if name not in arguments:
            return f"argument {name!r} is missing"
    try:
        misfits = (misfit(value, known[name], name) for name, value in arguments.items())
        return next(filter(None, misfits), "")
    except RecursionError:
        return "an argument is nested too deeply"


def misfit(value: Any, schema: Mapping[str, Any] | bool, where: str) -> str:
    """Validates a JSON value against a schema. Returns the first error, which begins with `where`, or an empty string."""
    if isinstance(schema, bool):  # True accepts every value, and False accepts no value
        return "" if schema else f"{where} is unknown"
    if value is None and schema.get("nullable"):
        return ""
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        misfits = [misfit(value, choice, where) for choice in choices]
        return "" if "" in misfits else misfits[0]
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    kind = _TYPES[type(value)]
    if kinds and kind not in kinds and not (kind == "integer" and "number" in kinds):
        return f"{where} must be {' or '.join(kinds)}; got {value!r:.80}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{where} must be one of {schema['enum']}; got {value!r:.80}"
    inside: list[tuple[Any, Any, Any]] = []
    if isinstance(value, list):
        items = schema.get("prefixItems", [schema.get("items", {})] * len(value))
        if len(items) != len(value):
            return f"{where} must have {len(items)} items; got {len(value)}"
        inside = list(zip(range(len(value)), value, items, strict=True))
    elif isinstance(value, dict):
        named, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        inside = [(name, item, named.get(name, others)) for name, item in value.items()]
    misfits = (misfit(item, of_item, f"{where}[{key!r:.40}]") for key, item, of_item in inside)
    return next(filter(None, misfits), "")


def _schema(hint: Any, where: str) -> dict[str, Any]:
    """Returns the schema of an annotation in the format that transformers uses."""
    if hint is Any:
        return {}
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Literal and all(isinstance(value, str | int | None) for value in inside):
        kinds = list(dict.fromkeys(_TYPES[type(value)] for value in inside))
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(inside)}
    if origin is list:
        return {"type": "array", "items": _schema(inside[0], where)}
    if origin is tuple and ... not in inside:
        return {"type": "array", "prefixItems": [_schema(item, where) for item in inside]}
    if origin is dict and inside[0] is str:
        return {"type": "object", "additionalProperties": _schema(inside[1], where)}
    if origin in (Union, types.UnionType):
        choices = [_schema(choice, where) for choice in inside if choice is not type(None)]
        plain = all(choice.keys() == {"type"} for choice in choices)
        kinds = sorted({choice["type"] for choice in choices}) if plain else []
        schema = choices[0] if len(choices) == 1 else {"type": kinds} if plain else {"anyOf": choices}
        return schema | ({"nullable": True} if type(None) in inside else {})
    raise ValueError(
        f"{where} has the type {hint!r:.120}, which has no JSON schema; use str, int, float, bool, list, tuple, dict, Literal, or unions of these"
    )


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """Returns the description and the argument descriptions from a Google-style docstring."""
    description, *sections = _SECTION.split(text)
    inside = dict(zip(sections[::2], sections[1::2], strict=True))
    lines = inside.get("Args", inside.get("Arguments", ""))
    return description.strip(), {name: " ".join(about.split()) for _, name, about in _ARGUMENT.findall(lines)}
