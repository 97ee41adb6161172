"""Converts groups and responses in flight to plain arrays and back, for checkpoints and for other processes.

Ragged lists become arrays: the tokens of all responses, their log-probabilities, the records of experts if there are any, and JSON for everything else. Prompts are not
stored, because their ordinals are enough to load them. A brief group contains the data for metrics and scores, but no tokens and no text. It occupies at most about 100
bytes per response.
"""

import json
from collections.abc import Callable, Mapping, Sequence
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
from dapo_jax.sampling.round_sampler import Drawn

FINISH_REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length")
"""Finish reasons, which are stored as indices into this tuple. None means that the response has not ended."""

Arrays = dict[str, np.ndarray]
PromptAt = Callable[[int], Prompt]

_VERDICT = [field.name for field in fields(Verdict)]
_FLIGHT = "flight_"
"""Prefix of the names of in-flight arrays, which a checkpoint stores next to the arrays of groups."""


def group_arrays(groups: Sequence[Group], *, whole: Sequence[bool] | None = None, texts: int = 0) -> Arrays:
    """Flattens groups to arrays. Without groups, returns an empty dict.

    Args:
        groups: the groups to flatten.
        whole: whether each group keeps its tokens, log-probabilities, texts and reasons; other groups are stored in brief. If None, all groups keep them.
        texts: number of responses in each brief group that keep their texts and reasons.
    """
    if not groups:
        return {}
    records, kept = [], list[Response]()
    for place, group in enumerate(groups):
        full = whole is None or whole[place]
        rollouts = [_rollout_record(one, full or index < texts) for index, one in enumerate(group.rollouts)]
        records.append([group.prompt.ordinal, full, rollouts])
        kept += [rollout.response for rollout in group.rollouts if full]
    return {"records": _as_bytes(records), **_joined(kept)}


def groups_of(arrays: Mapping[str, np.ndarray], prompt_at: PromptAt) -> list[Group]:
    """Rebuilds the groups that `group_arrays` flattened; other arrays are ignored. In brief groups, tokens are placeholder zeros that occupy no memory.

    Raises:
        ValueError: the records are damaged.
    """
    if "records" not in arrays:
        return []
    take = _Parts(arrays)
    return [
        Group(
            prompt=prompt_at(ordinal),
            rollouts=tuple(_rollout(record, take if full else _zeros) for record in rollouts),
        )
        for ordinal, full, rollouts in json.loads(arrays["records"].tobytes())
    ]


def flight_arrays(in_flight: InFlight | None) -> Arrays:
    """Flattens responses in flight to arrays. Without responses in flight, returns an empty dict."""
    if in_flight is None:
        return {}
    requests = [in_flight.responses[one] for one in in_flight.clock.started()]
    responses = [[*_record(one), one.begun, one.reasons, one.due, asdict(one.standing)] for one in requests]
    records = {"clock": in_flight.clock.state(), "responses": responses}
    arrays = {"records": _as_bytes(records), **_joined(requests)}
    return {f"{_FLIGHT}{name}": array for name, array in arrays.items()}


def flight_of(arrays: Mapping[str, np.ndarray], prompt_at: PromptAt) -> InFlight | None:
    """Rebuilds the responses in flight that `flight_arrays` flattened; other arrays are ignored. Returns None if nothing was in flight.

    Raises:
        ValueError: the records are damaged.
    """
    arrays = {name.removeprefix(_FLIGHT): arrays[name] for name in arrays if name.startswith(_FLIGHT)}
    if not arrays:
        return None
    records, take = json.loads(arrays["records"].tobytes()), _Parts(arrays)
    clock, responses = VirtualClock.restored(records["clock"]), {}
    for one, record in zip(clock.started(), records["responses"], strict=True):
        *kept, begun, reasons, due, standing = record
        own = {"begun": begun, "reasons": tuple(reasons), "due": due, "standing": Standing.of(standing)}
        drawn, part = kept[0], _part(kept, take)
        responses[one] = Request(prompt_at(one.ordinal), one.index, 0, drawn=drawn, **own, **part)
    return InFlight(clock=clock, responses=responses)


