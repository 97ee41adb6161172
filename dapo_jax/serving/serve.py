"""Serving a model or a run over gRPC by JetStream: what `dapo-jax serve` calls."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import TYPE_CHECKING

import jax
from flax import nnx

from dapo_jax.config import ConfigError, DataConfig, ParallelConfig, SamplingConfig
from dapo_jax.extras import how_to_install
from dapo_jax.parallel.weights import both_on
from dapo_jax.run.policy import Policy, data_of_run, find_policy, mesh_of
from dapo_jax.run.programs import Transfer, sharing, transfer_of
from dapo_jax.run.prompt_sets import dated, prompt_format
from dapo_jax.run.records import use_compilation_cache
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.serving.follow import Follower, checkpoints_of
from dapo_jax.serving.options import ServingOptions
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
    """The options of `dapo-jax serve` besides the model. How tokens are drawn is one for all requests: JetStream's carry none of their own.

    Raises:
        ConfigError: one is out of its range, or only a conversation has it.
    """

    chat: bool = False
    """A request's text is a user's message, put through the model's chat template."""
    system_prompt: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.chat and (self.system_prompt or self.chat_template_kwargs):
            raise ConfigError(
                "--system-prompt and --chat-template-kwargs are a conversation's; give --chat too"
            )


def serve(source: str, options: ServeOptions, *, say: Callable[[str], None] = print) -> None:
    """Answers requests until it is interrupted (KeyboardInterrupt); `say` is told where, and of new weights.

    Raises:
        ConfigError: the extra is missing, there is no such model or run, lengths do not fit it, or nothing can listen
            at the address.
    """
    try:
        from dapo_jax.serving.server import Server
    except ImportError as error:
        # A package called jetstream exists too, of other people and for other things.
        raise ConfigError(
            f"serving needs JetStream, which cannot be imported ({error}); {how_to_install('jetstream')}, or "
            "google-jetstream==0.2.2 (not the package jetstream)"
        ) from error
    use_compilation_cache(options.compilation_cache)
    checkpoints = None if options.follow_s is None else checkpoints_of(source)
    with ExitStack() as ends:
        follower = None if checkpoints is None else ends.enter_context(Follower(checkpoints, say))
        # Spread over all devices from the start: a large model does not fit on the first one.
        mesh = mesh_of(ParallelConfig())
        shares = sharing(both_on(mesh), SamplingConfig(), dtype=options.compute_dtype)
        policy = find_policy(source, mesh=mesh, shares=shares)
        engine, transfer = serving_engine(
            policy, options, today=prompt_format(dated(DataConfig(), like=data_of_run(source))).today
        )
        engine.warm_up()
        try:
            server = Server(
                engine,
                host=options.host,
                port=options.port,
                max_prompt_tokens=options.max_prompt_tokens,
                max_response_tokens=options.max_response_tokens,
            )
        except OSError as error:
            raise ConfigError(str(error)) from error
        ends.enter_context(server)
        if follower is not None and options.follow_s is not None:
            follower.start(policy, partial(_take, engine, transfer), options.follow_s)
        say(_greeting(source, server.address, options))
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            say("stopping; requests in flight have 10 s to finish")


def serving_engine(
    policy: Policy, options: ServeOptions, *, today: date | None = None
) -> tuple["JetStreamEngine", Transfer]:
    """The engine that JetStream is given, and what makes weights for it of the policy's parameters.

    Raises:
        ConfigError: lengths or slots do not fit the model or the devices.
    """
    from dapo_jax.serving.adapter import JetStreamEngine
    from dapo_jax.serving.tokenizer import PREFILL_LENGTHS

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
    mesh = mesh_of(ParallelConfig())
    transfer = transfer_of(policy, both_on(mesh), SamplingConfig(), dtype=options.compute_dtype)
    try:
        drawing = decoding(temperature=options.temperature, top_p=options.top_p, top_k=options.top_k)
        decoder = DecoderEngine(
            policy.decoder,
            slots=options.slots,
            capacity=prompt + response,
            steps_per_call=options.steps_per_call,
            stop_ids=policy.tokenizer.stop_ids,
            mesh=mesh,
            compute_dtype=options.compute_dtype,
            page_tokens=options.page_tokens,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    engine = JetStreamEngine(
        decoder,
        transfer(policy.params),
        policy.tokenizer,
        mesh,
        decoding=drawing,
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


def _take(engine: "JetStreamEngine", transfer: Transfer, params: nnx.State, version: int) -> None:
    with engine.exclusive():
        weights = transfer(params)
    engine.swap(weights)


def _greeting(source: str, address: str, options: ServeOptions) -> str:
    host, _, port = address.rpartition(":")
    reached = f"localhost:{port}" if host in ("[::]", "0.0.0.0") else address
    drawn = f"temperature {options.temperature:g}" if options.temperature else "greedy"
    return (
        f"serving {source} at {address}: {options.slots} slots, prompts of up to {options.max_prompt_tokens} tokens, "
        f"responses of up to {options.max_response_tokens}, {drawn}; Ctrl-C stops it. From Python:\n\n"
        + CLIENT.format(address=reached, max_tokens=options.max_response_tokens)
    )
