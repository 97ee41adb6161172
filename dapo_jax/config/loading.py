"""Loads a configuration from a YAML file and `key=value` overrides. Each error is reported in a single message that contains the remedy.

This module checks the names of keys. Their values are checked when the configuration sections are created (`Section`).
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from os import PathLike
from typing import Any, NoReturn, TypeAlias, TypeVar, cast, get_args

import yaml

from dapo_jax.config.algorithms import ALGORITHMS, DEFINING, NOT_OFFERED, OTHER_NAMES
from dapo_jax.config.former_keys import converted, has, is_former, put, refuse_former, value_of
from dapo_jax.config.keys import ConfigError, named, needed, prefixed, refuse, shown, takes_mapping
from dapo_jax.config.other_libraries import of_another_library, unknown_key
from dapo_jax.config.reading import read_file, read_yaml, shipped_configs, write_yaml
from dapo_jax.config.schema import EvaluateConfig, SftConfig, TrainConfig
from dapo_jax.config.section import Section, field_types, leaf_types
from dapo_jax.hints import nearest
from dapo_jax.storage import path_of

AnyConfig: TypeAlias = TrainConfig | SftConfig | EvaluateConfig

OF_TRAINING = ("algorithm=", "dynamic_sampling.metric=")
"""Beginnings of the overrides of a training configuration that also change an evaluation."""

RECORD = "config.yaml"
"""Name of the file in which a run records its configuration. Keys of earlier versions are converted in it."""

_Config = TypeVar("_Config", bound=AnyConfig)
_Section = TypeVar("_Section", bound=Section)


def load_config(
    path: str | PathLike[str], overrides: Sequence[str] = (), *, schema: type[_Config] = TrainConfig
) -> _Config:
    """Loads a YAML file, applies `section.key=value` overrides in order (the last one wins), and checks the result.

    The value of an override is parsed as YAML. For a text key, however, the value is used literally, so `data.prompt_template=Q: {prompt}` needs no
    quotes beyond the shell's. If a key is a mapping, a single entry can be set: `data.chat_template_kwargs.enable_thinking=false`.

    `algorithm` is not a key: for training, it is replaced by the keys of an algorithm (`dapo_jax.config.algorithms`). In a file, these keys precede
    all others. The override `algorithm=gspo` sets them at its place in the list. If there are several algorithms, only the last one is used.

    Args:
        path: a YAML file, or the name of a configuration in the package, for example `quickstart`. If both exist, the file is used.
        overrides: `key=value` strings, as on the command line.
        schema: `TrainConfig`, `SftConfig` or `EvaluateConfig`.

    Raises:
        ConfigError: the file or an override cannot be parsed, has a key that is not in the schema, or has an invalid
            value. The message names the file or the override, the key, the value and the remedy.
    """
    return cast(_Config, _load(path, _listed(overrides), (schema,)))


def load_evaluation(path: str | PathLike[str] | None = None, overrides: Sequence[str] = ()) -> EvaluateConfig:
    """Loads an evaluation configuration. The file may also be a training or warm-start configuration, whose other keys are ignored.

    Overrides of `OF_TRAINING` apply to the training configuration. All others apply to the evaluation, so they need not fit the ignored keys. If a training
    configuration is not valid without the other overrides, they apply to it, too.

    Raises:
        ConfigError: as in `load_config`, or an override has a key that an evaluation ignores.
    """
    of_training = [each for each in _listed(overrides) if each.startswith(OF_TRAINING)]
    schemas = (EvaluateConfig, TrainConfig, SftConfig)
    try:
        config = evaluation_of(_load(path, of_training, schemas))
    except ConfigError:
        return evaluation_of(_load(path, overrides, schemas))
    others = [each for each in overrides if each not in of_training]
    for place, override in enumerate(others):
        key = override.partition("=")[0]
        if key == "model.compute_dtype":
            others[place] = override.removeprefix("model.")
        elif key in leaf_types(TrainConfig).keys() - leaf_types(EvaluateConfig):
            raise ConfigError(f"override {shown(override)}: an evaluation does not use {key}: leave it out")
    return evaluation_of(_built(EvaluateConfig, dataclasses.asdict(config), others, path, {}))


def evaluation_of(config: AnyConfig) -> EvaluateConfig:
    """Returns the configuration that a run with `config` uses for its own evaluations. Raises ConfigError for a `sampling.temperature` that nothing would use."""
    if config.sampling.temperature != 1 and not isinstance(config, TrainConfig):
        config.refuse("sampling.temperature", "1 without training", "set eval.temperature")
    if isinstance(config, EvaluateConfig):
        return config
    names = {field.name for field in dataclasses.fields(EvaluateConfig)} - {"compute_dtype"}
    shared = {name: value for name, value in vars(config).items() if name in names}
    shared["sampling"] = dataclasses.replace(config.sampling, temperature=1.0)
    return EvaluateConfig(compute_dtype=config.model.compute_dtype, **shared)


def to_yaml(config: AnyConfig) -> str:
    """Returns the complete configuration as YAML, including all defaults. `load_config` loads an equal configuration from this text."""
    return write_yaml(dataclasses.asdict(config))


def changed_yaml(config: AnyConfig) -> str:
    """Returns the required keys and the keys that differ from their defaults, as YAML. `load_config` loads an equal configuration from this text.

    >>> print(changed_yaml(TrainConfig(run_dir="x", seed=1)), end="")
    run_dir: x
    seed: 1
    """
    changed = {one.name: getattr(config, one.name) for one in dataclasses.fields(config) if needed(one)}
    for key, (_, value) in changed_keys(type(config)(**changed), config).items():
        put(changed, key, value)
    return write_yaml(changed)


def changed_keys(a: AnyConfig, b: AnyConfig) -> dict[str, tuple[Any, Any]]:
    """Returns the dotted keys whose values differ between two configurations, each with its value in `a` and in `b`.

    >>> changed_keys(TrainConfig(run_dir="x", seed=1), TrainConfig(run_dir="x", seed=2))
    {'seed': (1, 2)}
    """
    before, after = leaf_values(a), leaf_values(b)
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}


def leaf_values(config: AnyConfig) -> dict[str, Any]:
    """Returns the values in a configuration, as a mapping from their dotted keys."""
    return {key: attrgetter(key)(config) for key in leaf_types(type(config))}


def _listed(overrides: Sequence[str]) -> Sequence[str]:
    if isinstance(overrides, str):
        raise ConfigError(f"overrides: found the text {overrides!r}, needs a list; write [{overrides!r}]")
    return overrides


def _load(
    name: str | PathLike[str] | None, overrides: Sequence[str], schemas: Sequence[type[AnyConfig]]
) -> AnyConfig:
    """Builds a configuration from a file (if `name` is given) and overrides. Uses the first of `schemas` that contains all top-level names of the file, or else `schemas[0]`."""
    path, content = None, dict[Any, Any]()
    if name is not None:
        with prefixed(""):
            path = path_of(name)
        if not path.is_file():
            path = shipped_configs().get(str(name), path)
        with prefixed(path):
            content = read_file(path)
            if path.name == RECORD:
                content = converted(content)
            refuse_former(content)
    is_name = not isinstance(content.get("algorithm", {}), dict)  # a mapping is a section of verl
    algorithm = content.pop("algorithm") if is_name else None
    schema = next((each for each in schemas if content.keys() <= field_types(each).keys()), schemas[0])
    kinds, row = leaf_types(schema), dict[str, Any]()
    with prefixed(path):
        if is_name and schema is not TrainConfig:
            _refuse_unknown("algorithm", algorithm, kinds)
        _check_names(content, schema, kinds)
        if is_name:
            row = _row(algorithm)
            given = [key for key in DEFINING if key in row and has(content, key)]
            if both := [key for key in given if not _same_name(value_of(content, key), row[key])]:
                remedy = "keys in a file have no order: remove one of them, or write all keys of the algorithm instead of its name"
                refuse("algorithm", algorithm, f"a file without {both[0]}, which the algorithm sets", remedy)
            if not any(each.startswith("algorithm=") for each in overrides):
                for key in [key for key in row if not has(content, key)]:
                    put(content, key, row[key])
    return _built(schema, content, overrides, path, row)


def _built(
    schema: type[_Config], content: dict[Any, Any], overrides: Sequence[str], path: object, row: Mapping[str, Any]
) -> _Config:  # fmt: skip
    """Builds a configuration from the content of the file at `path`, which may be None, and overrides. `row` has the keys of the algorithm that the file names."""
    kinds = leaf_types(schema)
    places = [place for place, each in enumerate(overrides) if each.startswith("algorithm=")]
    for place, override in enumerate(overrides):
        with prefixed(f"override {shown(override)}"):
            if place not in places or schema is not TrainConfig:
                put(content, *_parse_override(override, kinds, content))
                continue
            row = _row(override.partition("=")[2])
            for key, value in row.items() if place == places[-1] else ():
                put(content, key, value)
    try:
        built = _build(schema, content)
        if row is ALGORITHMS["opd"] and not leaf_values(built)["teacher.source"]:
            remedy = "name the teacher, in the same form as model.source"
            refuse("teacher.source", "", "a model with algorithm = 'opd'", remedy)
        return built
    except ConfigError as error:
        keys = re.findall(r"[a-z_0-9]+(?:\.[a-z_0-9]+)*", str(error))
        keys += ["algorithm"] if row.keys() & set(keys) else []
        about = [
            shown(each)
            for each in overrides
            if any(f"{key}.".startswith(f"{each.partition('=')[0]}.") for key in keys)
        ]
        places = [str(path)] * (path is not None) + [f"override {' '.join(about)}"] * bool(about)
        raise ConfigError(f"{' with '.join(places)}: {error}" if places else str(error)) from None


def _row(name: Any) -> dict[str, Any]:
    """Returns the keys of an algorithm, or raises ConfigError if its name is unknown or not offered."""
    if not isinstance(name, str) or name in ("", "null"):
        refuse("algorithm", name, f"one of {', '.join(ALGORITHMS)}", "write one of them, or leave it out")
    name = OTHER_NAMES.get(name, name)
    if name in NOT_OFFERED:
        raise ConfigError(f"algorithm = {name}: {NOT_OFFERED[name]}")
    if name not in ALGORITHMS:
        near = nearest(name, [*ALGORITHMS, *OTHER_NAMES], least=0.0)[0]
        refuse("algorithm", name, f"one of {', '.join(ALGORITHMS)}", f"did you mean {near}?")
    return ALGORITHMS[name]


def _same_name(value: Any, row: Any) -> bool:
    """Returns True if a file only sets options of the objective or of the selection in an algorithm's row."""
    return isinstance(value, dict) and isinstance(row, str | dict) and [*value] == [named(row).name]


