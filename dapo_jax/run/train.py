"""DAPO training from a configuration, used by `dapo-jax train` and from Python."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.config import TrainConfig, load_config
from dapo_jax.dapo.advantages import Advantages
from dapo_jax.health.stalls import Watch, interrupt
from dapo_jax.health.stopping import Stop
from dapo_jax.parallel import gpu_settings, processes
from dapo_jax.parallel.processes import is_first, tell_others
from dapo_jax.parallel.together import by_first
from dapo_jax.rewards.functions import Rewards
from dapo_jax.run.build import Run
from dapo_jax.run.disk_space import check_room
from dapo_jax.run.end_of_step import EndOfStep, OnStep
from dapo_jax.run.guard import Guard
from dapo_jax.run.loop import Observer, run_steps
from dapo_jax.run.observers import JudgeCounts, Ratios, StepProgress, TracedSteps
from dapo_jax.run.policy import Policy
from dapo_jax.run.prompt_sets import GivenRows
from dapo_jax.run.records import Records, use_compilation_cache, write_config
from dapo_jax.run.resume_point import has_checkpoint
from dapo_jax.run.run_dir import claim_run_dir, remove_run
from dapo_jax.run.updater_setup import objective_of
from dapo_jax.storage import AnyPath
from dapo_jax.storage.locks import Lock
from dapo_jax.trackers.profile import Profile
from dapo_jax.trackers.progress import Progress
from dapo_jax.trackers.run_status import status_kept, write_status
from dapo_jax.training.update import Objective, trace_objective


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The run's folder, trained policy and metrics, returned by `train`."""

    run_dir: AnyPath
    """The run's folder. A local path is absolute."""
    policy: Policy
    """The trained policy, also written to `run_dir/model`."""
    metrics: list[dict[str, Any]]
    """The lines of metrics.jsonl, one dict per step. Step 0 is the evaluation before training. Empty except in the first process."""


def train(
    config: TrainConfig | str | Path,
    *,
    reward: Rewards | None = None,
    prompts: GivenRows | None = None,
    eval_rows: GivenRows | None = None,
    on_step: OnStep | None = None,
    objective: Objective | None = None,
    advantages: Advantages | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    stop: Stop | None = None,
) -> TrainResult:
    """Trains a policy with DAPO.

    Args:
        config: a configuration, or the path of a configuration file.
        reward: a reward function. It receives one `rewards.Sample`, or with `rewards.whole_group` a list of all samples of a group, and returns a
            bool, a number or a `Verdict` for each sample. It may be `async`. Alternatively a list of (function or grader's name, weight)
            pairs, which are combined into a weighted sum; the first entry decides correctness. Defaults to `config.reward`.
        prompts: rows with `prompt` and `answer` to train on. Defaults to the dataset `config.data.source`.
        eval_rows: rows for evaluation. Defaults to the dataset's held-out split. If only `prompts` are given, there is no evaluation.
        on_step: called with (step, metrics) at the end of each step.
        objective: a loss function with the signature of `dapo_loss`. It replaces `config.loss.objective`; the clip ratios in the configuration then have no effect.
        advantages: a function that returns the advantages of all responses in a step (`dapo.advantages.Advantages`). It replaces `config.advantage`.
        resume: whether to continue from the last checkpoint in `config.run_dir`.
        overwrite: whether to remove the run in `config.run_dir` and start over. If the folder contains a file that runs do not write, nothing is removed.
        progress: shows progress. By default, progress is shown on standard output.
        stop: requests a stop of the run. `stopping.stopped_by_signals` creates a `Stop` for signals. If the run stalls for
            `config.stall_timeout_s` seconds, the process ends if `stop` is given; otherwise KeyboardInterrupt is raised.

    Raises:
        ConfigError: the configuration is invalid, or another process is training in the same folder. Nothing was started.
        ValueError: the objective requires an unknown array, raises an error, or does not return a loss and metrics. Nothing was started.
        LockLostError: another run has taken over the folder in a bucket, because this run did not renew its lease in time.
        ShortfallError: dynamic sampling found too few informative groups.
        GuardError: weights are not finite, too many updates were skipped, or the mismatch between sampler and trainer exceeds the limit in `config.guard`.
        CheckpointError: a checkpoint cannot be written, or no checkpoint to resume from can be read.
        StoppedError: the run was asked to stop.

    Before an error is raised, the last finished step is saved if possible. A note on the error (`__notes__`, shown in the traceback)
    specifies the checkpoint from which `resume` continues. After a KeyboardInterrupt, nothing is saved, but a save in progress is finished.
    """
    config = config if isinstance(config, TrainConfig) else load_config(config)
    _trace(config, objective)
    end = interrupt if stop is None else processes.end
    watch = Watch(config.stall_timeout_s, end=end, broadcast=processes.broadcast, received=processes.received)
    stop = stop or Stop()
    gpu_settings.apply()
    use_compilation_cache()
    console = Console(quiet=not is_first())
    shown = progress or Progress(config.steps, metric=config.dynamic_sampling.metric, console=console)
    # There are two stacks, because the folder must stay locked until everything else is closed and the model is written.
    with ExitStack() as locked, ExitStack() as opened:
        run_dir, config, lock = claim_run_dir(
            config, resume=resume, overwrite=overwrite, held=locked, lost=end
        )
        # `tell_others` must run before each exit callback that may wait for the other processes, so it is pushed again after each such callback.
        locked.push(tell_others)
        run = Run(
            config,
            reward=reward,
            prompts=prompts,
            eval_rows=eval_rows,
            objective=objective,
            advantages=advantages,
            stop=stop,
            watch=watch,
            say=shown.starting,
            resumes=resume and has_checkpoint(run_dir / "checkpoints"),
        )
        opened.callback(run.close)
        session = _Session(
            run, run_dir, lock, shown=shown, stop=stop, watch=watch, locked=locked, opened=opened
        )
        session.open(overwrite=overwrite)
        session.start(resume=resume)
        return session.train(on_step)


