"""DAPO training from a configuration, used by `dapo-jax train` and from Python."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from dapo_jax.config import TrainConfig, load_config
from dapo_jax.dapo.advantages import Advantages
from dapo_jax.health.stalls import Watch, interrupt
from dapo_jax.health.stopping import Stop
from dapo_jax.parallel import gpu_settings, processes
from dapo_jax.parallel.processes import is_first, tell_others
from dapo_jax.rewards.functions import Rewards
from dapo_jax.run.build import Run
from dapo_jax.run.end_of_step import EndOfStep, OnStep
from dapo_jax.run.guard import Guard
from dapo_jax.run.loop import run_steps
from dapo_jax.run.observers import GraderCounts, Ratios, StepProgress
from dapo_jax.run.policy import Policy
from dapo_jax.run.prompt_sets import GivenRows
from dapo_jax.run.records import use_compilation_cache
from dapo_jax.run.resume_point import has_checkpoint
from dapo_jax.run.run_dir import claim_run_dir
from dapo_jax.run.session import Session
from dapo_jax.run.updater_setup import objective_of
from dapo_jax.storage import AnyPath
from dapo_jax.trackers.progress import Progress
from dapo_jax.trackers.run_status import write_status
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
        session = Session(
            run, run_dir, lock, shown=shown, stop=stop, watch=watch, locked=locked, opened=opened
        )
        session.open(overwrite=overwrite)
        session.begin(resume=resume)
        return _run_all(session, on_step)


def _trace(config: TrainConfig, objective: Objective | None) -> None:
    """Raises an error if the objective is invalid. The default objective is not traced."""
    if objective is not None or config.loss.objective != "clip":
        rows, function = config.batch.rows_per_microbatch, objective or objective_of(config.loss)
        trace_objective(function, rows=rows, row_tokens=config.row_tokens)


def _run_all(session: Session, on_step: OnStep | None) -> TrainResult:
    """Runs all steps, and writes the trained model."""
    run, start = session.run, session.start
    ratios = Ratios(session.config, batches=run.batches, updater=run.updater)
    guard, end_of_step = Guard(session), EndOfStep(session, ratios=ratios, on_step=on_step)
    # The order matters: traces end before the guard checks the step, and `EndOfStep` writes the guard's metrics.
    counts, progress = GraderCounts(run.counting), StepProgress(session.config, session.shown)
    observers = (session.profile, ratios, progress, counts, guard, end_of_step)
    session.opened.enter_context(session.stop.held())
    session.shown.starting("compiling (later runs load the programs from the cache)")
    run.sampling.compile()
    with end_of_step.saves_last_step():
        end_of_step.start()
        state = run_steps(
            start.state,
            start.position,
            steps=session.config.steps,
            sampling=run.sampling,
            batches=run.batches,
            updater=run.updater,
            learning_rate=run.learning_rate,
            observers=observers,
        )
        session.checkpointer.wait()
    session.opened.close()
    policy = replace(run.policy, params=state.params)
    with end_of_step.saves_last_step():
        session.check()
        policy.save(session.run_dir / "model")
    if is_first():
        write_status(session.run_dir, "finished")
    metrics = session.records.read() if session.records else []
    return TrainResult(run_dir=session.run_dir, policy=policy, metrics=metrics)
