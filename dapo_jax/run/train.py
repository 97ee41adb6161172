"""DAPO training from a configuration: what `dapo-jax train` calls, and notebooks too."""

import json
import os
import re
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import zip_longest
from pathlib import Path
from typing import Any

from etils import epath
from rich.console import Console

from dapo_jax import locks
from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.config import ConfigError, TrainConfig, load_config, to_yaml
from dapo_jax.config.loading import changed_keys
from dapo_jax.health.stalls import Watch, interrupt
from dapo_jax.health.stopping import Stop
from dapo_jax.locks import Lock, Lost
from dapo_jax.parallel import processes
from dapo_jax.parallel.gather import by_first, exchange
from dapo_jax.parallel.processes import is_first, tell_others
from dapo_jax.rewards.functions import Rewards
from dapo_jax.run.build import Run
from dapo_jax.run.disk_space import check_room
from dapo_jax.run.end_of_step import Boundaries, Boundary, OnStep
from dapo_jax.run.folders import locked, place_of
from dapo_jax.run.guard import Guard, GuardError
from dapo_jax.run.identity import FREE_TO_CHANGE
from dapo_jax.run.policy import Policy
from dapo_jax.run.prompt_sets import GivenRows, dated
from dapo_jax.run.records import Records, use_compilation_cache
from dapo_jax.run.token_ratios import Ratios
from dapo_jax.run.wave_messages import Waves
from dapo_jax.storage import AnyPath, entries, in_bucket, write_whole
from dapo_jax.trackers.profile import Profile
from dapo_jax.trackers.progress import Progress
from dapo_jax.trackers.run_status import status_kept, write_status
from dapo_jax.training.loop import StepResult, run_steps
from dapo_jax.training.update import Objective

OF_A_RUN = (
    locks.NAME,
    "checkpoints",
    "config.yaml",
    "evaluations",
    "metrics",
    "metrics.jsonl",
    "model",
    "post_mortem",
    "profile",
    "report.html",
    "rollouts",
    "status.json",
    "tensorboard",
    "wandb",
    "wandb_run_id",
)
"""Names of all that a run writes into its folder, and of a report's page."""


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
        resume: go on from the last checkpoint in `config.run_dir`.
        overwrite: begin anew where `config.run_dir` holds a run, which is removed; nothing is if there is anything that no run wrote.
        progress: where progress is shown; None shows it on standard output.
        stop: by which it can be told to stop; `stopping.stopped_by_signals` has one for signals. With one, a run that stalls for
            `config.stall_timeout_s` ends the process; without, it raises KeyboardInterrupt.

    Raises:
        ConfigError: something does not fit, or another process trains in that folder; nothing was started.
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
    end = interrupt if stop is None else processes.end
    watch = Watch(config.stall_timeout_s, end=end, post=processes.post, posted=processes.posted)
    stop = stop or Stop()
    stop.grace_s = config.checkpoint.grace_s
    use_compilation_cache(config.compilation_cache)
    first = is_first()
    metric = config.dynamic_sampling.metric
    shown = progress or Progress(config.steps, metric=metric, console=Console(quiet=not first))
    # Two: the folder stays locked until the model is written, when all else is closed.
    with ExitStack() as held, ExitStack() as stack:
        run_dir, config, lock = _checked_place(
            config, resume=resume, overwrite=overwrite, held=held, lost=end
        )
        # What failed is told before what was opened is closed, which may wait for the other processes; so it is pushed again after
        # whatever they wait in.
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
        )
        stack.callback(run.close)
        little_room = check_room(config, run.policy.decoder.parameters)
        if overwrite:
            by_first(lambda: _remove_run(run_dir))  # nobody looks into the folder before it is empty
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

        guard = Guard(
            config,
            run_dir,
            start=start,
            split=run.split,
            records=records,
            shown=shown,
        )
        waves = Waves(config, shown)
        ratios = Ratios(config, split=run.split, ratios=run.updater.ratios)
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
            identity=run.identity,
            check=check,
        )

        def after_step(result: StepResult) -> None:
            step = result.position.step
            check()
            profile.end(step)
            try:
                checked = guard.checked(result)
            except GuardError as error:
                if error.whole is not None:
                    boundaries.passed(error.whole)
                raise
            boundaries.after_step(checked)
            if step < config.steps:
                profile.begin(step + 1)

        stack.enter_context(stop.held())
        with boundaries.kept():
            shown.starting("compiling; from the second time on this is read from the cache")
            boundaries.start(start)
            profile.begin(start.position.step + 1)
            state = run_steps(
                start.state,
                start.position,
                steps=config.steps,
                pipe=guard.watching(ratios.watching(waves.watching(run.pipe))),
                after_step=after_step,
                on_phase=shown.phase,
            )
            checkpointer.wait()
        stack.close()
        policy = replace(run.policy, params=state.params)
        with boundaries.kept():
            check()
            policy.save(run_dir / "model")
        if first:
            write_status(run_dir, "finished")
        return TrainResult(run_dir=run_dir, policy=policy, metrics=records.read() if records else [])


