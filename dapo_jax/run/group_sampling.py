"""Graded groups for the steps and the evaluations of a run, sampled by this process alone or together with others."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from jaxtyping import PyTree

from dapo_jax.config import TrainConfig
from dapo_jax.dapo.dynamic_sampling import Collected, Collecting
from dapo_jax.dapo.rollouts import Group, Prompt
from dapo_jax.data.prompts import PromptSource
from dapo_jax.data.stream import PromptStream
from dapo_jax.environments import Episodes
from dapo_jax.evaluation import responses_kept
from dapo_jax.health.stalls import Watch
from dapo_jax.health.stopping import Stop
from dapo_jax.parallel.weights import SamplerWeights
from dapo_jax.rewards.grading import Grading
from dapo_jax.run.group_exchange import PromptAt, SamplerShare
from dapo_jax.run.position import Position
from dapo_jax.run.response_sampler import ResponseSampler

FOR_OTHERS = "waiting for the groups of the other processes"


class GroupSampling(ABC):
    """Samples prompts and grades their responses, for one run: for evaluations here, for its steps in one of the two subclasses."""

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
        episodes: Episodes | None = None,
    ) -> None:
        """`stream` gives the prompts of `prompts` that this process samples; `watch` is told what goes on. With `episodes` responses have several turns."""
        self._episodes = episodes
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

    @abstractmethod
    def collector(self, position: Position) -> Collecting:
        """The sampling of the step after `position`, of which nothing is sampled yet."""
        ...

    @abstractmethod
    def groups(self, weights: PyTree, collector: Any) -> Iterator[Group]:
        """The graded groups of a step, each added to what `collector` gave, in the order in which their verdicts come."""
        ...

    @abstractmethod
    def finish(self, collector: Any) -> Collected:
        """The groups that a step trains on and those that it leaves, whole in every process.

        Raises:
            ShortfallError: there are too few informative groups.
        """
        ...

    def evaluate(self, params: PyTree, step: int) -> dict[str, list[Group]]:
        """Name of each dataset to evaluate on -> the graded groups of its prompts, after step `step`.

        Raises:
            StoppedError: the run was told to stop; in every process.
        """
        weights = self.transfer(params)
        with nullcontext() if self._episodes is None else self._episodes.apart():
            return {
                name: self._evaluated(weights, prompts, name=name, step=step)
                for name, prompts in self._held_out.items()
            }

    def close(self) -> None:
        """Ends the grading workers and their event loop."""
        self._grading.close()

    def _evaluated(self, weights: PyTree, prompts: Sequence[Prompt], *, name: str, step: int) -> list[Group]:
        groups = self._sampler.evaluate(
            weights,
            [prompt for prompt in prompts if self._share.takes(prompt.ordinal)],
            lambda sampled: self._share.graded(sampled, self._grading.groups),
            self._config.eval,
            name=name,
            step=step,
            environments=self._episodes,
        )
        if self._share.alone:
            self._stop.check()
            return groups
        by_ordinal = {prompt.ordinal: prompt for prompt in prompts}
        kept = responses_kept(len(prompts))
        return self._gathered(groups, by_ordinal.__getitem__, texts=max(kept, default=0))

    def _gathered(self, groups: Sequence[Group], prompt_at: PromptAt, *, texts: int = 0) -> list[Group]:
        self._watch.note(FOR_OTHERS, for_others=True)
        return self._share.gathered(groups, prompt_at, texts=texts)
