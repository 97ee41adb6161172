"""Responses to prompts, sampled by the engine that a configuration asks for: training, evaluation and `dapo-jax sample` share it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import islice
from typing import Any
from zlib import crc32

import jax
from jaxtyping import PRNGKeyArray, PyTree

from dapo_jax.config import ConfigError, EvalConfig, SamplingConfig
from dapo_jax.dapo.episode_limits import EpisodeLimits
from dapo_jax.dapo.rollouts import Group, Prompt, Response
from dapo_jax.parallel.device_memory import bytes_on_device, least_device_bytes
from dapo_jax.parallel.mesh import Meshes
from dapo_jax.run.cache_room import cache_note, room_for_cache
from dapo_jax.run.policy import Policy
from dapo_jax.run.programs import Transfer, compile_sampling, engine_of, sampled_decoder, transfer_of
from dapo_jax.sampling.continuous_batching import Sampler
from dapo_jax.sampling.decoding import Decoding, decoding
from dapo_jax.sampling.prompt_packing import PrefillShape, prefill_shape
from dapo_jax.sampling.rounds import RoundSampler
from dapo_jax.sampling.turns import Environments, limits_of
from dapo_jax.text.stop_strings import StopStrings, stop_ids

_TURNS_AT_ONCE = 16
"""Rows that are read at a time where each turn of an episode reads it again: they are many, and mostly short."""

TRAINING, EVALUATION = 0, 1
"""Key domains: evaluation never draws the numbers that training draws."""

Sampled = Iterator[tuple[Prompt, tuple[Response, ...]]]
Grade = Callable[[Sampled], Iterable[Group]]
"""Makes graded groups of what is sampled: `Grading.groups`."""


def prompts_at_once(sampling: SamplingConfig, group_size: int) -> int:
    """The prompts that are asked for at a time: as many as fill the slots with their groups."""
    return max(1, sampling.slots // group_size)


def prefill_of(
    sampling: SamplingConfig,
    group_size: int,
    *,
    max_prompt_tokens: int,
    in_flight: int = 0,
    has_turns: bool = False,
) -> PrefillShape:
    """The rows that one call of prefill reads: prompts, and where responses are read again, in flight or between turns, what these have drawn, too."""
    capacity, prompts = (
        max_prompt_tokens + sampling.max_response_tokens,
        prompts_at_once(sampling, group_size),
    )
    return prefill_shape(
        longest=capacity if in_flight or has_turns else max_prompt_tokens,
        capacity=capacity,
        prompts=max(prompts, _TURNS_AT_ONCE) if has_turns else prompts,
        tokens=sampling.prefill_tokens,
        alone=sampling.batch_invariant,
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
        in_flight: int = 0,
        has_turns: bool = False,
        beside: int = 0,
        memory: int | None = None,
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        """Makes the programs of sampling; nothing is compiled yet.

        Args:
            policy: whose decoder samples.
            meshes: of the run.
            sampling: the configuration's section.
            seed: of all draws.
            max_prompt_tokens: the longest prompt.
            compute_dtype: of products, and unless `sampling` says otherwise of weights and cache.
            group_size: responses to a prompt.
            has_turns: responses are episodes of several turns.
            in_flight: responses that `rounds` has in flight in this sampler at most; 0: it is not called.
            beside: bytes on each device while it samples, but for the sampler's weights and cache.
            memory: bytes of a device; None: what the devices say, which those of a CPU do not.
            on_look: called before each call of the engine that draws tokens.

        Raises:
            ConfigError: slots or lengths do not fit the mesh, the model or the memory.
        """
        self.max_response_tokens = sampling.max_response_tokens
        if sampling.merge_lora and policy.decoder.lora is None:
            raise ConfigError(
                "sampling.merge_lora=true needs a model with an adapter, this one has none: leave it out"
            )
        self.transfer: Transfer = transfer_of(policy, meshes, sampling, dtype=compute_dtype)
        decoder = sampled_decoder(policy.decoder, sampling)
        how = {"in_flight": in_flight, "has_turns": has_turns}
        shape = prefill_of(sampling, group_size, max_prompt_tokens=max_prompt_tokens, **how)
        memory = memory or least_device_bytes(meshes.sampler)
        room = room_for_cache(
            decoder,
            meshes.sampler,
            sampling,
            shape,
            capacity=max_prompt_tokens + sampling.max_response_tokens,
            compute_dtype=compute_dtype,
            in_flight=in_flight,
            has_turns=has_turns,
            resident=beside + bytes_on_device(self.transfer.shapes, meshes.sampler.shape),
            memory=memory,
        )
        try:
            self._engine = engine_of(
                decoder,
                mesh=meshes.sampler,
                slots=sampling.slots,
                capacity=max_prompt_tokens + sampling.max_response_tokens,
                steps_per_call=sampling.steps_per_call,
                stop_ids=tuple(stop_ids(policy.tokenizer, sampling.stop_token_ids)),
                compute_dtype=compute_dtype,
                page_tokens=sampling.page_tokens,
                cache_tokens=sampling.cache_tokens,
                cache_dtype=sampling.cache_dtype,
                cache_bytes=room,
                in_flight=in_flight,
                prefill=shape,
                batch_invariant=sampling.batch_invariant,
                has_turns=has_turns,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.notes = (
            []
            if room is None or memory is None
            else [cache_note(self._engine.page_sizes, room=room, memory=memory)]
        )
        """The sentences that a run says of its sampler when it starts."""
        self.prompts_at_once = prompts_at_once(sampling, group_size)
        self._on_look = on_look
        self._sampler = Sampler(self._engine, prefill_prompts=self.prompts_at_once, on_look=on_look)
        self._stop = StopStrings(policy.tokenizer, sampling.stop).find if sampling.stop else None
        self._key: PRNGKeyArray = jax.random.key(seed)

    def compile(self, *decodings: Mapping[str, Any]) -> None:
        """Compiles the programs that sample with each of these options of `decoding`. Options that differ in numbers alone share them; whether the
        distribution is cut (top-k, top-p) makes another one."""
        drawing = [jax.eval_shape(partial(decoding, **options)) for options in decodings]
        compile_sampling(self._engine, self.transfer.shapes, drawing)

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
        """Prompts with their responses as they end; see `Sampler.sample`. `version` is that of the weights. Keys are those of `domain`, and `within` it of further numbers. With
        `environments` responses are episodes."""
        key = reduce(jax.random.fold_in, (domain, *within), self._key)
        return self._sampler.sample(
            weights,
            draw,
            key=key,
            decoding=decoding,
            samples_per_prompt=samples,
            max_response_tokens=self.max_response_tokens,
            stop=self._stop,
            version=version,
            environments=environments,
        )

    def limits(self, episodes: Environments) -> EpisodeLimits:
        """The limits of episodes in this sampler."""
        most, capacity = self.max_response_tokens, self._engine.capacity
        return limits_of(episodes, max_response_tokens=most, capacity=capacity)

    def rounds(
        self, weights: PyTree, *, decoding: Decoding, domain: int, episodes: Environments | None = None
    ) -> RoundSampler:
        """Draws for responses in flight, round by round, as long as these are the weights; keys are those of `domain`. With `episodes` responses are episodes."""
        return RoundSampler(
            self._engine,
            weights,
            key=jax.random.fold_in(self._key, domain),
            decoding=decoding,
            max_response_tokens=self.max_response_tokens,
            stop=self._stop,
            on_look=self._on_look,
            limits=None if episodes is None else self.limits(episodes),
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
        environments: Environments | None = None,
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
            version=step,
            environments=environments,
        )
        return sorted(grade(sampled), key=lambda group: group.prompt.ordinal)
