"""The answers of the HTTP server in the shapes that clients of vLLM and OpenAI expect."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from dapo_jax.dapo.rollouts import FinishReason, Span
from dapo_jax.serving.http_requests import HttpRequest, RequestError
from dapo_jax.serving.request_loop import NewTokens
from dapo_jax.serving.text import GrowingText, decoded
from dapo_jax.text.tokenizers import Tokenizer, token_bytes


@dataclass(kw_only=True)
class Answer:
    """The tokens of one response so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: tuple[Span, ...] = ()
    finish_reason: FinishReason | None = None

    def add(self, new: NewTokens) -> None:
        """Appends new tokens."""
        self.tokens += new.tokens.tolist()
        self.logprobs += _finite(new.logprobs)
        self.spans, self.finish_reason = new.spans, new.finish_reason


class ResponseText:
    """The text of a response that arrives in blocks of tokens, up to its first stop string.

    Text at the end that may begin a stop string is held back.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._growing, self._stop = GrowingText(tokenizer), stop
        self._held = max((len(each) for each in stop), default=1) - 1
        self._waiting, self._over = "", False

    def add(self, tokens: list[int], *, last: bool) -> str:
        """Returns the text that these tokens complete; with the `last` tokens, all the rest."""
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


def generate_json(
    request: HttpRequest, answers: Sequence[Answer], tokenizer: Tokenizer, *, request_id: str, model: str
) -> dict[str, Any]:
    """Returns the answer of `/inference/v1/generate`."""
    choices = [
        {
            "index": index,
            "token_ids": answer.tokens,
            "logprobs": _logprobs(answer.tokens, answer.logprobs, tokenizer) if request.logprobs else None,
            "finish_reason": answer.finish_reason,
            "spans": _spans(answer),
        }
        for index, answer in enumerate(answers)
    ]
    return {"request_id": request_id, "model": model, "choices": choices, **_totals(request, answers)}


class ChatAnswer:
    """The answer of `/v1/chat/completions`, whole or in chunks."""

    def __init__(self, request: HttpRequest, tokenizer: Tokenizer, *, name: str, model: str) -> None:
        """`name` is the `id` of the answer."""
        self._request, self._tokenizer = request, tokenizer
        self._head = {"id": name, "created": int(time.time()), "model": model}
        self._prompt = {"prompt_token_ids": request.prompt.tolist()} if request.return_token_ids else {}
        self.answers = [Answer() for _ in range(request.count)]
        self._texts = [ResponseText(tokenizer, request.stop) for _ in range(request.count)]

    def whole(self) -> dict[str, Any]:
        """Returns the complete answer, once every response has ended."""
        choices = []
        for index, (answer, text) in enumerate(zip(self.answers, self._texts, strict=True)):
            message = {"role": "assistant", "content": text.add(answer.tokens, last=True)}
            parts = self._parts(answer.tokens, answer.logprobs)
            ending = {"finish_reason": answer.finish_reason, "spans": _spans(answer)}
            choices.append({"index": index, "message": message, **parts, **ending})
        totals = _totals(self._request, self.answers)
        return {**self._head, "object": "chat.completion", "choices": choices, **totals, **self._prompt}

    def first_chunks(self) -> list[dict[str, Any]]:
        """Returns the chunks before all tokens, which name the role."""
        delta = {"role": "assistant", "content": ""}
        chunks = [
            self._chunk([{"index": index, "delta": delta, "finish_reason": None}])
            for index in range(len(self.answers))
        ]
        return [chunks[0] | self._prompt, *chunks[1:]]

    def chunk(self, new: NewTokens) -> dict[str, Any] | None:
        """Returns the chunk of new tokens; None if they complete nothing that the request asked for."""
        answer, last = self.answers[new.index], new.finish_reason is not None
        answer.add(new)
        tokens = new.tokens.tolist()
        text = self._texts[new.index].add(tokens, last=last)
        asked = tokens and (self._request.logprobs or self._request.return_token_ids)
        if not (text or last or asked):
            return None
        choice = {
            "index": new.index,
            "delta": {"content": text} if text else {},
            **self._parts(tokens, new.logprobs.tolist()),
            "finish_reason": answer.finish_reason,
        }
        if not last:
            return self._chunk([choice])
        return self._chunk([{**choice, "spans": _spans(answer)}]) | {"weights_version": _oldest([answer])}

    def usage_chunk(self) -> dict[str, Any] | None:
        """Returns the chunk after all others, if the request asked for it."""
        if not self._request.include_usage:
            return None
        return self._chunk([]) | {"usage": _usage(self._request, self.answers)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": choices}

    def _parts(self, tokens: list[int], logprobs: list[float]) -> dict[str, Any]:
        request = self._request
        parts: dict[str, Any] = {"logprobs": None}
        if request.logprobs:
            parts["logprobs"] = _logprobs(tokens, logprobs, self._tokenizer, named=not request.tokens_as_ids)
        return {**parts, "token_ids": tokens} if request.return_token_ids else parts


def _finite(logprobs: Float[np.ndarray, " tokens"]) -> list[float]:
    if not np.isfinite(logprobs).all():
        raise RequestError(
            "the weights give log-probabilities that are not finite: serve others",
            status=500,
            code="not_finite",
        )
    return logprobs.tolist()


def _logprobs(
    tokens: Sequence[int], logprobs: Sequence[float], tokenizer: Tokenizer, *, named: bool = False
) -> dict[str, Any]:
    """Returns each token with its log-probability and its bytes. A token is named by its text if `named`, else by its id."""
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
    return {"content": entries}


def _spans(answer: Answer) -> list[Mapping[str, int]]:
    return [span._asdict() for span in answer.spans]


def _oldest(answers: Sequence[Answer]) -> int:
    """Returns the oldest version of the weights that sampled a token."""
    return min(answer.spans[0].version for answer in answers)


def _usage(request: HttpRequest, answers: Sequence[Answer]) -> dict[str, int]:
    prompt, response = len(request.prompt), sum(len(answer.tokens) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": response, "total_tokens": prompt + response}


def _totals(request: HttpRequest, answers: Sequence[Answer]) -> dict[str, Any]:
    return {"usage": _usage(request, answers), "weights_version": _oldest(answers)}
