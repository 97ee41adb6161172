"""Implements `dapo-jax serve`, which serves a model or a run over HTTP or JetStream's gRPC protocol. The engine is the same as in training."""

import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import jax
import numpy as np
from flax import nnx

from dapo_jax.checkpoints.checkpointer import Checkpointer, Restored
from dapo_jax.config import ConfigError, DataConfig, ParallelConfig, SamplingConfig, load_config
from dapo_jax.config.keys import prefixed
from dapo_jax.hints import needing
from dapo_jax.parallel.weights import both_on
from dapo_jax.run.learner import optimizer_of
from dapo_jax.run.meshes import mesh_of
from dapo_jax.run.policy import Policy, check_of_readers, find_policy
from dapo_jax.run.prompt_sets import with_template_date
from dapo_jax.run.records import use_compilation_cache
from dapo_jax.run.run_dir import checked_folder
from dapo_jax.run.sampler_programs import Transfer, compile_sampling, sharing, transfer_of
from dapo_jax.run.sources import data_of_run
from dapo_jax.sampling.decoding import DecodingOptions, decoding_of_slots
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.sampling.engine_spec import EngineSpec
from dapo_jax.sampling.requests import OwnOptions
from dapo_jax.serving.request_loop import RequestLoop
from dapo_jax.serving.served_requests import GRACE_S, ServedLimits, ServerThread
from dapo_jax.terminal import visible
from dapo_jax.text.formatting import PromptFormat
from dapo_jax.text.stop_strings import stop_ids
from dapo_jax.training.state import state_structs

_LONGEST = 1024
"""Default limit on the number of tokens in a prompt or a response. It is lower if the model has too few positions."""
_LARGEST = 1 << 31
_LEAST = {"slots": 1, "steps_per_call": 1}
_MOST = {"seed": (1 << 32) - 1, "port": (1 << 16) - 1}


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """The options of `dapo-jax serve` that both servers share; its help describes them. Raises ConfigError if a value is out of range."""

    host: str = "127.0.0.1"
    port: int = 9000
    slots: int = 16
    queue: int = 1024
    max_prompt_tokens: int = 0
    max_response_tokens: int = 0
    """For prompts and responses, 0 means up to 1,024 tokens, or fewer if the model has too few positions."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    steps_per_call: int = 4
    """More steps per engine call increase throughput, and fewer steps lower the latency of streams."""
    compute_dtype: str = "float32"
    batch_invariant: bool = False
    follow_s: float | None = None
    """If None, the weights do not change."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least, most = _LEAST.get(name, 0), _MOST.get(name, _LARGEST)
            if type(value) is int and not least <= value <= most:
                raise ConfigError(f"{name}={value} must be from {least} to {most}")
        if self.follow_s is not None and not 0 < self.follow_s <= 86_400:
            raise ConfigError(f"follow={self.follow_s} must be more than 0 seconds and at most 86400 (a day)")
        with prefixed(""):
            self.decoding()

    def decoding(self) -> DecodingOptions:
        """Returns the temperature, top-p and top-k as decoding options. Raises ValueError if a value is out of range."""
        return DecodingOptions(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ServingOptions):
    """The options of `dapo-jax serve --jetstream`. Temperature, top-p and top-k apply to all requests, because JetStream requests cannot set them."""

    max_prompt_tokens: int = 64
    max_response_tokens: int = 64
    temperature: float = 0.0
    chat: bool = False
    system_prompt: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.chat and (self.system_prompt or self.chat_template_kwargs):
            raise ConfigError("--system-prompt and --chat-template-kwargs work only with --chat: add --chat")


@dataclass(frozen=True, kw_only=True)
class HttpOptions(ServingOptions):
    """The options of `dapo-jax serve`. Temperature, top-p and top-k are defaults, which a request can override."""

    model_name: str = ""
    top_logprobs: int = 0


def serve(source: str, options: ServeOptions, *, say: Callable[[str], None] = print) -> None:
    """Answers JetStream requests until KeyboardInterrupt. `say` logs the address and each new version of the weights.

    Raises:
        ConfigError: the extra is missing, the model or run does not exist, the model has too few positions, or the address cannot be bound.
        RuntimeError: the engine has failed.
    """
    # The package `jetstream` on PyPI is a different project.
    needed = "serving needs google-jetstream==0.2.2 (not the package jetstream)"
    with needing("jetstream", needed, ConfigError):
        from dapo_jax.serving.jetstream_server import JetStreamServer

    def server_of(policy: Policy, limits: ServedLimits) -> Callable[..., ServerThread]:
        if options.chat and policy.tokenizer.chat_template is None:
            raise ConfigError("--chat needs a chat template, but the model has none; serve it without --chat")
        data = DataConfig(
            chat=options.chat,
            system_prompt=options.system_prompt,
            chat_template_kwargs=dict(options.chat_template_kwargs),
            template_date=limits.today.isoformat() if limits.today else "",
        )
        return partial(JetStreamServer, limits=limits, prompt_format=PromptFormat(data), say=say)

    sampling = f"temperature {options.temperature:g}" if options.temperature else "greedy"
    _serve(source, options, server_of, f", {sampling}; Ctrl-C stops it", say)


