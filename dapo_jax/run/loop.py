"""The training loop. One step is a simple pipeline:

    prompts -> sampler -> rewards -> informative groups -> advantages -> minibatches -> updates
                 ^                                                                         |
                 +------------------------------- weights ---------------------------------+

`dapo_jax.run.build` creates the objects of a run, so the loop needs no configuration. To watch or change a step, pass an `Observer`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax

from dapo_jax.dapo.corrections import with_effective_share
from dapo_jax.dapo.dynamic_sampling import Collected, ShortfallError
from dapo_jax.dapo.metrics import Metric, to_scalars
from dapo_jax.dapo.rollouts import Group
from dapo_jax.rollout.collector import Collector, Position
from dapo_jax.rollout.group_sampling import GroupSampling
from dapo_jax.run.training_pass import StepBatches
from dapo_jax.training.minibatch import Minibatch
from dapo_jax.training.state import TrainState
from dapo_jax.training.step_metrics import rollout_metrics
from dapo_jax.training.update import Updater
from dapo_jax.training.update_metrics import with_association

Metrics = Mapping[str, Metric]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The position, train state, groups and metrics at the end of a finished step."""

    position: Position
    state: TrainState
    collected: Collected
    metrics: dict[str, float | int]


class Observer:
    """Base class of observers, which watch the steps of a run. Hooks do nothing unless a subclass overrides them.

    Each hook is called in every process, for all observers in order. An exception in a hook ends the run.
    """

    def before_sampling(self, position: Position, collector: Collector) -> None:
        """Called when a step starts. `position` is the end of the previous step, and `collector` is empty."""

    def on_group(self, group: Group, collector: Collector) -> None:
        """Called after a group was sampled, graded and added to `collector`. Groups may arrive in a different order than their prompts."""

    def on_shortfall(self, error: ShortfallError) -> None:
        """Called if sampling ended with too few informative groups. Afterwards `error` is raised, unless the hook raises another error."""

    def after_sampling(self, step: int, collected: Collected) -> None:
        """Called after the groups of the step were chosen. `collected` is complete and the same in every process."""

    def before_updates(self, minibatches: Sequence[Minibatch]) -> Sequence[Minibatch]:
        """Called when the minibatches of the step are on the device, with old and reference log-probabilities (see `Updater.prepare`).

        If the old log-probabilities are not the sampler's, the first minibatch contains none, because the first update computes them.

        Returns:
            The minibatches to update on, either unchanged or replaced.
        """
        return minibatches

    def before_update(self, state: TrainState, minibatch: Minibatch, *, index: int, count: int) -> None:
        """Called before each of the `count` updates in the step. `index` counts the updates of the step from 0. The update donates `state`."""

    def after_update(self, minibatch: Minibatch, metrics: Metrics, *, learning_rate: float) -> None:
        """Called after an update was dispatched. Reading the values of `metrics` blocks until the device has finished."""

    def after_step(self, result: StepResult) -> None:
        """Called at the end of the step, when its metrics are on the host. A hook may add metrics to `result.metrics` for later observers."""


def run_steps(
    state: TrainState,
    position: Position,
    *,
    steps: int,
    sampling: GroupSampling,
    batches: StepBatches,
    updater: Updater,
    learning_rate: Callable[[int], float],
    observers: Sequence[Observer] = (),
    clock: Callable[[], float] = time.perf_counter,
) -> TrainState:
    """Runs DAPO from `position` to step `steps` and returns the final state. `state` is donated.

    Args:
        state: initial parameters and optimizer moments.
        position: position of `state` in the run.
        steps: number of the last step.
        sampling: samples groups with the given weights and grades them.
        batches: converts the groups of a step to minibatches.
        updater: updates the state with a minibatch.
        learning_rate: returns the learning rate of a step.
        observers: observers, called in this order.
        clock: returns the time in seconds. Used only for metrics.
    """
    ended: float | None = None
    while position.step < steps:
        step = position.step + 1
        collector = sampling.collector(position)
        for observer in observers:
            observer.before_sampling(position, collector)
        began, weights = clock(), sampling.transfer(state.params)
        between = 0.0 if ended is None else began - ended
        for group in sampling.groups(weights, collector):
            for observer in observers:
                observer.on_group(group, collector)
        missing = sampling.not_arrived_frac(state.params, weights)
        del weights
        try:
            collected = collector.choose()
        except ShortfallError as error:
            for observer in observers:
                observer.on_shortfall(error)
            raise
        sampled, phases = clock(), sampling.seconds()
        for observer in observers:
            observer.after_sampling(step, collected)
        end_step = sampling.more_rounds(collector)

        packed = batches.minibatches(collected.groups, step, partial(updater.logprobs, state))
        minibatches: Sequence[Minibatch] = updater.prepare(state, packed)
        jax.block_until_ready(minibatches)  # otherwise, updates would include the time of log-probabilities
        prepared = clock()
        for observer in observers:
            minibatches = observer.before_updates(minibatches)
        rate = learning_rate(step)
        measured: list[Metrics] = []
        for index, minibatch in enumerate(minibatches):
            for observer in observers:
                observer.before_update(state, minibatch, index=index, count=len(minibatches))
            state, of_update = updater.update(state, minibatch, learning_rate=rate, first=index == 0)
            for observer in observers:
                observer.after_update(minibatch, of_update, learning_rate=rate)
            measured.append(of_update)
        scalars = with_association(with_effective_share(to_scalars(measured)))
        minibatches = minibatch = ()  # frees device memory before the next step is sampled
        chosen, collected = collected, end_step()

        kept = {"cursor": collected.cursor, "carry": collected.carry, "streaks": collected.solved.streaks}
        position = Position(step=step, in_flight=collector.going_on(), **kept)
        ended = clock()
        times = _times(chosen, began, sampled, ended)
        times |= {f"time/{name}_s": phases.get(name, 0.0) for name in ("grade", "wait")}
        times |= {"time/logprobs_s": prepared - sampled, "time/between_s": between}
        metrics = {**rollout_metrics(collected), **scalars, "sync/not_arrived_frac": missing}
        metrics |= {"update/learning_rate": rate, **times, **sampling.worker_metrics()}
        result = StepResult(position=position, state=state, collected=collected, metrics=metrics)
        for observer in observers:
            observer.after_step(result)
    return state


def _times(collected: Collected, began: float, sampled: float, ended: float) -> dict[str, float]:
    """Returns the timing metrics of a step. They include all device work of the step: the other metrics are already on the host, so this work has finished."""
    tokens = collected.drawn_tokens
    if tokens is None:
        tokens = sum(rollout.response_tokens for group in collected.sampled for rollout in group.rollouts)
    trained = sum(rollout.response_tokens for group in collected.groups for rollout in group.rollouts)
    return {
        "time/sample_s": sampled - began,
        "time/update_s": ended - sampled,
        "time/step_s": ended - began,
        "speed/sampled_tokens_per_s": tokens / max(sampled - began, 1e-9),
        "speed/trained_tokens_per_s": trained / max(ended - sampled, 1e-9),
    }
