"""Responses to prompts, sampled by the engine that a configuration asks for: training, evaluation and `dapo-jax sample` share it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from itertools import islice
from zlib import crc32

import jax
from jaxtyping import PRNGKeyArray, PyTree

from dapo_jax.config import ConfigError, EvalConfig, SamplingConfig
from dapo_jax.dapo.rollouts import Group, Prompt, Response
from dapo_jax.parallel.mesh import Meshes
from dapo_jax.parallel.weights import SamplerWeights
from dapo_jax.run.policy import Policy
from dapo_jax.run.programs import engine_of, transfer_of
from dapo_jax.sampling.continuous_batching import Sampler
from dapo_jax.sampling.decoding import Decoding, decoding
from dapo_jax.sampling.prompt_packing import PrefillShape, prefill_shape
from dapo_jax.text.stop_strings import StopStrings, stop_ids

TRAINING, EVALUATION = 0, 1
"""Key domains: evaluation never draws the numbers that training draws."""

Sampled = Iterator[tuple[Prompt, tuple[Response, ...]]]
Grade = Callable[[Sampled], Iterable[Group]]
"""Makes graded groups of what is sampled: `Grading.groups`."""


def prompts_at_once(sampling: SamplingConfig, group_size: int) -> int:
    """The prompts that are asked for at a time: as many as fill the slots with their groups."""
    return max(1, sampling.slots // group_size)


def prefill_of(sampling: SamplingConfig, group_size: int, *, max_prompt_tokens: int) -> PrefillShape:
    """The rows that one call of prefill reads."""
    return prefill_shape(
        longest=max_prompt_tokens,
        capacity=max_prompt_tokens + sampling.max_response_tokens,
        prompts=prompts_at_once(sampling, group_size),
        tokens=sampling.prefill_tokens,
    )


class ResponseSampler:
    """The sampler with what stays fixed over a run: engine, seed, lengths."""

    def __init__(
        self,
        policy: Policy,
        meshes: Meshes,
        sampling: SamplingConfig,
        *,
        seed: int,
        max_prompt_tokens: int,
        compute_dtype: str,
        group_size: int,
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        """Raises ConfigError where slots or lengths do not fit the mesh or the model."""
        self.max_response_tokens = sampling.max_response_tokens
        self.transfer: Callable[[PyTree], SamplerWeights] = transfer_of(
            policy.decoder, meshes, dtype=compute_dtype, eight_bit=sampling.weight_dtype == "int8"
        )
        try:
            engine = engine_of(
                policy.decoder,
                meshes.sampler,
                slots=sampling.slots,
                capacity=max_prompt_tokens + sampling.max_response_tokens,
                steps_per_call=sampling.steps_per_call,
                stop_ids=tuple(stop_ids(policy.tokenizer, sampling.stop_token_ids)),
                compute_dtype=compute_dtype,
                page_tokens=sampling.page_tokens,
                cache_tokens=sampling.cache_tokens,
                cache_dtype=sampling.cache_dtype,
                cache_bytes=None,
                prefill=prefill_of(sampling, group_size, max_prompt_tokens=max_prompt_tokens),
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.prompts_at_once = prompts_at_once(sampling, group_size)
        self._sampler = Sampler(engine, prefill_prompts=self.prompts_at_once, on_look=on_look)
        self._stop = StopStrings(policy.tokenizer, sampling.stop).find if sampling.stop else None
        self._key: PRNGKeyArray = jax.random.key(seed)

    def sample(
        self,
        weights: PyTree,
        draw: Callable[[int], Sequence[Prompt]],
        *,
        decoding: Decoding,
        samples: int,
        domain: int,
        within: Sequence[int] = (),
    ) -> Sampled:
        """Prompts with their responses as they end; see `Sampler.sample`. Keys are those of `domain`, and `within` it of further numbers."""
        key = reduce(jax.random.fold_in, (domain, *within), self._key)
        return self._sampler.sample(
            weights,
            draw,
            key=key,
            decoding=decoding,
            samples_per_prompt=samples,
            max_response_tokens=self.max_response_tokens,
            stop=self._stop,
        )

    def evaluate(
        self,
        weights: PyTree,
        prompts: Iterable[Prompt],
        grade: Grade,
        config: EvalConfig,
        *,
        name: str,
        step: int,
    ) -> list[Group]:
        """Graded groups of held-out prompts, in the prompts' order.

        Each dataset, by its `name`, and each `step` draws numbers of its own, so that the luck of one evaluation is not that of the
        next; the same evaluation made again draws the same.
        """
        left = iter(prompts)
        sampled = self.sample(
            weights,
            lambda n: list(islice(left, n)),
            decoding=decoding(temperature=config.temperature, top_p=config.top_p, top_k=config.top_k),
            samples=config.samples_per_prompt,
            domain=EVALUATION,
            within=(step, crc32(name.encode())),
        )
        return sorted(grade(sampled), key=lambda group: group.prompt.ordinal)