def _check_names(section: dict[Any, Any], schema: type, kinds: Mapping[str, Any], prefix: str = "") -> None:
    """Raises ConfigError if a name is not in the schema, or a section is not a mapping."""
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
    """Raises ConfigError for a key that is not in the schema. For an unknown section, the error is about the first key in it that has a known remedy, or else about its first key."""
    if key in kinds or _is_section(key, kinds):
        nested = ": ".join(key.split("."))
        raise ConfigError(f"{key}: dotted keys are for overrides; in a file, write it nested: {nested}: ...")
    inside = dict(_walk(key, value))
    key = next((each for each in inside if of_another_library(each, kinds)), next(iter(inside)))
    parent = key.rpartition(".")[0]
    is_value = f"{parent} is one value, not a section; set {parent}"
    remedy = is_value if parent in kinds else unknown_key(key, kinds)
    raise ConfigError(f"unknown key {key} = {shown(inside[key])}: {remedy}")


def _walk(key: str, value: object) -> Iterator[tuple[str, object]]:
    """Yields the dotted keys in an unknown section with their values, or only `key` itself if it is not a section."""
    if not isinstance(value, dict) or not value:
        yield key, value
        return
    for name, inner in value.items():
        yield from _walk(f"{key}.{name}", inner)


def _is_section(key: str, kinds: Mapping[str, Any]) -> bool:
    return any(each.startswith(f"{key}.") for each in kinds)


