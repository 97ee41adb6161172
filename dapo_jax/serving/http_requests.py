"""The requests that the HTTP server takes, as arguments: vLLM's of token ids, OpenAI's of messages.

A field that would change what is sampled and is not supported is refused by its name, unless it has the value that changes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any

import numpy as np
from jaxtyping import Int

from dapo_jax.sampling.decoding import LEAST_TEMPERATURE, MOST_TEMPERATURE, MOST_TOP_K, DecodingOptions
from dapo_jax.serving.http_fields import Fields, RequestError, shown
from dapo_jax.text.conversations import conversation_ids
from dapo_jax.text.stop_strings import StopStrings
from dapo_jax.text.tokenizers import Tokenizer

_MOST_STOPS = 16
"""Stop strings and stop tokens of one request: each is looked for in every response."""
_LONGEST_STOP = 256
"""Characters of a stop string."""
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_OWN_VARIABLES = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize", "today"),
        *("self", "super", "loop", "caller", "varargs", "kwargs"),
        *("raise_exception", "strftime_now", "namespace", "dict", "range", "cycler", "joiner"),
    }
)  # fmt: skip
"""Names that a request cannot set by `chat_template_kwargs`: the request's other fields, words of Jinja, and functions that templates call."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a server, and what requests are read with."""

    model: str
    """The name of the model, which requests may leave out."""
    tokenizer: Tokenizer
    vocabulary: int
    """Token ids of the model, of which the tokenizer may know fewer: what was sampled may come back in a prompt."""
    max_prompt_tokens: int
    max_response_tokens: int
    most_responses: int
    """Responses that may be under way or waiting, and so the most of one request."""
    decoding: DecodingOptions = field(default_factory=DecodingOptions)
    """The options of requests that do not name them."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, unless a request has others."""
    today: date | None = None


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """The prompt of a request, and how it is answered."""

    prompt: Int[np.ndarray, " prompt"]
    max_tokens: int
    count: int
    """Responses."""
    decoding: DecodingOptions
    seed: int | None
    """None: the numbers drawn are those of no other request."""
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """A request of `/inference/v1/generate`."""

    sample: SampleRequest
    request_id: str
    """Empty: the server makes one up."""
    logprobs: bool


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A request of `/v1/chat/completions`."""

    sample: SampleRequest
    logprobs: bool
    return_token_ids: bool
    tokens_as_ids: bool
    """Log-probabilities name tokens by their ids."""
    stream: bool
    include_usage: bool


def read_generate(body: Fields, limits: Limits) -> GenerateRequest:
    """Reads a request of token ids.

    Raises:
        RequestError: it cannot be served; the message names the field.
    """
    _check_model(body, limits)
    if "token_ids" not in body.rest:
        raise RequestError("the body has no token_ids: give the prompt's, a list of integers", code="missing")
    ids = body.ids("token_ids", vocabulary=limits.vocabulary)
    prompt = _checked_prompt(np.array(ids, np.int32), limits)
    request_id = body.text("request_id")
    body.ignored("cache_salt")  # nothing of a prompt is kept for another request
    body.flag("return_token_ids")
    body.neutral("priority", 0)
    body.neutral("stream", False)
    body.neutral("features", {})
    for name in ("stream_options", "content_parts", "kv_transfer_params"):
        body.neutral(name)
    options = body.part("sampling_params")
    body.finish()
    logprobs = (
        options.integer("logprobs", None, least=0, most=1, why=", that of the token itself") is not None
    )
    # The answer has no text.
    for name in (
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "detokenize",
        "include_stop_str_in_output",
    ):
        options.flag(name)
    options.ignored("routed_experts_prompt_start")  # of experts, which no model here routes to
    options.neutral("best_of", 1)
    for name in (
        "prompt_logprobs",
        "extra_args",
        "truncate_prompt_tokens",
        "structured_outputs",
        "guided_decoding",
    ):
        options.neutral(name)
    sample = _sample(options, prompt, options.integer("max_tokens", None, **_max_tokens(limits)), limits)
    options.finish()
    return GenerateRequest(sample=sample, request_id=request_id[:200], logprobs=logprobs)


def read_chat(body: Fields, limits: Limits) -> ChatRequest:
    """Reads a request of messages, and makes its prompt. Takes as long as its texts are to be tokenized.

    Raises:
        RequestError: it cannot be served; the message names the field.
    """
    _check_model(body, limits)
    messages = _messages(body)
    variables = _template_variables(body, limits)
    logprobs = body.flag("logprobs")
    body.neutral("top_logprobs", 0)
    asked = [
        body.integer(name, None, **_max_tokens(limits)) for name in ("max_completion_tokens", "max_tokens")
    ]
    stream = body.flag("stream")
    stream_options = body.part("stream_options")
    include_usage = stream_options.flag("include_usage")
    stream_options.neutral("continuous_usage_stats", False)
    stream_options.neutral("include_obfuscation", False)
    stream_options.finish()
    shape = {name: body.flag(name) for name in ("return_token_ids", "return_tokens_as_token_ids")}
    _refuse_other_chats(body)
    sample = _sample(body, np.zeros(0, np.int32), next((each for each in asked if each), None), limits)
    body.finish()
    try:
        prompt = conversation_ids(messages, limits.tokenizer, today=limits.today, variables=variables)
    except ValueError as error:
        raise RequestError(f"messages: {error!s:.1000}") from error
    except RecursionError as error:
        raise RequestError("messages: too many objects inside one another") from error
    _checked_prompt(prompt, limits)
    return ChatRequest(
        sample=replace(sample, prompt=prompt),
        logprobs=logprobs,
        return_token_ids=shape["return_token_ids"],
        tokens_as_ids=shape["return_tokens_as_token_ids"],
        stream=stream,
        include_usage=include_usage,
    )


def _check_model(body: Fields, limits: Limits) -> None:
    if (name := body.text("model", limits.model)) != limits.model:
        raise RequestError(
            f"model is {shown(name)}; this server has {shown(limits.model)}, which is also taken where the field is left out",
            status=404,
            code="model_not_found",
        )


def _checked_prompt(prompt: Int[np.ndarray, " prompt"], limits: Limits) -> Int[np.ndarray, " prompt"]:
    if not 0 < len(prompt) <= limits.max_prompt_tokens:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens; the server takes 1 to {limits.max_prompt_tokens}: shorten it, or serve with a larger --max-prompt-tokens",
            code="context_length_exceeded" if len(prompt) else "invalid_value",
        )
    return prompt


def _max_tokens(limits: Limits) -> dict[str, Any]:
    return {
        "least": 1,
        "most": limits.max_response_tokens,
        "why": ": lower it, or serve with a larger --max-response-tokens",
    }


def _sample(
    options: Fields, prompt: Int[np.ndarray, " prompt"], max_tokens: int | None, limits: Limits
) -> SampleRequest:
    """The options that both kinds of requests have."""
    usual = limits.decoding
    temperature = options.number("temperature", usual.temperature, least=0.0, most=MOST_TEMPERATURE)
    if 0 < temperature < LEAST_TEMPERATURE:
        raise RequestError(
            f"temperature is {temperature}; the server takes 0, which is greedy, or {LEAST_TEMPERATURE} to {MOST_TEMPERATURE:g}"
        )
    top_p = options.number("top_p", usual.top_p, least=0.0, most=1.0)
    if not top_p:
        raise RequestError("top_p is 0; the server takes more than 0 to 1 (1 is off)")
    top_k = options.integer("top_k", usual.top_k, least=-1, most=MOST_TOP_K, why=" (0 and -1 are off)")
    count = options.integer("n", 1, least=1, most=limits.most_responses, why=", its slots and its --queue")
    seed = options.integer("seed", None, least=0, most=(1 << 63) - 1)
    stop = options.texts("stop", most=_MOST_STOPS)
    _check_stop(stop, limits)
    stop_token_ids = options.ids("stop_token_ids", vocabulary=limits.vocabulary, most=_MOST_STOPS)
    options.neutral("min_tokens", 0)
    options.neutral("ignore_eos", False)
    options.neutral("min_p", 0)
    options.neutral("presence_penalty", 0)
    options.neutral("frequency_penalty", 0)
    options.neutral("repetition_penalty", 1)
    options.neutral("logit_bias", {})
    options.neutral("bad_words", [])
    options.neutral("allowed_token_ids")
    return SampleRequest(
        prompt=prompt,
        max_tokens=limits.max_response_tokens if max_tokens is None else max_tokens,
        count=count,
        decoding=DecodingOptions(temperature=temperature, top_p=top_p, top_k=top_k),
        seed=seed,
        stop=stop,
        stop_token_ids=tuple(stop_token_ids),
    )


def _check_stop(stop: Sequence[str], limits: Limits) -> None:
    if long := [each for each in stop if len(each) > _LONGEST_STOP]:
        raise RequestError(
            f"stop has a text of {len(long[0])} characters; the server takes up to {_LONGEST_STOP}"
        )
    try:
        for each in stop:
            each.encode("utf-8")  # half of a surrogate pair is no text
        StopStrings(limits.tokenizer, stop)
        if stop:
            limits.tokenizer.decode(np.array([limits.vocabulary - 1], np.int32))  # which may be sampled
    except ValueError as error:
        raise RequestError(f"stop: {error}") from error


def _refuse_other_chats(body: Fields) -> None:
    """Refuses what would make another answer of a conversation."""
    body.neutral("add_generation_prompt", True)
    body.neutral("continue_final_message", False)
    body.neutral("add_special_tokens", False)
    body.neutral("skip_special_tokens", True)
    body.neutral("spaces_between_special_tokens", True)
    body.neutral("include_stop_str_in_output", False)
    body.neutral("echo", False)
    body.neutral("store", False)
    body.neutral("priority", 0)
    body.neutral("response_format", {"type": "text"})
    body.neutral("modalities", ["text"])
    body.neutral("best_of", 1)
    body.neutral("use_beam_search", False)
    body.neutral("service_tier", "auto", "default")
    for name in (
        "chat_template", "documents", "functions", "function_call", "audio", "prediction", "prompt_logprobs", "reasoning_effort",
        "truncate_prompt_tokens", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "web_search_options",
    ):  # fmt: skip
        body.neutral(name)
    body.ignored(
        "user", "metadata", "safety_identifier", "prompt_cache_key", "cache_salt", "request_id", "parallel_tool_calls"
    )  # fmt: skip


def _template_variables(body: Fields, limits: Limits) -> dict[str, Any]:
    """Variables of the chat template: those of the server, of the request, and its tools."""
    given = body.part("chat_template_kwargs").rest
    if wrong := [
        name for name in given if name in _OWN_VARIABLES or name.endswith("_token") or not name.isidentifier()
    ]:
        raise RequestError(
            f"chat_template_kwargs has {shown(wrong[0])}, which is not a variable that a request can set: leave it out"
        )
    tools = []
    for tool in body.items("tools", where=lambda index: f"tools[{index}]"):
        described = tool.rest
        if described.get("type") != "function" or not isinstance(described.get("function"), Mapping):
            raise RequestError(
                f'a tool is {shown(described)}; the server takes {{"type": "function", "function": {{...}}}}'
            )
        tools.append(described)
    choice = body.take("tool_choice")
    if choice not in (None, "auto", "none"):
        raise RequestError(
            f'tool_choice is {shown(choice)}, and this server does not support it: leave it out, or set it to "auto" or "none"',
            code="unsupported_parameter",
        )
    shown_tools = {"tools": tools} if tools and choice != "none" else {}
    return {**limits.template_kwargs, **given, **shown_tools}


def _messages(body: Fields) -> list[Any]:
    """The messages as they were given: they are made canonical where they are rendered."""
    given = body.take("messages")
    if not given:
        raise RequestError(
            'the body has no messages: give some, such as [{"role": "user", "content": "1+1"}]',
            code="missing",
        )
    if not isinstance(given, list):
        raise RequestError(f"messages must be a list of objects; found {shown(given)}", code="invalid_type")
    roles = [Fields(each, f"messages[{index}]").text("role") for index, each in enumerate(given)]
    if unknown := [index for index, role in enumerate(roles) if role not in _ROLES]:
        raise RequestError(
            f"messages[{unknown[0]}]: role is {shown(roles[unknown[0]])}; the server takes {', '.join(_ROLES)}"
        )
    if roles[-1] == "assistant":
        raise RequestError(
            "the last message is the assistant's: the response would be a second answer in a row; end with another"
        )
    return given
