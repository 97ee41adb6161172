"""Ends each step: writes its metrics, evaluates and saves a checkpoint. Also saves a checkpoint if a run ends early."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from dapo_jax.checkpoints.manifest import CheckpointError
from dapo_jax.config import SftConfig, TrainConfig
from dapo_jax.config.section import due
from dapo_jax.evaluation import lost_verdicts, problem_record, responses_kept, summarize
from dapo_jax.health.stopping import StoppedError, first_reason
from dapo_jax.parallel import processes
from dapo_jax.parallel.processes import is_first, resume_by
from dapo_jax.parallel.together import all_gather_bytes, broadcast_from_first
from dapo_jax.rollout.checkpoint_arrays import flight_arrays, group_arrays
from dapo_jax.run.guard import GuardError
from dapo_jax.run.loop import Observer, StepResult
from dapo_jax.run.observers import Ratios
from dapo_jax.run.resume_point import ResumePoint
from dapo_jax.run.session import Session
from dapo_jax.storage import path_of
from dapo_jax.trackers.rollout_log import write_problems

OnStep = Callable[[int, Mapping[str, float | int]], None]


def evaluates_after(config: TrainConfig | SftConfig, step: int) -> bool:
    """Returns whether the policy is evaluated after this step. It is evaluated every `eval.every_steps` steps and after the last step."""
    return step == config.steps or due(step, config.eval.every_steps)


class EndOfStep(Observer):
    """Writes metrics, evaluates and saves checkpoints at the end of each step of a run. All processes must make the same calls."""

    def __init__(self, session: Session, *, ratios: Ratios, on_step: OnStep | None) -> None:
        self._session, self._ratios, self._on_step = session, ratios, on_step
        self._run, self._config, self._shown = session.run, session.config, session.shown
        self._checkpointer, self._records = session.checkpointer, session.records
        self._now, self._saved = session.start, session.start.position.step
        self._saving_s = 0.0
        """Seconds for which a save after the last step has blocked the run."""
        self._measure = repr(replace(self._config.eval, every_steps=0))
        """The settings of evaluations, which may change on resume. Scores of other settings are not compared."""

    def start(self) -> None:
        """Evaluates the initial policy or, in a resumed run, repeats an interrupted evaluation. Must be called before the first step.

        Raises:
            StoppedError: the run was asked to stop.
        """
        self._announce_resume()
        if self._now.unfinished is not None:
            self._finish(dict(self._now.unfinished))
        elif self._saved == 0 and self._run.held_out:
            self._record(0, self._evaluated()[0])

    def after_step(self, result: StepResult) -> None:
        """Shows and writes the metrics of the step. Evaluates and saves a checkpoint if they are due after this step.

        Raises:
            StoppedError: the run was asked to stop.
            CheckpointError: an earlier checkpoint could not be saved.
        """
        step, metrics = result.position.step, {**result.metrics, **memory_metrics()}
        metrics["time/checkpoint_s"], self._saving_s = self._saving_s, 0.0
        self._shown.step(step, metrics)
        if self._records is not None:
            self._records.rollouts(step, result.collected, self._ratios.found, self._run.batches.advantages)
        self._now = ResumePoint(state=result.state, position=result.position, unfinished=metrics)
        self._finish(metrics)
        if step < self._config.steps:
            self._stop_if_asked()

    @contextmanager
    def saves_last_step(self) -> Iterator[None]:
        """Returns a context manager that saves the last finished step if the run stops or fails inside the block.

        A note is added to the error with the checkpoint from which `--resume` continues. Raises CheckpointError if the run was asked to stop, but its last step
        could not be saved.
        """
        try:
            yield
        except StoppedError as stopped:
            try:
                if self._now.position.step > self._saved:
                    self._save(None)
                self._checkpointer.wait()
            except CheckpointError as error:
                error.add_note(self._where_to_resume())
                raise
            stopped.add_note(self._where_to_resume())
            raise
        except Exception as error:
            if isinstance(error, GuardError) and (whole := error.whole) is not None:
                # The guard stopped the run before the evaluation of this step, so a resumed run must evaluate first.
                self._now = ResumePoint(state=whole.state, position=whole.position, unfinished=whole.metrics)
            lost = self._rescue(error)
            error.add_note(self._where_to_resume() + (f" ({lost})" if lost else ""))
            raise

    def _rescue(self, error: Exception) -> str:
        """Saves the last finished step of a run that failed. Returns the reason if the step cannot be saved, otherwise an empty string.

        Saving requires all processes, so it is attempted only if all of them failed after the same step with the same type of error.
        """
        step = self._now.position.step
        if step <= self._last():
            return ""
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._now.state)):
            return f"step {step} can no longer be saved: the next step was already changing its weights"
        if jax.process_count() > 1:
            if not processes.all_say(f"step {step}: {type(error).__name__}"):
                return f"step {step} was not saved: this needs all processes, but they did not all fail with the same error"
            if isinstance(error, CheckpointError):
                return f"step {step} was not saved: some processes may still wait in the save that failed"
        try:
            with suppress(CheckpointError):  # an earlier save may have failed
                self._checkpointer.wait()
            if step > self._last():
                self._save(None)
                self._checkpointer.wait()
        except Exception as failed:
            return f"step {step} could not be saved: {failed}"
        return ""

    def _last(self) -> int:
        """Returns the step of the last checkpoint, or 0 if there is no checkpoint yet."""
        return max(self._checkpointer.steps(), default=0)

    def _where_to_resume(self) -> str:
        if not (latest := self._last()):
            return "there is no checkpoint yet: --resume starts at step 0, and any key may be changed"
        folder = path_of(self._config.run_dir) / "checkpoints"
        return f"the last good checkpoint is from step {latest} in {folder}: --resume continues from it"

    def _finish(self, metrics: dict[str, float | int]) -> None:
        """Runs the evaluation if it is due, writes the metrics of the step, and saves a checkpoint if it is due."""
        step, config, score = self._now.position.step, self._config, None
        if self._run.held_out and evaluates_after(config, step):
            self._stop_if_asked()
            scores, score = self._evaluated()
            metrics |= scores
        self._record(step, metrics)
        self._now = replace(self._now, unfinished=None)
        began = time.perf_counter()  # before the search for the best score, which waits for the previous save
        best = config.checkpoint.keep_best and score is not None and self._is_best(score)
        if step > self._saved and (best or step == config.steps or due(step, config.checkpoint.every_steps)):
            self._save(score)
        self._saving_s = time.perf_counter() - began
        if self._on_step is not None:
            self._on_step(step, metrics)

    def _record(self, step: int, metrics: Mapping[str, float | int]) -> None:
        self._session.check()
        if self._records is not None:
            self._records.step(step, metrics)

    def _evaluated(self) -> tuple[dict[str, float], float | None]:
        """Evaluates the policy. Returns metrics and the score that rates the checkpoint: avg@k, or the mean reward for `metric=score`, on the first dataset."""
        self._shown.phase("evaluate")
        began, step = time.perf_counter(), self._now.position.step
        counts = self._config.dynamic_sampling.metric == "correct"
        headline = f"avg@{self._config.eval.samples_per_prompt}" if counts else "reward"
        scores: dict[str, float] = {}
        score = None
        graded = self._run.sampling.evaluate(self._now.state.params, step)
        self._session.check()
        for name, groups in graded.items():
            if is_first():
                folder = self._session.run_dir / "evaluations" / f"step_{step:06d}"
                kept = responses_kept(len(groups))
                records = [problem_record(*pair) for pair in zip(groups, kept, strict=True)]
                write_problems(folder, records, name=name, step=step)
            summary = summarize(groups, name=name)
            scores |= summary
            if score is None:
                score = summary[f"eval/{name}/{headline}"]
            self._shown.evaluation(name, scores, step)
            if lost := lost_verdicts(groups):
                self._shown.message(f"eval  {name}  {lost}")
        return {**scores, "time/eval_s": time.perf_counter() - began}, score

    def _is_best(self, score: float) -> bool:
        """Returns whether this score is the highest of these evaluation settings so far. The first process decides for all, so that either all processes save a checkpoint or none does."""
        best = self._checkpointer.best(self._measure)
        return broadcast_from_first(b"best" if best is None or score > best[1] else b"") != b""

    def _save(self, score: float | None) -> None:
        self._shown.phase("checkpoint")
        self._session.check()
        position, progress = self._now.position, self._now.progress(self._run.identity)
        carry = {**group_arrays(position.carry), **flight_arrays(position.in_flight)}
        scored = {"score": score, "measure": self._measure}
        self._checkpointer.save(position.step, self._now.state, progress, carry, **scored)
        self._saved = position.step
        self._announce_resume()

    def _announce_resume(self) -> None:
        """Sets the message about resuming that is printed if a process dies without an error message."""
        begun = f"the save of step {self._saved} in {self._checkpointer.folder} has begun, and --resume uses the last complete checkpoint"
        resume_by(f"Start all processes again: {begun if self._saved else 'there is no checkpoint yet'}")

    def _stop_if_asked(self) -> None:
        """Raises StoppedError in every process if any process was asked to stop, or CheckpointError if the last save failed in any process."""
        state = json.dumps([self._session.stop.reason, self._checkpointer.failure()]).encode()
        reasons, failures = zip(*map(json.loads, all_gather_bytes(state, buffer_bytes=1024)), strict=True)
        if reason := first_reason(dict(enumerate(reasons)), jax.process_index()):
            raise StoppedError(reason)
        if failure := next(filter(None, failures), ""):
            raise CheckpointError(failure)


GIB = 2**30
_STATM = Path("/proc/self/statm")
"""A file on Linux with the memory use of this process in pages. Its second number is the number of resident pages."""


def memory_metrics(devices: Sequence[Any] | None = None) -> dict[str, float]:
    """Returns `memory/host_gib` of this process, and `memory/device_gib` and `memory/device_peak_gib` of the device with the highest use.

    Host memory is available only on Linux, and device memory only on accelerators. Unavailable metrics are omitted. `devices` defaults to the local devices.
    """
    metrics = {}
    if _STATM.is_file():
        metrics["memory/host_gib"] = int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / GIB
    stats = [device.memory_stats() or {} for device in (jax.local_devices() if devices is None else devices)]
    for name, key in (("device_gib", "bytes_in_use"), ("device_peak_gib", "peak_bytes_in_use")):
        if known := [device[key] for device in stats if key in device]:
            metrics[f"memory/{name}"] = max(known) / GIB
    return metrics
