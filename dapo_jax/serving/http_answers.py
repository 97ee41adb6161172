"""The answers of the HTTP server: what was sampled, as the JSON that vLLM's and OpenAI's clients read."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from dapo_jax.dapo.rollouts import FinishReason, Span
from dapo_jax.serving.http_fields import RequestError
from dapo_jax.serving.http_requests import ChatRequest, GenerateRequest, SampleRequest
from dapo_jax.serving.request_loop import Progress
from dapo_jax.serving.text import GrowingText, decoded
from dapo_jax.text.tokenizers import Tokenizer, token_bytes


@dataclass(kw_only=True)
class Answer:
    """One response, as far as it has come."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: tuple[Span, ...] = ()
    finish_reason: FinishReason | None = None

    def add(self, progress: Progress) -> None:
        """Takes new tokens."""
        self.tokens += progress.tokens.tolist()
        self.logprobs += _finite(progress.logprobs)
        self.spans, self.finish_reason = progress.spans, progress.finish_reason


class ResponseText:
    """The text of a response whose tokens come piece by piece, up to the first stop string.

    The end of it waits that may yet turn out to begin one.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        """Holds nothing yet."""
        self._growing, self._stop = GrowingText(tokenizer), stop
        self._held = max((len(each) for each in stop), default=1) - 1
        self._waiting, self._over = "", False

    def add(self, tokens: list[int], *, last: bool) -> str:
        """The text that these tokens complete; with the `last` ones all that is left."""
        if self._over:
            return ""
        self._waiting += self._growing.add(tokens)
        if last:
            self._waiting += self._growing.rest()
        places = [place for each in self._stop if (place := self._waiting.find(each)) >= 0]
        self._over = bool(places)
        whole = min(places, default=len(self._waiting) if last else max(len(self._waiting) - self._held, 0))
        text, self._waiting = self._waiting[:whole], self._waiting[whole:]
        return text


def to_json(content: Any) -> bytes:
    """The bytes of an answer."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def error_json(error: RequestError) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": str(error), "type": error.kind, "code": error.code}}


def generate_json(
    request: GenerateRequest, answers: Sequence[Answer], tokenizer: Tokenizer, *, request_id: str, model: str
) -> dict[str, Any]:
    """The answer of `/inference/v1/generate`."""
    choices = [
        {
            "index": index,
            "token_ids": answer.tokens,
            "logprobs": {"content": _entries(answer.tokens, answer.logprobs, tokenizer)}
            if request.logprobs
            else None,
            "finish_reason": answer.finish_reason,
            "spans": _spans(answer.spans),
        }
        for index, answer in enumerate(answers)
    ]
    return {
        "request_id": request_id,
        "model": model,
        "choices": choices,
        "usage": _usage(request.sample, answers),
        "weights_version": _oldest(answers),
    }


class ChatAnswer:
    """The answer of `/v1/chat/completions`, whole or in chunks."""

    def __init__(self, request: ChatRequest, tokenizer: Tokenizer, *, name: str, model: str) -> None:
        """`name` is its `id`."""
        self._request, self._tokenizer = request, tokenizer
        self._head = {"id": name, "created": int(time.time()), "model": model}
        sample = request.sample
        self.answers = [Answer() for _ in range(sample.count)]
        self._texts = [ResponseText(tokenizer, sample.stop) for _ in range(sample.count)]

    def whole(self) -> dict[str, Any]:
        """All of it, once every response has ended."""
        choices = []
        for index, (answer, text) in enumerate(zip(self.answers, self._texts, strict=True)):
            message = {"role": "assistant", "content": text.add(answer.tokens, last=True)}
            new = self._parts(answer.tokens, answer.logprobs)
            choices.append(
                {"index": index, "message": message, **new, **_ending(answer), "spans": _spans(answer.spans)}
            )
        return {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": _usage(self._request.sample, self.answers),
            "weights_version": _oldest(self.answers),
            **self._prompt(),
        }

    def first_chunks(self) -> list[dict[str, Any]]:
        """The chunks before all tokens: who speaks."""
        return [
            self._chunk(
                [{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
            )
            | (self._prompt() if index == 0 else {})
            for index in range(len(self.answers))
        ]

    def chunk(self, progress: Progress) -> dict[str, Any] | None:
        """The chunk of new tokens; None if they make nothing that was asked for."""
        answer, last = self.answers[progress.index], progress.finish_reason is not None
        answer.add(progress)
        tokens = progress.tokens.tolist()
        text = self._texts[progress.index].add(tokens, last=last)
        new = self._parts(tokens, _finite(progress.logprobs))
        if not (text or last or (tokens and (self._request.logprobs or self._request.return_token_ids))):
            return None
        choice = {
            "index": progress.index,
            "delta": {"content": text} if text else {},
            **new,
            **_ending(answer),
        }
        if last:
            choice["spans"] = _spans(answer.spans)
        return self._chunk([choice]) | ({"weights_version": _oldest([answer])} if last else {})

    def usage_chunk(self) -> dict[str, Any] | None:
        """The chunk behind all others, if it was asked for."""
        if not self._request.include_usage:
            return None
        return self._chunk([]) | {"usage": _usage(self._request.sample, self.answers)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": choices}

    def _prompt(self) -> dict[str, Any]:
        if not self._request.return_token_ids:
            return {}
        return {"prompt_token_ids": self._request.sample.prompt.tolist()}

    def _parts(self, tokens: list[int], logprobs: list[float]) -> dict[str, Any]:
        parts: dict[str, Any] = {"logprobs": None}
        if self._request.logprobs:
            named = not self._request.tokens_as_ids
            parts["logprobs"] = {"content": _entries(tokens, logprobs, self._tokenizer, named=named)}
        return {**parts, "token_ids": tokens} if self._request.return_token_ids else parts


def _finite(logprobs: Float[np.ndarray, " tokens"]) -> list[float]:
    if not np.isfinite(logprobs).all():
        raise RequestError(
            "the weights give log-probabilities that are not finite: serve others",
            status=500, code="not_finite", kind="server_error",
        )  # fmt: skip
    return logprobs.tolist()


def _entries(
    tokens: Sequence[int], logprobs: Sequence[float], tokenizer: Tokenizer, *, named: bool = False
) -> list[dict[str, Any]]:
    """Returns each token with its log-probability and its bytes; it is called by its id, or by its text if it is `named`."""
    entries = []
    for token, logprob in zip(tokens, logprobs, strict=True):
        content = token_bytes(tokenizer, token)
        entries.append(
            {
                "token": decoded(tokenizer, [token]) if named else f"token_id:{token}",
                "logprob": logprob,
                "bytes": None if content is None else list(content),
                "top_logprobs": [],
            }
        )
    return entries


def _ending(answer: Answer) -> dict[str, Any]:
    return {"finish_reason": answer.finish_reason}


def _spans(spans: Sequence[Span]) -> list[Mapping[str, int]]:
    return [span._asdict() for span in spans]


def _oldest(answers: Sequence[Answer]) -> int:
    """The version of the weights that drew the first token."""
    return min(answer.spans[0].version for answer in answers)


def _usage(sample: SampleRequest, answers: Sequence[Answer]) -> dict[str, int]:
    prompt, response = len(sample.prompt), sum(len(answer.tokens) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": response, "total_tokens": prompt + response}
