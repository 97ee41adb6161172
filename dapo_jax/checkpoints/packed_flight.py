"""Rollouts in flight as plain arrays, for a checkpoint: the clock, and what was drawn of the responses to groups without a verdict."""

import json
from collections.abc import Mapping

import numpy as np

from dapo_jax.dapo.in_flight import InFlight, ResponseSoFar
from dapo_jax.dapo.rollouts import FinishReason, Span
from dapo_jax.dapo.virtual_clock import VirtualClock

_REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length")
_COUNTS = ("lengths", "reasons", "span_counts")
_PREFIX = "flight_"
"""The beginning of the arrays' names: in a checkpoint they lie beside those of carried groups."""


def flight_arrays(in_flight: InFlight | None) -> dict[str, np.ndarray]:
    """Flattens what is in flight; empty for nothing. The responses are those that the clock says have started, in its order."""
    if in_flight is None:
        return {}
    responses = [in_flight.responses[one] for one in in_flight.clock.started()]
    spans = [span for response in responses for span in response.spans]
    empty = np.empty(0, np.int32)
    arrays = {
        "clock": np.frombuffer(json.dumps(in_flight.clock.state()).encode(), np.uint8),
        "lengths": np.array([len(response.tokens) for response in responses], np.int64),
        "reasons": np.array([_REASONS.index(response.finish_reason) for response in responses], np.int64),
        "span_counts": np.array([len(response.spans) for response in responses], np.int64),
        "span_firsts": np.array([span.first for span in spans], np.int64),
        "span_versions": np.array([span.version for span in spans], np.int64),
        "tokens": np.concatenate([empty, *(response.tokens for response in responses)]),
        "logprobs": np.concatenate(
            [empty.astype(np.float32), *(response.logprobs for response in responses)]
        ),
    }
    return {f"{_PREFIX}{name}": array for name, array in arrays.items()}


def split_flight(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The arrays of carried groups, and those of `flight_arrays`."""
    flight = {name: array for name, array in arrays.items() if name.startswith(_PREFIX)}
    return {name: array for name, array in arrays.items() if name not in flight}, flight


def flight_of(arrays: Mapping[str, np.ndarray], *, vocabulary: int, version: int) -> InFlight | None:
    """The rollouts that `flight_arrays` flattened; None for nothing.

    Args:
        arrays: of a checkpoint, which may come from anywhere.
        vocabulary: tokens are below it.
        version: that of the weights now.

    Raises:
        ValueError: `flight_arrays` does not make these; names what is wrong.
    """
    if not arrays:
        return None
    made = {name: arrays.get(f"{_PREFIX}{name}") for name in _KINDS}
    for name, kind in _KINDS.items():
        array = made[name]
        if array is None or array.ndim != 1 or array.dtype.kind != kind:
            raise ValueError(f"{name!r} is missing or of another kind")
    found = {name: array for name, array in made.items() if array is not None}
    try:
        clock = VirtualClock.restored(json.loads(found["clock"].tobytes()))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the clock cannot be read: {error}") from error
    if clock.version != version:
        raise ValueError(f"the clock is of step {clock.version}")
    started = list(clock.started())
    _check(found, len(started), vocabulary=vocabulary, version=version)
    ends, span_ends = np.cumsum(found["lengths"]), np.cumsum(found["span_counts"])
    responses = {}
    for place, one in enumerate(started):
        part = slice(ends[place] - found["lengths"][place], ends[place])
        of_it = slice(span_ends[place] - found["span_counts"][place], span_ends[place])
        spans = zip(found["span_firsts"][of_it].tolist(), found["span_versions"][of_it].tolist(), strict=True)
        responses[one] = ResponseSoFar(
            tokens=found["tokens"][part].astype(np.int32),
            logprobs=found["logprobs"][part].astype(np.float32),
            spans=tuple(Span(*span) for span in spans),
            finish_reason=_REASONS[found["reasons"][place]],
        )
        ended, left = responses[one].finish_reason is not None, clock.groups[one.ordinal].left
        if ended == (one.index in left):
            raise ValueError(
                f"response {one.index} to prompt {one.ordinal} has ended, or not, other than the clock says"
            )
    return InFlight(clock=clock, responses=responses)


def _check(arrays: Mapping[str, np.ndarray], count: int, *, vocabulary: int, version: int) -> None:
    for name in _COUNTS:
        if len(arrays[name]) != count:
            raise ValueError(f"{name!r} has {len(arrays[name]):,} entries instead of {count:,}")
    lengths, counts = arrays["lengths"], arrays["span_counts"]
    if count and not (
        lengths.min() >= 0 and lengths.max() < 1 << 40 and counts.min() >= 0 and counts.max() < 1 << 40
    ):
        raise ValueError("a length is negative, or too large")
    if not np.isin(arrays["reasons"], range(len(_REASONS))).all():
        raise ValueError("'reasons' has one that is none")
    for name, total in (
        ("tokens", lengths),
        ("logprobs", lengths),
        ("span_firsts", counts),
        ("span_versions", counts),
    ):
        if len(arrays[name]) != total.sum():
            raise ValueError(f"{name!r} has {len(arrays[name]):,} entries instead of {total.sum():,}")
    tokens, firsts, versions = (arrays[name] for name in ("tokens", "span_firsts", "span_versions"))
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocabulary:
        raise ValueError(f"'tokens' has one that is not from 0 to {vocabulary - 1}, of the vocabulary")
    if ((lengths == 0) != (counts == 0)).any():
        raise ValueError("'span_counts' has spans of no tokens, or tokens of no span")
    begins = np.zeros(len(firsts), bool)
    begins[(np.cumsum(counts) - counts)[counts > 0]] = True
    follows = ~begins[1:]
    if (
        (firsts[begins] != 0).any()
        or (np.diff(firsts)[follows] <= 0).any()
        or (firsts >= np.repeat(lengths, counts)).any()
    ):
        raise ValueError("'span_firsts' has spans that do not follow each other within a response")
    if (versions < 0).any() or (versions > version).any() or (np.diff(versions)[follows] <= 0).any():
        raise ValueError(f"'span_versions' has versions that do not rise up to {version}")


_KINDS = {
    **dict.fromkeys((*_COUNTS, "span_firsts", "span_versions", "tokens"), "i"),
    "clock": "u",
    "logprobs": "f",
}
"""Kind of each array."""