def _trace(config: TrainConfig, objective: Objective | None) -> None:
    """Raises an error if the objective is invalid. The default objective is not traced."""
    if objective is not None or config.loss.objective != "clip":
        rows, function = config.batch.rows_per_microbatch, objective or objective_of(config.loss)
        trace_objective(function, rows=rows, row_tokens=config.row_tokens)


class _Session:
    """The open resources of a run in one process: its folder, records, checkpoints and observers."""

    def __init__(
        self,
        run: Run,
        run_dir: AnyPath,
        lock: Lock | None,
        *,
        shown: Progress,
        stop: Stop,
        watch: Watch,
        locked: ExitStack,
        opened: ExitStack,
    ) -> None:
        """`locked` is closed after the model is written, and `opened` before. Only the first process has the `lock` of the folder."""
        self._run, self._config, self._run_dir = run, run.config, run_dir
        self._note, self._check_lock = ("", lambda: None) if lock is None else (lock.note, lock.check)
        self._shown, self._stop, self._watch = shown, stop, watch
        self._locked, self._opened = locked, opened
        self._records: Records | None = None

    def open(self, *, overwrite: bool) -> None:
        """Checks the free space on the disk, shows messages, and opens the folder of checkpoints. With `overwrite`, removes the files of the earlier run."""
        run, config, opened = self._run, self._config, self._opened
        little_room = check_room(config, run.policy.decoder.trained_parameters)
        if overwrite:
            by_first(lambda: remove_run(self._run_dir))  # all processes wait until the folder is empty
        opened.enter_context(self._shown)
        self._shown.listen(self._watch.phase)
        for message in filter(None, (self._note, *run.notes, little_room)):
            self._shown.message(message)
        keep, keep_best = config.checkpoint.keep, config.checkpoint.keep_best
        self._checkpointer = Checkpointer(self._run_dir / "checkpoints", keep=keep, keep_best=keep_best)
        opened.enter_context(self._checkpointer)
        opened.push(tell_others)

    def start(self, *, resume: bool) -> None:
        """Restores the last checkpoint or starts at step 0, then opens the records, which are the first files to be written."""
        self._start = self._run.start(self._checkpointer, resume=resume, say=self._shown.message)
        step, folder = self._start.position.step, self._checkpointer.folder
        self._shown.begin(step)
        if resume:
            none = f"there is no checkpoint in {folder}: starting at step 0"
            self._shown.message(f"continuing from {folder / str(step)}" if step else none)
        if is_first():  # not earlier, because a run that fails a check must not change the folder
            self._open_records(resume=resume)
        self._profile = self._opened.enter_context(
            Profile(self._config.log.profile_steps, self._run_dir / "profile")
        )
        self._opened.enter_context(self._watch)
        self._opened.push(tell_others)
        if is_first():
            self._locked.enter_context(status_kept(self._run_dir, check=self._check_lock))

    def _open_records(self, *, resume: bool) -> None:
        """Writes the configuration, and opens the trackers."""
        write_config(self._config, self._run_dir)
        step = self._start.position.step
        # The last step whose metrics are final. At step 0, there is no such step, because the evaluation before training is repeated.
        written = step - (self._start.unfinished is not None) if step else -1
        resume_step, decode = written if resume else None, self._run.policy.tokenizer.decode
        records = Records(self._config, self._run_dir, resume_step=resume_step, decode=decode)
        self._records = self._opened.enter_context(records)

    def train(self, on_step: OnStep | None) -> TrainResult:
        """Runs all steps, and writes the trained model."""
        run, (end_of_step, observers) = self._run, self._observers(on_step)
        self._opened.enter_context(self._stop.held())
        self._shown.starting("compiling (later runs load the programs from the cache)")
        run.sampling.compile()
        with end_of_step.saves_last_step():
            end_of_step.start()
            state = run_steps(
                self._start.state,
                self._start.position,
                steps=self._config.steps,
                sampling=run.sampling,
                batches=run.batches,
                updater=run.updater,
                learning_rate=run.learning_rate,
                observers=observers,
            )
            self._checkpointer.wait()
        self._opened.close()
        policy = replace(run.policy, params=state.params)
        with end_of_step.saves_last_step():
            self._check_lock()
            policy.save(self._run_dir / "model")
        if is_first():
            write_status(self._run_dir, "finished")
        metrics = self._records.read() if self._records else []
        return TrainResult(run_dir=self._run_dir, policy=policy, metrics=metrics)

    def _observers(self, on_step: OnStep | None) -> tuple[EndOfStep, Sequence[Observer]]:
        """Returns `EndOfStep`, and all observers of the run in order."""
        run, config, run_dir = self._run, self._config, self._run_dir
        ratios = Ratios(config, batches=run.batches, updater=run.updater)
        shared: dict[str, Any] = {"start": self._start, "records": self._records, "shown": self._shown}
        guard = Guard(config, run_dir, batches=run.batches, check=self._check_lock, **shared)
        end_of_step = EndOfStep(
            run,
            run_dir,
            ratios=ratios,
            checkpointer=self._checkpointer,
            stop=self._stop,
            on_step=on_step,
            check=self._check_lock,
            **shared,
        )
        # The order matters: traces end before the guard checks the step, and `EndOfStep` writes the guard's metrics.
        counts, progress = JudgeCounts(run.judges), StepProgress(config, self._shown)
        return end_of_step, (TracedSteps(self._profile), ratios, progress, counts, guard, end_of_step)
