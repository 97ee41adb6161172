"""A YAML file and `key=value` overrides -> a configuration, or one message that says what to change.

OmegaConf reads the YAML; names are compared with the schema here, and each object checks its values when it is built (`Section`).
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, NoReturn, TypeAlias, TypeVar, cast, get_args, get_origin, overload

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dapo_jax.config.evaluate_schema import EvaluateConfig, evaluation_of
from dapo_jax.config.keys import ConfigError, needed
from dapo_jax.config.reading import check_bounds, omegaconf_problem, read_file
from dapo_jax.config.schema import TrainConfig
from dapo_jax.config.section import Section, field_types, leaf_types
from dapo_jax.config.sft_schema import SftConfig
from dapo_jax.config.shipped import shipped_configs
from dapo_jax.config.suggestions import alias_of, instead_of, unknown_key
from dapo_jax.config.values import refuse, shown
from dapo_jax.storage import AnyPath, path_of

AnyConfig: TypeAlias = TrainConfig | SftConfig | EvaluateConfig
MAX_KEY = 200
"""Characters of an override's key."""

_Config = TypeVar("_Config", TrainConfig, SftConfig, EvaluateConfig)
_Section = TypeVar("_Section", bound=Section)
_Read = TypeVar("_Read")


@overload
def load_config(path: str | PathLike[str], overrides: Sequence[str] = ()) -> TrainConfig: ...


@overload
def load_config(
    path: str | PathLike[str], overrides: Sequence[str] = (), *, schema: type[_Config]
) -> _Config: ...


def load_config(
    path: str | PathLike[str], overrides: Sequence[str] = (), *, schema: type[AnyConfig] = TrainConfig
) -> AnyConfig:
    """Reads a YAML file, applies `section.key=value` overrides in order (the last one wins), checks everything.

    An override's value is read as YAML, except that for a text key it is taken as it stands, so
    `data.prompt_template=Q: {prompt}` needs no quotes beyond the shell's. Of a key that holds a mapping, one name
    can be set: `data.chat_template_kwargs.enable_thinking=false`.

    Args:
        path: the YAML file, or the name of a configuration that comes with the package, such as `quickstart`. A file wins.
        overrides: `key=value` each, as on the command line.
        schema: `TrainConfig`, `SftConfig` or `EvaluateConfig`.

    Raises:
        ConfigError: the file or an override cannot be read, names no key of the schema, or gives a value that
            cannot be run. The message names the file or the override, the key, the value and the remedy.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"overrides: found the text {overrides!r}, needs a list; write [{overrides!r}]")
    path = _path(path)
    return _load(_named(path, lambda: read_file(path)), path, overrides, schema)


def load_evaluation(path: str | PathLike[str] | None = None, overrides: Sequence[str] = ()) -> EvaluateConfig:
    """An evaluation from its own file, or from that of a training run or warm start, whose other keys are left aside.

    Raises:
        ConfigError: as `load_config`.
    """
    if path is None:
        return evaluation_of(_load({}, None, overrides, EvaluateConfig))
    path = _path(path)
    keys = _named(path, lambda: read_file(path)).keys()
    schemas = (EvaluateConfig, TrainConfig, SftConfig)
    schema = next((each for each in schemas if keys <= field_types(each).keys()), EvaluateConfig)
    return evaluation_of(load_config(path, overrides, schema=schema))


def to_yaml(config: AnyConfig) -> str:
    """The whole configuration as YAML, every default written out; `load_config` reads it back equal."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def changed_yaml(config: AnyConfig) -> str:
    """The keys that differ from their defaults, and those without a default, as YAML; `load_config` reads it back equal.

    >>> print(changed_yaml(TrainConfig(run_dir="x", seed=1)), end="")
    run_dir: x
    seed: 1
    """
    given = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if needed(field)}
    changed = given | {key: value for key, (_, value) in changed_keys(type(config)(**given), config).items()}
    return OmegaConf.to_yaml(OmegaConf.create(_nested(changed)))


