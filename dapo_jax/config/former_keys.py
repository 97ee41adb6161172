"""Keys of earlier versions. In a file or an override, such a key is an error that contains the new key and its value. In the config.yaml of a run, it is converted."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial, reduce
from typing import Any, TypeAlias

from dapo_jax.config.keys import ConfigError, named, refuse, shown

Values: TypeAlias = dict[Any, Any]
"""A configuration as nested mappings."""


Convert: TypeAlias = Callable[[Any, Values], Mapping[str, Any]]
"""Function from the value of a former key, and the configuration without this key, to today's keys and values. A key in the result replaces an equal key of the configuration."""


def has(values: object, key: str) -> bool:
    """Returns True if nested mappings contain a dotted key."""
    for name in key.split("."):
        if not isinstance(values, Mapping) or name not in values:
            return False
        values = values[name]
    return True


def value_of(values: Values, key: str, default: Any = None) -> Any:
    """Returns the value of a dotted key in nested mappings, or `default`."""
    return reduce(lambda inner, name: inner[name], key.split("."), values) if has(values, key) else default


def put(values: Values, key: str, value: object) -> None:
    """Sets the value of a dotted key in nested mappings. A name in place of a mapping gets the option below it. Raises ConfigError if another value is there."""
    *sections, name = parts = key.split(".")
    for place, section in enumerate(sections, 1):
        inner = values.get(section, {})
        if inner == parts[place] and place < len(sections):
            inner = {}
        if not isinstance(inner, dict):
            where = ".".join(sections[:place])
            raise ConfigError(
                f"{where}: found {shown(inner)}, needs a mapping; remove it, or leave out {key}"
            )
        values[section] = dict(inner)  # copied, because keys may share this mapping through a YAML anchor
        values = values[section]
    values[name] = value


def _without(values: Values, key: str) -> Values:
    """Returns nested mappings without a dotted key. A section of this key only is removed, too."""
    name, _, rest = key.partition(".")
    inner = _without(values[name], rest) if rest else None
    return {other: value for other, value in values.items() if other != name} | (
        {name: inner} if inner else {}
    )


def _options(key: str, default: str, value: Any, values: Values) -> Mapping[str, Any]:
    """The options of the objective or of the selection are below its name today."""
    name, options = named(value_of(values, key) or default)
    return {key: {name: {**options, **value}}} if value else {}


def _part(key: str, usual: str, value: Any, values: Values) -> Mapping[str, Any]:
    """A revision or a checkpoint is a part of the source today."""
    source = value_of(values, key, "RUN" if usual else "hf:ORG/NAME")
    return {} if value == usual else {key: f"{source}@{value}"}


def _tracker(name: str, value: Any, values: Values) -> Mapping[str, Any]:
    """The trackers are in a list today."""
    others = value_of(values, "log.trackers", [])
    return {"log.trackers": [*([others] if isinstance(others, str) else others), name]} if value else {}


def _of_workers(name: str, environment: bool, value: Any, values: Values) -> Mapping[str, Any]:
    """Graders and the environment share the settings of workers today."""
    has_environment = bool(value_of(values, "environment.source"))
    return {f"workers.{name}": value} if has_environment == environment else {}


def _keep_by(value: Any, values: Values) -> Mapping[str, Any]:
    keep = value_of(values, "batch.keep", 0)
    return {"batch.keep": {value: keep}} if keep and value != "shortest" else {}


def _dual_clip(value: Any, values: Values) -> Mapping[str, Any]:
    return {} if value is None else _options("loss.objective", "clip", {"dual_clip": value}, values)


FORMER: dict[str, Convert] = {
    "reward.workers": partial(_of_workers, "count", False),
    "reward.timeout_s": partial(_of_workers, "timeout_s", False),
    "environment.workers": partial(_of_workers, "count", True),
    "environment.timeout_s": partial(_of_workers, "timeout_s", True),
    "log.tensorboard": partial(_tracker, "tensorboard"),
    "log.wandb": partial(_tracker, "wandb"),
    "reward.graders": lambda value, values: {"reward.grader": value} if value else {},
    "batch.keep_by": _keep_by,
    "model.revision": partial(_part, "model.source", ""),
    "model.checkpoint": partial(_part, "model.source", "last"),
    "teacher.revision": partial(_part, "teacher.source", ""),
    "loss.options": partial(_options, "loss.objective", "clip"),
    "loss.select_options": partial(_options, "loss.select", "all"),
    "loss.dual_clip": _dual_clip,
    "loss.importance_cap": lambda cap, values: {} if cap is None else {"loss.importance_range": [0, cap]},
    "rollout.max_age_steps": lambda value, values: {"rollout.max_staleness": value},
    "guard.on_mismatch": lambda value, values: {"guard.max_mismatch_kl": None} if value == "warn" else {},
}
"""Maps each key of an earlier version to its meaning."""

_REASONS = {
    "guard.on_mismatch": "above guard.max_mismatch_kl, a run always stops",
    "checkpoint.grace_s": "a stopped run always has 25 seconds for its last checkpoint",
    "reward.on_nonfinite": "a score that is not finite always ends the run: correct the reward function",
    "compilation_cache": "set the environment variable JAX_COMPILATION_CACHE_DIR instead",
    "data.data_dir": "set the environment variable TFDS_DATA_DIR instead",
    "batch.packing": "a row always contains several responses if they fit",
    "optimizer.from_source": "a run that starts from another run has a new optimizer state",
    "sampling.page_tokens": "the number of tokens per page follows from the platform and the slots",
    "sampling.steps_per_call": "it follows from sampling.max_response_tokens",
    "sampling.merge_lora": "the sampler always applies the adapters separately, as training does",
}
"""The reason why a value can no longer be chosen, for error messages."""

FORMER |= {key: lambda value, values: {} for key in _REASONS if key not in FORMER}


def is_former(key: str) -> bool:
    """Returns True for a key of an earlier version, and for a key in its mapping."""
    return any(f"{key}.".startswith(f"{former}.") for former in FORMER)


def converted(values: Values) -> Values:
    """Returns the configuration of a run of an earlier version with today's keys."""
    for key, convert in FORMER.items():
        if has(values, key):
            value, values = value_of(values, key), _without(values, key)
            for name, new in convert(value, values).items():
                put(values, name, new)
    return values


def converted_leaves(leaves: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Returns the values of dotted keys with today's keys. `known` are all keys of today."""
    values = Values()
    for key, value in leaves.items():
        put(values, key, value)
    values = converted(values)
    return {key: value_of(values, key) for key in (*leaves, *known) if has(values, key)}


def refuse_former(values: Values, around: Values | None = None) -> None:
    """Checks that nested mappings contain no key of an earlier version. `around` is the configuration that an override changes. Raises ConfigError if there is
    such a key. The message contains today's key and its value."""
    for key, convert in FORMER.items():
        if has(values, key):
            value, others = value_of(values, key), _without(values, key) if around is None else around
            try:
                now = [f"{name}={shown(new)}" for name, new in convert(value, others).items()]
            except (AttributeError, TypeError, ValueError):
                remedy = "this key has changed: leave it out"
                refuse(key, value, "a value that fits the keys around it", remedy)
            remedy = f"write {' '.join(now)}" if now else "leave it out"
            why = f" ({_REASONS[key]})" if key in _REASONS else ""
            raise ConfigError(f"{key} = {shown(value)}: this key has changed: {remedy}{why}")
