"""Converts groups and responses in flight to plain arrays and back, for checkpoints and for other processes.

Ragged lists become arrays: one for each value of the tokens of all responses, and JSON for everything else. Prompts are not
stored, because their ordinals are enough to load them. A brief group contains the data for metrics and scores, but no tokens and no text. It occupies at most about 110
bytes per response.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any

import numpy as np

from dapo_jax.dapo.rollouts import (
    ContextSpan,
    Draw,
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
from dapo_jax.dapo.tokens import VALUES, Tokens, join
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

    Groups for which `whole` is True (None: all groups) keep their tokens, log-probabilities, texts and reasons. In each brief group, the first `texts` responses keep
    their texts and reasons.
    """
    if not groups:
        return {}
    records, responses = [], list[Response]()
    for index, group in enumerate(groups):
        full = whole is None or whole[index]
        rollouts = enumerate(group.rollouts)
        records_of_group = [_rollout_record(rollout, full or number < texts) for number, rollout in rollouts]
        draws = [] if full else [[rollout.response.draw for rollout in group.rollouts]]
        records.append([group.prompt.ordinal, full, records_of_group, *draws])
        responses += [rollout.response for rollout in group.rollouts if full]
    return {"records": _as_bytes(records), **_joined(responses)}


def groups_of(arrays: Mapping[str, np.ndarray], prompt_at: PromptAt) -> list[Group]:
    """Rebuilds the groups that `group_arrays` flattened; other arrays are ignored. In brief groups, tokens are placeholder zeros that occupy no memory. Raises
    ValueError if the records are damaged."""
    if "records" not in arrays:
        return []
    take, groups = _ResponseReader(arrays), list[Group]()
    for ordinal, full, records, *draws in json.loads(arrays["records"].tobytes()):
        if full:
            rollouts = tuple(_rollout(record, take) for record in records)
        else:
            rollouts = tuple(
                _rollout(record, partial(_zeros, draw)) for record, draw in zip(records, *draws, strict=True)
            )
        groups.append(Group(prompt=prompt_at(ordinal), rollouts=rollouts))
    return groups


def flight_arrays(in_flight: InFlight | None) -> Arrays:
    """Flattens responses in flight to arrays. Without responses in flight, returns an empty dict."""
    if in_flight is None:
        return {}
    requests = [in_flight.responses[response] for response in in_flight.clock.started()]
    responses = [
        [*_response_record(request), request.begun, request.reasons, request.due, asdict(request.standing)]
        for request in requests
    ]
    records = {"clock": in_flight.clock.state(), "responses": responses}
    arrays = {"records": _as_bytes(records), **_joined(requests)}
    return {f"{_FLIGHT}{name}": array for name, array in arrays.items()}


def flight_of(arrays: Mapping[str, np.ndarray], prompt_at: PromptAt) -> InFlight | None:
    """Rebuilds the responses in flight that `flight_arrays` flattened; other arrays are ignored. Returns None if nothing was in flight. Raises ValueError if
    the records are damaged."""
    arrays = {name.removeprefix(_FLIGHT): arrays[name] for name in arrays if name.startswith(_FLIGHT)}
    if not arrays:
        return None
    records, take = json.loads(arrays["records"].tobytes()), _ResponseReader(arrays)
    clock, responses = VirtualClock.restored(records["clock"]), {}
    for response, record_of_request in zip(clock.started(), records["responses"], strict=True):
        *record, begun, reasons, due, standing = record_of_request
        episode = {"begun": begun, "reasons": tuple(reasons), "due": due, "standing": Standing.of(standing)}
        values = _response_fields(record, take)
        responses[response] = Request(prompt_at(response.ordinal), response.index, 0, **episode, **values)
    return InFlight(clock=clock, responses=responses)


def drawn_arrays(drawn: Sequence[Drawn]) -> Arrays:
    """Flattens the new tokens of a round to arrays with 12 bytes per response and `bytes_per_token` per token."""
    heads = [(len(new.record), new.new, FINISH_REASONS.index(new.finish_reason)) for new in drawn]
    return {"heads": np.array(heads, np.int32).reshape(-1, 3), **_joined(drawn)}


