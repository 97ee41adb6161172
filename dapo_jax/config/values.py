"""What one value may be: its type, its range, its choices. Nothing here looks at a second key."""

import math
import os
import re
from collections.abc import Callable
from types import NoneType
from typing import Any, NamedTuple, NoReturn, get_args, get_origin

from dapo_jax.config.base import ConfigError
from dapo_jax.nearest import nearest


class Range(NamedTuple):
    """Numbers that a key may hold."""

    needs: str
    holds: Callable[[float], bool]


_SIZE = Range("1 or more", lambda v: v >= 1)
_NOT_NEGATIVE = Range("0 or more", lambda v: v >= 0)
_POSITIVE = Range("more than 0", lambda v: v > 0)
_BETA = Range("0 or more and less than 1", lambda v: 0 <= v < 1)
_TOP_P = Range("more than 0 and at most 1 (1: off)", lambda v: 0 < v <= 1)
_TOP_K = Range("1 or more, or 0 or -1 (both: off)", lambda v: v >= -1)
_FRAC = Range("from 0 to 1", lambda v: 0 <= v <= 1)
_AXIS = Range("1 or more devices, or -1 for those that the other axes leave", lambda v: v >= 1 or v == -1)

RANGES: dict[str, Range] = {
    "seed": Range("0 or more and less than 2**32 = 4294967296", lambda v: 0 <= v < 2**32),
    "steps": Range("0 or more (0: evaluate only)", lambda v: v >= 0),
    "stall_timeout_s": _NOT_NEGATIVE,
    "max_response_tokens": _SIZE,
    "model.logprob_chunk_vocab": _SIZE,
    "data.max_prompt_tokens": _SIZE,
    "data.mixture[].weight": _POSITIVE,
    "sampling.temperature": _NOT_NEGATIVE,
    "sampling.top_p": _TOP_P,
    "sampling.top_k": _TOP_K,
    "sampling.max_response_tokens": _SIZE,
    "sampling.slots": _SIZE,
    "sampling.steps_per_call": _SIZE,
    "reward.workers": _NOT_NEGATIVE,
    "reward.async_calls": _SIZE,
    "reward.graders[].weight": Range("a number that is not 0", lambda v: v != 0),
    "reward.timeout_s": _POSITIVE,
    "reward.worker_memory_mb": _SIZE,
    "reward.overlong.buffer_tokens": _NOT_NEGATIVE,
    "reward.overlong.penalty_factor": _NOT_NEGATIVE,
    "dynamic_sampling.prompts_per_wave": _NOT_NEGATIVE,
    "dynamic_sampling.max_waves": _NOT_NEGATIVE,
    "dynamic_sampling.max_age_steps": _SIZE,
    "batch.prompts_per_step": _SIZE,
    "batch.group_size": _SIZE,
    "batch.groups_per_update": _SIZE,
    "batch.pairs_per_step": _SIZE,
    "batch.rows_per_microbatch": _SIZE,
    "batch.row_tokens": Range("1 or more, or 0 for the longest prompt and response", lambda v: v >= 0),
    "loss.clip_ratio_low": Range("more than 0 and less than 1", lambda v: 0 < v < 1),
    "loss.clip_ratio_high": _POSITIVE,
    "loss.dual_clip": Range("more than 1, or null (off)", lambda v: v > 1),
    "loss.importance_cap": Range("1 or more, or null (off)", lambda v: v >= 1),
    "loss.kl_coef": _NOT_NEGATIVE,
    "optimizer.learning_rate": _POSITIVE,
    "optimizer.warmup_steps": _NOT_NEGATIVE,
    "optimizer.beta1": _BETA,
    "optimizer.beta2": _BETA,
    "optimizer.epsilon": _POSITIVE,
    "optimizer.weight_decay": _NOT_NEGATIVE,
    "optimizer.max_grad_norm": _POSITIVE,
    "eval.every_steps": _NOT_NEGATIVE,
    "eval.prompts": Range("1 or more, or 0 for the whole split", lambda v: v >= 0),
    "eval.samples_per_prompt": _SIZE,
    "eval.temperature": Range("0 (greedy) or more", lambda v: v >= 0),
    "eval.top_p": _TOP_P,
    "eval.top_k": _TOP_K,
    "checkpoint.every_steps": _NOT_NEGATIVE,
    "checkpoint.keep": _SIZE,
    "checkpoint.grace_s": _POSITIVE,
    "log.rollouts_every_steps": _NOT_NEGATIVE,
    "log.rollout_groups": _SIZE,
    "log.eval_responses": _NOT_NEGATIVE,
    "guard.max_skipped_updates": _NOT_NEGATIVE,
    "guard.post_mortems": _NOT_NEGATIVE,
    "guard.max_mismatch_kl": Range("0 or more, or null (no limit)", lambda v: v >= 0),
    "guard.mismatch_cap": _SIZE,
    "watchdogs.window": Range("4 or more", lambda v: v >= 4),
    "watchdogs.min_entropy": _NOT_NEGATIVE,
    "watchdogs.min_length_frac": _FRAC,
    "watchdogs.max_truncated_frac": _FRAC,
    "watchdogs.min_mixed_frac": _FRAC,
    "parallel.data": _AXIS,
    "parallel.fsdp": _AXIS,
    "parallel.tensor": _AXIS,
    "parallel.context": _SIZE,
    "parallel.sampler_tensor": Range("1 or more, or 0 for the size of parallel.tensor", lambda v: v >= 0),
    "parallel.sampler_hosts": _SIZE,
}

