"""Parses HTTP request bodies with `msgspec`, in vLLM's format (token ids) or OpenAI's formats (messages, and prompts to complete).

A request that cannot be served raises a RequestError, whose message names the field.

A field that this server does not support is accepted if its value has no effect, and refused otherwise.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

import jax
import msgspec
import numpy as np
from jaxtyping import Int, PRNGKeyArray
from msgspec import Meta, structs

from dapo_jax.hints import nearest
from dapo_jax.sampling.requests import OwnOptions
from dapo_jax.serving.request_loop import RequestError
from dapo_jax.serving.served_requests import CheckedRequest, ServedLimits
from dapo_jax.text.conversations import conversation_ids
from dapo_jax.text.stop_strings import StopStrings

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_RESERVED = ("messages", "tools", "add_generation_prompt", "chat_template", "raise_exception", "strftime_now")
"""Names that `chat_template_kwargs` cannot set, because the server sets them."""
_IGNORED = frozenset(
    {
        "cache_salt", "user", "metadata", "safety_identifier", "prompt_cache_key", "parallel_tool_calls",
        "routed_experts_prompt_start", "skip_special_tokens", "spaces_between_special_tokens", "detokenize", "include_stop_str_in_output",
    }
)  # fmt: skip
"""Request fields that are ignored, because they would not change this server's answer."""
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,), "add_special_tokens": (False,), "bad_words": ([],), "best_of": (1,), "continue_final_message": (False,),
    "continuous_usage_stats": (False,), "echo": (False,), "features": ({},), "frequency_penalty": (0,), "ignore_eos": (False,),
    "include_obfuscation": (False,), "logit_bias": ({},), "min_p": (0,), "min_tokens": (0,), "modalities": (["text"],), "presence_penalty": (0,),
    "priority": (0,), "repetition_penalty": (1,), "response_format": ({"type": "text"},), "service_tier": ("auto", "default"), "store": (False,),
    "stream": (False,), "top_logprobs": (0,), "use_beam_search": (False,),
}  # fmt: skip
"""For each unsupported field, the values that have no effect and are therefore accepted."""

_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_Stop = Annotated[str, Meta(min_length=1, max_length=256)]


