"""Graded groups for the steps and the evaluations of a run, sampled by this process alone or together with others."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

from jaxtyping import PyTree

from dapo_jax.config import TrainConfig
from dapo_jax.dapo.dynamic_sampling import Collected, Collector, InformativeShare
from dapo_jax.dapo.rollouts import Group, Prompt
from dapo_jax.data.prompts import PromptSource
from dapo_jax.data.stream import PromptStream
from dapo_jax.evaluation import responses_kept
from dapo_jax.health.stalls import Watch
from dapo_jax.health.stopping import Stop
from dapo_jax.parallel.weights import SamplerWeights
from dapo_jax.rewards.grading import Grading
from dapo_jax.run.group_exchange import PromptAt, SamplerShare
from dapo_jax.run.response_sampler import TRAINING, ResponseSampler, Sampled
from dapo_jax.sampling.decoding import decoding

_SampledFrom = Callable[[Callable[[int], list[Prompt]]], Sampled]
"""(count -> so many prompts) -> prompts with their responses, as they end."""

_FOR_OTHERS = "waiting for the groups of the other processes"


class GroupSampling:
    """Samples prompts and grades their responses, for one run."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        sampler: ResponseSampler,
        grading: Grading,
        prompts: PromptSource,
        stream: PromptStream,
        held_out: Mapping[str, Sequence[Prompt]],
        share: SamplerShare,
        stop: Stop,
        watch: Watch,
    ) -> None:
        """`stream` gives the prompts of `prompts` that this process samples; `watch` is told what goes on."""
        self._config, self._sampler, self._grading = config, sampler, grading
        self._prompts, self._stream, self._held_out = prompts, stream, held_out
        self._share, self._stop, self._watch = share, stop, watch

    def transfer(self, params: PyTree) -> SamplerWeights:
        """The trainer's parameters as the sampler's weights."""
        return self._sampler.transfer(params)

    def compile(self) -> None:
        """Compiles the programs of sampling, those of evaluation too if there is one."""
        config, cut = self._config, self._config.eval
        drawn: list[dict[str, float | int]] = [{"temperature": config.sampling.temperature}]
        if self._held_out:
            drawn.append({"temperature": cut.temperature, "top_p": cut.top_p, "top_k": cut.top_k})
        self._sampler.compile(*drawn)

    def collector(
        self,
        cursor: int,
        *,
        version: int = 0,
        carried: Sequence[Group] = (),
        share: InformativeShare | None = None,
    ) -> Collector:
        """The dynamic sampling of a step that begins with the prompt `cursor` and weights of that version."""
        config, dynamic = self._config, self._config.dynamic_sampling
        return Collector(
            needed=config.batch.prompts_per_step,
            cursor=cursor,
            version=version,
            prompts_per_wave=config.prompts_per_wave,
            max_waves=dynamic.max_waves,
            carried=carried,
            share=share or InformativeShare(),
            surplus=dynamic.surplus,
            max_age_steps=dynamic.max_age_steps,
            metric=dynamic.metric,
            enabled=dynamic.enabled,
        )

    def groups(
        self, weights: PyTree, draw: Callable[[int], list[int]], *, version: int = 0
    ) -> Iterator[Group]:
        """The graded groups of the prompts whose ordinals `draw` gives, until it gives none once the last verdict is in."""

        def sampled(prompts: Callable[[int], list[Prompt]]) -> Sampled:
            return self._sampler.sample(
                weights,
                prompts,
                decoding=decoding(temperature=self._config.sampling.temperature),
                samples=self._config.batch.group_size,
                domain=TRAINING,
                version=version,
            )

        return self._alone(sampled, draw) if self._share.alone else self._together(sampled, draw)

    def finish(self, collector: Collector) -> Collected:
        """The groups that a step trains on and those that it leaves, whole in every process.

        Raises:
            ShortfallError: there are too few informative groups.
        """
        dynamic, logged = self._config.dynamic_sampling, self._config.log.rollout_groups
        collected = collector.finish(on_shortfall=dynamic.on_shortfall)
        if self._share.alone:
            return collected
        self._watch.note(_FOR_OTHERS, for_others=True)
        return self._share.whole(collected, logged=logged)

    def evaluate(self, params: PyTree, step: int) -> dict[str, list[Group]]:
        """Name of each dataset to evaluate on -> the graded groups of its prompts, after step `step`.

        Raises:
            StoppedError: the run was told to stop; in every process.
        """
        weights = self.transfer(params)
        return {
            name: self._evaluated(weights, prompts, name=name, step=step)
            for name, prompts in self._held_out.items()
        }

    def close(self) -> None:
        """Ends the grading workers and their event loop."""
        self._grading.close()

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

    def _evaluated(self, weights: PyTree, prompts: Sequence[Prompt], *, name: str, step: int) -> list[Group]:
        groups = self._sampler.evaluate(
            weights,
            [prompt for prompt in prompts if self._share.takes(prompt.ordinal)],
            lambda sampled: self._share.graded(sampled, self._grading.groups),
            self._config.eval,
            name=name,
            step=step,
        )
        if self._share.alone:
            self._stop.check()
            return groups
        by_ordinal = {prompt.ordinal: prompt for prompt in prompts}
        kept = responses_kept(len(prompts), self._config.log.eval_responses)
        return self._gathered(groups, by_ordinal.__getitem__, texts=max(kept, default=0))

    def _prompt_at(self, ordinal: int) -> Prompt:
        self._watch.note("reading prompts")
        return self._stream.at(ordinal)

    def _gathered(self, groups: Sequence[Group], prompt_at: PromptAt, *, texts: int = 0) -> list[Group]:
        self._watch.note(_FOR_OTHERS, for_others=True)
        return self._share.gathered(groups, prompt_at, texts=texts)
