"""Groups and responses in flight as plain arrays, for a checkpoint and for other processes.

Ragged lists become three arrays: all tokens and all log-probabilities, one response after the other, and JSON for everything else. Prompts are not stored: ordinals give them
back. A group in brief has everything that metrics and scores need, but neither tokens nor text, at most about 100 bytes a response.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np

from dapo_jax.dapo.rollouts import (
    ContextSpan,
    FinishReason,
    Group,
    Prompt,
    Response,
    Rollout,
    Span,
    Standing,
    TurnSpan,
    Verdict,
)
from dapo_jax.rollout.collector import InFlight
from dapo_jax.rollout.virtual_clock import VirtualClock
from dapo_jax.sampling.requests import Request
from dapo_jax.sampling.rounds import Drawn

FINISH_REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length")
"""Numbers of the reasons for which a response ends; None: it has not ended."""

Arrays = dict[str, np.ndarray]
PromptAt = Callable[[int], Prompt]

_VERDICT = [field.name for field in fields(Verdict)]
_FLIGHT = "flight_"
"""Prefix of the arrays of responses in flight: a checkpoint has groups next to them."""


def group_arrays(groups: Sequence[Group], *, whole: Sequence[bool] | None = None, texts: int = 0) -> Arrays:
    """Flattens groups; empty for no groups.

    Args:
        groups: to flatten.
        whole: for each group whether its tokens, log-probabilities, texts and reasons are kept; None: of all groups.
        texts: the first `texts` responses of each other group keep their texts and reasons, too.
    """
    if not groups:
        return {}
    kept = [True] * len(groups) if whole is None else whole
    records = [
        [
            group.prompt.ordinal,
            full,
            [_rollout_record(each, full or place < texts) for place, each in enumerate(group.rollouts)],
        ]
        for group, full in zip(groups, kept, strict=True)
    ]
    parts = [
        rollout.response
        for group, full in zip(groups, kept, strict=True)
        if full
        for rollout in group.rollouts
    ]
    return _arrays(records, [part.tokens for part in parts], [part.logprobs for part in parts])


def groups_of(arrays: Mapping[str, np.ndarray], prompt_at: PromptAt) -> list[Group]:
    """Returns the groups that `group_arrays` flattened. The tokens of groups in brief are zeros, which take no memory.

    Raises:
        ValueError: the arrays do not fit together.
    """
    if not arrays:
        return []

    def made(records: list[Any], take: "_Parts") -> list[Group]:
        return [
            Group(
                prompt=prompt_at(ordinal),
                rollouts=tuple(_rollout(record, take, full) for record in rollouts),
            )
            for ordinal, full, rollouts in records
        ]

    return _read(arrays, made)


def flight_arrays(in_flight: InFlight | None) -> Arrays:
    """Flattens responses in flight; empty for None."""
    if in_flight is None:
        return {}
    requests = [in_flight.responses[one] for one in in_flight.clock.started()]
    records = {
        "clock": in_flight.clock.state(),
        "responses": [
            [
                *_record(request, request.drawn),
                request.begun,
                request.reasons,
                request.due,
                asdict(request.standing),
            ]
            for request in requests
        ],
    }
    arrays = _arrays(
        records,
        [request.tokens[: request.drawn] for request in requests],
        [request.logprobs[: request.drawn] for request in requests],
    )
    return {f"{_FLIGHT}{name}": array for name, array in arrays.items()}


def flight_of(arrays: Mapping[str, np.ndarray], prompt_at: PromptAt) -> InFlight | None:
    """Returns the responses in flight that `flight_arrays` flattened; None for no arrays.

    Raises:
        ValueError: the arrays do not fit together.
    """
    if not arrays:
        return None

    def made(records: dict[str, Any], take: "_Parts") -> InFlight:
        clock = VirtualClock.restored(records["clock"])
        responses = {}
        for one, record in zip(clock.started(), records["responses"], strict=True):
            *kept, begun, reasons, due, standing = record
            length = kept[0]
            tokens, logprobs = take(length)
            request = Request(prompt_at(one.ordinal), one.index, 0, drawn=length, begun=begun, due=due)
            request.tokens, request.logprobs = tokens.copy(), logprobs.copy()
            request.finish_reason, request.spans, request.turns, request.contexts = _fields(kept)
            request.reasons = tuple(reasons)
            request.standing = Standing.of(standing)
            responses[one] = request
        return InFlight(clock=clock, responses=responses)

    return _read({name.removeprefix(_FLIGHT): array for name, array in arrays.items()}, made)


def split_flight(arrays: Mapping[str, np.ndarray]) -> tuple[Arrays, Arrays]:
    """Splits the arrays of a checkpoint into those of `group_arrays` and those of `flight_arrays`."""
    flight = {name: array for name, array in arrays.items() if name.startswith(_FLIGHT)}
    return {name: array for name, array in arrays.items() if name not in flight}, flight


def drawn_arrays(drawn: Sequence[Drawn]) -> Arrays:
    """Flattens the new tokens of responses in a round: 8 bytes a response and 8 a token."""
    heads = [(len(part.tokens), FINISH_REASONS.index(part.finish_reason)) for part in drawn]
    tokens, logprobs = [part.tokens for part in drawn], [part.logprobs for part in drawn]
    return {
        "heads": np.array(heads, np.int32).reshape(-1, 2),
        "tokens": np.concatenate([np.empty(0, np.int32), *tokens]).astype(np.int32),
        "logprobs": np.concatenate([np.empty(0, np.float32), *logprobs]).astype(np.float32),
    }


def drawn_of(arrays: Mapping[str, np.ndarray]) -> list[Drawn]:
    """Returns the new tokens that `drawn_arrays` flattened."""
    take = _Parts(arrays)
    found = []
    for length, reason in arrays["heads"].tolist():
        tokens, logprobs = take(length)
        found.append(Drawn(tokens=tokens, logprobs=logprobs, finish_reason=FINISH_REASONS[reason]))
    return found


class _Parts:
    """Cuts tokens and log-probabilities into those of one response after the other."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._tokens, self._logprobs = arrays["tokens"], arrays["logprobs"]
        self.at = 0

    def __call__(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        part = slice(self.at, self.at + length)
        self.at = part.stop
        return self._tokens[part], self._logprobs[part]

    def check(self) -> None:
        """Raises ValueError if the lengths do not add up to the tokens."""
        for name, array in (("tokens", self._tokens), ("logprobs", self._logprobs)):
            if len(array) != self.at:
                raise ValueError(f"{name!r} has {len(array):,} entries instead of {self.at:,}")


def _arrays(records: Any, tokens: Iterable[np.ndarray], logprobs: Iterable[np.ndarray]) -> Arrays:
    return {
        "records": np.frombuffer(json.dumps(records, separators=(",", ":")).encode(), np.uint8),
        "tokens": np.concatenate([np.empty(0, np.int32), *tokens]),
        "logprobs": np.concatenate([np.empty(0, np.float32), *logprobs]),
    }


def _read(arrays: Mapping[str, np.ndarray], made: Callable[[Any, _Parts], Any]) -> Any:
    try:
        take = _Parts(arrays)
        found = made(json.loads(arrays["records"].tobytes()), take)
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError(f"its records cannot be read: {error!r:.200}") from error
    take.check()
    return found


def _record(part: Response | Request, length: int) -> list[Any]:
    reason = FINISH_REASONS.index(part.finish_reason)
    return [length, reason, part.spans, part.turns, part.contexts]


def _fields(record: Sequence[Any]) -> tuple[Any, ...]:
    """Returns reason, spans, turns and contexts of a `_record`."""
    _, reason, spans, turns, contexts = record
    return (
        FINISH_REASONS[reason],
        tuple(Span(*span) for span in spans),
        tuple(TurnSpan(*turn) for turn in turns),
        tuple(ContextSpan(*context) for context in contexts),
    )


def _rollout_record(rollout: Rollout, with_text: bool) -> list[Any]:
    verdict = rollout.verdict if with_text else replace(rollout.verdict, reason="")
    return [
        *_record(rollout.response, len(rollout.response.tokens)),
        rollout.text if with_text else "",
        rollout.reward,
        rollout.overlong_penalty,
        [getattr(verdict, name) for name in _VERDICT],
    ]


def _rollout(record: Sequence[Any], take: _Parts, full: bool) -> Rollout:
    *kept, text, reward, penalty, verdict = record
    length = kept[0]
    zeros = np.broadcast_to(np.int32(0), length), np.broadcast_to(np.float32(0), length)
    tokens, logprobs = take(length) if full else zeros
    finish_reason, spans, turns, contexts = _fields(kept)
    response = Response(
        tokens=tokens,
        logprobs=logprobs,
        finish_reason=finish_reason,
        spans=spans,
        turns=turns,
        contexts=contexts,
    )
    given = Verdict(**dict(zip(_VERDICT, verdict, strict=True)))
    return Rollout(response=response, text=text, verdict=given, reward=reward, overlong_penalty=penalty)
