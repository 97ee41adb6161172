"""Graded groups for the steps of a run, in waves: each response is sampled to its end by the weights of one step."""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain

from jaxtyping import PyTree

from dapo_jax.dapo.dynamic_sampling import Collected, Collector
from dapo_jax.dapo.rollouts import Group, Prompt
from dapo_jax.run.group_sampling import FOR_OTHERS, GroupSampling
from dapo_jax.run.position import Position
from dapo_jax.run.response_sampler import TRAINING, Sampled
from dapo_jax.sampling.decoding import decoding
from dapo_jax.trackers.rollout_log import LOGGED_GROUPS

_SampledFrom = Callable[[Callable[[int], list[Prompt]]], Sampled]
"""(count -> so many prompts) -> prompts with their responses, as they end."""


class WaveSampling(GroupSampling):
    """Samples waves of prompts until a step has enough informative groups."""

    def collector(self, position: Position) -> Collector:
        """The dynamic sampling of the step after `position`."""
        config, dynamic = self._config, self._config.dynamic_sampling
        return Collector(
            needed=config.batch.prompts_per_step,
            cursor=position.cursor,
            version=position.step,
            prompts_per_wave=config.prompts_per_wave,
            max_waves=dynamic.max_waves,
            carried=position.carry,
            share=position.share,
            surplus=dynamic.surplus,
            metric=dynamic.metric,
            enabled=dynamic.enabled,
        )

    def groups(self, weights: PyTree, collector: Collector) -> Iterator[Group]:
        """The graded groups of the prompts that `collector` draws, until it draws none once the last verdict is in."""

        def sampled(prompts: Callable[[int], list[Prompt]]) -> Sampled:
            return self._sampler.sample(
                weights,
                prompts,
                decoding=decoding(temperature=self._config.sampling.temperature),
                samples=self._config.batch.group_size,
                domain=TRAINING,
                version=collector.version,
                environments=self._episodes,
            )

        graded = self._alone if self._share.alone else self._together
        for group in graded(sampled, collector.draw):
            collector.add(group)
            yield group

    def finish(self, collector: Collector) -> Collected:
        """The groups that a step trains on and those that it leaves, whole in every process.

        Raises:
            ShortfallError: there are too few informative groups.
        """
        dynamic, logged = self._config.dynamic_sampling, LOGGED_GROUPS
        collected = collector.finish(on_shortfall=dynamic.on_shortfall)
        if self._share.alone:
            return collected
        self._watch.note(FOR_OTHERS, for_others=True)
        return self._share.whole(collected, logged=logged)

    def _alone(self, sampled: _SampledFrom, draw: Callable[[int], list[int]]) -> Iterator[Group]:
        ahead: deque[int] = deque()

        def prompts(count: int) -> list[Prompt]:
            ordinals = [ahead.popleft() for _ in range(min(count, len(ahead)))] or draw(count)
            return [self._prompt_at(ordinal) for ordinal in ordinals]

        # The sampler is done when nothing more is drawn. Verdicts that are still on their way may then call for another wave.
        while ordinals := draw(self._sampler.prompts_at_once):
            ahead.extend(ordinals)
            yield from self._stop.watched(self._grading.groups(sampled(prompts)))

    def _together(self, sampled: _SampledFrom, draw: Callable[[int], list[int]]) -> Iterator[Group]:
        """The graded groups of all samplers, a wave at a time: at its end every process learns what the others found.

        All waves that are certain to be needed are sampled as one. The waves are those of a process that samples alone: it
        opens a wave while groups are still in flight only when they cannot make it unnecessary.
        """
        while ordinals := list(chain.from_iterable(iter(lambda: draw(1024), []))):
            mine = deque(filter(self._share.takes, ordinals))

            def prompts(count: int, mine: deque[int] = mine) -> list[Prompt]:
                return [self._prompt_at(mine.popleft()) for _ in range(min(count, len(mine)))]

            groups = self._share.graded(sampled(prompts), self._grading.groups)
            yield from self._gathered(groups, self._prompts.__getitem__)

    def _prompt_at(self, ordinal: int) -> Prompt:
        self._watch.note("reading prompts")
        return self._stream.at(ordinal)
