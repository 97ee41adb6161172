"""Loads a configuration from a YAML file and `key=value` overrides, or raises one message that contains the remedy.

Names are compared with the schema here; each object checks its values when it is built (`Section`).
"""

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import SequenceMatcher
from operator import attrgetter
from os import PathLike
from typing import Any, NoReturn, TypeAlias, TypeVar, cast, get_args, get_origin, overload

import yaml

from dapo_jax.config.keys import ConfigError, needed, refuse, shown
from dapo_jax.config.reading import read_file, read_yaml, shipped_configs, write_yaml
from dapo_jax.config.schema import EvaluateConfig, SftConfig, TrainConfig, evaluation_of
from dapo_jax.config.section import Section, field_types, leaf_types, rules_by_key
from dapo_jax.storage import path_of

AnyConfig: TypeAlias = TrainConfig | SftConfig | EvaluateConfig

_Config = TypeVar("_Config", TrainConfig, SftConfig, EvaluateConfig)
_Section = TypeVar("_Section", bound=Section)

_RULES = rules_by_key(TrainConfig)
ALIASES = {alias: ours for ours, rules in _RULES.items() for alias in rules.aliases}
"""Name in verl, TRL or open-instruct -> our key. A dotted name takes precedence over its last part."""

NOTES = {alias: note for rules in _RULES.values() for alias, note in rules.aliases.items() if note}
"""Alias -> note, if it is not the same quantity or is easily confused with another."""

_NO_KEY = {
    "num_iterations ppo_epochs": "each response is trained on once; for several updates a step, make `batch.groups_per_update` smaller than "
    "`batch.prompts_per_step`",
    "use_vllm rollout.name": "the library samples with its own engine, whose keys are in `sampling`",
    "lr_scheduler_type": "the learning rate rises over `optimizer.warmup_steps` and is constant afterwards",
    "push_to_hub": "after the run, upload the folder `model` in `run_dir`, which has the Hugging Face layout: hf upload ORG/NAME RUN_DIR/model",
    "logging_steps logging_strategy logging_first_step": "metrics are logged in every step; `log.rollouts_every_steps` is for sampled responses",
    "resume_from_checkpoint resume_mode": "the option --resume of the command continues from the last checkpoint",
    "multi_objective_aggregation": "the rewards of `reward.graders` are summed by weight, and advantages are computed from the sum",
    "importance_sampling_level": "ratios are computed per token; a loss with another ratio is a function: train(config, objective=...)",
    "min_p repetition_penalty sampling.top_p sampling.top_k rollout.top_p rollout.top_k": "training samples from the whole distribution, because "
    "the loss uses the ratio to it; `eval.top_p` and `eval.top_k` are for evaluation",
    "optim": "the optimizer is AdamW, whose keys are in `optimizer`",
    "eval_on_start val_before_train": "every run evaluates before its first step and after its last one; `eval.every_steps` adds to these",
    "adv_estimator": "advantages compare the responses of a group: reward minus the mean, divided by the standard deviation with `loss.normalize_std`",
    "entropy_coeff": "the loss has no entropy bonus; `loss.clip_ratio_high` keeps up the entropy",
    "disable_dropout": "the models have no dropout",
    "use_liger_kernel use_liger_loss": "log-probabilities are always computed in chunks of the vocabulary",
    "sync_ref_model": "the reference policy of `loss.kl_coef` is the model at the start of the run",
    "project_name wandb_project": "the environment variable WANDB_PROJECT names the project of Weights & Biases",
    "cache_dir": "the environment variable HF_HOME sets the folder of models from the Hugging Face hub",
}
NO_KEY = {name: answer for names, answer in _NO_KEY.items() for name in names.split()}
"""Name in verl or TRL without a key here -> the remedy."""

_NO_KEY_PREFIXES = {"vllm_": NO_KEY["use_vllm"], "hub_": NO_KEY["push_to_hub"]}


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


def of_another_library(key: str, known: Collection[str]) -> str | None:
    """Returns the remedy for a key of verl, TRL or open-instruct; None if `known` has no key for it.

    The longest ending of a dotted name decides.

    >>> of_another_library("actor_rollout_ref.rollout.n", ["batch.group_size"])
    '`rollout.n` of verl, TRL or open-instruct is `batch.group_size` here'
    """
    parts = key.lower().split(".")
    endings = [".".join(parts[start:]) for start in range(len(parts))]
    places = {place for each in known for place in (each, each.rpartition(".")[0])}
    if alias := next((ending for ending in endings if ALIASES.get(ending) in places), None):
        unit = f" ({NOTES[alias]})" if alias in NOTES else ""
        ours = f"`{alias}` of verl, TRL or open-instruct is `{ALIASES[alias]}` here{unit}"
        others = [near for near in nearest_keys(key, known, least=1.5) if near != ALIASES[alias]]
        return f"{ours}; or did you mean {_either(others)}?" if others else ours
    same_start = (answer for start, answer in _NO_KEY_PREFIXES.items() if parts[-1].startswith(start))
    answer = next((NO_KEY[ending] for ending in endings if ending in NO_KEY), None) or next(same_start, None)
    if answer and set(re.findall("`([^`]+)`", answer)) <= places:
        return f"verl or TRL has this key, dapo_jax does not: {answer}"
    return None


def nearest_keys(key: str, known: Collection[str], *, least: float = 1.1) -> list[str]:
    """Returns the three dotted keys most similar to `key`, or fewer, best first.

    The similarity goes to 2 (equal); keys below `least` are left out. A right last part in the wrong section counts as much as a
    right section with a misspelt last part.

    >>> nearest_keys("temperature", ["sampling.temperature", "eval.temperature", "seed"])
    ['eval.temperature', 'sampling.temperature']
    """

    def similarity(candidate: str) -> float:
        whole = SequenceMatcher(None, key, candidate).ratio()
        last = SequenceMatcher(None, key.rsplit(".", 1)[-1], candidate.rsplit(".", 1)[-1]).ratio()
        return whole + last

    scores = {candidate: similarity(candidate) for candidate in known}
    best = sorted(scores, key=lambda candidate: (-scores[candidate], candidate))[:3]
    return [candidate for candidate in best if scores[candidate] >= max(least, scores[best[0]] - 0.35)]


def unknown_key(key: str, known: Collection[str]) -> str:
    """Returns the remedy that follows "unknown key": our name for it, the nearest keys, or the top level."""
    if answer := of_another_library(key, known):
        return answer
    # The name may be inside a misspelt mapping.
    if near := nearest_keys(key, known) or nearest_keys(key.rpartition(".")[0], known, least=1.5):
        return f"did you mean {_either(near)}?"
    top = sorted({candidate.split(".", 1)[0] for candidate in known})
    return f"no key is similar; the top level has {', '.join(top)}"


def _either(keys: Collection[str]) -> str:
    return " or ".join(f"`{key}`" for key in keys)