def _written(start: Boundary) -> int:
    """The last step whose metrics are final where a run goes on from `start`; -1 if none are.

    Without a checkpoint to go on from, the evaluation before training is repeated too.
    """
    return start.position.step - (start.unfinished is not None) if start.position.step else -1


def _begins_at(step: int, folder: AnyPath) -> str:
    return (
        f"going on from {folder / str(step)}"
        if step
        else f"there is no checkpoint in {folder}: beginning at step 0"
    )


def _remove_run(run_dir: AnyPath) -> bytes:
    """Removes what a run wrote to `run_dir`, which was checked to hold nothing else; the lock that this run holds stays."""
    for place in entries(run_dir):
        if place.name in OF_A_RUN and place.name != locks.NAME:
            if place.is_dir():
                place.rmtree() if isinstance(place, epath.Path) else shutil.rmtree(place)
            else:
                place.unlink()
    return b""


def _checked_place(
    config: TrainConfig, *, resume: bool, overwrite: bool, held: ExitStack, lost: Lost
) -> tuple[AnyPath, TrainConfig, Lock | None]:
    """The run's folder, locked and checked in the first process, which is also the one that writes there, and that all processes have its
    configuration; and that with the day on which the run began and the size of its waves, and the lock, which the others do not have.

    Raises:
        ConfigError: in every process.
    """
    taken: list[Lock] = []

    def checked() -> bytes:
        place = place_of(config.run_dir, key="run_dir", write=True)
        # First of all: what is looked for below, another run could be writing.
        taken.append(held.enter_context(locked(place, value=config.run_dir, key="run_dir", lost=lost)))
        begun = resume and (place / "config.yaml").exists()
        day = dated(
            config.data, like=load_config(place / "config.yaml").data if begun else None
        ).template_date
        check_run_dir(place, _on(config, day), resume=resume, overwrite=overwrite)
        return json.dumps([to_yaml(config), day]).encode()

    firsts, day = json.loads(by_first(checked))
    lines = zip_longest(firsts.splitlines(), to_yaml(config).splitlines())
    differing = [pair for pair in lines if pair[0] != pair[1]]
    for process, found in enumerate(exchange(json.dumps(differing[:1]).encode())):
        for theirs, own in json.loads(found):
            raise ConfigError(
                f"all processes need one configuration; the first has {theirs!r} where process {process} has {own!r}"
            )
    run_dir = place_of(config.run_dir, key="run_dir", write=False)
    return run_dir, _on(config, day), taken[0] if taken else None


def _on(config: TrainConfig, day: str) -> TrainConfig:
    return replace(config.resolved(), data=replace(config.data, template_date=day))