def drawn_of(arrays: Mapping[str, np.ndarray]) -> list[Drawn]:
    """Rebuilds the new tokens that `drawn_arrays` flattened."""
    take, heads = _ResponseReader(arrays), arrays["heads"].tolist()
    return [
        Drawn(new=new, finish_reason=FINISH_REASONS[reason], **take(count)) for count, new, reason in heads
    ]


def _as_bytes(records: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(records, separators=(",", ":")).encode(), np.uint8)


_NOTHING, _SAME = -1, -2
"""Marks in place of a number of records: there is no record, or it is the last prompt's record. Responses to a prompt mostly share its record."""


def _joined(responses: Sequence[Response | Request | Drawn]) -> Arrays:
    """Concatenates the values of all tokens. Prompts have values that the model computed, so `counts` has the number of records of each prompt and response."""
    counts, records, last = [], list[Mapping[str, np.ndarray]](), dict[str, np.ndarray]()
    for response in responses:
        prompt, processed = response.prompt_values, response.record.processed
        same = bool(prompt) and all(np.array_equal(array, last.get(n, ())) for n, array in prompt.items())
        counts.append([_SAME if same else _count(prompt), _count(processed)])
        records += [values for values in ({} if same else prompt, processed) if values]
        last = {**last, **prompt}
    arrays = join([response.record.sampled for response in responses]).arrays
    if records:
        arrays |= {name: np.concatenate([values[name] for values in records]) for name in records[0]}
        arrays["counts"] = np.array(counts, np.int32)
    return arrays


def _count(values: Mapping[str, np.ndarray]) -> int:
    return len(next(iter(values.values()))) if values else _NOTHING


class _ResponseReader:
    """Splits arrays from `_joined` into responses, one response per call."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        of_tokens = {name: arrays[name] for name in VALUES if name in arrays}
        self._processed = {name: of_tokens.pop(name) for name in [*of_tokens] if VALUES[name].processed}
        self._tokens, self._counts = Tokens(**of_tokens), iter(arrays.get("counts", ()))
        self._prompt: dict[str, np.ndarray] = {}
        self._first = self._recorded = 0

    def __call__(self, length: int) -> dict[str, Any]:
        first, self._first = self._first, self._first + length
        record = self._tokens.cut(first, self._first)
        if not self._processed:
            return {"record": record}
        prompt, response = (self._values(count) for count in next(self._counts).tolist())
        self._prompt = prompt or self._prompt
        record.fill(0, response)
        return {"record": record, "prompt_values": prompt}

    def _values(self, count: int) -> dict[str, np.ndarray]:
        if count < 0:
            return self._prompt if count == _SAME else {}
        first, self._recorded = self._recorded, self._recorded + count
        return {name: array[first : self._recorded] for name, array in self._processed.items()}


def _zeros(draw: Sequence[Any], count: int) -> dict[str, Any]:
    return {"record": Tokens(np.broadcast_to(np.int32(0), count)), "known_draw": Draw(*draw)}


def _response_record(response: Response | Request) -> list[Any]:
    reason = FINISH_REASONS.index(response.finish_reason)
    return [len(response.record), reason, response.spans, response.turns, response.contexts]


def _response_fields(record: Sequence[Any], take: Callable[[int], Mapping[str, Any]]) -> dict[str, Any]:
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
        *_response_record(rollout.response),
        rollout.text if with_text else "",
        rollout.reward,
        rollout.overlong_penalty,
        [getattr(verdict, name) for name in _VERDICT],
    ]


def _rollout(record: Sequence[Any], take: Callable[[int], Mapping[str, Any]]) -> Rollout:
    *of_response, text, reward, penalty, verdict = record
    if len(verdict) == len(_VERDICT) - 1:  # an earlier checkpoint, without `forgotten`
        verdict = [*verdict, ()]
    return Rollout(
        response=Response(**_response_fields(of_response, take)),
        text=text,
        verdict=Verdict(**dict(zip(_VERDICT, verdict, strict=True))),
        reward=reward,
        overlong_penalty=penalty,
    )