def _load(
    content: Mapping[Any, Any], path: AnyPath | None, overrides: Sequence[str], schema: type[AnyConfig]
) -> AnyConfig:
    """A configuration of a file's values and the overrides; without a file there are only these."""
    kinds = leaf_types(schema)
    values = _named(path, lambda: _flatten(content, schema, kinds))
    for override in overrides:
        try:
            key, value = _parse_override(override, kinds)
        except ConfigError as error:
            raise ConfigError(f"override {shown(override)}: {error}") from None
        _set(values, key, value, kinds)
    try:
        return _build(schema, _nested(values))
    except ConfigError as error:
        raise ConfigError(f"{_origin(path, overrides, error)}{error}") from None


def _path(path: str | PathLike[str]) -> AnyPath:
    """The file that is meant: one that is there, or else the configuration of that name that comes with the package."""
    try:
        file = path_of(path)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    shipped = shipped_configs().get(str(path))
    return file if shipped is None or file.is_file() else shipped


def _named(path: AnyPath | None, read: Callable[[], _Read]) -> _Read:
    """Calls `read`; its errors begin with the file."""
    try:
        return read()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def changed_keys(a: AnyConfig, b: AnyConfig) -> dict[str, tuple[Any, Any]]:
    """The dotted keys in which two configurations differ, each with the value in `a` and the value in `b`.

    >>> changed_keys(TrainConfig(run_dir="x", seed=1), TrainConfig(run_dir="x", seed=2))
    {'seed': (1, 2)}
    """
    if type(a) is not type(b):
        raise ValueError(
            f"cannot compare a {type(a).__name__} with a {type(b).__name__}; pass two of one class"
        )
    before, after = leaf_values(a), leaf_values(b)
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}


def leaf_values(config: AnyConfig) -> dict[str, Any]:
    """Every dotted key of a configuration, with its value."""
    leaves = {}
    for key in leaf_types(type(config)):
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name)
        leaves[key] = value
    return leaves