def serve_http(
    source: str, options: HttpOptions, *, api_key: str = "", say: Callable[[str], None] = print
) -> None:
    """Answers HTTP requests until KeyboardInterrupt. `say` logs the address and each new version of the weights. Each request is logged to standard error.
    `source` is a model or a run folder. Requests must send `api_key` as a bearer token, unless it is empty.

    Raises:
        ConfigError: the extra is missing, the model or run does not exist, the model has too few positions, the address cannot be bound, or
            other machines could reach the server without a key.
        RuntimeError: the engine has failed.
    """
    with needing("http", "serving over HTTP needs aiohttp and msgspec", ConfigError):
        from dapo_jax.serving.http_server import HttpServer
        from dapo_jax.text.http import is_loopback
    if not api_key and not is_loopback(options.host):
        raise ConfigError(
            f"--host {options.host} can be reached from other machines, but no key is set: set DAPO_JAX_API_KEY, which requests must then send as a "
            "bearer token, or leave out --host"
        )

    key = "; requests need the key" if api_key else ""
    greeting = f"{key}; Ctrl-C stops it. http://{{address}}/v1/models describes the model"
    make = partial(HttpServer, api_key=api_key, say=say)
    address = {"name": options.model_name, "scheme": "http://"}
    _serve(source, options, lambda _, limits: partial(make, limits=limits), greeting, say, **address)


def _serve(
    source: str,
    options: ServingOptions,
    server_of: Callable[[Policy, ServedLimits], Callable[..., ServerThread]],
    greeting: str,
    say: Callable[[str], None],
    *,
    name: str = "",
    scheme: str = "",
) -> None:
    """Runs a server until Ctrl-C. `server_of` returns a function that builds the server. `greeting` is appended to the start-up message."""
    use_compilation_cache()
    with ExitStack() as ends:
        held = ends.enter_context(_held(options.host, options.port))
        follower = None
        if options.follow_s is not None:
            follower = Follower(source, options.follow_s, say)
            ends.callback(follower.close)
        # The weights are sharded over all devices from the start, because a large model does not fit on the first device.
        mesh = mesh_of(ParallelConfig())
        shares = sharing(both_on(mesh), SamplingConfig(), dtype=options.compute_dtype)
        policy = find_policy(source, mesh=mesh, shares=shares)
        limits = limits_of(source, policy, options, name=name)
        make = server_of(policy, limits)
        requests, transfer = request_loop(policy, options, limits)
        server = make(requests, host=options.host, port=held.getsockname()[1])
        ends.enter_context(requests)
        _answer_once(requests, limits.decoding)
        with prefixed("", OSError):
            ends.enter_context(server)
        if follower is not None:
            follower.start(policy, lambda params, version: requests.take(partial(transfer, params), version))
        host, _, port = server.address.rpartition(":")
        reachable = f"localhost:{port}" if host in ("[::]", "0.0.0.0") else server.address
        say(
            f"serving {source} at {scheme}{server.address}: {options.slots} slots, prompts of up to {limits.max_prompt_tokens} tokens, "
            f"responses of up to {limits.max_response_tokens}{greeting.format(address=reachable)}"
        )
        try:
            requests.ended.wait()
        except KeyboardInterrupt:
            say(f"stopping; requests in flight have {GRACE_S} s to finish")
            return
    raise RuntimeError(f"the engine has failed: {requests.failure!r}") from requests.failure


def _held(host: str, port: int) -> socket.socket:
    """Returns a socket that holds an address while the model is loaded. It refuses connections, and the server may listen on the same address later."""
    try:
        [(family, *_, address), *_] = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        held = socket.socket(family)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(address)
    except OSError as error:
        reason = f"{error.strerror or error}; --port 0 picks a free port"
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from error
    return held


