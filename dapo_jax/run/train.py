"""DAPO training from a configuration: what `dapo-jax train` calls, and notebooks too."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.config import TrainConfig, load_config, to_yaml
from dapo_jax.health.stalls import Watch, interrupt
from dapo_jax.health.stopping import Stop
from dapo_jax.parallel import processes
from dapo_jax.parallel.gather import by_first
from dapo_jax.parallel.processes import is_first, tell_others
from dapo_jax.rewards.functions import Rewards
from dapo_jax.rollout.collector import Collector, Position
from dapo_jax.run.build import Run
from dapo_jax.run.disk_space import check_room
from dapo_jax.run.end_of_step import EndOfStep, OnStep
from dapo_jax.run.guard import Guard
from dapo_jax.run.loop import Observer, StepResult, run_steps
from dapo_jax.run.policy import Policy
from dapo_jax.run.prompt_sets import GivenRows
from dapo_jax.run.records import Records, use_compilation_cache
from dapo_jax.run.resume_point import ResumePoint, has_checkpoint
from dapo_jax.run.run_dir import claim_run_dir, remove_run
from dapo_jax.run.step_progress import StepProgress
from dapo_jax.run.token_ratios import Ratios
from dapo_jax.storage import AnyPath, write_whole
from dapo_jax.trackers.profile import Profile
from dapo_jax.trackers.progress import Progress
from dapo_jax.trackers.run_status import status_kept, write_status
from dapo_jax.training.update import Objective, check_objective


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The result of `train`."""

    run_dir: AnyPath
    """Absolute, if it is local."""
    policy: Policy
    """The trained policy, also written to `run_dir/model`."""
    metrics: list[dict[str, Any]]
    """The lines of metrics.jsonl, one dict a step; step 0 is the evaluation before training. Of several processes, the first has them."""