CHOICES: dict[str, tuple[str, ...]] = {
    "data.on_bad_row": ("error", "skip"),
    "model.compute_dtype": ("float32", "bfloat16"),
    "compute_dtype": ("float32", "bfloat16"),
    "model.attention": ("auto", "xla", "splash", "cudnn"),
    "model.remat": ("none", "full", "dots"),
    "dynamic_sampling.on_shortfall": ("error", "train_fewer"),
    "dynamic_sampling.surplus": ("discard", "carry"),
    "dynamic_sampling.metric": ("correct", "score"),
    "loss.aggregation": ("token_mean", "prompt_mean", "sequence_mean", "token_sum_norm"),
    "loss.old_logprobs": ("trainer", "sampler"),
    "reward.on_nonfinite": ("error", "lost"),
    "guard.on_mismatch": ("warn", "stop", "correct"),
}

NOT_EMPTY = (
    "run_dir", "model.source", "data.source", "data.train_split", "data.eval_split", "data.mixture[].source",
    "eval.datasets[].source", "reward.grader", "reward.graders[].grader",
)  # fmt: skip


_PLACES = ("run_dir", "compilation_cache", "source", "path", "cache_dir", "data_dir")
"""Last names of the keys that hold a folder, a file or a model's name."""
_PASSWORD = re.compile(r"(://[^/\s:@]*:)[^/\s@]+@")


SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY")
"""Variables of the environment whose values are never printed, whoever put them into a message."""
SHORTEST_SECRET = 8
"""Characters; a shorter value would be found in ordinary words."""


def without_secrets(text: str) -> str:
    """`text` with the names of `SECRETS` for their values, and without passwords."""
    for name in SECRETS:
        if len(value := os.environ.get(name, "")) >= SHORTEST_SECRET:
            text = text.replace(value, f"${name}")
    return without_password(text)


def without_password(text: str) -> str:
    """`text` with `...` for the password of every `scheme://user:password@host` in it."""
    return _PASSWORD.sub(r"\1...@", text)


def refuse(key: str, value: object, needs: str, remedy: str) -> NoReturn:
    """Raises the one message that all configuration errors share."""
    raise ConfigError(f"{key}: found {shown(value)}, needs {needs}; {remedy}")


def shown(value: object) -> str:
    """A value as a message shows it, shortened to 80 characters."""
    text = {True: "true", False: "false", None: "null"}.get(value) if isinstance(value, bool | None) else None
    text = repr(value) if text is None else text
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_value(key: str, value: object, expected: Any, *, rules: str = "") -> None:
    """Checks the type of one value, then its range or its choices; `rules` is what these are listed under if not `key`."""
    rules = rules or key
    if get_origin(expected) is list:
        _check_list(key, value, get_args(expected)[0])
    elif get_origin(expected) is dict:
        _check_mapping(key, value)
    else:
        _check_type(key, value, expected)
    if rules in RANGES and isinstance(value, int | float) and not RANGES[rules].holds(value):
        refuse(key, value, RANGES[rules].needs, "change it, or leave the key out to keep its default")
    if rules in CHOICES and value not in CHOICES[rules]:
        near = nearest(str(value), CHOICES[rules])
        remedy = f"did you mean {near[0]}?" if near else "write one of them"
        refuse(key, value, " or ".join(CHOICES[rules]), remedy)
    if rules in NOT_EMPTY and not str(value).strip():
        refuse(key, value, "a name", "write one")


