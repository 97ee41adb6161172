"""Loads a configuration from a YAML file and `key=value` overrides, or raises one message that contains the remedy.

Names are compared with the schema here; each object checks its values when it is built (`Section`).
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from os import PathLike
from typing import Any, NoReturn, TypeAlias, TypeVar, cast, get_args, get_origin, overload

import yaml

from dapo_jax.config.keys import ConfigError, needed, refuse, shown
from dapo_jax.config.other_libraries import of_another_library, unknown_key
from dapo_jax.config.reading import read_file, read_yaml, shipped_configs, write_yaml
from dapo_jax.config.schema import EvaluateConfig, SftConfig, TrainConfig, evaluation_of
from dapo_jax.config.section import Section, field_types, leaf_types
from dapo_jax.storage import path_of

AnyConfig: TypeAlias = TrainConfig | SftConfig | EvaluateConfig

_Config = TypeVar("_Config", TrainConfig, SftConfig, EvaluateConfig)
_Section = TypeVar("_Section", bound=Section)


@overload
def load_config(path: str | PathLike[str], overrides: Sequence[str] = ()) -> TrainConfig: ...


@overload
def load_config(
    path: str | PathLike[str], overrides: Sequence[str] = (), *, schema: type[_Config]
) -> _Config: ...


def load_config(
    path: str | PathLike[str], overrides: Sequence[str] = (), *, schema: type[AnyConfig] = TrainConfig
) -> AnyConfig:
    """Reads a YAML file, applies `section.key=value` overrides in order (the last one wins), and checks everything.

    The value of an override is YAML. For a text key it is taken literally, so `data.prompt_template=Q: {prompt}` needs no quotes
    beyond the shell's. A name inside a key that holds a mapping can be set: `data.chat_template_kwargs.enable_thinking=false`.

    Args:
        path: a YAML file, or the name of a configuration in the package, such as `quickstart`. A file takes precedence.
        overrides: `key=value` each, as on the command line.
        schema: `TrainConfig`, `SftConfig` or `EvaluateConfig`.

    Raises:
        ConfigError: the file or an override cannot be read, names a key that the schema does not have, or gives a value that
            cannot be run. The message names the file or the override, the key, the value and the remedy.
    """
    return _load(path, overrides, (schema,))


def load_evaluation(path: str | PathLike[str] | None = None, overrides: Sequence[str] = ()) -> EvaluateConfig:
    """Loads an evaluation from its own file, or from the file of a training run or warm start, whose other keys are ignored.

    Raises:
        ConfigError: as `load_config`.
    """
    return evaluation_of(_load(path, overrides, (EvaluateConfig, TrainConfig, SftConfig)))


def to_yaml(config: AnyConfig) -> str:
    """Returns the whole configuration as YAML, with every default; `load_config` reads it back equal."""
    return write_yaml(dataclasses.asdict(config))


def changed_yaml(config: AnyConfig) -> str:
    """Returns the keys that are required or differ from their defaults, as YAML; `load_config` reads it back equal.

    >>> print(changed_yaml(TrainConfig(run_dir="x", seed=1)), end="")
    run_dir: x
    seed: 1
    """
    changed = {
        field.name: getattr(config, field.name) for field in dataclasses.fields(config) if needed(field)
    }
    for key, (_, value) in changed_keys(type(config)(**changed), config).items():
        _set(changed, key, value)
    return write_yaml(changed)


def changed_keys(a: AnyConfig, b: AnyConfig) -> dict[str, tuple[Any, Any]]:
    """Returns the dotted keys in which two configurations differ, each with the value in `a` and the value in `b`.

    >>> changed_keys(TrainConfig(run_dir="x", seed=1), TrainConfig(run_dir="x", seed=2))
    {'seed': (1, 2)}
    """
    before, after = leaf_values(a), leaf_values(b)
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}


def leaf_values(config: AnyConfig) -> dict[str, Any]:
    """Returns the value of every dotted key of a configuration."""
    return {key: attrgetter(key)(config) for key in leaf_types(type(config))}


def _load(
    name: str | PathLike[str] | None, overrides: Sequence[str], schemas: Sequence[type[AnyConfig]]
) -> AnyConfig:
    """Builds a configuration from a file, if a name is given, and overrides, by the first schema that has the file's sections."""
    if isinstance(overrides, str):
        raise ConfigError(f"overrides: found the text {overrides!r}, needs a list; write [{overrides!r}]")
    path, content = None, dict[Any, Any]()
    if name is not None:
        try:
            path = path_of(name)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if not path.is_file():
            path = shipped_configs().get(str(name), path)
        with _prefixed(path):
            content = read_file(path)
    schema = next((each for each in schemas if content.keys() <= field_types(each).keys()), schemas[0])
    kinds = leaf_types(schema)
    with _prefixed(path):
        _check_names(content, schema, kinds)
    for override in overrides:
        with _prefixed(f"override {shown(override)}"):
            _set(content, *_parse_override(override, kinds))
    try:
        return _build(schema, content)
    except ConfigError as error:
        keys = re.findall(r"[a-z_0-9]+(?:\.[a-z_0-9]+)*", str(error))
        about = [shown(override) for override in overrides if override.partition("=")[0] in keys]
        places = [str(path)] * (path is not None) + [f"override {' '.join(about)}"] * bool(about)
        raise ConfigError(f"{' with '.join(places)}: {error}" if places else str(error)) from None