class _Sampling(msgspec.Struct, kw_only=True, frozen=True):
    """Sampling options that all routes accept."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: int = 1
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    stop: _Stop | Annotated[tuple[_Stop, ...], Meta(max_length=16)] = ()
    stop_token_ids: Annotated[tuple[int, ...], Meta(max_length=16)] = ()


class _SamplingParams(_Sampling, kw_only=True, frozen=True):
    """The field `sampling_params` in a request to `/inference/v1/generate`."""

    logprobs: Annotated[int, Meta(ge=0, le=1)] | None = None


class _GenerateBody(msgspec.Struct, kw_only=True, frozen=True):
    """The body of a request to `/inference/v1/generate`."""

    token_ids: list[int]
    model: str = ""
    request_id: str = ""
    return_token_ids: bool = False
    sampling_params: dict[str, Any] = {}


class _ChatBody(_Sampling, kw_only=True, frozen=True):
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


class _CompletionsBody(_Sampling, kw_only=True, frozen=True):
    """The body of a request to `/v1/completions`."""

    prompt: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]
    model: str = ""
    echo: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=1)] | None = None


_Body = TypeVar("_Body", _GenerateBody, _ChatBody, _CompletionsBody)


class _StreamOptions(msgspec.Struct, kw_only=True, frozen=True):
    """The field `stream_options` in a request to `/v1/chat/completions`."""

    include_usage: bool = False


# msgspec prepares a struct when it is first used. If two threads did this at the same time, the process would crash.
for _kind in (_SamplingParams, _GenerateBody, _ChatBody, _CompletionsBody, _StreamOptions):
    msgspec.json.Decoder(_kind)


def read_generate(content: bytes, limits: ServedLimits) -> CheckedRequest:
    """Parses the body of a request to `/inference/v1/generate`."""
    body = _body(content, _GenerateBody, limits)
    prompt = np.array(limits.checked_ids("token_ids", body.token_ids), np.int32)
    options = _struct(body.sampling_params, _SamplingParams, "sampling_params")
    logprobs = options.logprobs is not None
    return _request(options, prompt, limits, logprobs=logprobs, request_id=body.request_id[:200])


def read_chat(content: bytes, limits: ServedLimits) -> CheckedRequest:
    """Parses the body of a request to `/v1/chat/completions`, and renders and tokenizes its prompt."""
    body = _body(content, _ChatBody, limits)
    streaming = _struct(body.stream_options, _StreamOptions, "stream_options")
    for index, message in enumerate(body.messages):
        if message.get("role") not in _ROLES:
            raise RequestError(
                f"messages[{index}].role is {message.get('role')!r:.80}; the server accepts {', '.join(_ROLES)}"
            )
    if body.messages[-1]["role"] == "assistant":
        raise RequestError("messages: the last message is the assistant's; end with a user message")
    most = limits.top_logprobs if body.logprobs else 0
    if not 0 <= body.top_logprobs <= most:
        remedy = "serve with a larger --top-logprobs" if body.logprobs else "also set logprobs to true"
        raise RequestError(
            f"top_logprobs is {body.top_logprobs}; the server accepts 0 to {most}: lower it, or {remedy}"
        )
    variables = _template_variables(body, limits)
    try:
        prompt = conversation_ids(body.messages, limits.tokenizer, today=limits.today, variables=variables)
    except ValueError as error:
        raise RequestError(f"messages: {error!s:.1000}") from error
    return _request(
        body, prompt, limits, logprobs=body.logprobs, top_logprobs=body.top_logprobs, return_token_ids=body.return_token_ids, tokens_as_ids=body.return_tokens_as_token_ids,
        stream=body.stream, include_usage=streaming.include_usage,
    )  # fmt: skip


def read_completions(content: bytes, limits: ServedLimits) -> list[CheckedRequest]:
    """Parses the body of a request to `/v1/completions`, and tokenizes its prompts. Returns one request for each prompt."""
    body = _body(content, _CompletionsBody, limits)
    prompts: list[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if len(kinds := {type(prompt) for prompt in prompts}) > 1:
        raise RequestError(
            f"prompt: found {prompts!r:.80}, a list of several types; needs texts, token ids, or lists of token ids"
        )
    prompts = [prompts] if kinds == {int} else prompts
    if len(prompts) > limits.most_responses:
        raise RequestError(
            f"prompt: found {len(prompts)} prompts; the server accepts up to {limits.most_responses} in a request"
        )
    scoring = {"max_tokens": (0, 1), "temperature": (0, None), "n": (1,)} if body.echo else {}
    for name, accepted in scoring.items():
        if (value := getattr(body, name)) not in accepted:
            raise RequestError(
                f"{name} is {value}; with echo, which scores the prompt, the server accepts {' or '.join(map(str, accepted))}"
            )
    requests, options = [], structs.replace(body, max_tokens=1) if body.echo else body
    for prompt in prompts:
        try:
            ids = limits.tokenizer.encode_prompt(prompt).tolist() if isinstance(prompt, str) else prompt
        except ValueError as error:
            raise RequestError(f"prompt: {error!s:.1000}") from error
        checked = np.array(limits.checked_ids("prompt", ids), np.int32)
        request = _request(options, checked, limits, logprobs=body.logprobs is not None, echo=body.echo)
        requests.append(replace(request, max_tokens=body.max_tokens or 0) if body.echo else request)
    return requests


def _body(content: bytes, kind: type[_Body], limits: ServedLimits) -> _Body:
    try:
        decoded = msgspec.json.decode(content)
    except RecursionError as error:
        raise RequestError("the body's JSON is nested too deeply", code="invalid_json") from error
    except msgspec.DecodeError as error:
        raise RequestError(f"the body is not JSON: {error!s:.200}", code="invalid_json") from error
    body = _struct(decoded, kind, "the body")
    if body.model not in ("", limits.model):
        raise RequestError(
            f"model is {body.model!r:.80}; this server has only {limits.model!r}: use this name, or omit the field",
            status=404, code="model_not_found",
        )  # fmt: skip
    return body


def _struct(content: object, kind: type[_Struct], where: str) -> _Struct:
    """Converts a JSON object to a struct. A field that is null is treated as missing."""
    if isinstance(content, dict):
        content = {name: value for name, value in _present(content).items() if name not in _IGNORED}
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


def _request(
    options: _Sampling, prompt: Int[np.ndarray, " prompt"], limits: ServedLimits, **others: Any
) -> CheckedRequest:  # fmt: skip
    """Builds a `CheckedRequest` from the options and the prompt, after checking both against the server's limits."""
    fields = _present(structs.asdict(options))
    named = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    max_tokens = fields.get(named, limits.max_response_tokens)
    changed = {name: fields[name] for name in ("temperature", "top_p", "top_k") if name in fields}
    stop = (options.stop,) if isinstance(options.stop, str) else options.stop
    ids = limits.checked_ids("stop_token_ids", options.stop_token_ids)
    try:
        decoding = replace(limits.decoding, **changed)
        strings = StopStrings(limits.tokenizer, stop, ids)
    except ValueError as error:
        raise RequestError(str(error)) from error
    key = None if options.seed is None else _seeded_key(options.seed)
    sampling = OwnOptions(decoding=decoding, key=key, stop=strings.find if stop or ids else None)
    others |= {"options": sampling, "stop": stop}
    return limits.request(prompt, max_tokens, count=options.n, named=named, **others)


def _template_variables(body: _ChatBody, limits: ServedLimits) -> dict[str, Any]:
    """Returns the chat template's variables: the server's defaults, the request's `chat_template_kwargs`, and its `tools`."""
    variables = _present(body.chat_template_kwargs)
    for name in variables:
        if name in _RESERVED or name.endswith("_token"):
            raise RequestError(
                f"chat_template_kwargs sets {name!r:.80}, which a request cannot set: leave it out"
            )
    if body.tools and body.tool_choice != "none":
        variables["tools"] = [_present(tool) for tool in body.tools]
    return {**limits.template_kwargs, **variables}


def _present(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _seeded_key(seed: int) -> PRNGKeyArray:
    """Returns the PRNG key for a request with a seed of up to 64 bits. The key does not depend on the server's seed."""
    high, low = divmod(seed, 1 << 32)
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(0), np.uint32(high)), np.uint32(low))
