"""Serving a model or a run over gRPC by JetStream: what `dapo-jax serve` calls."""

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import jax

from dapo_jax.checkpoints.checkpointer import Checkpointer, Restored
from dapo_jax.config import ConfigError, DataConfig, ParallelConfig, SamplingConfig, load_config
from dapo_jax.extras import how_to_install
from dapo_jax.parallel.weights import both_on
from dapo_jax.run.folders import place_of
from dapo_jax.run.policy import (
    Policy,
    check_of_readers,
    data_of_run,
    find_policy,
    mesh_of,
    optimizer_of,
    state_structs,
)
from dapo_jax.run.programs import Transfer, sharing, transfer_of
from dapo_jax.run.prompt_sets import dated, prompt_format
from dapo_jax.run.records import use_compilation_cache
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.storage import AnyPath
from dapo_jax.terminal import visible
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
class ServeOptions:
    """The options of `dapo-jax serve` besides the model."""

    host: str = "127.0.0.1"
    """The interface; [::] is every one."""
    port: int = 9000
    """0 lets the system choose."""
    slots: int = 16
    """Responses that are decoded side by side."""
    max_prompt_tokens: int = 64
    max_response_tokens: int = 64
    temperature: float = 0.0
    """0 is greedy. Of all requests alike: JetStream's carry none of their own."""
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    chat: bool = False
    """A request's text is a user's message, put through the model's chat template."""
    system_prompt: str = ""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    steps_per_call: int = 4
    """Tokens to a message of the stream: more are faster, fewer come sooner."""
    page_tokens: int = 0
    """Tokens of a page of the cache; 0: as `sampling.page_tokens` has it."""
    compute_dtype: str = "float32"
    follow_s: float | None = None
    """Seconds between looks for a new checkpoint of the run; None: its weights stay."""
    compilation_cache: str = "~/.cache/dapo_jax/xla"

    def __post_init__(self) -> None:
        for name in ("slots", "max_prompt_tokens", "max_response_tokens", "steps_per_call"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.page_tokens < 0:
            raise ConfigError(
                f"page_tokens={self.page_tokens} must be 0, which is what suits the platform, or more"
            )
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"port={self.port} must be from 0, which takes a free one, to {(1 << 16) - 1}")
        if self.compute_dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"compute_dtype={self.compute_dtype!r} must be float32 or bfloat16")
        if self.follow_s is not None and not self.follow_s > 0:
            raise ConfigError(f"follow={self.follow_s} must be more than 0 seconds")
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
    checkpoints = place_of(source, key="model", write=False) / "checkpoints"
    if options.follow_s is not None and not checkpoints.is_dir():
        raise ConfigError(
            f"--follow looks for new checkpoints of a run; {source} has no folder `checkpoints`"
        )
    with ExitStack() as ends:
        # Looked up before the weights are read: should one come in between, it is read twice rather than never.
        follower = ends.enter_context(_Follower(checkpoints, say)) if options.follow_s is not None else None
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
            follower.start(policy, engine, transfer, options.follow_s)
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


class _Follower:
    """Serves each new checkpoint of a run as it is completed, in a thread; a context manager, whose end stops it."""

    def __init__(self, checkpoints: AnyPath, say: Callable[[str], None]) -> None:
        self._run, self._say = checkpoints.parent, say
        self._checkpointer = Checkpointer(checkpoints)
        self._served = self._checkpointer.latest_step()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, policy: Policy, engine: "JetStreamEngine", transfer: Transfer, every_s: float) -> None:
        """Looks every so often from now on."""
        config = load_config(self._run / "config.yaml")
        target = state_structs(policy, optimizer_of(config.optimizer), mesh_of(ParallelConfig()))
        restore = partial(self._checkpointer.restore, target, check=check_of_readers(config, policy))
        self._thread = threading.Thread(target=self._follow, args=(restore, engine, transfer, every_s))
        self._thread.start()

    def _follow(
        self, restore: Callable[[], Restored], engine: "JetStreamEngine", transfer: Transfer, every_s: float
    ) -> None:
        told = ""
        while not self._stopping.wait(every_s):
            try:
                if self._checkpointer.latest_step() == self._served:
                    continue
                found = restore()
                with engine.exclusive():
                    weights = transfer(found.state.params)
                engine.swap(weights)
            except Exception as error:  # whatever it is, what is served now goes on being served
                if str(error) != told:
                    told = str(error)
                    self._say(visible(f"no new weights: {error}"))
                continue
            self._served, told = found.step, ""
            self._say(f"now serving step {found.step}")

    def __enter__(self) -> "_Follower":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        self._checkpointer.close()


def _greeting(source: str, address: str, options: ServeOptions) -> str:
    host, _, port = address.rpartition(":")
    reached = f"localhost:{port}" if host in ("[::]", "0.0.0.0") else address
    drawn = f"temperature {options.temperature:g}" if options.temperature else "greedy"
    return (
        f"serving {source} at {address}: {options.slots} slots, prompts of up to {options.max_prompt_tokens} tokens, "
        f"responses of up to {options.max_response_tokens}, {drawn}; Ctrl-C stops it. From Python:\n\n"
        + CLIENT.format(address=reached, max_tokens=options.max_response_tokens)
    )
