"""From a Python function to the JSON schema that a chat template tells the model, and from the schema to what is wrong with a call.

The schema is the one of OpenAI's and transformers' tools: name and arguments are the function's, types are its annotations, what is said of them stands in its docstring.
"""

import inspect
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_TYPES: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    tuple: "array",
    dict: "object",
    type(None): "null",
}
_PYTHON: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_SECTION = re.compile(
    r"^(Args|Arguments|Returns|Raises|Yields|Example|Examples|Note|Notes):\s*$", re.MULTILINE
)
_ARGUMENT = re.compile(r"^( +)\*{0,2}(\w+)(?: *\([^()\n]*\))?:(.*(?:\n\1 +.*|\n *(?=\n))*)", re.MULTILINE)


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The schema of a function: `{"type": "function", "function": {"name", "description", "parameters"}}`.

    The docstring's text up to its first section is the description, the lines below `Args:` are those of the arguments.

    Raises:
        ValueError: an argument has no annotation, or one that JSON has no type for; or it can only be given by its place.

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
    except Exception as error:  # of evaluating somebody else's annotations
        raise ValueError(f"tool {name}: its annotations cannot be read: {error}") from error
    said, described = _docstring(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    required = []
    for argument in inspect.signature(function).parameters.values():
        if argument.kind not in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY):
            raise ValueError(
                f"tool {name}: {argument} cannot be given by its name; a tool's arguments have names"
            )
        if argument.name not in hints:
            raise ValueError(
                f"tool {name}: argument {argument.name} has no annotation, which says what it takes"
            )
        properties[argument.name] = _schema(hints[argument.name], f"tool {name}: argument {argument.name}")
        if argument.name in described:
            properties[argument.name]["description"] = described[argument.name]
        if argument.default is argument.empty:
            required.append(argument.name)
    parameters = {"type": "object", "properties": properties} | ({"required": required} if required else {})
    return {"type": "function", "function": {"name": name, "description": said, "parameters": parameters}}


def what_is_wrong(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> str:
    """The first thing in the arguments of a call that the schema's `parameters` do not allow; empty if there is none."""
    known = parameters["properties"]
    for name in arguments:
        if name not in known:
            return f"there is no argument {name!r:.80}; there are {sorted(known)}"
    for name in parameters.get("required", ()):
        if name not in arguments:
            return f"argument {name!r} is missing"
    try:
        misfits = (_misfit(value, known[name], name) for name, value in arguments.items())
        return next(filter(None, misfits), "")
    except RecursionError:
        return "an argument has too many brackets inside one another"


def _misfit(value: Any, schema: Mapping[str, Any], where: str) -> str:
    if value is None and schema.get("nullable"):
        return ""
    if "anyOf" in schema:
        found = [_misfit(value, one, where) for one in schema["anyOf"]]
        return "" if "" in found else found[0]
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    # True is an int in Python, and none in JSON.
    fits = any(
        isinstance(value, _PYTHON[kind]) and (kind == "boolean" or not isinstance(value, bool))
        for kind in kinds
    )
    if kinds and not fits:
        return f"{where} has to be {' or '.join(kinds)}; got {value!r:.80}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{where} has to be one of {schema['enum']}; got {value!r:.80}"
    inner: list[tuple[Any, Any, str]] = []
    if isinstance(value, list):
        each = schema.get("prefixItems")
        if each is not None and len(each) != len(value):
            return f"{where} has to have {len(each)} items; got {len(value)}"
        each = [schema.get("items", {})] * len(value) if each is None else each
        inner = [
            (item, one, f"{where}[{place}]")
            for place, (item, one) in enumerate(zip(value, each, strict=True))
        ]
    elif isinstance(value, dict):
        inner = [
            (item, schema.get("additionalProperties", {}), f"{where}[{name!r:.40}]")
            for name, item in value.items()
        ]
    return next((said for item, one, place in inner if (said := _misfit(item, one, place))), "")


def _schema(hint: Any, where: str) -> dict[str, Any]:
    """The schema of an annotation, in transformers' words."""
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
        return {"type": "array", "prefixItems": [_schema(each, where) for each in inside]}
    if origin is dict and inside[0] is str:
        return {"type": "object", "additionalProperties": _schema(inside[1], where)}
    if origin in (Union, types.UnionType):
        several = [_schema(each, where) for each in inside if each is not type(None)]
        plain = all(one.keys() == {"type"} for one in several)
        kinds = sorted({one["type"] for one in several}) if plain else []
        found = several[0] if len(several) == 1 else {"type": kinds} if plain else {"anyOf": several}
        return found | ({"nullable": True} if type(None) in inside else {})
    raise ValueError(
        f"{where} is annotated with {hint!r:.120}, which JSON has no type for; str, int, float, bool, list, tuple, dict, Literal, and unions of them are known"
    )


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description, and those of the arguments, of a docstring in Google's style."""
    said, *sections = _SECTION.split(text)
    inside = dict(zip(sections[::2], sections[1::2], strict=True))
    lines = inside.get("Args", inside.get("Arguments", ""))
    return said.strip(), {name: " ".join(about.split()) for _, name, about in _ARGUMENT.findall(lines)}
