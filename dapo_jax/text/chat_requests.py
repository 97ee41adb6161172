"""Reads the bodies of requests in OpenAI's chat format. Serving, and environments whose agents send requests, share this module.

A field that a server does not support is accepted if its value has no effect, and refused otherwise. Needs the `http` extra.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from dapo_jax.hints import nearest
from dapo_jax.text.http import RequestError

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_IGNORED = frozenset(
    {
        "cache_salt", "user", "metadata", "safety_identifier", "prompt_cache_key", "parallel_tool_calls",
        "routed_experts_prompt_start", "spaces_between_special_tokens", "detokenize",
    }
)  # fmt: skip
"""Request fields that are ignored, because they would not change this server's answer."""
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,), "add_special_tokens": (False,), "bad_words": ([],), "best_of": (1,), "continue_final_message": (False,),
    "continuous_usage_stats": (False,), "echo": (False,), "features": ({},), "frequency_penalty": (0,), "ignore_eos": (False,),
    "include_obfuscation": (False,), "include_stop_str_in_output": (False,), "logit_bias": ({},), "min_p": (0,), "min_tokens": (0,), "modalities": (["text"],), "presence_penalty": (0,),
    "priority": (0,), "repetition_penalty": (1,), "response_format": ({"type": "text"},), "service_tier": ("auto", "default"), "skip_special_tokens": (True,), "store": (False,),
    "stream": (False,), "top_logprobs": (0,), "use_beam_search": (False,),
}  # fmt: skip
"""For each unsupported field, the values that have no effect and are therefore accepted."""

_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_Stop = Annotated[str, Meta(min_length=1, max_length=256)]


class SamplingFields(msgspec.Struct, kw_only=True, frozen=True):
    """Sampling options that all routes accept."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: int = 1
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    stop: _Stop | Annotated[tuple[_Stop, ...], Meta(max_length=16)] = ()
    stop_token_ids: Annotated[tuple[int, ...], Meta(max_length=16)] = ()


class ChatBody(SamplingFields, kw_only=True, frozen=True):
    """The body of a request to `/v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    model: str = ""
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    stream: bool = False
    stream_options: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["auto", "none"] = "auto"
    chat_template_kwargs: dict[str, Any] = {}
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    def check_messages(self) -> None:
        """Raises RequestError if a role is unknown, or the conversation ends with an answer."""
        for index, message in enumerate(self.messages):
            if message.get("role") not in _ROLES:
                raise RequestError(
                    f"messages[{index}].role is {message.get('role')!r:.80}; the server accepts {', '.join(_ROLES)}"
                )
        if self.messages[-1]["role"] == "assistant":
            raise RequestError("messages: the last message is the assistant's; end with a user message")


class StreamOptions(msgspec.Struct, kw_only=True, frozen=True):
    """The field `stream_options` in a request to `/v1/chat/completions`."""

    include_usage: bool = False


# msgspec prepares a struct when it is first used. If two threads did this at the same time, the process would crash.
for _kind in (ChatBody, StreamOptions):
    msgspec.json.Decoder(_kind)


def json_of(content: bytes) -> Any:
    """Parses a JSON body."""
    try:
        return msgspec.json.decode(content)
    except RecursionError as error:
        raise RequestError("the body's JSON is nested too deeply", code="invalid_json") from error
    except msgspec.DecodeError as error:
        raise RequestError(f"the body is not JSON: {error!s:.200}", code="invalid_json") from error


def struct_of(content: object, kind: type[_Struct], where: str) -> _Struct:
    """Converts a JSON object to a struct. A field that is null is treated as missing."""
    if isinstance(content, dict):
        content = {name: value for name, value in present(content).items() if name not in _IGNORED}
        for name in content.keys() - set(kind.__struct_fields__):
            value, neutral = content[name], _NEUTRAL.get(name, ())
            if any(
                value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral
            ):
                continue
            remedy = f", or set it to {' or '.join(map(repr, neutral))}" if neutral else ""
            if not neutral and (known := nearest(name[:80], kind.__struct_fields__, least=0.7)):
                remedy = f"; did you mean {known[0]!r}?"
            raise RequestError(
                f"{where} has the field {name!r:.80}={value!r:.80}, which this server does not support: leave it out{remedy}",
                code="unsupported_parameter",
            )
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        needed, _, path = str(error).partition(" - at `$")
        value: Any = content
        for step in re.findall(r"\w+", path):  # a step is a field name or a list index
            value = value[int(step) if isinstance(value, list) else step]
        name = path.strip(".`") or where
        raise RequestError(f"{name}: {needed}; found {value!r:.80}") from error


def present(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that are not null."""
    return {name: value for name, value in values.items() if value is not None}