def check_run_dir(run_dir: AnyPath, config: TrainConfig, *, resume: bool, overwrite: bool = False) -> None:
    """Refuses to write over a run unless told to, or to resume one under another configuration, or one that is not there.

    Raises:
        ConfigError: `run_dir` holds a run and neither `resume` nor `overwrite` is True, or with `overwrite` what no run wrote; `resume`
            would change what the run learns, or there is none and one of almost this name lies beside; TensorBoard's events
            would have to be appended to in a bucket; or something that is no folder, or a link to nothing, lies where the run needs one.
    """
    if resume and overwrite:
        raise ConfigError("resume=True goes on with a run and overwrite=True removes it; give one of them")
    if config.log.tensorboard and in_bucket(run_dir):
        raise ConfigError(
            f"log.tensorboard=true with run_dir={config.run_dir}: TensorBoard's events are appended to a file, and objects "
            "in a bucket cannot be; set log.tensorboard=false (metrics are kept all the same) or log.wandb=true"
        )
    for name in ("checkpoints", "evaluations", "model", "rollouts"):
        if problem := _unusable(run_dir / name):
            raise ConfigError(f"run_dir={config.run_dir}: {name} {problem}")
    kept = run_dir / "config.yaml"
    if overwrite:
        if strange := [place.name for place in entries(run_dir) if place.name not in OF_A_RUN]:
            raise ConfigError(
                f"overwrite=True with run_dir={config.run_dir}: it holds {strange[0]!r}, which no run wrote; move that away, or "
                "choose another run_dir"
            )
        return
    begun = kept.exists() or any(path.name.isdigit() for path in entries(run_dir / "checkpoints"))
    if begun and not resume:
        raise ConfigError(
            f"run_dir={config.run_dir} already holds a run; resume it with --resume (from Python: resume=True, or "
            "overwrite=True to begin anew), or choose another run_dir"
        )
    empty = all(place.name == locks.NAME for place in entries(run_dir))
    if resume and empty and (near := _run_beside(run_dir)):
        raise ConfigError(
            f"run_dir={config.run_dir}: there is no run to resume, but one in {near}; name that one, or leave --resume out "
            "to begin a new run"
        )
    learnt = any(path.name.removesuffix(".damaged").isdigit() for path in entries(run_dir / "checkpoints"))
    if kept.exists() and learnt:  # before the first checkpoint nothing was learnt under another configuration
        changed = changed_keys(load_config(kept).resolved(), config.resolved())
        bad = {key: pair for key, pair in changed.items() if not key.startswith(FREE_TO_CHANGE)}
        if "" in bad.get("data.template_date", ()):
            # A run of before days were kept has none, and who only asks has none yet.
            del bad["data.template_date"]
        if bad:
            lines = "; ".join(f"{key} was {old!r}, is {new!r}" for key, (old, new) in bad.items())
            raise ConfigError(
                f"resuming {config.run_dir} under another configuration would change the run: {lines}"
            )


def _unusable(place: AnyPath) -> str:
    """Why a run cannot use the folder `place`, which may not be there yet; empty if it can."""
    if os.path.islink(place) and not os.path.exists(place):
        return f"is a link to {os.readlink(place)}, which is not there: mount its disk, or remove the link to do without what it led to"
    if place.is_file() or (os.path.lexists(place) and not os.path.isdir(place)):
        return "is a file, and the run needs a folder there: move it away"
    if os.path.isdir(place) and not os.access(place, os.R_OK | os.X_OK):
        return "cannot be listed by this user: let it read there"
    return ""


def _run_beside(run_dir: AnyPath) -> AnyPath | None:
    """The run beside `run_dir` whose name is almost the same; another number, as of a seed, is another run."""
    runs = {place.name: place for place in entries(run_dir.parent) if (place / "config.yaml").is_file()}
    alike = [name for name in runs if re.findall(r"\d+", name) == re.findall(r"\d+", run_dir.name)]
    return next((runs[name] for name in get_close_matches(run_dir.name, alike, n=1, cutoff=0.75)), None)