def _check_type(key: str, value: object, expected: Any) -> None:
    """Accepts exactly the annotated type, and an integer for a float: nothing is converted silently."""
    optional = NoneType in get_args(expected)
    kind = next(arg for arg in get_args(expected) or (expected,) if arg is not NoneType)
    needs = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]
    needs += " or null" if optional else ""
    if value is None:
        if not optional:
            refuse(key, value, needs, "write one, or leave the key out if it has a default")
    elif isinstance(value, str) and ("${" in value or value == "???"):
        refuse(
            key,
            value,
            f"{needs}, written out",
            "interpolations and placeholders are not resolved: write the value",
        )
    elif isinstance(value, dict | list | tuple):
        noun = "section" if isinstance(value, dict) else "list"
        refuse(key, value, needs, f"{key} is one value, not a {noun}: write the value itself")
    elif kind is str and isinstance(value, bool):
        refuse(key, value, needs, "unquoted yes, no, on and off are true and false in YAML: quote the word")
    elif kind is str and not isinstance(value, str):
        refuse(key, value, needs, f"quote it: '{value}'")
    elif kind is str and key.rpartition(".")[2] in _PLACES and _PASSWORD.search(str(value)):
        needs, remedy = (
            "a place without a password",
            "it would be written into config.yaml and to trackers: leave it out",
        )
        refuse(key, without_password(str(value)), needs, remedy)
    elif kind is bool and not isinstance(value, bool):
        refuse(
            key, value, needs, "write true or false, unquoted (1, 0 and other numbers are not taken for them)"
        )
    elif kind in (int, float) and not _is_number(value, kind):
        refuse(key, value, needs, _number_remedy(value, kind))
    elif isinstance(value, int) and abs(value) >= 1 << 63:
        refuse(key, value, f"{needs} of at most 63 bits", f"write one up to {(1 << 63) - 1}")
    elif isinstance(value, float) and not math.isfinite(value):
        refuse(key, value, f"a finite number{' or null' if optional else ''}", "write a number such as 1e-6")


def _check_list(key: str, value: object, kind: Any) -> None:
    of = {str: "text", int: "whole numbers"}.get(kind, "mappings")
    needs = f"a list of {of}"
    if not isinstance(value, list):
        refuse(
            key, value, needs, f"put it in brackets: [{value}]" if value is not None else "write [] for none"
        )
    for place, item in enumerate(value):
        check_value(f"{key}[{place}]", item, kind)


def _check_mapping(key: str, value: object) -> None:
    """What JSON can say, by names that are text."""
    if not isinstance(value, dict):
        refuse(key, value, "a mapping", "write `name: value` lines under it, or {} for none")
    for name, item in value.items():
        if not isinstance(name, str):
            refuse(key, name, "names that are text", f"quote it: '{name}'")
        check_plain(f"{key}.{name}", item)


def check_plain(key: str, value: object) -> None:
    """Checks a value inside a mapping: whatever JSON can say, written out."""
    if isinstance(value, dict):
        _check_mapping(key, value)
    elif isinstance(value, list):
        for place, item in enumerate(value):
            check_plain(f"{key}[{place}]", item)
    elif isinstance(value, bool | int | float | str):
        _check_type(key, value, type(value))
    elif value is not None:
        refuse(key, value, "text, a number, true or false, a list or a mapping", "write one of these")


def _is_number(value: object, kind: type) -> bool:
    """True for an integer, and for a float where one is asked for; a bool is no number."""
    return not isinstance(value, bool) and isinstance(value, int | kind)


def _number_remedy(value: object, kind: type) -> str:
    """What to write instead of something that is no number of this kind."""
    if isinstance(value, float) and math.isfinite(value):
        near = dict.fromkeys(f"{bound}" for bound in (math.floor(value), math.ceil(value)))
        return f"write {' or '.join(near)}"
    if not isinstance(value, str):
        return "write a number: true and false are not taken for 1 and 0"
    if value.lower() in ("none", "off", "false", ""):
        return "to switch off a key that allows it, write null"
    try:
        return f"remove the quotes: {value}" if math.isfinite(kind(value)) else "write a finite number"
    except ValueError:
        return "write a number, unquoted"
