"""Serving a model or a run over HTTP, with the engine that training samples from: what `dapo-jax serve --http` calls."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
from flax import nnx

from dapo_jax.config import ConfigError, DataConfig, ParallelConfig, SamplingConfig
from dapo_jax.extras import how_to_install
from dapo_jax.parallel.weights import both_on
from dapo_jax.run.policy import Policy, data_of_run, find_policy, mesh_of
from dapo_jax.run.programs import Transfer, compile_sampling, sharing, transfer_of
from dapo_jax.run.prompt_sets import dated, prompt_format
from dapo_jax.run.records import use_compilation_cache
from dapo_jax.sampling.decoding import DecodingOptions, decoding_of_slots
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.serving.follow import Follower, checkpoints_of
from dapo_jax.serving.http_requests import Limits
from dapo_jax.serving.options import ServingOptions
from dapo_jax.serving.request_loop import RequestLoop

_LONGEST = 1024
"""Tokens of a prompt, and of a response, unless an option or the model says otherwise."""


@dataclass(frozen=True, kw_only=True)
class HttpOptions(ServingOptions):
    """The options of `dapo-jax serve --http` besides the model. How tokens are drawn is that of requests which do not say.

    Raises:
        ConfigError: one is out of its range.
    """

    least_length: ClassVar[int] = 0

    max_prompt_tokens: int = 0
    """0: 1,024, or what the model has room for."""
    max_response_tokens: int = 0
    """0: 1,024, or what the model has room for."""
    temperature: float = 1.0
    model_name: str = ""
    """The name that requests call the model by; empty: its source."""
    queue: int = 1024
    """Responses that may wait for a slot."""
    batch_invariant: bool = False
    """No bit of a response depends on what is served beside it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.queue < 0:
            raise ConfigError(f"queue={self.queue} must be at least 0")


def serve_http(
    source: str, options: HttpOptions, *, api_key: str = "", say: Callable[[str], None] = print
) -> None:
    """Answers requests until it is interrupted (KeyboardInterrupt); `say` is told where, and of new weights.

    Args:
        source: a model or a run folder.
        options: all else.
        api_key: requests need it as a bearer token; empty: they need none.

    Raises:
        ConfigError: the extra is missing, there is no such model or run, lengths do not fit it, nothing can listen at the address, or others than
            this machine could reach it without a key.
        RuntimeError: the engine has failed.
    """
    try:
        from dapo_jax.serving.http_server import HttpServer, is_loopback
    except ImportError as error:
        raise ConfigError(
            f"serving over HTTP needs aiohttp, which cannot be imported ({error}); {how_to_install('http')}"
        ) from error
    if not api_key and not is_loopback(options.host):
        raise ConfigError(
            f"--host {options.host} can be reached from other machines, and there is no key: set DAPO_JAX_API_KEY to one, which requests then need as a "
            "bearer token, or leave out --host"
        )
    use_compilation_cache(options.compilation_cache)
    checkpoints = None if options.follow_s is None else checkpoints_of(source)
    with ExitStack() as ends:
        follower = None if checkpoints is None else ends.enter_context(Follower(checkpoints, say))
        # Spread over all devices from the start: a large model does not fit on the first one.
        mesh = mesh_of(ParallelConfig())
        shares = sharing(both_on(mesh), SamplingConfig(), dtype=options.compute_dtype)
        policy = find_policy(source, mesh=mesh, shares=shares)
        limits = limits_of(source, policy, options)
        requests, transfer = request_loop(policy, options, limits)
        server = HttpServer(requests, limits, host=options.host, port=options.port, api_key=api_key, say=say)
        ends.enter_context(requests)
        try:
            ends.enter_context(server)
        except OSError as error:
            raise ConfigError(str(error)) from error
        if follower is not None and options.follow_s is not None:
            follower.start(policy, partial(_take, requests, transfer), options.follow_s)
        say(_greeting(source, server.address, options, limits, keyed=bool(api_key)))
        try:
            requests.ended.wait()
        except KeyboardInterrupt:
            say("stopping; requests in flight have 10 s to finish")
            return
    raise RuntimeError(f"the engine has failed: {requests.failure!r}") from requests.failure


def limits_of(source: str, policy: Policy, options: HttpOptions) -> Limits:
    """The limits of requests: lengths as given, or as far as the model has room.

    Raises:
        ConfigError: the model has no room for them.
    """
    positions, prompt, response = (
        policy.decoder.max_positions,
        options.max_prompt_tokens,
        options.max_response_tokens,
    )
    response = response or min(_LONGEST, (positions - prompt) // (1 if prompt else 2))
    prompt = prompt or min(_LONGEST, positions - response)
    if not (prompt > 0 and response > 0 and prompt + response <= positions):
        raise ConfigError(
            f"--max-prompt-tokens {options.max_prompt_tokens or prompt} and --max-response-tokens {options.max_response_tokens or response} are "
            f"{prompt + response} positions; the model has {positions}: lower one"
        )
    return Limits(
        model=options.model_name or source,
        tokenizer=policy.tokenizer,
        vocabulary=policy.decoder.vocab_size,
        max_prompt_tokens=prompt,
        max_response_tokens=response,
        most_responses=options.slots + options.queue,
        decoding=DecodingOptions(temperature=options.temperature, top_p=options.top_p, top_k=options.top_k),
        template_kwargs=options.chat_template_kwargs,
        today=prompt_format(dated(DataConfig(), like=data_of_run(source))).today,
    )


def request_loop(policy: Policy, options: HttpOptions, limits: Limits) -> tuple[RequestLoop, Transfer]:
    """The loop that samples for requests, its programs compiled, and the function that makes weights for it of the policy's parameters.

    Raises:
        ConfigError: slots do not fit the devices.
    """
    mesh = mesh_of(ParallelConfig())
    transfer = transfer_of(policy, both_on(mesh), SamplingConfig(), dtype=options.compute_dtype)
    try:
        engine = DecoderEngine(
            policy.decoder,
            slots=options.slots,
            capacity=limits.max_prompt_tokens + limits.max_response_tokens,
            steps_per_call=options.steps_per_call,
            stop_ids=policy.tokenizer.stop_ids,
            mesh=mesh,
            compute_dtype=options.compute_dtype,
            page_tokens=options.page_tokens,
            batch_invariant=options.batch_invariant,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    drawing = jax.eval_shape(partial(decoding_of_slots, [None] * options.slots))
    compile_sampling(engine, transfer.shapes, [drawing])
    made = RequestLoop(
        engine,
        transfer(policy.params),
        key=jax.random.key(options.seed),
        version=policy.step,
        most_responses=limits.most_responses,
    )
    return made, transfer


def _take(requests: RequestLoop, transfer: Transfer, params: nnx.State, version: int) -> None:
    requests.take(partial(transfer, params), version)


def _greeting(source: str, address: str, options: HttpOptions, limits: Limits, *, keyed: bool) -> str:
    host, _, port = address.rpartition(":")
    reached = f"localhost:{port}" if host in ("[::]", "0.0.0.0") else address
    key = "; requests need the key" if keyed else ""
    return (
        f"serving {source} at http://{address}: {options.slots} slots, prompts of up to {limits.max_prompt_tokens} tokens, "
        f"responses of up to {limits.max_response_tokens}{key}; Ctrl-C stops it. Ask http://{reached}/v1/models for what it serves"
    )
