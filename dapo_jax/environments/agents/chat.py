"""Reads the requests of agents in OpenAI's chat format, matches them to earlier turns, and writes the answers."""

import hashlib
import json
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dapo_jax.environments.protocol import Turn
from dapo_jax.environments.tool_calls import BrokenCall, text_before_calls, tool_calls
from dapo_jax.text.chat_requests import ChatBody, StreamOptions, json_of, present, struct_of
from dapo_jax.text.http import RequestError
from dapo_jax.text.messages import canonical_messages
from dapo_jax.text.thoughts import without_thoughts

OVERRIDDEN = frozenset(
    {
        "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "reasoning_effort",
        "skip_special_tokens",
    }
)  # fmt: skip
"""Fields that the run's settings replace, because the policy must be sampled as it is trained."""


class ChatRequest:
    """A request of an agent that the policy can answer."""

    def __init__(self, content: bytes, stop: Sequence[str]) -> None:
        """Parses a body. `stop` are the stop strings of the run. Raises RequestError, which names the field that cannot be served."""
        given: Any = json_of(content)
        fields = present(given) if isinstance(given, Mapping) else {}
        self.overridden = OVERRIDDEN.intersection(fields)
        served = {name: value for name, value in fields.items() if name not in OVERRIDDEN}
        self.body = body = struct_of(served or given, ChatBody, "the body")
        body.check_messages()
        stops = [body.stop] if isinstance(body.stop, str) else body.stop
        for name, value, accepted in (
            ("n", body.n, [1]),
            ("stop", sorted(stops), [[], sorted(stop)]),
            ("stop_token_ids", body.stop_token_ids, [()]),
            ("top_logprobs", body.top_logprobs, [0]),
            ("chat_template_kwargs", body.chat_template_kwargs, [{}]),
            ("return_token_ids", body.return_token_ids, [False]),
        ):
            if value not in accepted:
                need = " or ".join(map(repr, accepted))
                raise RequestError(f"{name} is {value!r:.80}; an agent's server accepts {need}: leave it out")
        self.includes_usage = struct_of(body.stream_options, StreamOptions, "stream_options").include_usage
        limits = [limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None]
        self.max_tokens = min(limits, default=0)
        """Maximum number of tokens in the answer. 0 means that only the limits of the run apply."""
        if any(limit < 1 for limit in limits):
            raise RequestError(f"max_tokens is {self.max_tokens}; it must be 1 or more")
        self.tools = [present(tool) for tool in body.tools] if body.tool_choice != "none" else []
        for index, tool in enumerate(self.tools):
            function = tool.get("function")
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                need = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
                raise RequestError(f"tools[{index}] is {tool!r:.80}; a tool must be {need}")
        try:
            messages = canonical_messages(body.messages)
        except ValueError as error:
            raise RequestError(f"messages: {error!s:.1000}") from error
        self.keys = (_digest(self.tools), *map(_key, messages))
        """The key of the tools, and of each message. Messages with equal keys are the same message."""
        made = [call for message in messages for call in message.get("tool_calls", ())]
        self.called = {str(call.get("id")): call["function"]["name"] for call in made}
        """The names of the called functions, by the ids of the calls."""
        self.digest = _digest(fields)
        """Requests with equal bodies have equal digests."""


def _digest(value: object) -> bytes:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()


