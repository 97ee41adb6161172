"""Serves a model or a run over HTTP, with the engine that training samples from: `dapo-jax serve --http`."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import jax

from dapo_jax.config import ConfigError
from dapo_jax.hints import how_to_install
from dapo_jax.run.policy import Policy
from dapo_jax.run.programs import Transfer, compile_sampling
from dapo_jax.sampling.decoding import DecodingOptions, decoding_of_slots
from dapo_jax.serving.request_loop import RequestLoop
from dapo_jax.serving.served_model import ServingOptions, engine_of, reachable, served_policy, today_of

if TYPE_CHECKING:
    from dapo_jax.serving.http_requests import ServedLimits

_LONGEST = 1024
"""Default length of a prompt, and of a response, if the model has room for it."""


@dataclass(frozen=True, kw_only=True)
class HttpOptions(ServingOptions):
    """The options of `dapo-jax serve --http`. Temperature, top-p and top-k are the defaults of requests.

    Raises:
        ConfigError: a value is out of its range.
    """

    least_length: ClassVar[int] = 0

    max_prompt_tokens: int = 0
    """0: 1,024, or as many as the model has room for."""
    max_response_tokens: int = 0
    """0: 1,024, or as many as the model has room for."""
    temperature: float = 1.0
    model_name: str = ""
    """Name of the model in requests; empty: its source."""
    queue: int = 1024
    """Number of responses that may wait for a slot."""
    batch_invariant: bool = False
    """No bit of a response depends on other requests."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.queue < 0:
            raise ConfigError(f"queue={self.queue} must be at least 0")


def serve_http(
    source: str, options: HttpOptions, *, api_key: str = "", say: Callable[[str], None] = print
) -> None:
    """Answers requests until KeyboardInterrupt. `say` logs the address and each new version of the weights.

    Args:
        source: a model or a run folder.
        options: all other options.
        api_key: bearer token that requests need; empty: no key is needed.

    Raises:
        ConfigError: the extra is missing, there is no such model or run, lengths do not fit it, the address cannot be bound, or other machines
            could reach the server without a key.
        RuntimeError: the engine has failed.
    """
    try:
        from dapo_jax.serving.http_server import HttpServer, is_loopback
    except ImportError as error:
        raise ConfigError(
            f"serving over HTTP needs aiohttp and msgspec, which cannot be imported ({error}); {how_to_install('http')}"
        ) from error
    if not api_key and not is_loopback(options.host):
        raise ConfigError(
            f"--host {options.host} can be reached from other machines, and there is no key: set DAPO_JAX_API_KEY to one, which requests then need as a "
            "bearer token, or leave out --host"
        )
    with served_policy(source, options, say) as (policy, follow), ExitStack() as ends:
        limits = limits_of(source, policy, options)
        requests, transfer = request_loop(policy, options, limits)
        server = HttpServer(requests, limits, host=options.host, port=options.port, api_key=api_key, say=say)
        ends.enter_context(requests)
        try:
            ends.enter_context(server)
        except OSError as error:
            raise ConfigError(str(error)) from error
        follow(lambda params, version: requests.take(partial(transfer, params), version))
        key = "; requests need the key" if api_key else ""
        say(
            f"serving {source} at http://{server.address}: {options.slots} slots, prompts of up to {limits.max_prompt_tokens} tokens, "
            f"responses of up to {limits.max_response_tokens}{key}; Ctrl-C stops it. http://{reachable(server.address)}/v1/models describes the model"
        )
        try:
            requests.ended.wait()
        except KeyboardInterrupt:
            say("stopping; requests in flight have 10 s to finish")
            return
    raise RuntimeError(f"the engine has failed: {requests.failure!r}") from requests.failure


def limits_of(source: str, policy: Policy, options: HttpOptions) -> "ServedLimits":
    """Returns the limits of requests: the lengths of `options`, or as far as the model has room.

    Raises:
        ConfigError: the model has no room for them.
    """
    from dapo_jax.serving.http_requests import ServedLimits

    positions = policy.decoder.max_positions
    prompt, response = options.max_prompt_tokens, options.max_response_tokens
    response = response or min(_LONGEST, (positions - prompt) // (1 if prompt else 2))
    prompt = prompt or min(_LONGEST, positions - response)
    if not (prompt > 0 and response > 0 and prompt + response <= positions):
        raise ConfigError(
            f"--max-prompt-tokens {prompt} and --max-response-tokens {response} are {prompt + response} positions; "
            f"the model has {positions}: lower one"
        )
    return ServedLimits(
        model=options.model_name or source,
        tokenizer=policy.tokenizer,
        vocabulary=policy.decoder.vocab_size,
        max_prompt_tokens=prompt,
        max_response_tokens=response,
        most_responses=options.slots + options.queue,
        decoding=DecodingOptions(temperature=options.temperature, top_p=options.top_p, top_k=options.top_k),
        template_kwargs=options.chat_template_kwargs,
        today=today_of(source),
    )


def request_loop(
    policy: Policy, options: HttpOptions, limits: "ServedLimits"
) -> tuple[RequestLoop, Transfer]:
    """Returns the loop that samples responses, with its programs compiled, and the function that turns parameters into its weights.

    Raises:
        ConfigError: the slots do not fit the devices.
    """
    capacity = limits.max_prompt_tokens + limits.max_response_tokens
    engine, transfer, _ = engine_of(
        policy, options, capacity=capacity, batch_invariant=options.batch_invariant
    )
    decoding = jax.eval_shape(partial(decoding_of_slots, [None] * options.slots))
    compile_sampling(engine, transfer.shapes, [decoding])
    loop = RequestLoop(
        engine,
        transfer(policy.params),
        key=jax.random.key(options.seed),
        version=policy.step,
        most_responses=limits.most_responses,
    )
    return loop, transfer
