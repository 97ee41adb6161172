"""What happens between two steps: records, evaluation, checkpoints; and where a run that is told to stop is left."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from dapo_jax.checkpoints import Checkpointer
from dapo_jax.config import TrainConfig
from dapo_jax.evaluation import problem_record, summarize
from dapo_jax.parallel.exchange import exchange
from dapo_jax.parallel.processes import is_first
from dapo_jax.rollouts import Group
from dapo_jax.run.carry import carry_arrays
from dapo_jax.run.ratios import TokenRatios
from dapo_jax.run.records import Records
from dapo_jax.stopping import Stop, StoppedError, first_told
from dapo_jax.storage import AnyPath
from dapo_jax.trackers.evaluation_log import write_problems
from dapo_jax.trackers.progress import Progress
from dapo_jax.training.loop import Position, StepResult
from dapo_jax.training.state import TrainState

Evaluate = Callable[[TrainState, int], Mapping[str, Sequence[Group]]]
OnStep = Callable[[int, Mapping[str, float | int]], None]

UNFINISHED = "unfinished_metrics"
"""In a checkpoint's progress: the metrics, as JSON, of a step whose evaluation was cut short; its line is yet to be written."""


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """A state that training can go on from."""

    state: TrainState
    position: Position
    unfinished: Mapping[str, float | int] | None = None
    """The step's metrics, as long as they lack its evaluation."""


class Boundaries:
    """Those of one run, one after the other. All processes make the same calls."""

    def __init__(
        self,
        config: TrainConfig,
        run_dir: AnyPath,
        *,
        ratios: Callable[[], TokenRatios],
        evaluate: Evaluate | None,
        checkpointer: Checkpointer,
        records: Records | None,
        shown: Progress,
        stop: Stop,
        on_step: OnStep | None,
    ) -> None:
        """`evaluate` gives the graded groups of each held-out dataset, `ratios` those of the last step; `records` are those of
        the process that writes."""
        self._config, self._run_dir, self._evaluate = config, run_dir, evaluate
        self._ratios = ratios
        self._checkpointer, self._records, self._shown = checkpointer, records, shown
        self._stop, self._on_step = stop, on_step
        self._now: Boundary | None = None
        self._saved = 0

    def start(self, now: Boundary) -> None:
        """The one that a run starts or goes on from, evaluated if that is still to be done.

        Raises:
            StoppedError: the run was told to stop.
        """
        self._now, step = now, now.position.step
        self._saved = step
        if now.unfinished is not None:
            self._finish(dict(now.unfinished))
        elif step == 0 and self._evaluate is not None:
            scores, _ = self._evaluated(self._evaluate, now)
            self._record(0, scores)

    def after_step(self, result: StepResult) -> None:
        """The one that a step has led to.

        Raises:
            StoppedError: the run was told to stop.
        """
        step, metrics = result.position.step, {**result.metrics}
        self._shown.step(step, metrics)
        if self._records is not None:
            self._records.rollouts(step, result.collected, self._ratios())
        self._now = Boundary(state=result.state, position=result.position, unfinished=metrics)
        self._finish(metrics)
        if step < self._config.steps:
            self._stop_if_told()

    def leave(self) -> None:
        """Saves the last boundary of a run that stops, unless that was done or nothing has been learnt."""
        if self._now is not None and self._now.position.step > self._saved:
            self._save(None)
        self._checkpointer.wait()

    def _finish(self, metrics: dict[str, float | int]) -> None:
        """Evaluates if this is due, writes the step's metrics, and saves if this is due."""
        assert self._now is not None
        step, config, score = self._now.position.step, self._config, None
        last = step == config.steps
        if self._evaluate is not None and (last or _due(step, config.eval.every_steps)):
            self._stop_if_told()
            scores, score = self._evaluated(self._evaluate, self._now)
            metrics |= scores
        self._now = replace(self._now, unfinished=None)
        self._record(step, metrics)
        best = config.checkpoint.keep_best and score is not None and self._is_best(score)
        if step > self._saved and (last or best or _due(step, config.checkpoint.every_steps)):
            self._save(score)
        if self._on_step is not None:
            self._on_step(step, metrics)

    def _record(self, step: int, metrics: Mapping[str, float | int]) -> None:
        if self._records is not None:
            self._records.step(step, metrics)

    def _evaluated(self, evaluate: Evaluate, now: Boundary) -> tuple[dict[str, float], float | None]:
        """The metrics, and the one by which the best checkpoint is known: avg@k on the first dataset."""
        self._shown.phase("evaluate")
        began, step = time.perf_counter(), now.position.step
        scores: dict[str, float] = {}
        score = None
        for name, groups in evaluate(now.state, step).items():
            if is_first():
                folder = self._run_dir / "evaluations" / f"step_{step:06d}"
                write_problems(folder, map(problem_record, groups), name=name, step=step)
            found = summarize(groups, name=name)
            scores |= found
            if score is None:
                score = found[f"eval/{name}/avg@{self._config.eval.samples_per_prompt}"]
            self._shown.evaluation(name, scores, step)
        return {**scores, "time/eval_s": time.perf_counter() - began}, score

    def _is_best(self, score: float) -> bool:
        best = self._checkpointer.best()
        return best is None or score > best[1]

    def _save(self, score: float | None) -> None:
        assert self._now is not None
        self._shown.phase("checkpoint")
        position, unfinished = self._now.position, self._now.unfinished
        progress: dict[str, Any] = {"cursor": position.cursor, "seed": self._config.seed}
        if unfinished is not None:
            progress[UNFINISHED] = json.dumps(unfinished)  # as text: some may be nan
        carry = carry_arrays(position.carry)
        self._checkpointer.save(position.step, self._now.state, progress, carry, score=score)
        self._saved = position.step

    def _stop_if_told(self) -> None:
        """Raises StoppedError in every process if one of them was told."""
        reasons = exchange(self._stop.reason.encode(), buffer_bytes=1024)
        told = {process: reason.decode() for process, reason in enumerate(reasons)}
        if reason := first_told(told, jax.process_index()):
            raise StoppedError(reason)


def _due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0
