"""Keys of earlier versions. In a file or an override, such a key is an error that contains the new key and its value. In the config.yaml of a run, it is converted."""

from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

from dapo_jax.config.keys import ConfigError, named, shown

Values: TypeAlias = dict[Any, Any]
"""A configuration as nested mappings."""


class Former(NamedTuple):
    """The meaning of a key of an earlier version."""

    convert: Callable[[Any, Values], Mapping[str, Any]]
    """Function from the value, and the configuration without the key, to today's keys and values. A key in the result replaces an equal key of the configuration."""
    reason: str = ""
    """The reason for the change, for the error message."""


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
    """Sets the value of a dotted key in nested mappings. Raises ConfigError if a value is in place of a mapping."""
    *sections, name = key.split(".")
    for section in sections:
        inner = values.get(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(
                f"{section}: found {shown(inner)}, needs a mapping; remove it, or leave out {key}"
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


def _moved(key: str, reason: str = "") -> Former:
    """A key that has another name today."""
    return Former(lambda value, values: {key: value}, reason)


def _fixed(reason: str) -> Former:
    """A key whose value can no longer be chosen."""
    return Former(lambda value, values: {}, reason)


def _mismatch(value: Any, values: Values) -> Mapping[str, Any]:
    return {"guard.max_mismatch_kl": None} if value == "warn" else {}


def _options(key: str, default: str) -> Former:
    """The options of the objective or of the selection, which are below its name today."""

    def convert(value: Any, values: Values) -> Mapping[str, Any]:
        name, options = named(value_of(values, key) or default)
        return {key: {name: {**options, **value}}} if value else {}

    return Former(convert)


def _part(key: str, usual: str) -> Former:
    """A revision or a checkpoint, which is a part of the source today."""

    def convert(value: Any, values: Values) -> Mapping[str, Any]:
        return (
            {}
            if value == usual
            else {key: f"{value_of(values, key, 'RUN' if usual else 'hf:ORG/NAME')}@{value}"}
        )

    return Former(convert)


def _tracker(name: str) -> Former:
    """A tracker, which is in a list today."""

    def convert(value: Any, values: Values) -> Mapping[str, Any]:
        return {"log.trackers": [*value_of(values, "log.trackers", []), name]} if value else {}

    return Former(convert)


def _of_workers(name: str, environment: bool) -> Former:
    """A setting of workers, which graders and the environment share today."""

    def convert(value: Any, values: Values) -> Mapping[str, Any]:
        return (
            {f"workers.{name}": value} if bool(value_of(values, "environment.source")) == environment else {}
        )

    return Former(convert)


def _keep_by(value: Any, values: Values) -> Mapping[str, Any]:
    keep = value_of(values, "batch.keep", 0)
    return {"batch.keep": {value: keep}} if keep and value != "shortest" else {}


def _dual_clip(value: Any, values: Values) -> Mapping[str, Any]:
    return {} if value is None else _options("loss.objective", "clip").convert({"dual_clip": value}, values)


def _importance_cap(value: Any, values: Values) -> Mapping[str, Any]:
    return {} if value is None else {"loss.importance_range": [0, value]}


FORMER = {
    "reward.workers": _of_workers("count", environment=False),
    "reward.timeout_s": _of_workers("timeout_s", environment=False),
    "environment.workers": _of_workers("count", environment=True),
    "environment.timeout_s": _of_workers("timeout_s", environment=True),
    "log.tensorboard": _tracker("tensorboard"),
    "log.wandb": _tracker("wandb"),
    "reward.graders": Former(lambda value, values: {"reward.grader": value} if value else {}),
    "batch.keep_by": Former(_keep_by),
    "model.revision": _part("model.source", ""),
    "model.checkpoint": _part("model.source", "last"),
    "teacher.revision": _part("teacher.source", ""),
    "loss.options": _options("loss.objective", "clip"),
    "loss.select_options": _options("loss.select", "all"),
    "loss.dual_clip": Former(_dual_clip),
    "loss.importance_cap": Former(_importance_cap),
    "rollout.max_age_steps": _moved("rollout.max_staleness"),
    "guard.on_mismatch": Former(_mismatch, "above guard.max_mismatch_kl, a run always stops"),
    "checkpoint.grace_s": _fixed("a stopped run always has 25 seconds for its last checkpoint"),
    "reward.on_nonfinite": _fixed(
        "a score that is not finite always ends the run: correct the reward function"
    ),
    "compilation_cache": _fixed("set the environment variable JAX_COMPILATION_CACHE_DIR instead"),
    "data.data_dir": _fixed("set the environment variable TFDS_DATA_DIR instead"),
    "batch.packing": _fixed("a row always contains several responses if they fit"),
    "optimizer.from_source": _fixed("a run that starts from another run has a new optimizer state"),
    "sampling.page_tokens": _fixed("the number of tokens per page follows from the platform and the slots"),
    "sampling.steps_per_call": _fixed("it follows from sampling.max_response_tokens"),
    "sampling.merge_lora": _fixed("the sampler always applies the adapters separately, as training does"),
}
"""Maps each key of an earlier version to its meaning."""


def is_former(key: str) -> bool:
    """Returns True for a key of an earlier version, and for a key in its mapping."""
    return any(f"{key}.".startswith(f"{former}.") for former in FORMER)


def converted(values: Values) -> Values:
    """Returns the configuration of a run of an earlier version with today's keys."""
    for key, former in FORMER.items():
        if has(values, key):
            value, values = value_of(values, key), _without(values, key)
            for name, new in former.convert(value, values).items():
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
    for key, former in FORMER.items():
        if has(values, key):
            value, others = value_of(values, key), _without(values, key) if around is None else around
            now = [f"{name}={shown(new)}" for name, new in former.convert(value, others).items()]
            remedy = f"write {' '.join(now)}" if now else "leave it out"
            why = f" ({former.reason})" if former.reason else ""
            raise ConfigError(f"{key} = {shown(value)}: this key has changed: {remedy}{why}")
