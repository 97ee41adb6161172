"""Samples responses to prompts with one engine, for training, evaluation and `dapo-jax sample`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import islice
from typing import Any
from zlib import crc32

import jax
from jaxtyping import PRNGKeyArray, PyTree

from dapo_jax.config import EvalConfig
from dapo_jax.dapo.rollouts import Group, Prompt, Response
from dapo_jax.parallel.weights import AdapterTransfer, WeightTransfer
from dapo_jax.sampling.continuous_batching import Environments, Sampler, limits_of
from dapo_jax.sampling.decode_loop import StopRule
from dapo_jax.sampling.decoding import Decoding, decoding
from dapo_jax.sampling.interface import Engine
from dapo_jax.sampling.requests import EpisodeLimits
from dapo_jax.sampling.round_sampler import RoundSampler

TRAINING, EVALUATION = 0, 1
"""Domains of random keys, so that evaluation and training use different random numbers."""

Sampled = Iterator[tuple[Prompt, tuple[Response, ...]]]
Grade = Callable[[Sampled], Iterable[Group]]
"""Function that grades sampled responses, for example `Grading.groups`."""


class ResponseSampler:
    """Samples with one engine and with settings that stay fixed during a run: seed, lengths and stop strings. `run.sampler_setup` creates it."""

    def __init__(
        self,
        engine: Engine,
        transfer: WeightTransfer | AdapterTransfer,
        *,
        seed: int,
        max_response_tokens: int,
        prompts_at_once: int,
        stop: StopRule | None,
        compile_for: Callable[[list[Decoding]], None],
        notes: Sequence[str] = (),
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        """Does not compile any program; see `compile`.

        Args:
            engine, transfer: the engine, and the function from the trainer's parameters to the engine's weights.
            seed, max_response_tokens: the seed of all random numbers, and the maximum length of a response.
            prompts_at_once: number of prompts to request together.
            stop: finds the stop string at which a response ends. None if there are no stop strings.
            compile_for: compiles the programs for a list of decoding options.
            notes: messages that a run shows when it starts.
            on_look: called before every engine call that samples tokens.
        """
        self.engine, self.transfer, self._compile_for = engine, transfer, compile_for
        self.max_response_tokens, self.prompts_at_once = max_response_tokens, prompts_at_once
        self.notes, self._on_look = notes, on_look
        self._ends: dict[str, Any] = {"max_response_tokens": max_response_tokens, "stop": stop}
        self._sampler = Sampler(engine, prefill_prompts=prompts_at_once, on_look=on_look)
        self._key: PRNGKeyArray = jax.random.key(seed)

    def compile(self, *decodings: Mapping[str, Any]) -> None:
        """Compiles the sampling programs for each of these sets of `decoding` options. Sets that differ only in numerical values share a program, but top-k
        and top-p require a separate program."""
        self._compile_for([jax.eval_shape(partial(decoding, **options)) for options in decodings])

    def sample(
        self,
        weights: PyTree,
        draw: Callable[[int], Sequence[Prompt]],
        *,
        decoding: Decoding,
        samples: int,
        domain: int,
        within: Sequence[int] = (),
        version: int = 0,
        environments: Environments | None = None,
    ) -> Sampled:
        """Yields each prompt with its responses when all responses to it have ended; see `Sampler.sample`. `version` is the version of the weights. Random keys depend on
        `domain` and on the numbers in `within`. With `environments`, responses are episodes."""
        key = reduce(jax.random.fold_in, (domain, *within), self._key)
        options: Any = {"samples_per_prompt": samples, "version": version, "environments": environments}
        return self._sampler.sample(weights, draw, key=key, decoding=decoding, **options, **self._ends)

    def limits(self, episodes: Environments | None) -> EpisodeLimits | None:
        """Returns the limits of episodes in this sampler, or None if responses have no environment."""
        if episodes is None:
            return None
        capacity = self.engine.capacity
        return limits_of(episodes, max_response_tokens=self.max_response_tokens, capacity=capacity)

    def rounds(
        self, weights: PyTree, *, decoding: Decoding, limits: EpisodeLimits | None = None
    ) -> RoundSampler:
        """Returns a training sampler that samples responses in flight with these weights. With `limits`, responses are episodes."""
        options: Any = {"on_look": self._on_look, "limits": limits, **self._ends}
        key = jax.random.fold_in(self._key, TRAINING)
        return RoundSampler(self.engine, weights, key=key, decoding=decoding, **options)

    def evaluate(
        self,
        weights: PyTree,
        prompts: Iterable[Prompt],
        grade: Grade,
        config: EvalConfig,
        *,
        name: str,
        step: int,
        environments: Environments | None = None,
    ) -> list[Group]:
        """Returns the graded groups of held-out prompts, sorted by ordinal.

        Random numbers depend on the `name` of the dataset and on `step`, so evaluations are independent of each other and can be repeated.
        """
        left = iter(prompts)
        sampled = self.sample(
            weights,
            lambda n: list(islice(left, n)),
            decoding=decoding(temperature=config.temperature, top_p=config.top_p, top_k=config.top_k),
            samples=config.samples_per_prompt,
            domain=EVALUATION,
            within=(step, crc32(name.encode())),
            version=step,
            environments=environments,
        )
        return sorted(grade(sampled), key=lambda group: group.prompt.ordinal)