def _answer_once(requests: RequestLoop, decoding: DecodingOptions) -> None:
    """Answers one request of each kind, so that nothing is compiled once the server is ready."""
    answers, shared = SimpleQueue[Any](), OwnOptions(decoding=decoding)
    seeded = replace(shared, key=jax.random.fold_in(jax.random.key(0), np.uint32(0)))
    for options, scores in ((shared, False), (seeded, False), (shared, True)):
        prompt = np.zeros(1, np.int32)
        requests.submit(prompt, options, count=1, max_tokens=1, listener=answers.put, scores=scores)
        if isinstance(failure := answers.get(), BaseException):
            raise RuntimeError(f"the engine has failed: {failure!r}") from failure


class Follower:
    """Watches a training run from a separate thread, and loads each new checkpoint. Raises ConfigError if `source` is not a run with checkpoints."""

    def __init__(self, source: str, every_s: float, say: Callable[[str], None]) -> None:
        """Records the step of the latest checkpoint. Create the follower before loading the weights, so that no later checkpoint is missed."""
        self._run, self._every_s, self._say = checked_folder(source, key="model", write=False), every_s, say
        if not (self._run / "checkpoints").is_dir():
            raise ConfigError(
                f"--follow loads new checkpoints of a run, but {source} has no `checkpoints` folder"
            )
        self._checkpointer = Checkpointer(self._run / "checkpoints")
        self._served = self._checkpointer.latest_step()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, policy: Policy, take: Callable[[nnx.State, int], None]) -> None:
        """Starts the thread, which passes the parameters and the step of each new checkpoint to `take`."""
        config = load_config(self._run / "config.yaml")
        target = state_structs(policy.params, optimizer_of(config.optimizer), mesh_of(ParallelConfig()))
        check = check_of_readers(config, policy.folder)
        restore = partial(self._checkpointer.restore, replace(target, opt_state=None), check=check, part=True)
        self._thread = threading.Thread(target=self._follow, args=(restore, take))
        self._thread.start()

    def _follow(self, restore: Callable[[], Restored], take: Callable[[nnx.State, int], None]) -> None:
        logged = ""
        while not self._stopping.wait(self._every_s):
            try:
                if self._checkpointer.latest_step() == self._served:
                    continue
                restored = restore()
                take(restored.state.params, restored.step)
                self._served, logged = restored.step, ""
                self._say(f"now serving step {restored.step}")
            except Exception as error:  # whatever the error, the server keeps the old weights
                if str(error) != logged and not self._stopping.is_set():
                    logged = str(error)
                    self._say(visible(f"no new weights: {error}"))

    def close(self) -> None:
        """Stops the thread."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        self._checkpointer.close()


def limits_of(source: str, policy: Policy, options: ServingOptions, *, name: str = "") -> ServedLimits:
    """Returns the limits for requests. Maximum lengths of 0 are resolved as described in `ServingOptions`. If `name` is empty, `source` is used."""
    positions = policy.decoder.max_positions
    prompt, response = options.max_prompt_tokens, options.max_response_tokens
    response = response or max(1, min(_LONGEST, (positions - prompt) // (1 if prompt else 2)))
    prompt = prompt or max(1, min(_LONGEST, positions - response))
    if prompt + response > positions:
        raise ConfigError(
            f"--max-prompt-tokens {prompt} and --max-response-tokens {response} need {prompt + response} positions, but "
            f"the model has {positions}: lower one of them"
        )
    return ServedLimits(
        model=name or source,
        tokenizer=policy.tokenizer,
        vocabulary=policy.decoder.vocab_size,
        max_prompt_tokens=prompt,
        max_response_tokens=response,
        most_responses=options.slots + options.queue,
        decoding=options.decoding(),
        template_kwargs=options.chat_template_kwargs,
        top_logprobs=options.top_logprobs if isinstance(options, HttpOptions) else 0,
        # If a chat template prints a date, it gets the training run's date, so that prompts are the same as in training.
        today=PromptFormat(with_template_date(DataConfig(), like=data_of_run(source))).today,
    )


def request_loop(
    policy: Policy, options: ServingOptions, limits: ServedLimits
) -> tuple[RequestLoop, Transfer]:
    """Builds the loop that samples responses, and compiles its programs. Also returns a function that converts parameters to the sampler's weights."""
    mesh = mesh_of(ParallelConfig())
    transfer = transfer_of(policy, both_on(mesh), SamplingConfig(), dtype=options.compute_dtype)
    with prefixed(""):
        spec = EngineSpec(
            slots=options.slots,
            capacity=limits.max_prompt_tokens + limits.max_response_tokens,
            steps_per_call=options.steps_per_call,
            stop_ids=stop_ids(policy.tokenizer),
            compute_dtype=options.compute_dtype,
            batch_invariant=options.batch_invariant,
            heads=limits.top_logprobs,
        )
        engine = DecoderEngine(policy.decoder, mesh, spec)
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
