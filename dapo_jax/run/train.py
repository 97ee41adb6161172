"""DAPO training from a configuration: what `dapo-jax train` calls, and notebooks too."""

import json
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console

from dapo_jax.checkpoints import Checkpointer
from dapo_jax.config import ConfigError, TrainConfig, load_config, to_yaml
from dapo_jax.config.loading import changed_keys
from dapo_jax.parallel import processes
from dapo_jax.parallel.exchange import agreed
from dapo_jax.parallel.processes import is_first, tell_others
from dapo_jax.rewards.functions import Rewards
from dapo_jax.run.assembly import Run
from dapo_jax.run.boundaries import Boundaries, Boundary, OnStep
from dapo_jax.run.guard import Guard
from dapo_jax.run.places import place_of
from dapo_jax.run.policy import Policy
from dapo_jax.run.prompts import GivenRows, dated
from dapo_jax.run.ratios import Ratios
from dapo_jax.run.records import Records, use_compilation_cache
from dapo_jax.stalls import Watch, interrupt
from dapo_jax.stopping import Stop, StoppedError
from dapo_jax.storage import AnyPath, in_bucket
from dapo_jax.trackers.profile import Profile
from dapo_jax.trackers.progress import Progress
from dapo_jax.training.loop import StepResult, run_steps
from dapo_jax.training.update import Objective

FREE_TO_CHANGE = (
    "run_dir",
    "steps",
    "compilation_cache",
    "data.data_dir",
    "parallel.",
    "batch.rows_per_microbatch",
    "batch.row_tokens",
    "batch.packing",
    "optimizer.offload",
    "model.attention",
    "model.remat",
    "model.logprob_chunk_vocab",
    "sampling.slots",
    "sampling.steps_per_call",
    "reward.workers",
    "reward.async_calls",
    "reward.on_nonfinite",
    "eval.",
    "checkpoint.",
    "log.",
    "stall_timeout_s",
    "guard.",
    "watchdogs.",
)
"""Keys that a resumed run may change: they do not decide what is learnt, but for the order in which sums are rounded, and for
what a run does when something goes wrong."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What `train` hands back."""

    run_dir: AnyPath
    policy: Policy
    """The trained policy, also written to `run_dir/model`."""
    metrics: list[dict[str, Any]]
    """What metrics.jsonl holds, one dict a step; step 0 is the evaluation before training. Of several processes, the first has them."""