def _flatten(
    section: Mapping[Any, Any], schema: type, kinds: Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """Dotted key -> value of a nested mapping, whose names are those of the schema."""
    values: dict[str, Any] = {}
    for name, value in section.items():
        key = f"{prefix}{name}"
        kind = field_types(schema).get(name) if isinstance(name, str) else None
        if kind is None:
            _refuse_unknown(key, value, kinds)
        elif not dataclasses.is_dataclass(kind):
            values[key] = value
        elif isinstance(value, dict):
            values |= _flatten(value, cast(type, kind), kinds, f"{key}.")
        else:
            keys = ", ".join(f"`{name}`" for name in field_types(cast(type, kind)))
            refuse(
                key, value, f"a section with some of {keys}", "indent its keys under it, or remove the line"
            )
    return values


def _refuse_unknown(key: str, value: object, kinds: Mapping[str, Any]) -> NoReturn:
    """Raises for a key that the schema does not have; in an unknown section, for a key that we know under
    another name, or else its first."""
    if key in kinds or _is_section(key, kinds):
        nested = ": ".join(key.split("."))
        raise ConfigError(f"{key}: dotted keys are for overrides; in a file write it nested, {nested}: ...")
    inside = dict(_walk(key, value))
    answered = (each for each in inside if alias_of(each, kinds) or instead_of(each, kinds))
    key = next(answered, next(iter(inside)))
    value = inside[key]
    parent = key.rpartition(".")[0]
    if parent in kinds:
        raise ConfigError(
            f"unknown key {key} = {shown(value)}: {parent} holds a value, not a section; set {parent}"
        )
    raise ConfigError(f"unknown key {key} = {shown(value)}: {unknown_key(key, kinds)}")


def _walk(key: str, value: object) -> Iterator[tuple[str, object]]:
    """The dotted keys inside a value that the schema does not know, or the key itself."""
    if not isinstance(value, dict) or not value:
        yield key, value
        return
    for name, inner in value.items():
        yield from _walk(f"{key}.{name}", inner)


def _is_section(key: str, kinds: Mapping[str, Any]) -> bool:
    return any(each.startswith(f"{key}.") for each in kinds)


def _parse_override(override: str, kinds: Mapping[str, Any]) -> tuple[str, Any]:
    """`key=value` -> the dotted key and the value."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError("needs the form key=value, without spaces around =, as in batch.group_size=16")
    if len(key) > MAX_KEY:
        raise ConfigError(f"the key before = has {len(key)} characters, needs at most {MAX_KEY}; shorten it")
    if key != key.strip().lstrip("-+~"):
        raise ConfigError(f"write {key.strip().lstrip('-+~')}={text}, with nothing around the key")
    if _is_section(key, kinds):
        keys = ", ".join(each for each in kinds if each.startswith(f"{key}."))
        raise ConfigError(
            f"{key} = {text} would replace a whole section; override one key at a time, of {keys}"
        )
    if _mapping_key(key, kinds):
        return key, _parse_value(key, text)
    if key not in kinds:
        _refuse_unknown(key, text, kinds)
    literal = kinds[key] is str and not _is_yaml_text(text)
    return key, text if literal else _parse_value(key, text)


def _mapping_key(key: str, kinds: Mapping[str, Any]) -> str | None:
    """The key of the schema that holds a mapping and has `key` inside, if there is one."""
    return next(
        (each for each, kind in kinds.items() if get_origin(kind) is dict and key.startswith(f"{each}.")),
        None,
    )


def _set(values: dict[str, Any], key: str, value: object, kinds: Mapping[str, Any]) -> None:
    """Sets a key, or one name inside a key that holds a mapping."""
    mapping = _mapping_key(key, kinds)
    if mapping is None:
        values[key] = value
        return
    *outer, name = key.removeprefix(f"{mapping}.").split(".")
    if not isinstance(held := values.get(mapping, {}), dict):
        return  # of the file, and refused when the object is built
    node = values[mapping] = dict(held)
    for part in outer:
        node[part] = dict(inner) if isinstance(inner := node.get(part), dict) else {}
        node = node[part]
    node[name] = value


def _is_yaml_text(text: str) -> bool:
    """True for a null and for quoted text; any other value of a text key is taken literally."""
    return text in ("null", "~") or (len(text) > 1 and text[0] == text[-1] and text[0] in "'\"")


def _parse_value(key: str, text: str) -> Any:
    try:
        check_bounds(text)
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
        return cast(dict[str, Any], parsed)["value"]
    except yaml.MarkedYAMLError as error:
        raise ConfigError(
            f"{key}: found {shown(text)}, which is not YAML: {error.problem}; put it in quotes"
        ) from None
    except (yaml.YAMLError, UnicodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{key}: found {shown(text)}, which is not YAML: {reason}; write text") from None
    except OmegaConfBaseException as error:
        raise ConfigError(omegaconf_problem(error, key)) from None


def _build(schema: type[_Section], values: Mapping[str, Any], defaults: _Section | None = None) -> _Section:
    """An object of the schema with these values, which it checks; `defaults` has the others, if they are not the schema's own."""
    kinds, given = field_types(schema), {}
    for field in dataclasses.fields(cast(Any, schema)):
        name, kind = field.name, kinds[field.name]
        if name in values and dataclasses.is_dataclass(kind):
            given[name] = _build(cast(Any, kind), values[name], _default_of(field, defaults))
        elif name in values:
            given[name] = _as_float(values[name]) if float in (kind, *get_args(kind)) else values[name]
        elif needed(field):
            remedy = f"add `{name}: some/folder` to the file or {name}=some/folder to the command"
            raise ConfigError(f"{name}: missing, needs a value; {remedy}")
    return schema(**given) if defaults is None else dataclasses.replace(cast(Any, defaults), **given)


def _default_of(field: "dataclasses.Field[Any]", defaults: object) -> Any:
    made = cast(Any, field.default_factory)
    return made() if defaults is None else getattr(defaults, field.name)


def _as_float(value: object) -> object:
    """An integer stands for a number, also in a list."""
    if isinstance(value, list):
        return [_as_float(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted key as sections in sections."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        node = nested
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return nested


def _origin(path: AnyPath | None, overrides: Sequence[str], error: ConfigError) -> str:
    """The file, and the overrides whose keys the error is about."""
    keys = set(re.findall(r"[a-z_0-9]+(?:\.[a-z_0-9]+)*", str(error)))
    about = [override for override in overrides if override.partition("=")[0] in keys]
    # One value is wrong; or two contradict each other, and one of them may come from the file.
    if error.key and about:
        return f"override {shown(about[-1])}: "
    named = f"override {' '.join(map(repr, about))}" if about else ""
    origin = " with ".join([str(path)] * (path is not None) + [named] * bool(named))
    return f"{origin}: " if origin else ""
