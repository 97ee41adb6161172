"""The answers of the HTTP server in the shapes that clients of vLLM and OpenAI expect."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dapo_jax.dapo.rollouts import FinishReason, Span
from dapo_jax.serving.request_loop import NewTokens
from dapo_jax.serving.served_requests import CheckedRequest, ServedLimits
from dapo_jax.serving.text import GrowingText, decoded
from dapo_jax.text.tokenizers import token_bytes


@dataclass
class _Response:
    """One response so far."""

    text: GrowingText
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: tuple[Span, ...] = ()
    finish_reason: FinishReason | None = None

    def ending(self) -> dict[str, Any]:
        return {"finish_reason": self.finish_reason, "spans": [span._asdict() for span in self.spans]}


class GenerateAnswer:
    """The answer of `/inference/v1/generate`."""

    def __init__(self, request: CheckedRequest, limits: ServedLimits) -> None:
        self._request, self._tokenizer, self._model = request, limits.tokenizer, limits.model
        self._responses = [
            _Response(GrowingText(limits.tokenizer, request.stop)) for _ in range(request.count)
        ]

    def add(self, new: NewTokens) -> _Response:
        """Appends new tokens, and returns their response."""
        response = self._responses[new.index]
        response.tokens += new.tokens.tolist()
        response.logprobs += new.logprobs.tolist()
        response.spans, response.finish_reason = new.spans, new.finish_reason
        return response

    def whole(self) -> dict[str, Any]:
        """Returns the complete answer, once every response has ended."""
        name = self._request.request_id or f"generate-{uuid.uuid4().hex}"
        choices = [
            {"index": index, "token_ids": each.tokens, "logprobs": self._logprobs(each.tokens, each.logprobs), **each.ending()}
            for index, each in enumerate(self._responses)
        ]  # fmt: skip
        return {"request_id": name, "model": self._model, "choices": choices, **self._totals()}

    def _logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[float], *, named: bool = False
    ) -> dict[str, Any] | None:
        """Returns each token with its log-probability and its bytes. A token is named by its text if `named`, else by its id."""
        if not self._request.logprobs:
            return None
        entries = []
        for token, logprob in zip(tokens, logprobs, strict=True):
            content = token_bytes(self._tokenizer, token)
            name = decoded(self._tokenizer, [token]) if named else f"token_id:{token}"
            entry = {"token": name, "logprob": logprob, "bytes": None if content is None else list(content)}
            entries.append({**entry, "top_logprobs": []})
        return {"content": entries}

    def _usage(self) -> dict[str, int]:
        prompt, response = len(self._request.prompt), sum(len(each.tokens) for each in self._responses)
        return {"prompt_tokens": prompt, "completion_tokens": response, "total_tokens": prompt + response}

    def _totals(self) -> dict[str, Any]:
        """Returns the usage, and the oldest version of the weights that sampled a token."""
        oldest = min(each.spans[0].version for each in self._responses)
        return {"usage": self._usage(), "weights_version": oldest}


class ChatAnswer(GenerateAnswer):
    """The answer of `/v1/chat/completions`, whole or in chunks."""

    def __init__(self, request: CheckedRequest, limits: ServedLimits) -> None:
        super().__init__(request, limits)
        name = f"chatcmpl-{uuid.uuid4().hex}"
        self._head = {"id": name, "created": int(time.time()), "model": limits.model}
        self._prompt = {"prompt_token_ids": request.prompt.tolist()} if request.return_token_ids else {}

    def whole(self) -> dict[str, Any]:
        """Returns the complete answer, once every response has ended."""
        choices = []
        for index, each in enumerate(self._responses):
            message = {"role": "assistant", "content": each.text.add(each.tokens, last=True)}
            parts = self._parts(each.tokens, each.logprobs)
            choices.append({"index": index, "message": message, **parts, **each.ending()})
        return {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            **self._totals(),
            **self._prompt,
        }

    def first_chunks(self) -> list[dict[str, Any]]:
        """Returns the chunks before all tokens, which name the role."""
        delta = {"role": "assistant", "content": ""}
        chunks = [
            self._chunk({"index": index, "delta": delta, "finish_reason": None})
            for index in range(len(self._responses))
        ]
        return [chunks[0] | self._prompt, *chunks[1:]]

    def chunk(self, new: NewTokens) -> dict[str, Any] | None:
        """Returns the chunk of new tokens; None if they complete nothing that the request asked for."""
        response, last, tokens = self.add(new), new.finish_reason is not None, new.tokens.tolist()
        text = response.text.add(tokens, last=last)
        asked = tokens and (self._request.logprobs or self._request.return_token_ids)
        if not (text or last or asked):
            return None
        parts = self._parts(tokens, new.logprobs.tolist())
        choice = {"index": new.index, "delta": {"content": text} if text else {}, **parts}
        if not last:
            return self._chunk({**choice, "finish_reason": None})
        return self._chunk({**choice, **response.ending()}) | {"weights_version": response.spans[0].version}

    def usage_chunk(self) -> dict[str, Any] | None:
        """Returns the chunk after all others, if the request asked for it."""
        return self._chunk() | {"usage": self._usage()} if self._request.include_usage else None

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": choices}

    def _parts(self, tokens: list[int], logprobs: list[float]) -> dict[str, Any]:
        parts = {"logprobs": self._logprobs(tokens, logprobs, named=not self._request.tokens_as_ids)}
        return {**parts, "token_ids": tokens} if self._request.return_token_ids else parts