def drawn_arrays(drawn: Sequence[Drawn]) -> Arrays:
    """Flattens the new tokens of a round to arrays with 8 bytes per response and 8 per token."""
    heads = [(len(part.tokens), FINISH_REASONS.index(part.finish_reason)) for part in drawn]
    return {"heads": np.array(heads, np.int32).reshape(-1, 2), **_joined(drawn)}


def drawn_of(arrays: Mapping[str, np.ndarray]) -> list[Drawn]:
    """Rebuilds the new tokens that `drawn_arrays` flattened."""
    take, heads = _Parts(arrays), arrays["heads"].tolist()
    return [Drawn(finish_reason=FINISH_REASONS[reason], **take(length)) for length, reason in heads]


def _as_bytes(records: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(records, separators=(",", ":")).encode(), np.uint8)


_NOTHING, _SAME = -1, -2
"""Marks in place of a number of records: there is no record, or it is the last prompt's record. Responses to a prompt mostly share its record."""


def _joined(parts: Sequence[Response | Request | Drawn]) -> Arrays:
    counts, routes, last = [], list[np.ndarray](), None
    for part in parts:
        prompt, own = part.prompt_routes, part.routes
        same = prompt is not None and last is not None and np.array_equal(prompt, last)
        counts.append([_SAME if same else _count(prompt), _count(own)])
        routes += [record for record in (None if same else prompt, own) if record is not None]
        last = last if prompt is None else prompt
    recorded = {"routes": np.concatenate(routes), "counts": np.array(counts, np.int32)} if routes else {}
    return {
        **recorded,
        "tokens": np.concatenate([np.empty(0, np.int32), *(part.tokens for part in parts)]),
        "logprobs": np.concatenate([np.empty(0, np.float32), *(part.logprobs for part in parts)]),
    }


def _count(record: np.ndarray | None) -> int:
    return _NOTHING if record is None else len(record)


class _Parts:
    """Splits arrays from `_joined` into responses, one response per call."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._tokens, self._logprobs, self._at = arrays["tokens"], arrays["logprobs"], 0
        self._routes, self._counts = arrays.get("routes"), iter(arrays.get("counts", ()))
        self._prompt: np.ndarray | None = None
        self._recorded = 0

    def __call__(self, length: int) -> dict[str, Any]:
        part = slice(self._at, self._at + length)
        self._at = part.stop
        found = {"tokens": self._tokens[part], "logprobs": self._logprobs[part]}
        if self._routes is None:
            return found
        prompt, own = (self._record(self._routes, count) for count in next(self._counts).tolist())
        self._prompt = self._prompt if prompt is None else prompt
        return {**found, "prompt_routes": prompt, "routes": own}

    def _record(self, routes: np.ndarray, count: int) -> np.ndarray | None:
        if count < 0:
            return self._prompt if count == _SAME else None
        self._recorded += count
        return routes[self._recorded - count : self._recorded]


def _zeros(count: int) -> Arrays:
    return {"tokens": np.broadcast_to(np.int32(0), count), "logprobs": np.broadcast_to(np.float32(0), count)}


def _record(part: Response | Request) -> list[Any]:
    reason = FINISH_REASONS.index(part.finish_reason)
    return [len(part.tokens), reason, part.spans, part.turns, part.contexts]


def _part(record: Sequence[Any], take: Callable[[int], Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the fields of a response or request from its `_record`."""
    length, reason, spans, turns, contexts = record
    return {
        "finish_reason": FINISH_REASONS[reason],
        "spans": tuple(Span(*span) for span in spans),
        "turns": tuple(TurnSpan(*turn) for turn in turns),
        "contexts": tuple(ContextSpan(*context) for context in contexts),
        **take(length),
    }


def _rollout_record(rollout: Rollout, with_text: bool) -> list[Any]:
    verdict = rollout.verdict if with_text else replace(rollout.verdict, reason="")
    return [
        *_record(rollout.response),
        rollout.text if with_text else "",
        rollout.reward,
        rollout.overlong_penalty,
        [getattr(verdict, name) for name in _VERDICT],
    ]


def _rollout(record: Sequence[Any], take: Callable[[int], Mapping[str, Any]]) -> Rollout:
    *kept, text, reward, penalty, verdict = record
    return Rollout(
        response=Response(**_part(kept, take)),
        text=text,
        verdict=Verdict(**dict(zip(_VERDICT, verdict, strict=True))),
        reward=reward,
        overlong_penalty=penalty,
    )