def train(
    config: TrainConfig | str | Path,
    *,
    reward: Rewards | None = None,
    prompts: GivenRows | None = None,
    eval_rows: GivenRows | None = None,
    on_step: OnStep | None = None,
    objective: Objective | None = None,
    resume: bool = False,
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
        resume: go on from the last checkpoint in `config.run_dir`.
        progress: where progress is shown; None shows it on standard output.
        stop: by which it can be told to stop; `stopping.stopped_by_signals` has one for signals. With one, a run that stalls for
            `config.stall_timeout_s` ends the process; without, it raises KeyboardInterrupt.

    Raises:
        ConfigError: something does not fit; nothing was started.
        ShortfallError: dynamic sampling found too few informative groups.
        GuardError: too much was not finite, or `config.guard` stops a run whose sampler drifts.
        CheckpointError: a checkpoint cannot be written, or none of those to resume from can be read.
        StoppedError: it was told to stop; what it had learnt is in a checkpoint.
    """
    config = config if isinstance(config, TrainConfig) else load_config(config)
    watch = Watch(
        config.stall_timeout_s,
        end=interrupt if stop is None else processes.end,
        post=processes.post,
        posted=processes.posted,
    )
    stop = stop or Stop()
    stop.grace_s = config.checkpoint.grace_s
    use_compilation_cache(config.compilation_cache)
    first = is_first()
    run_dir, config = _checked_place(config, resume=resume)
    run = Run(
        config,
        reward=reward,
        prompts=prompts,
        eval_rows=eval_rows,
        objective=objective,
        stop=stop,
        watch=watch,
    )
    if first:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(to_yaml(config))
    with ExitStack() as stack:
        stack.callback(run.close)
        shown = stack.enter_context(progress or Progress(config.steps, console=Console(quiet=not first)))
        shown.listen(watch.phase)
        for note in run.notes:
            shown.message(note)
        checkpointer = stack.enter_context(
            Checkpointer(
                run_dir / "checkpoints", keep=config.checkpoint.keep, keep_best=config.checkpoint.keep_best
            )
        )
        start = run.start(checkpointer, resume=resume, say=shown.message)
        records = (
            stack.enter_context(Records(config, run_dir, resume_step=_written(start) if resume else None))
            if first
            else None
        )
        profile = stack.enter_context(Profile(config.log.profile_steps, run_dir / "profile"))
        stack.enter_context(watch)
        stack.push(tell_others)

        guard = Guard(
            config,
            run_dir,
            start=start,
            split=run.split,
            checkpointer=checkpointer,
            records=records,
            shown=shown,
        )
        ratios = Ratios(config.log, split=run.split, ratios=run.updater.ratios)
        boundaries = Boundaries(
            config,
            run_dir,
            ratios=ratios.of_step,
            evaluate=run.evaluate if run.evaluates else None,
            checkpointer=checkpointer,
            records=records,
            shown=shown,
            stop=stop,
            on_step=on_step,
        )

        def after_step(result: StepResult) -> None:
            step = result.position.step
            profile.end(step)
            boundaries.after_step(guard.checked(result))
            if step < config.steps:
                profile.begin(step + 1)

        stack.enter_context(stop.held())
        try:
            boundaries.start(start)
            profile.begin(start.position.step + 1)
            state = run_steps(
                start.state,
                start.position,
                steps=config.steps,
                pipe=guard.watching(ratios.watching(run.pipe)),
                after_step=after_step,
                on_phase=shown.phase,
            )
        except StoppedError:
            boundaries.leave()
            raise
        checkpointer.wait()
    policy = replace(run.policy, params=state.params)
    policy.save(run_dir / "model")
    return TrainResult(run_dir=run_dir, policy=policy, metrics=records.read() if records else [])


def _written(start: Boundary) -> int:
    """The last step whose metrics are final where a run goes on from `start`; -1 if none are.

    Without a checkpoint to go on from, the evaluation before training is repeated too.
    """
    return start.position.step - (start.unfinished is not None) if start.position.step else -1


def _checked_place(config: TrainConfig, *, resume: bool) -> tuple[AnyPath, TrainConfig]:
    """The run's folder, checked in the first process, which is also the one that writes there, and that all processes have its
    configuration; and that with the day on which the run began.

    Raises:
        ConfigError: in every process.
    """
    refusal, day = "", ""
    if is_first():
        try:
            place = place_of(config.run_dir, key="run_dir", write=True)
            begun = resume and (place / "config.yaml").exists()
            day = dated(
                config.data, like=load_config(place / "config.yaml").data if begun else None
            ).template_date
            check_run_dir(place, _on(config, day), resume=resume)
        except ConfigError as error:
            refusal = str(error)
    said = json.loads(agreed(json.dumps([refusal, to_yaml(config), day]).encode()))
    if said[0]:
        raise ConfigError(said[0])
    if said[1] != to_yaml(config):
        theirs, ours = said[1].splitlines(), to_yaml(config).splitlines()
        differing = next(pair for pair in zip_longest(theirs, ours) if pair[0] != pair[1])
        raise ConfigError(
            f"all processes need one configuration; the first has {differing[0]!r} where this one has {differing[1]!r}"
        )
    return place_of(config.run_dir, key="run_dir", write=False), _on(config, said[2])


def _on(config: TrainConfig, day: str) -> TrainConfig:
    return replace(config, data=replace(config.data, template_date=day))


def check_run_dir(run_dir: AnyPath, config: TrainConfig, *, resume: bool) -> None:
    """Refuses to write over a run, or to resume one under another configuration.

    Raises:
        ConfigError: `run_dir` holds a run and `resume` is False, or `resume` would change what the run learns; or
            TensorBoard's events would have to be appended to in a bucket.
    """
    if config.log.tensorboard and in_bucket(run_dir):
        raise ConfigError(
            f"log.tensorboard=true with run_dir={config.run_dir}: TensorBoard's events are appended to a file, and objects "
            "in a bucket cannot be; set log.tensorboard=false (metrics are kept all the same) or log.wandb=true"
        )
    for folder in ("checkpoints", "evaluations", "model", "rollouts"):
        if (run_dir / folder).is_file():
            raise ConfigError(
                f"run_dir={config.run_dir}: {folder} is a file, and the run needs a folder there: move it away"
            )
    kept = run_dir / "config.yaml"
    if kept.exists() and not resume:
        raise ConfigError(
            f"run_dir={config.run_dir} already holds a run; resume it with --resume (from Python: resume=True), or "
            "choose another run_dir"
        )
    if kept.exists():
        changed = changed_keys(load_config(kept), config)
        bad = {key: pair for key, pair in changed.items() if not key.startswith(FREE_TO_CHANGE)}
        if bad.get("data.template_date", ("", ""))[0] == "":
            bad.pop("data.template_date", None)  # a run from before days were kept has none
        if bad:
            lines = "; ".join(f"{key} was {old!r}, is {new!r}" for key, (old, new) in bad.items())
            raise ConfigError(
                f"resuming {config.run_dir} under another configuration would change the run: {lines}"
            )
