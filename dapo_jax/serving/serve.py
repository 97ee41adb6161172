"""Serves a model or a run with the engine that training samples from: `dapo-jax serve`, over HTTP or with JetStream's protocol over gRPC."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from dapo_jax.config import ConfigError
from dapo_jax.hints import how_to_install
from dapo_jax.run.policy import Policy
from dapo_jax.serving.served_model import ServingOptions, limits_of, reachable, request_loop, served_policy
from dapo_jax.serving.served_requests import GRACE_S, ServedLimits, ServerThread
from dapo_jax.text.formatting import PromptFormat

ServerOf = Callable[..., ServerThread]
"""Makes a server of a request loop, `host` and `port`."""
CLIENT = """\
    import grpc
    from jetstream.core.proto import jetstream_pb2 as pb, jetstream_pb2_grpc

    server = jetstream_pb2_grpc.OrchestratorStub(grpc.insecure_channel("{address}"))
    prompt = pb.DecodeRequest.TextContent(text="1+2")
    for part in server.Decode(pb.DecodeRequest(text_content=prompt, max_tokens={max_tokens})):
        print(part.stream_content.samples[0].text, end="", flush=True)
"""


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ServingOptions):
    """The options of `dapo-jax serve`. Temperature, top-p and top-k hold for all requests: JetStream's requests have none.

    Raises:
        ConfigError: a value is out of its range, or needs `chat`.
    """

    max_prompt_tokens: int = 64
    max_response_tokens: int = 64
    temperature: float = 0.0
    chat: bool = False
    """The text of a request is a user's message, rendered by the model's chat template."""
    system_prompt: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.chat and (self.system_prompt or self.chat_template_kwargs):
            raise ConfigError("--system-prompt and --chat-template-kwargs need a chat: give --chat too")


@dataclass(frozen=True, kw_only=True)
class HttpOptions(ServingOptions):
    """The options of `dapo-jax serve --http`. Temperature, top-p and top-k are the defaults of requests."""

    model_name: str = ""
    """Name of the model in requests; empty: its source."""


def serve(source: str, options: ServeOptions, *, say: Callable[[str], None] = print) -> None:
    """Answers JetStream's requests until KeyboardInterrupt. `say` logs the address and each new version of the weights.

    Raises:
        ConfigError: the extra is missing, there is no such model or run, lengths do not fit it, or the address cannot be bound.
        RuntimeError: the engine has failed.
    """
    try:
        from dapo_jax.serving.jetstream_server import JetStreamServer
    except ImportError as error:
        # The package `jetstream` is a different project.
        raise ConfigError(
            f"serving needs JetStream, which cannot be imported ({error}); {how_to_install('jetstream')}, or "
            "google-jetstream==0.2.2 (not the package jetstream)"
        ) from error

    def server_of(policy: Policy, limits: ServedLimits) -> ServerOf:
        if options.chat and policy.tokenizer.chat_template is None:
            raise ConfigError("--chat needs a chat template, and the model has none; serve it without")
        prompt_format = PromptFormat(
            chat=options.chat,
            system_prompt=options.system_prompt,
            chat_template_kwargs=options.chat_template_kwargs,
            today=limits.today,
        )
        return partial(JetStreamServer, limits=limits, prompt_format=prompt_format, say=say)

    def greeting(address: str, limits: ServedLimits) -> str:
        sampling = f"temperature {options.temperature:g}" if options.temperature else "greedy"
        client = CLIENT.format(address=reachable(address), max_tokens=limits.max_response_tokens)
        return f", {sampling}; Ctrl-C stops it. From Python:\n\n{client}"

    _serve(source, options, server_of, greeting, say)


def serve_http(
    source: str, options: HttpOptions, *, api_key: str = "", say: Callable[[str], None] = print
) -> None:
    """Answers HTTP requests until KeyboardInterrupt. `say` logs the address and each new version of the weights.

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

    def server_of(policy: Policy, limits: ServedLimits) -> ServerOf:
        return partial(HttpServer, limits=limits, api_key=api_key, say=say)

    def greeting(address: str, limits: ServedLimits) -> str:
        key = "; requests need the key" if api_key else ""
        models = f"http://{reachable(address)}/v1/models describes the model"
        return f"{key}; Ctrl-C stops it. {models}"

    _serve(source, options, server_of, greeting, say, name=options.model_name, scheme="http://")


def _serve(
    source: str,
    options: ServingOptions,
    server_of: Callable[[Policy, ServedLimits], ServerOf],
    rest_of_greeting: Callable[[str, ServedLimits], str],
    say: Callable[[str], None],
    *,
    name: str = "",
    scheme: str = "",
) -> None:
    with served_policy(source, options, say) as (policy, follow), ExitStack() as ends:
        limits = limits_of(source, policy, options, name=name)
        make = server_of(policy, limits)
        requests, transfer = request_loop(policy, options, limits)
        server = make(requests, host=options.host, port=options.port)
        ends.enter_context(requests)
        try:
            ends.enter_context(server)
        except OSError as error:
            raise ConfigError(str(error)) from error
        follow(lambda params, version: requests.take(partial(transfer, params), version))
        say(
            f"serving {source} at {scheme}{server.address}: {options.slots} slots, prompts of up to {limits.max_prompt_tokens} tokens, "
            f"responses of up to {limits.max_response_tokens}{rest_of_greeting(server.address, limits)}"
        )
        try:
            requests.ended.wait()
        except KeyboardInterrupt:
            say(f"stopping; requests in flight have {GRACE_S} s to finish")
            return
    raise RuntimeError(f"the engine has failed: {requests.failure!r}") from requests.failure