@contextmanager
def _prefixed(place: object) -> Iterator[None]:
    """Puts the file or the override before the message of an error."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None


def _check_names(
    section: Mapping[Any, Any], schema: type, kinds: Mapping[str, Any], prefix: str = ""
) -> None:
    """Raises ConfigError for a name that the schema does not have, and for a section that is not a mapping."""
    for name, value in section.items():
        key = f"{prefix}{name}"
        kind = field_types(schema).get(name) if isinstance(name, str) else None
        if kind is None:
            _refuse_unknown(key, value, kinds)
        elif dataclasses.is_dataclass(kind):
            if not isinstance(value, dict):
                keys = ", ".join(f"`{name}`" for name in field_types(cast(type, kind)))
                remedy = "indent its keys under it, or remove the line"
                refuse(key, value, f"a section with some of {keys}", remedy)
            _check_names(value, cast(type, kind), kinds, f"{key}.")


def _refuse_unknown(key: str, value: object, kinds: Mapping[str, Any]) -> NoReturn:
    """Raises for a key that the schema does not have. In an unknown section it names a key with a known remedy, or else the first."""
    if key in kinds or _is_section(key, kinds):
        nested = ": ".join(key.split("."))
        raise ConfigError(f"{key}: dotted keys are for overrides; in a file write it nested, {nested}: ...")
    inside = dict(_walk(key, value))
    key = next((each for each in inside if of_another_library(each, kinds)), next(iter(inside)))
    parent = key.rpartition(".")[0]
    remedy = (
        f"{parent} holds a value, not a section; set {parent}" if parent in kinds else unknown_key(key, kinds)
    )
    raise ConfigError(f"unknown key {key} = {shown(inside[key])}: {remedy}")


def _walk(key: str, value: object) -> Iterator[tuple[str, object]]:
    """Yields the dotted keys inside an unknown value, or the key itself."""
    if not isinstance(value, dict) or not value:
        yield key, value
        return
    for name, inner in value.items():
        yield from _walk(f"{key}.{name}", inner)


def _is_section(key: str, kinds: Mapping[str, Any]) -> bool:
    return any(each.startswith(f"{key}.") for each in kinds)


def _parse_override(override: str, kinds: Mapping[str, Any]) -> tuple[str, Any]:
    """Parses `key=value` into the dotted key and the value."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError("needs the form key=value, without spaces around =, as in batch.group_size=16")
    if key != key.strip().lstrip("-+~"):
        raise ConfigError(f"write {key.strip().lstrip('-+~')}={text}, with nothing around the key")
    if _is_section(key, kinds):
        keys = ", ".join(each for each in kinds if each.startswith(f"{key}."))
        raise ConfigError(
            f"{key} = {text} would replace a whole section; override one key at a time, of {keys}"
        )
    mappings = [f"{each}." for each, kind in kinds.items() if get_origin(kind) is dict]
    if key not in kinds and not key.startswith(tuple(mappings)):
        _refuse_unknown(key, text, kinds)
    # Null and quoted text are YAML for a text key too.
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    if kinds.get(key) is str and text not in ("null", "~") and not quoted:
        return key, text
    try:
        return key, read_yaml(text)
    except yaml.YAMLError as error:
        reason = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ConfigError(
            f"{key}: found {shown(text)}, which is not YAML: {reason}; put it in quotes"
        ) from None


def _set(values: dict[str, Any], key: str, value: object) -> None:
    """Sets the value of a dotted key in nested mappings."""
    *outer, name = key.split(".")
    for part in outer:
        inner = values.get(part, {})
        if not isinstance(inner, dict):
            refuse(part, inner, "a mapping", f"remove it, or leave out {key}")
        values[part] = dict(inner)  # an anchor of YAML may share it
        values = values[part]
    values[name] = value


def _build(schema: type[_Section], values: Mapping[str, Any], defaults: _Section | None = None) -> _Section:
    """Builds and checks an object of the schema. `defaults` has the values that are not given, if they differ from the schema's."""
    kinds, given = field_types(schema), {}
    for field in dataclasses.fields(cast(Any, schema)):
        name, kind = field.name, kinds[field.name]
        if dataclasses.is_dataclass(kind) and isinstance(values.get(name), Mapping):
            usual = cast(Any, field.default_factory)() if defaults is None else getattr(defaults, name)
            given[name] = _build(cast(Any, kind), values[name], usual)
        elif name in values:
            given[name] = _as_float(values[name]) if float in (kind, *get_args(kind)) else values[name]
        elif defaults is None and needed(field):
            remedy = f"add `{name}: some/folder` to the file or {name}=some/folder to the command"
            raise ConfigError(f"{name}: missing, needs a value; {remedy}")
    return schema(**given) if defaults is None else dataclasses.replace(cast(Any, defaults), **given)


def replaced(config: _Section, changes: Mapping[str, Any]) -> _Section:
    """Returns the configuration with other values of some keys (dotted key -> value). It is checked like a loaded one."""
    values: dict[str, Any] = {}
    for key, value in changes.items():
        _set(values, key, value)
    return _build(type(config), values, config)


def _as_float(value: object) -> object:
    """Converts an integer, also in a list, to a float."""
    if isinstance(value, list):
        return [_as_float(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
