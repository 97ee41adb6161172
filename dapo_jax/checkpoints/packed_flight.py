"""Rollouts in flight as plain arrays, for a checkpoint: the clock, and what was drawn of the responses to groups without a verdict."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, get_args

import numpy as np

from dapo_jax.checkpoints.packed_spans import SPAN_ARRAYS, check_spans, span_arrays, spans_of
from dapo_jax.dapo.in_flight import FINISH_REASONS, EpisodeSoFar, InFlight, ResponseSoFar, Standing
from dapo_jax.dapo.rollouts import ContextSpan, FinishReason, Lost, TurnSpan
from dapo_jax.dapo.virtual_clock import VirtualClock

_LONGEST_WAIT = 1 << 16
"""Rounds that an answer may be waited for: a run would go through all of those that a file asks for."""

_PREFIX = "flight_"
"""The beginning of the arrays' names: in a checkpoint they lie beside those of carried groups."""


def flight_arrays(in_flight: InFlight | None) -> dict[str, np.ndarray]:
    """Flattens what is in flight; empty for nothing. The responses are those that the clock says have started, in its order."""
    if in_flight is None:
        return {}
    responses = [in_flight.responses[one] for one in in_flight.clock.started()]
    empty = np.empty(0, np.int32)
    arrays = {
        "clock": np.frombuffer(json.dumps(in_flight.clock.state()).encode(), np.uint8),
        "lengths": np.array([len(response.tokens) for response in responses], np.int64),
        "reasons": np.array(
            [FINISH_REASONS.index(response.finish_reason) for response in responses], np.int64
        ),
        **span_arrays([response.spans for response in responses]),
        "tokens": np.concatenate([empty, *(response.tokens for response in responses)]),
        "logprobs": np.concatenate(
            [empty.astype(np.float32), *(response.logprobs for response in responses)]
        ),
    }
    episodes = [None if response.episode is None else asdict(response.episode) for response in responses]
    if any(episodes):
        arrays["episodes"] = np.frombuffer(json.dumps(episodes).encode(), np.uint8)
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
    episodes = _episodes(arrays.get(f"{_PREFIX}episodes"), len(started))
    _check(found, len(started), vocabulary=vocabulary, version=version)
    ends, spans = np.cumsum(found["lengths"]), spans_of(found)
    responses = {}
    for place, one in enumerate(started):
        part = slice(ends[place] - found["lengths"][place], ends[place])
        responses[one] = ResponseSoFar(
            tokens=found["tokens"][part].astype(np.int32),
            logprobs=found["logprobs"][part].astype(np.float32),
            spans=spans[place],
            finish_reason=FINISH_REASONS[found["reasons"][place]],
            episode=episodes[place],
        )
        ended, left = responses[one].finish_reason is not None, clock.groups[one.ordinal].left
        if ended == (one.index in left):
            raise ValueError(
                f"response {one.index} to prompt {one.ordinal} has ended, or not, other than the clock says"
            )
        if (episode := episodes[place]) is not None and not _fits(episode, responses[one], clock.rounds):
            raise ValueError(
                f"'episodes' has turns of response {one.index} to prompt {one.ordinal} that it cannot have"
            )
    return InFlight(clock=clock, responses=responses)


def _episodes(array: np.ndarray | None, count: int) -> list[EpisodeSoFar | None]:
    """The episodes of so many responses; older checkpoints, and those of runs without an environment, have none."""
    if array is None:
        return [None] * count
    try:
        said = json.loads(array.tobytes())
        found = [None if each is None else _episode(**each) for each in said]
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"'episodes' cannot be read: {error}") from error
    if len(found) != count or any((one is None) != (found[0] is None) for one in found):
        raise ValueError(f"'episodes' are not those of {count:,} responses")
    return found


def _episode(
    *,
    due: int | None,
    turns: list[list[int]],
    reasons: list[FinishReason],
    contexts: list[list[int]],
    begun: int,
    standing: dict[str, Any],
) -> EpisodeSoFar:
    """An episode as `asdict` has taken it apart.

    Raises:
        TypeError, ValueError: it is not.
    """
    found = EpisodeSoFar(
        due=due,
        turns=tuple(TurnSpan(*turn) for turn in turns),
        reasons=tuple(reasons),
        contexts=tuple(ContextSpan(*context) for context in contexts),
        begun=begun,
        standing=Standing.of(standing),
    )
    whole = [begun, *(edge for span in (*found.turns, *found.contexts) for edge in span)]
    whole += [] if due is None else [due]
    told = found.standing
    numbers = [*told.rewards, *told.metrics.values()]
    if (
        not all(type(each) is int and each >= 0 for each in whole)
        or not all(reason in FINISH_REASONS[1:] for reason in reasons)
        or not all(type(each) in (int, float) and math.isfinite(each) for each in numbers)
        or not all(isinstance(each, str) for each in (told.lost, told.reason, *told.metrics))
        or told.lost not in ("", *get_args(Lost))
        or not isinstance(told.correct, bool | None)
    ):
        raise ValueError(f"{standing!r:.80} with {due=}, {begun=}")
    return found


def _fits(episode: EpisodeSoFar, response: ResponseSoFar, rounds: int) -> bool:
    """Whether a response of these tokens can have these turns after so many rounds."""
    turns, tokens = episode.turns, len(response.tokens)
    spans = sorted([*turns, *episode.contexts])
    edges = [edge for span in spans for edge in span]
    if edges != sorted(edges) or not all(first < stop <= tokens for first, stop in spans):
        return False
    answered, over = len(turns), response.finish_reason is not None
    if episode.due is None:
        stands = over or (edges or [0])[-1] <= episode.begun <= tokens
    else:  # it has yet to begin, or its last turn is said to its end
        answered -= bool(turns)
        stands = not over and (episode.begun, tokens) == (turns[-1] if turns else (0, 0))
        stands = stands and episode.due <= rounds + _LONGEST_WAIT
    return stands and len(episode.reasons) == len(turns) and len(episode.standing.rewards) == answered


def _check(arrays: Mapping[str, np.ndarray], count: int, *, vocabulary: int, version: int) -> None:
    lengths, tokens = arrays["lengths"], arrays["tokens"]
    for name in ("lengths", "reasons"):
        if len(arrays[name]) != count:
            raise ValueError(f"{name!r} has {len(arrays[name]):,} entries instead of {count:,}")
    if count and not 0 <= lengths.min() <= lengths.max() <= len(tokens):
        raise ValueError("'lengths' has one that is negative, or too large")
    if not np.isin(arrays["reasons"], range(len(FINISH_REASONS))).all():
        raise ValueError("'reasons' has one that is none")
    for name in ("tokens", "logprobs"):
        if len(arrays[name]) != lengths.sum():
            raise ValueError(f"{name!r} has {len(arrays[name]):,} entries instead of {lengths.sum():,}")
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocabulary:
        raise ValueError(f"'tokens' has one that is not from 0 to {vocabulary - 1}, of the vocabulary")
    if ((lengths == 0) & (arrays["span_counts"][: len(lengths)] != 0)).any():
        raise ValueError("'span_counts' has spans of no tokens")
    check_spans(arrays, lengths=lengths, version=version, least=0)


_KINDS = {
    **dict.fromkeys(("lengths", "reasons", *SPAN_ARRAYS, "tokens"), "i"),
    "clock": "u",
    "logprobs": "f",
}
"""Kind of each array."""
