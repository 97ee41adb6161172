"""Values in config.json: the keys of a model family, checks of single values, and the conversion of RoPE settings to `Rope`."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dapo_jax.models.rope import Rope, RopeScaling


@dataclass(frozen=True, kw_only=True)
class Family:
    """The differences of a model family from Llama, in config.json and in the names of tensors."""

    architecture: str
    """The class in transformers."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The values of absent keys, if they differ from Llama's, and of all keys that Llama's class does not read."""
    ignored: tuple[str, ...] = ()
    """Keys that change other families, but not this one."""
    switches: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `DecoderConfig` that are the same in all models of the family."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of a written config.json, whose defaults in transformers describe another model."""
    full_every: int = 1
    """Every how many layers a layer attends to all tokens, if config.json does not list the kinds of layers. 0: all layers have a window."""
    two_ropes: bool = False
    """Whether layers with a window have a rotation of their own."""
    still_full: bool = False
    """Whether layers without a window are not rotated, if other layers have a window."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """The names of tensors in a layer that differ from Llama's. Parameters with the same name are stored in one tensor, one below the other. If a name
    contains {}, each expert has a tensor of its own."""
    paths: Mapping[str, str] = field(default_factory=dict)
    """The beginnings of names of tensors that differ from Llama's, in a layer or in the model. The first that fits is replaced."""
    experts: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Experts` that are the same in all models of the family."""
    read: Callable[[Mapping[str, Any], Mapping[str, Any], object], Mapping[str, Any]] | None = None
    """Maps the values of config.json with defaults, the fields of `DecoderConfig` so far, and the path of the file to further fields."""
    write: Callable[[Any], Mapping[str, Any]] | None = None
    """Maps a `DecoderConfig` to further keys of config.json."""
    further_layers: bool = False
    """Whether files may have layers after the last, which predict further tokens. They are not loaded."""
    neighbours: bool = False
    """Whether the rotation pairs dimensions 2i and 2i + 1 in the file."""
    layer_types: tuple[str, ...] = ("full_attention", "attention")
    """The names in layer_types that load, in addition to layers with a window."""

    def path(self, tensor: str) -> str:
        """Returns the name of a tensor in files of this family (see `paths`)."""
        begin = next((begin for begin in self.paths if tensor.startswith(begin)), "")
        return self.paths.get(begin, "") + tensor.removeprefix(begin)


ORIGINAL_LENGTH = "original_max_position_embeddings"
_SCALING_KINDS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", ORIGINAL_LENGTH, "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor",
        ORIGINAL_LENGTH,
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": (ORIGINAL_LENGTH, "short_factor", "long_factor", "attention_factor"),
}
"""The keys of each kind of RoPE scaling in config.json. `RopeScaling` has fields with the same names, except original_max_positions for `ORIGINAL_LENGTH`."""
_ALPHA_KEYS = ("alpha", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""The keys of the scaling "dynamic" with alpha. It only changes theta."""
_NEUTRAL = {"partial_rotary_factor": 1.0, "truncate": True}
"""RoPE settings that have no effect at these values."""
_MEANINGLESS = ("rope_type", "rope_theta", ORIGINAL_LENGTH, "max_position_embeddings")
"""RoPE settings that every kind of scaling may contain."""


def checked(values: Mapping[str, Any], key: str, kind: type, where: object) -> Any:
    """Returns a value of config.json, which must be a boolean or a positive number."""
    if key not in values:
        raise ValueError(f"{where} lacks the key {key!r}")
    value = values[key]
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (kind is not bool and not 0 < value < math.inf):
        needed = "true or false" if kind is bool else f"a positive {kind.__name__}"
        raise ValueError(f"{where}: {key} is {value!r}; it must be {needed}")
    return value


def present(described: Mapping[str, Any]) -> dict[str, Any]:
    """Removes keys whose value is null."""
    return {key: value for key, value in described.items() if value is not None}


def of_each_layer(values: Mapping[str, Any], key: str, layers: int, where: object) -> Sequence[Any] | None:
    """Returns a list with one entry per layer, or None if the key is absent."""
    found = values[key]
    if found is not None and (not isinstance(found, Sequence) or len(found) != layers):
        raise ValueError(
            f"{where}: {key}={found!r} must have one entry for each of the num_hidden_layers={layers} layers"
        )
    return found


def period(pattern: Any, where: object) -> int:
    """Returns every how many layers a layer attends to all tokens, from a number or a pattern such as "LLLG"."""
    if isinstance(pattern, str) and pattern == "L" * (len(pattern) - 1) + "G":
        return len(pattern)
    if type(pattern) is not int or pattern < 1:
        raise ValueError(
            f"{where}: sliding_window_pattern is {pattern!r}; it must be a positive int, or local layers and a global one, such as 'LLLG'"
        )
    return pattern


def two_ropes(
    values: Mapping[str, Any], described: Mapping[str, Any], family: Family, sizes: Mapping[str, Any], where: object
) -> tuple[Rope, Rope]:  # fmt: skip
    """Returns the rotations of layers without and with a window."""
    nested = _settings(described, "rope_parameters", where) or family.defaults.get("rope_parameters", {})
    if not nested:
        full = rope_of(described, family, sizes, where)[0]
        if "rope_local_base_freq" in values:
            return full, Rope(theta=checked(values, "rope_local_base_freq", float, where))
        if full.theta != family.defaults["rope_theta"]:
            raise ValueError(
                f"{where}: rope_theta={full.theta:g} does not determine the rotation of layers with a window, because versions of transformers differ: "
                f"write rope_parameters with full_attention and sliding_attention, or use {family.defaults['rope_theta']:g}"
            )
        return full, Rope(theta=full.theta)
    kinds = ("full_attention", "sliding_attention")
    if set(nested) != set(kinds):
        raise ValueError(
            f"{where}: rope_parameters has the keys {sorted(nested)}; it must have {' and '.join(kinds)}"
        )
    full, _ = rope_of({**described, "rope_parameters": nested[kinds[0]]}, family, sizes, where)
    theta = values.get("rope_local_base_freq")
    near, _ = rope_of({"rope_parameters": nested[kinds[1]], "rope_theta": theta}, family, sizes, where)
    return full, near


def rope_settings(rope: Rope, reads: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a rotation in the format of rope_parameters."""
    settings: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": "default"}
    if "partial_rotary_factor" in reads:
        settings["partial_rotary_factor"] = rope.share
    if rope.proportional:
        settings |= {"rope_type": "proportional", "partial_rotary_factor": rope.share}
    if rope.scaling is not None:
        ours = {**vars(rope.scaling), ORIGINAL_LENGTH: rope.scaling.original_max_positions}
        ours["truncate"] = None if rope.scaling.truncate else False
        ours["mscale_all_dim"] = rope.scaling.mscale_all_dim or None
        settings |= {"rope_type": rope.scaling.kind} | present(
            {key: ours.get(key) for key in _SCALING_KINDS[rope.scaling.kind]}
        )
    return settings


def rope_of(
    described: Mapping[str, Any], family: Family, sizes: Mapping[str, Any], where: object
) -> tuple[Rope, dict[str, Any]]:  # fmt: skip
    """Returns the rotation and its settings, from rope_parameters (transformers 5), or from rope_theta and rope_scaling (transformers 4)."""
    notations = [_settings(described, key, where) for key in ("rope_parameters", "rope_scaling")]
    given = [rope for rope in notations if rope] or [family.defaults.get("rope_scaling", {})]
    found = [_completed(rope, described, family) for rope in given]
    if found[0] != found[-1]:
        raise ValueError(f"{where}: rope_parameters {found[0]} and rope_scaling {found[1]} differ; keep one")
    rope = found[0]
    outside = {**family.defaults, **present(described)}.get(ORIGINAL_LENGTH)
    if outside not in (None, inside := rope.get(ORIGINAL_LENGTH)):
        absent = "" if described.get(ORIGINAL_LENGTH) else ", where it is the default"
        raise ValueError(
            f"{where}: {ORIGINAL_LENGTH} is {inside!r} in the settings of the rotation, but {outside!r} outside{absent}; write the same in both places"
        )
    kind = str(rope["rope_type"])
    by_alpha = "alpha" in family.defaults and kind == "dynamic"
    proportional = "global_head_dim" in family.defaults and kind == "proportional"
    if kind != "default" and kind not in _SCALING_KINDS and not by_alpha and not proportional:
        raise ValueError(f"{where}: rope_type {kind!r} is not one of default, {', '.join(_SCALING_KINDS)}")
    # config.json may contain the original context length even if its type of scaling does not use it.
    known = {*(_ALPHA_KEYS if by_alpha else _SCALING_KINDS.get(kind, ())), *_MEANINGLESS, *_NEUTRAL}
    known |= {*family.ignored}
    known |= {key for key in ("llama_4_scaling_beta",) if key in family.defaults}
    reads = {*family.defaults, *_SCALING_KINDS.get(kind, ())}
    neutral = {key: value for key, value in _NEUTRAL.items() if key not in reads}
    if proportional:
        known, neutral = known | {"factor"}, {"factor": 1.0}
    for key, value in rope.items():
        if key not in known or value != neutral.get(key, value):
            raise ValueError(f"{where}: {key}={value!r} with rope_type {kind!r} is not supported")
    needed = {
        "default": (),
        "proportional": (),
        "dynamic": ("alpha",),
        "longrope": ("short_factor", "long_factor"),
    }.get(kind, ("factor",))
    for key in needed:
        if key not in rope:
            raise ValueError(f"{where} lacks the key {key!r}, which rope_type {kind!r} needs")
    share, theta = (
        checked({"partial_rotary_factor": 1.0, **rope}, key, float, where)
        for key in ("partial_rotary_factor", "rope_theta")
    )
    if share > 1.0:
        raise ValueError(f"{where}: partial_rotary_factor is {share:g}; it must be at most 1, the whole head")
    if by_alpha:
        theta *= checked(rope, "alpha", float, where) ** (sizes["head_dim"] / (sizes["head_dim"] - 2))
    made = Rope(theta=theta, share=share, proportional=proportional)
    return replace(made, scaling=_scaling(rope, sizes, made.width(sizes["head_dim"]), where)), rope


def _settings(described: Mapping[str, Any], key: str, where: object) -> Mapping[str, Any]:
    """Returns the object at `key`, which is empty if the key is absent or null."""
    found = described.get(key) or {}
    if not isinstance(found, Mapping):
        raise ValueError(
            f"{where}: {key} is {found!r}; it must be an object such as {{'rope_type': 'default'}}"
        )
    return found


def _completed(rope: Mapping[str, Any], described: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Returns the RoPE settings in `rope`. Missing settings are filled in from other keys of config.json, and from defaults."""
    inside = present(rope)
    old_name = inside.pop("type", "default")
    elsewhere = present(described.get("rope_parameters") or {}) | present(described)
    outside = ("rope_theta", ORIGINAL_LENGTH, "partial_rotary_factor")
    kept = {key: elsewhere[key] for key in outside if key in elsewhere}
    defaults = {key: family.defaults[key] for key in outside if key in family.defaults}
    return {"rope_type": old_name, "rope_theta": 10_000.0, **defaults, **kept, **inside}


def _scaling(
    rope: Mapping[str, Any], sizes: Mapping[str, Any], width: int, where: object
) -> RopeScaling | None:
    kind = str(rope["rope_type"])
    if kind not in _SCALING_KINDS:
        return None
    given: dict[str, Any] = {key: rope[key] for key in _SCALING_KINDS[kind] if key in rope}
    original = checked({ORIGINAL_LENGTH: sizes["max_positions"], **given}, ORIGINAL_LENGTH, int, where)
    given.pop(ORIGINAL_LENGTH, None)
    if kind == "longrope":
        for key in ("short_factor", "long_factor"):
            entries = given[key] if isinstance(given[key], list | tuple) else [given[key]]
            given[key] = tuple(checked({key: entry}, key, float, where) for entry in entries)
            if len(entries) != width // 2:
                raise ValueError(
                    f"{where}: {key} has {len(entries)} entries, but {width // 2} pairs of dimensions are rotated"
                )
        return RopeScaling(
            kind=kind,
            factor=max(1.0, sizes["max_positions"] / original),
            original_max_positions=original,
            **given,
        )
    # An mscale of 0 means the same as no mscale.
    numbers: dict[str, Any] = {
        key: checked(given, key, bool if key == "truncate" else float, where)
        for key in given
        if given[key] != 0 or not key.startswith("mscale")
    }
    scales = [numbers.pop("mscale", 0.0), numbers.get("mscale_all_dim", 0.0)]
    if all(scales) and "attention_factor" not in numbers:
        over, under = (0.1 * scale * math.log(numbers["factor"]) + 1.0 for scale in scales)
        numbers["attention_factor"] = over / under
    if kind != "linear":
        numbers["original_max_positions"] = original
    return RopeScaling(kind=kind, **numbers)