def train(
    config: TrainConfig | str | Path,
    *,
    reward: Rewards | None = None,
    prompts: GivenRows | None = None,
    eval_rows: GivenRows | None = None,
    on_step: OnStep | None = None,
    objective: Objective | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    stop: Stop | None = None,
) -> TrainResult:
    """Trains a policy by DAPO.

    Args:
        config: a configuration, or the path of one.
        reward: grades one `rewards.Sample`, or a list of them if `rewards.whole_group` marks it: a bool, a number or a `Verdict`
            for each; `async def` is fine. Or a list of (function or grader's name, weight) pairs, whose first says what is
            correct. None: `config.reward`.
        prompts: rows with `prompt` and `answer` to train on. None: the dataset `config.data.source`.
        eval_rows: the same for evaluation. None: the dataset's held-out split, or no evaluation if `prompts` are given.
        on_step: called with (step, metrics) at the end of each step.
        objective: a function with the signature of `dapo_loss` that replaces it; the clip ratios are its own affair.
        resume: continue from the last checkpoint in `config.run_dir`.
        overwrite: remove the run in `config.run_dir`, and begin again; nothing is removed if there is a file that no run wrote.
        progress: where progress is shown; None shows it on standard output.
        stop: by which it can be told to stop; `stopping.stopped_by_signals` has one for signals. With one, a run that stalls for
            `config.stall_timeout_s` ends the process; without, it raises KeyboardInterrupt.

    Raises:
        ConfigError: something does not fit, or another process trains in that folder; nothing was started.
        ValueError: `objective` raises, or does not return a loss and metrics; nothing was started.
        LockLostError: this run was away for so long that another has taken over its folder in a bucket.
        ShortfallError: dynamic sampling found too few informative groups.
        GuardError: too much was not finite, or `config.guard` stops a run whose sampler drifts.
        CheckpointError: a checkpoint cannot be written, or none of those to resume from can be read.
        StoppedError: it was told to stop; what it had learnt is in a checkpoint.

    Before it is raised, what was learnt by whole steps is saved if that can be, and a note of the error (`__notes__`, which a traceback
    shows) says which checkpoint `resume` goes on from. An interrupt (KeyboardInterrupt) saves
    nothing more; a save under way is finished.
    """
    config = config if isinstance(config, TrainConfig) else load_config(config)
    if objective is not None:
        check_objective(objective, rows=config.batch.rows_per_microbatch, row_tokens=config.row_tokens)
    end = interrupt if stop is None else processes.end
    watch = Watch(config.stall_timeout_s, end=end, broadcast=processes.broadcast, received=processes.received)
    stop = stop or Stop()
    stop.grace_s = config.checkpoint.grace_s
    use_compilation_cache(config.compilation_cache)
    first = is_first()
    metric = config.dynamic_sampling.metric
    shown = progress or Progress(config.steps, metric=metric, console=Console(quiet=not first))
    # Two: the folder stays locked until the model is written, when all else is closed.
    with ExitStack() as held, ExitStack() as stack:
        run_dir, config, lock = claim_run_dir(config, resume=resume, overwrite=overwrite, held=held, lost=end)
        # `tell_others` must run before anything is closed that may wait for the other processes: it is pushed again after each such thing.
        held.push(tell_others)
        note, check = ("", lambda: None) if lock is None else (lock.note, lock.check)
        run = Run(
            config,
            reward=reward,
            prompts=prompts,
            eval_rows=eval_rows,
            objective=objective,
            stop=stop,
            watch=watch,
            say=shown.starting,
            goes_on=resume and has_checkpoint(run_dir / "checkpoints"),
        )
        stack.callback(run.close)
        little_room = check_room(config, run.policy.decoder.trained_parameters)
        if overwrite:
            by_first(lambda: remove_run(run_dir))  # no process looks into the folder before it is empty
        stack.enter_context(shown)
        shown.listen(watch.phase)
        for said in filter(None, (note, *run.notes, little_room)):
            shown.message(said)
        checkpointer = stack.enter_context(
            Checkpointer(
                run_dir / "checkpoints", keep=config.checkpoint.keep, keep_best=config.checkpoint.keep_best
            )
        )
        stack.push(tell_others)
        start = run.start(checkpointer, resume=resume, say=shown.message)
        shown.begin(start.position.step)
        if resume:
            shown.message(_begins_at(start.position.step, checkpointer.folder))
        if first:  # only now: a run that is refused leaves the folder as it was
            write_whole(run_dir / "config.yaml", to_yaml(config).encode())
        records = (
            stack.enter_context(Records(config, run_dir, resume_step=_written(start) if resume else None))
            if first
            else None
        )
        profile = stack.enter_context(Profile(config.log.profile_steps, run_dir / "profile"))
        stack.enter_context(watch)
        stack.push(tell_others)
        if first:
            held.enter_context(status_kept(run_dir, check=check))

        ratios = Ratios(config, batches=run.batches, updater=run.updater)
        guard = Guard(
            config,
            run_dir,
            start=start,
            batches=run.batches,
            records=records,
            shown=shown,
        )
        end_of_step = EndOfStep(
            config,
            run_dir,
            ratios=ratios.of_step,
            evaluate=run.sampling.evaluate if run.evaluates else None,
            checkpointer=checkpointer,
            records=records,
            shown=shown,
            stop=stop,
            on_step=on_step,
            identity=run.identity,
            check=check,
        )
        # Traces end before the guard looks at a step; what the guard has found is written at the step's end.
        observers = (
            FolderCheck(check),
            TracedSteps(profile),
            ratios,
            StepProgress(config, shown),
            guard,
            end_of_step,
        )

        stack.enter_context(stop.held())
        shown.starting("compiling; from the second time on this is read from the cache")
        run.sampling.compile()
        with end_of_step.kept():
            end_of_step.start(start)
            state = run_steps(
                start.state,
                start.position,
                steps=config.steps,
                sampling=run.sampling,
                batches=run.batches,
                updater=run.updater,
                learning_rate=run.learning_rate,
                observers=observers,
            )
            checkpointer.wait()
        stack.close()
        policy = replace(run.policy, params=state.params)
        with end_of_step.kept():
            check()
            policy.save(run_dir / "model")
        if first:
            write_status(run_dir, "finished")
        return TrainResult(run_dir=run_dir, policy=policy, metrics=records.read() if records else [])


class FolderCheck(Observer):
    """Checks after each step that the run may still write to its folder."""

    def __init__(self, check: Callable[[], None]) -> None:
        """`check` raises LockLostError if it may not."""
        self._check = check

    def after_step(self, result: StepResult) -> None:
        """Raises LockLostError if another run has taken over the folder."""
        self._check()


class TracedSteps(Observer):
    """Begins and ends the traces of the steps that are profiled."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile

    def before_sampling(self, position: Position, collector: Collector) -> None:
        """Begins the trace of the step."""
        self._profile.begin(position.step + 1)

    def after_step(self, result: StepResult) -> None:
        """Ends the trace of the step."""
        self._profile.end(result.position.step)


def _written(start: ResumePoint) -> int:
    """Returns the last step whose metrics are final if a run resumes at `start`, or -1.

    Without a checkpoint, the evaluation before training is repeated too.
    """
    return start.position.step - (start.unfinished is not None) if start.position.step else -1


def _begins_at(step: int, folder: AnyPath) -> str:
    return (
        f"going on from {folder / str(step)}"
        if step
        else f"there is no checkpoint in {folder}: beginning at step 0"
    )