def _key(message: Mapping[str, Any]) -> bytes:
    """Returns the key of a canonical message: its role, its text without whitespace at the ends, and the names and arguments of its calls."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    named = [[call["name"], call["arguments"]] for call in calls]
    return _digest([message["role"], message["content"].strip(), named])


class Conversations:
    """The conversation of an episode after each of its turns."""

    def __init__(self) -> None:
        self._turns: list[tuple[Collection[bytes], ...]] = []
        """For each turn, the possible keys of the tools, of each message, and of the answer, which may return with or without its thoughts."""

    def extended(self, keys: Sequence[bytes]) -> tuple[int | None, int]:
        """Returns the turn whose conversation the messages with these keys continue, and the number of messages in this conversation. The longest conversation is
        preferred, then the latest. Returns (None, 0) if they continue no conversation."""
        best, most = None, 1
        for number, parts in enumerate(self._turns):
            is_longer = most <= len(parts) < len(keys)
            if is_longer and all(key in part for part, key in zip(parts, keys, strict=False)):
                best, most = number, len(parts)
        return best, most - 1

    def add(self, keys: Sequence[bytes], answer: "Answer") -> None:
        """Adds a turn: the answer to a request with these keys."""
        after, _ = self.extended(keys)
        known = () if after is None else self._turns[after]
        self._turns.append((*known, *({key} for key in keys[len(known) :]), answer.keys))


class Answer:
    """A turn of the policy as the answer to a request."""

    def __init__(self, request: ChatRequest, turn: Turn) -> None:
        self._body, self._turn, self._includes_usage = request.body, turn, request.includes_usage
        marked = turn.marked_text or turn.text
        said = without_thoughts(marked).strip()
        calls = tool_calls(marked, request.tools) if request.tools else []
        self.unparsed = sum(isinstance(call, BrokenCall) for call in calls)
        """Number of calls that cannot be parsed. The answer then stays a text."""
        functions = [] if self.unparsed else [dict(vars(call)) for call in calls]
        ids = [function.pop("id") for function in functions]
        content = turn.text if said == marked.strip() else said
        content = text_before_calls(marked, request.tools) if functions else content
        self.message: dict[str, Any] = {"role": "assistant", "content": content}
        if said != marked.strip() and marked.rstrip().endswith(said):
            thoughts = marked.rstrip().removesuffix(said).strip()
            thoughts = thoughts.removeprefix("<think>").removesuffix("</think>").strip()
            self.message["reasoning_content"] = thoughts
        if len({*ids, ""}) <= len(ids):  # Mistral's templates require nine letters or digits
            ids = [f"call{turn.number:04}{n:x}" for n in range(len(ids))]
        self.calls: list[dict[str, Any]] = [
            {"id": name, "type": "function", "function": {**function, "arguments": json.dumps(function["arguments"])}}
            for name, function in zip(ids, functions, strict=True)
        ]  # fmt: skip
        if self.calls:
            self.message["tool_calls"] = self.calls
        listed = [{"function": function} for function in functions]
        self.keys = frozenset(
            _key({"role": "assistant", "content": text, "tool_calls": made})
            for text in (turn.text, marked, said, content)
            for made in ([], listed)
            if made or not functions or text != content
        )
        """The keys with which this answer may return in a later request. The text before its calls is the answer only with the calls."""
        prompt, sampled = turn.context_tokens, len(turn.tokens)
        usage = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
        self._head = {"id": f"chatcmpl-{turn.number}", "created": int(time.time()), "model": self._body.model or "policy"}  # fmt: skip
        self._usage = {"usage": usage}

    def whole(self) -> dict[str, Any]:
        """Returns the answer as one object."""
        choices = [self._choice("message", self.message)]
        return {**self._head, "object": "chat.completion", "choices": choices, **self._usage}

    def chunks(self) -> list[dict[str, Any]]:
        """Returns the answer as a stream: one chunk, and a chunk with the numbers of tokens if the request asks for it."""
        head = {**self._head, "object": "chat.completion.chunk"}
        calls = [{"index": n, **call} for n, call in enumerate(self.calls)]
        delta = self.message | ({"tool_calls": calls} if calls else {})
        chunks: list[dict[str, Any]] = [{**head, "choices": [self._choice("delta", delta)]}]
        if self._includes_usage:
            chunks.append({**head, "choices": [], **self._usage})
        return chunks

    def _choice(self, kind: str, message: Mapping[str, Any]) -> dict[str, Any]:
        turn, logprobs = self._turn, None
        if self._body.logprobs:
            pairs = zip(turn.tokens.tolist(), turn.logprobs.tolist(), strict=True)
            none = {"bytes": None, "top_logprobs": []}
            logprobs = {"content": [{"token": f"token_id:{token}", "logprob": value, **none} for token, value in pairs]}  # fmt: skip
        reason = "tool_calls" if self.calls and turn.finish_reason == "stop" else turn.finish_reason
        return {"index": 0, kind: message, "logprobs": logprobs, "finish_reason": reason}
