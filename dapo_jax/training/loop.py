"""The training loop. One step is one pass down a straight pipe:

    prompts -> sampler -> rewards -> informative groups -> advantages -> minibatches -> updates
                 ^                                                                         |
                 +------------------------------- weights ---------------------------------+

Everything the loop uses is handed to it; it builds nothing, reads no config and has no side effects of its own.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import PyTree

from dapo_jax.dapo.dynamic_sampling import Collected, Collector, InformativeShare
from dapo_jax.dapo.metrics import Metric, to_scalars
from dapo_jax.dapo.microbatch import Microbatch
from dapo_jax.dapo.rollouts import Group
from dapo_jax.training.state import TrainState
from dapo_jax.training.step_metrics import rollout_metrics


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run stands between two steps: all that a checkpoint needs beside the train state."""

    step: int = 0
    """Steps done."""
    cursor: int = 0
    """The ordinal of the next prompt."""
    carry: Sequence[Group] = ()
    """Informative groups left over from earlier steps."""
    share: InformativeShare = field(default_factory=InformativeShare)
    """How many of the groups sampled lately were informative."""


@dataclass(frozen=True, kw_only=True)
class Pipe:
    """The stages of a step, as functions."""

    transfer: Callable[[Any], PyTree]
    """Parameters -> the sampler's weights."""
    collector: Callable[[Position], Collector]
    sample: Callable[[PyTree, Callable[[int], list[int]]], Iterable[Group]]
    """(weights, draw ordinals) -> graded groups, as they end."""
    finish: Callable[[Collector], Collected]
    minibatches: Callable[[Sequence[Group], int], list[list[Microbatch]]]
    """(groups, step) -> the microbatches of each update, on the host."""
    prepare: Callable[[TrainState, list[list[Microbatch]]], Sequence[Any]]
    """Puts a step's microbatches on the device, with what the update compares with; see `Updater.prepare`."""
    update: Callable[..., tuple[TrainState, dict[str, Metric]]]
    """(state, prepared minibatch, learning_rate=, first=) -> the new state and metrics; see `Updater.update`."""
    learning_rate: Callable[[int], float]
    clock: Callable[[], float]
    """Seconds; only for metrics."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a finished step leaves behind."""

    position: Position
    state: TrainState
    collected: Collected
    metrics: dict[str, float | int]


def run_steps(
    state: TrainState,
    position: Position,
    *,
    steps: int,
    pipe: Pipe,
    after_step: Callable[[StepResult], None],
    on_phase: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> TrainState:
    """Runs DAPO from `position` to step `steps`, and returns the final state; `state` is donated.

    `after_step` is called at each step boundary: metrics, checkpoints and evaluation hang there. `on_phase(name, done,
    total)` says what goes on in between.
    """
    while position.step < steps:
        step, began = position.step + 1, pipe.clock()
        collector = pipe.collector(position)
        weights = pipe.transfer(state.params)
        on_phase("sample", 0, collector.needed)
        for group in pipe.sample(weights, collector.draw):
            collector.add(group)
            on_phase("sample", collector.kept, collector.needed)
        del weights
        collected, sampled = pipe.finish(collector), pipe.clock()

        minibatches = pipe.prepare(state, pipe.minibatches(collected.groups, step))
        rate = pipe.learning_rate(step)
        measured: list[Mapping[str, Metric]] = []
        for index, minibatch in enumerate(minibatches):
            on_phase("update", index, len(minibatches))
            state, of_update = pipe.update(state, minibatch, learning_rate=rate, first=index == 0)
            measured.append(of_update)
        scalars = to_scalars(measured)
        if scalars.get("policy/clip_high_frac") == 0.0:
            scalars.pop("policy/clipped_high_prob", None)  # a mean of no tokens

        position = Position(step=step, cursor=collected.cursor, carry=collected.carry, share=collected.share)
        times = _times(collected, began, sampled, pipe.clock())
        metrics = {
            **rollout_metrics(collected),
            **scalars,
            "update/learning_rate": rate,
            **times,
        }
        after_step(StepResult(position=position, state=state, collected=collected, metrics=metrics))
    return state


def _times(collected: Collected, began: float, sampled: float, ended: float) -> dict[str, float]:
    """The clock's metrics; the device has finished, since the step's metrics are on the host."""
    drawn = sum(rollout.response_tokens for group in collected.sampled for rollout in group.rollouts)
    trained = sum(rollout.response_tokens for group in collected.groups for rollout in group.rollouts)
    return {
        "time/sample_s": sampled - began,
        "time/update_s": ended - sampled,
        "time/step_s": ended - began,
        "speed/sampled_tokens_per_s": drawn / max(sampled - began, 1e-9),
        "speed/trained_tokens_per_s": trained / max(ended - sampled, 1e-9),
    }