def _parse_override(override: str, kinds: Mapping[str, Any], content: dict[Any, Any]) -> tuple[str, Any]:
    """Parses `key=value` into the dotted key and the value. `content` is the configuration that it changes."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError("must have the form key=value, without spaces around =, as in batch.group_size=16")
    if key != key.strip().lstrip("-+~"):
        raise ConfigError(f"write {key.strip().lstrip('-+~')}={text}, without spaces or signs around the key")
    if _is_section(key, kinds):
        keys = ", ".join(each for each in kinds if each.startswith(f"{key}."))
        raise ConfigError(f"{key} = {text} would replace a whole section; override one of its keys: {keys}")
    mappings = [f"{each}." for each, kind in kinds.items() if takes_mapping(kind)]
    if key not in kinds and not key.startswith(tuple(mappings)):
        if is_former(key):
            former = dict[Any, Any]()
            put(former, key, _parsed(key, text))
            refuse_former(former, content)
        _refuse_unknown(key, text, kinds)
    # For a text key, null and quoted values are still parsed as YAML.
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    if kinds.get(key) is str and text not in ("null", "~") and not quoted:
        return key, text
    return key, _parsed(key, text)


def _parsed(key: str, text: str) -> Any:
    try:
        return read_yaml(text)
    except yaml.YAMLError as error:
        reason = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ConfigError(f"{key}: found {shown(text)}, not YAML: {reason}; put it in quotes") from None


def _build(schema: type[_Section], values: Mapping[str, Any], defaults: _Section | None = None) -> _Section:
    """Builds and checks an object of class `schema`. Missing values come from `defaults` if it is given, else from the class."""
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
            raise ConfigError(f"{name} is missing; {remedy}")
    return schema(**given) if defaults is None else dataclasses.replace(cast(Any, defaults), **given)


def replaced(config: _Section, changes: Mapping[str, Any]) -> _Section:
    """Returns a copy of the configuration with the values in `changes` (dotted key -> value). The copy is checked like a loaded configuration."""
    values: dict[str, Any] = {}
    for key, value in changes.items():
        put(values, key, value)
    return _build(type(config), values, config)


def _as_float(value: object) -> object:
    """Converts an integer, or the integers in a list, to floats."""
    if isinstance(value, list):
        return [_as_float(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
