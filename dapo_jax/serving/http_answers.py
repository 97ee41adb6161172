"""Builds the bodies of HTTP answers in the formats that vLLM and OpenAI clients expect."""

import time
import uuid
from typing import Any

from dapo_jax.serving.request_loop import NewTokens
from dapo_jax.serving.served_requests import CheckedRequest, ServedLimits
from dapo_jax.serving.text import GrowingText, decoded
from dapo_jax.text.tokenizers import token_bytes


class GenerateAnswer:
    """The answer to a request to `/inference/v1/generate`."""

    def __init__(self, request: CheckedRequest, limits: ServedLimits) -> None:
        self._request, self._tokenizer, self._model = request, limits.tokenizer, limits.model
        self._latest: dict[int, NewTokens] = {}
        """The most recently received tokens of each response, by index. Without streaming, all tokens of a response arrive together."""
        self._sampled = 0

    def add(self, new: NewTokens) -> None:
        """Adds the new tokens of one response to the answer."""
        self._latest[new.index] = new
        self._sampled += len(new.tokens)

    def whole(self) -> dict[str, Any]:
        """Returns the complete answer. Every response must have ended."""
        name = self._request.request_id or f"generate-{uuid.uuid4().hex}"
        choices = []
        for index, new in sorted(self._latest.items()):
            parts = {"token_ids": new.tokens.tolist(), "logprobs": self._logprobs(new)}
            choices.append({"index": index, **parts, **_ending(new)})
        return {"request_id": name, "model": self._model, "choices": choices, **self._totals()}

    def _logprobs(self, new: NewTokens, *, named: bool = False) -> dict[str, Any] | None:
        """Returns the log-probabilities and bytes of new tokens, or None if not requested. If `named`, tokens are identified by text instead of id."""
        if not self._request.logprobs:
            return None
        entries = []
        for token, logprob in zip(new.tokens.tolist(), new.logprobs.tolist(), strict=True):
            content = token_bytes(self._tokenizer, token)
            name = decoded(self._tokenizer, [token]) if named else f"token_id:{token}"
            entry = {"token": name, "logprob": logprob, "bytes": None if content is None else list(content)}
            entries.append({**entry, "top_logprobs": []})
        return {"content": entries}

    def _usage(self) -> dict[str, int]:
        prompt, sampled = len(self._request.prompt), self._sampled
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def _totals(self) -> dict[str, Any]:
        """Returns the token counts, and the oldest version of the weights that sampled any token in the answer."""
        oldest = min(new.spans[0].version for new in self._latest.values())
        return {"usage": self._usage(), "weights_version": oldest}


class ChatAnswer(GenerateAnswer):
    """The answer to a request to `/v1/chat/completions`, as one object or in chunks."""

    def __init__(self, request: CheckedRequest, limits: ServedLimits) -> None:
        super().__init__(request, limits)
        name = f"chatcmpl-{uuid.uuid4().hex}"
        self._head = {"id": name, "created": int(time.time()), "model": limits.model}
        self._prompt = {"prompt_token_ids": request.prompt.tolist()} if request.return_token_ids else {}
        self._texts = [GrowingText(limits.tokenizer, request.stop) for _ in range(request.count)]

    def whole(self) -> dict[str, Any]:
        """Returns the complete answer. Every response must have ended."""
        choices = []
        for index, new in sorted(self._latest.items()):
            text = self._texts[index].add(new.tokens.tolist(), last=True)
            message = {"role": "assistant", "content": text}
            choices.append({"index": index, "message": message, **self._parts(new), **_ending(new)})
        parts = {"object": "chat.completion", "choices": choices, **self._totals()}
        return {**self._head, **parts, **self._prompt}

    def first_chunks(self) -> list[dict[str, Any]]:
        """Returns one chunk per response, to be sent first. It contains the role but no tokens."""
        parts = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        chunks = [self._chunk({"index": index, **parts}) for index in range(len(self._texts))]
        return [chunks[0] | self._prompt, *chunks[1:]]

    def chunk(self, new: NewTokens) -> dict[str, Any] | None:
        """Returns a chunk for new tokens, or None if there is nothing to send yet."""
        self.add(new)
        last, tokens = new.finish_reason is not None, new.tokens.tolist()
        text = self._texts[new.index].add(tokens, last=last)
        asked = tokens and (self._request.logprobs or self._request.return_token_ids)
        if not (text or last or asked):
            return None
        choice = {"index": new.index, "delta": {"content": text} if text else {}, **self._parts(new)}
        if not last:
            return self._chunk({**choice, "finish_reason": None})
        return self._chunk({**choice, **_ending(new)}) | {"weights_version": new.spans[0].version}

    def usage_chunk(self) -> dict[str, Any] | None:
        """Returns the final chunk with the token counts, or None if the request did not ask for the counts."""
        return self._chunk() | {"usage": self._usage()} if self._request.include_usage else None

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": choices}

    def _parts(self, new: NewTokens) -> dict[str, Any]:
        parts = {"logprobs": self._logprobs(new, named=not self._request.tokens_as_ids)}
        return {**parts, "token_ids": new.tokens.tolist()} if self._request.return_token_ids else parts


def _ending(new: NewTokens) -> dict[str, Any]:
    return {"finish_reason": new.finish_reason, "spans": [span._asdict() for span in new.spans]}
