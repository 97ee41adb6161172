"""Parses HTTP request bodies with `msgspec`, in vLLM's format (token ids) or OpenAI's formats (messages, and prompts to complete).

A request that cannot be served raises a RequestError, whose message names the field.

A field that this server does not support is accepted if its value has no effect, and refused otherwise.
"""

from dataclasses import replace
from typing import Annotated, Any, TypeVar

import jax
import msgspec
import numpy as np
from jaxtyping import Int, PRNGKeyArray
from msgspec import Meta, structs

from dapo_jax.sampling.requests import OwnOptions
from dapo_jax.serving.served_requests import CheckedRequest, ServedLimits
from dapo_jax.text.chat_requests import ChatBody, SamplingFields, StreamOptions, json_of, present, struct_of
from dapo_jax.text.conversations import conversation_ids
from dapo_jax.text.http import RequestError
from dapo_jax.text.stop_strings import StopStrings

_RESERVED = ("messages", "tools", "add_generation_prompt", "chat_template", "raise_exception", "strftime_now")
"""Names that `chat_template_kwargs` cannot set, because the server sets them."""


class _SamplingParams(SamplingFields, kw_only=True, frozen=True):
    """The field `sampling_params` in a request to `/inference/v1/generate`."""

    logprobs: Annotated[int, Meta(ge=0, le=1)] | None = None
    # These fields have no effect, because the answer has no text.
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False


class _GenerateBody(msgspec.Struct, kw_only=True, frozen=True):
    """The body of a request to `/inference/v1/generate`."""

    token_ids: list[int]
    model: str = ""
    request_id: str = ""
    return_token_ids: bool = False
    sampling_params: dict[str, Any] = {}


class _CompletionsBody(SamplingFields, kw_only=True, frozen=True):
    """The body of a request to `/v1/completions`."""

    prompt: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]
    model: str = ""
    echo: bool = False
    add_special_tokens: bool = True
    """Whether a text begins with the beginning-of-text token, if the model has one."""
    logprobs: Annotated[int, Meta(ge=0, le=1)] | None = None


_Body = TypeVar("_Body", _GenerateBody, ChatBody, _CompletionsBody)


# msgspec prepares a struct when it is first used. If two threads did this at the same time, the process would crash.
for _kind in (_SamplingParams, _GenerateBody, _CompletionsBody):
    msgspec.json.Decoder(_kind)


def read_generate(content: bytes, limits: ServedLimits) -> CheckedRequest:
    """Parses the body of a request to `/inference/v1/generate`."""
    body = _body(content, _GenerateBody, limits)
    prompt = np.array(limits.checked_ids("token_ids", body.token_ids), np.int32)
    options = struct_of(body.sampling_params, _SamplingParams, "sampling_params")
    logprobs = options.logprobs is not None
    return _request(options, prompt, limits, logprobs=logprobs, request_id=body.request_id[:200])


def read_chat(content: bytes, limits: ServedLimits) -> CheckedRequest:
    """Parses the body of a request to `/v1/chat/completions`, and renders and tokenizes its prompt."""
    body = _body(content, ChatBody, limits)
    streaming = struct_of(body.stream_options, StreamOptions, "stream_options")
    body.check_messages()
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
    encode = limits.tokenizer.encode_prompt if body.add_special_tokens else limits.tokenizer.encode
    requests, options = [], structs.replace(body, max_tokens=1) if body.echo else body
    for prompt in prompts:
        try:
            ids = encode(prompt).tolist() if isinstance(prompt, str) else prompt
        except ValueError as error:
            raise RequestError(f"prompt: {error!s:.1000}") from error
        checked = np.array(limits.checked_ids("prompt", ids), np.int32)
        request = _request(options, checked, limits, logprobs=body.logprobs is not None, echo=body.echo)
        requests.append(replace(request, max_tokens=body.max_tokens or 0) if body.echo else request)
    return requests


def _body(content: bytes, kind: type[_Body], limits: ServedLimits) -> _Body:
    body = struct_of(json_of(content), kind, "the body")
    if body.model not in ("", limits.model):
        raise RequestError(
            f"model is {body.model!r:.80}; this server has only {limits.model!r}: use this name, or omit the field",
            status=404, code="model_not_found",
        )  # fmt: skip
    return body


def _request(
    options: SamplingFields, prompt: Int[np.ndarray, " prompt"], limits: ServedLimits, **others: Any
) -> CheckedRequest:  # fmt: skip
    """Builds a `CheckedRequest` from the options and the prompt, after checking both against the server's limits."""
    fields = present(structs.asdict(options))
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
    others |= {"options": sampling, "stop": (stop, ids)}
    return limits.request(prompt, max_tokens, count=options.n, named=named, **others)


def _template_variables(body: ChatBody, limits: ServedLimits) -> dict[str, Any]:
    """Returns the chat template's variables: the server's defaults, the request's `chat_template_kwargs`, and its `tools`."""
    variables = present(body.chat_template_kwargs)
    for name in variables:
        if name in _RESERVED or name.endswith("_token"):
            raise RequestError(
                f"chat_template_kwargs sets {name!r:.80}, which a request cannot set: leave it out"
            )
    if body.tools and body.tool_choice != "none":
        variables["tools"] = [present(tool) for tool in body.tools]
    return {**limits.template_kwargs, **variables}


def _seeded_key(seed: int) -> PRNGKeyArray:
    """Returns the PRNG key for a request with a seed of up to 64 bits. The key does not depend on the server's seed."""
    high, low = divmod(seed, 1 << 32)
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(0), np.uint32(high)), np.uint32(low))
