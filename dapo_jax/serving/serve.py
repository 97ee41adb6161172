"""Serves a model or a run over gRPC by JetStream: `dapo-jax serve`."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import TYPE_CHECKING

import jax

from dapo_jax.config import ConfigError
from dapo_jax.hints import how_to_install
from dapo_jax.run.policy import Policy
from dapo_jax.run.programs import Transfer
from dapo_jax.sampling.decoding import decoding
from dapo_jax.serving.served_model import ServingOptions, engine_of, reachable, served_policy, today_of
from dapo_jax.text.formatting import PromptFormat

if TYPE_CHECKING:
    from dapo_jax.serving.adapter import JetStreamEngine


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

    chat: bool = False
    """The text of a request is a user's message, rendered by the model's chat template."""
    system_prompt: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.chat and (self.system_prompt or self.chat_template_kwargs):
            raise ConfigError("--system-prompt and --chat-template-kwargs need a chat: give --chat too")


def serve(source: str, options: ServeOptions, *, say: Callable[[str], None] = print) -> None:
    """Answers requests until KeyboardInterrupt. `say` logs the address and each new version of the weights.

    Raises:
        ConfigError: the extra is missing, there is no such model or run, lengths do not fit it, or the address cannot be bound.
    """
    try:
        from dapo_jax.serving.jetstream_server import Server
    except ImportError as error:
        # The package `jetstream` is a different project.
        raise ConfigError(
            f"serving needs JetStream, which cannot be imported ({error}); {how_to_install('jetstream')}, or "
            "google-jetstream==0.2.2 (not the package jetstream)"
        ) from error
    prompt, response = options.max_prompt_tokens, options.max_response_tokens
    with served_policy(source, options, say) as (policy, follow), ExitStack() as ends:
        engine, transfer = serving_engine(policy, options, today=today_of(source))
        engine.warm_up()
        try:
            server = Server(
                engine, host=options.host, port=options.port, max_prompt_tokens=prompt, max_response_tokens=response
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(str(error)) from error
        ends.enter_context(server)
        follow(lambda params, version: engine.swap(partial(transfer, params)))
        sampling = f"temperature {options.temperature:g}" if options.temperature else "greedy"
        say(
            f"serving {source} at {server.address}: {options.slots} slots, prompts of up to {prompt} tokens, "
            f"responses of up to {response}, {sampling}; Ctrl-C stops it. From Python:\n\n"
            + CLIENT.format(address=reachable(server.address), max_tokens=response)
        )
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            say("stopping; requests in flight have 10 s to finish")


def serving_engine(
    policy: Policy, options: ServeOptions, *, today: date | None = None
) -> tuple["JetStreamEngine", Transfer]:
    """Returns the engine for JetStream, and the function that turns the policy's parameters into its weights.

    Raises:
        ConfigError: lengths or slots do not fit the model or the devices.
    """
    from dapo_jax.serving.adapter import PREFILL_LENGTHS, JetStreamEngine

    prompt, response = options.max_prompt_tokens, options.max_response_tokens
    longest = min(policy.decoder.max_positions - response, PREFILL_LENGTHS[-1])
    if prompt > longest:
        raise ConfigError(
            f"--max-prompt-tokens {prompt} and --max-response-tokens {response} are {prompt + response} positions; the "
            f"model has {policy.decoder.max_positions}, JetStream takes prompts of up to {PREFILL_LENGTHS[-1]} tokens: "
            f"with these responses, prompts of up to {max(longest, 0)}"
        )
    if options.chat and policy.tokenizer.chat_template is None:
        raise ConfigError("--chat needs a chat template, and the model has none; serve it without")
    decoder, transfer, mesh = engine_of(policy, options, capacity=prompt + response)
    engine = JetStreamEngine(
        decoder,
        transfer(policy.params),
        policy.tokenizer,
        mesh,
        decoding=decoding(temperature=options.temperature, top_p=options.top_p, top_k=options.top_k),
        key=jax.random.key(options.seed),
        max_prefill_length=next(length for length in PREFILL_LENGTHS if length >= prompt),
        prompt_format=PromptFormat(
            chat=options.chat,
            system_prompt=options.system_prompt,
            chat_template_kwargs=options.chat_template_kwargs,
            today=today,
        ),
    )
    return engine, transfer
