"""The parts of the command that both servers share: options, the model, its request loop, and following a run's checkpoints."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from typing import Any

import jax
from flax import nnx

from dapo_jax.checkpoints.checkpointer import Checkpointer, Restored
from dapo_jax.config import ConfigError, DataConfig, ParallelConfig, SamplingConfig, load_config
from dapo_jax.parallel.weights import both_on
from dapo_jax.run.policy import (
    Policy,
    check_of_readers,
    data_of_run,
    find_policy,
    mesh_of,
    optimizer_of,
)
from dapo_jax.run.programs import Transfer, compile_sampling, sharing, transfer_of
from dapo_jax.run.prompt_sets import dated, prompt_format
from dapo_jax.run.records import use_compilation_cache
from dapo_jax.run.run_dir import place_of
from dapo_jax.sampling.decoding import DecodingOptions, decoding_of_slots
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.serving.request_loop import RequestLoop
from dapo_jax.serving.served_requests import ServedLimits
from dapo_jax.terminal import visible
from dapo_jax.training.state import state_structs

Take = Callable[[nnx.State, int], None]
"""Serves parameters of a version (number of steps done) from now on."""
_LONGEST = 1024
"""Default length of a prompt, and of a response, if the model has room for it."""


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """The options of `dapo-jax serve` for both servers.

    Raises:
        ConfigError: a value is out of its range.
    """

    host: str = "127.0.0.1"
    """The interface; [::] is all interfaces."""
    port: int = 9000
    """0 takes a free port."""
    slots: int = 16
    """Number of responses that are decoded in parallel."""
    queue: int = 1024
    """Number of responses that may wait for a slot."""
    max_prompt_tokens: int = 0
    """0: 1,024, or as many as the model has room for."""
    max_response_tokens: int = 0
    """0: 1,024, or as many as the model has room for."""
    temperature: float = 1.0
    """Default of requests; 0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    steps_per_call: int = 4
    """Tokens per call of the engine. More are faster; with fewer, tokens arrive sooner."""
    page_tokens: int = 0
    """Tokens per page of the KV cache; 0: the default of `sampling.page_tokens`."""
    compute_dtype: str = "float32"
    batch_invariant: bool = False
    """No bit of a response depends on other requests."""
    follow_s: float | None = None
    """Seconds between two searches for a new checkpoint of the run; None: the weights do not change."""
    compilation_cache: str = "~/.cache/dapo_jax/xla"

    def __post_init__(self) -> None:
        ranges: dict[str, tuple[float, float]] = {
            "slots": (1, 1 << 31),
            "steps_per_call": (1, 1 << 31),
            "queue": (0, 1 << 31),
            "max_prompt_tokens": (0, 1 << 31),
            "max_response_tokens": (0, 1 << 31),
            "page_tokens": (0, 1 << 31),
            "seed": (0, (1 << 32) - 1),
            "port": (0, (1 << 16) - 1),
        }
        for name, (least, most) in ranges.items():
            if not least <= (value := getattr(self, name)) <= most:
                raise ConfigError(f"{name}={value} must be from {least} to {most}")
        try:
            DecodingOptions(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if self.compute_dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"compute_dtype={self.compute_dtype!r} must be float32 or bfloat16")
        if self.follow_s is not None and not 0 < self.follow_s <= 86_400:
            raise ConfigError(f"follow={self.follow_s} must be more than 0 seconds, and at most 86400, a day")


class Follower:
    """Serves each new checkpoint of a run in a thread of its own; a context manager, whose end stops the thread.

    Raises:
        ConfigError: `source` is not the folder of a run.
    """

    def __init__(self, source: str, every_s: float, say: Callable[[str], None]) -> None:
        """Notes the last checkpoint. Must be made before the weights are loaded, so that no checkpoint is missed."""
        self._run, self._every_s, self._say = place_of(source, key="model", write=False), every_s, say
        if not (self._run / "checkpoints").is_dir():
            raise ConfigError(
                f"--follow looks for new checkpoints of a run; {source} has no folder `checkpoints`"
            )
        self._checkpointer = Checkpointer(self._run / "checkpoints")
        self._served = self._checkpointer.latest_step()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, policy: Policy, take: Take) -> None:
        """Starts the thread, which calls `take` with the parameters of each new checkpoint."""
        config = load_config(self._run / "config.yaml")
        target = state_structs(policy.params, optimizer_of(config.optimizer), mesh_of(ParallelConfig()))
        restore = partial(self._checkpointer.restore, target, check=check_of_readers(config, policy))
        self._thread = threading.Thread(target=self._follow, args=(restore, take))
        self._thread.start()

    def _follow(self, restore: Callable[[], Restored], take: Take) -> None:
        logged = ""
        while not self._stopping.wait(self._every_s):
            try:
                if self._checkpointer.latest_step() == self._served:
                    continue
                found = restore()
                take(found.state.params, found.step)
            except Exception as error:  # whatever it is, the old weights are served on
                if str(error) != logged and not self._stopping.is_set():
                    logged = str(error)
                    self._say(visible(f"no new weights: {error}"))
                continue
            self._served, logged = found.step, ""
            self._say(f"now serving step {found.step}")

    def __enter__(self) -> "Follower":
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        self._checkpointer.close()


@contextmanager
def served_policy(
    source: str, options: ServingOptions, say: Callable[[str], None]
) -> Iterator[tuple[Policy, Callable[[Take], None]]]:
    """Yields the model, and a function that starts to follow the run if `options.follow_s` is set.

    Raises:
        ConfigError: there is no such model or run.
    """
    use_compilation_cache(options.compilation_cache)
    with ExitStack() as ends:
        follower = None
        if options.follow_s is not None:
            follower = ends.enter_context(Follower(source, options.follow_s, say))
        # Spread over all devices from the start: a large model does not fit the first one.
        mesh = mesh_of(ParallelConfig())
        shares = sharing(both_on(mesh), SamplingConfig(), dtype=options.compute_dtype)
        policy = find_policy(source, mesh=mesh, shares=shares)
        yield policy, lambda take: None if follower is None else follower.start(policy, take)


def limits_of(source: str, policy: Policy, options: ServingOptions, *, name: str = "") -> ServedLimits:
    """Returns the limits of requests: the lengths of `options`, or as far as the model has room. `name` is the model's; empty: `source`.

    Raises:
        ConfigError: the model has no room for them.
    """
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
        model=name or source,
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
    policy: Policy, options: ServingOptions, limits: ServedLimits
) -> tuple[RequestLoop, Transfer]:
    """Returns the loop that samples responses, with its programs compiled, and the function that turns parameters into its weights.

    Raises:
        ConfigError: the slots do not fit the devices.
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


def today_of(source: str) -> date | None:
    """Returns the date that chat templates of a run print, so that prompts equal those of training."""
    return prompt_format(dated(DataConfig(), like=data_of_run(source))).today


def reachable(address: str) -> str:
    """Returns the address under which this machine reaches a server that listens at `address`."""
    host, _, port = address.rpartition(":")
    return f"localhost:{port}" if host in ("[::]", "0.0.0.0") else address
