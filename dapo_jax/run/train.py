"""DAPO training from a configuration: what `dapo-jax train` calls, and notebooks too."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from flax import nnx

from dapo_jax.batching import pack, row_weights, rows_of, split_minibatches
from dapo_jax.checkpoints import Checkpointer
from dapo_jax.config import ConfigError, TrainConfig, load_config, to_yaml
from dapo_jax.config.loading import changed_keys
from dapo_jax.data.prompts import PromptSource, checked_rows, load_rows
from dapo_jax.evaluation import summarize
from dapo_jax.filtering import Collector
from dapo_jax.losses import dapo_loss
from dapo_jax.rewards.functions import RewardFunction
from dapo_jax.rollouts import Group, Microbatch
from dapo_jax.run.carry import carry_arrays, carry_groups
from dapo_jax.run.policy import Policy, load_policy, mesh_of, optimizer_of, state_structs
from dapo_jax.run.records import Records, use_compilation_cache
from dapo_jax.run.rollout import TRAINING, Rollouts, eval_prompts, grading
from dapo_jax.sampling.decoding import decoding
from dapo_jax.trackers.progress import Progress
from dapo_jax.training.loop import Pipe, Position, StepResult, run_steps
from dapo_jax.training.state import TrainState, init_state, warmed_up
from dapo_jax.training.update import Objective, UpdateOptions, Updater

Rows = Sequence[Mapping[str, Any]]
OnStep = Callable[[int, Mapping[str, float | int]], None]

FREE_TO_CHANGE = ("run_dir", "steps", "compilation_cache", "eval.", "checkpoint.", "log.")
"""Keys that a resumed run may change: they do not decide what is learnt."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What `train` hands back."""

    run_dir: Path
    policy: Policy
    """The trained policy, also written to `run_dir/model`."""
    metrics: list[dict[str, Any]]
    """What metrics.jsonl holds, one dict a step; step 0 is the evaluation before training."""


def train(
    config: TrainConfig | str | Path,
    *,
    reward: RewardFunction | None = None,
    prompts: Rows | None = None,
    eval_rows: Rows | None = None,
    on_step: OnStep | None = None,
    objective: Objective | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> TrainResult:
    """Trains a policy by DAPO.

    Args:
        config: a configuration, or the path of one.
        reward: grades one `rewards.Sample`: returns a bool, a number or a `Verdict`. None: `config.reward.grader`.
        prompts: rows with `prompt` and `answer` to train on. None: the dataset `config.data.source`.
        eval_rows: the same for evaluation. None: the dataset's held-out split, or no evaluation if `prompts` are given.
        on_step: called with (step, metrics) at the end of each step.
        objective: a function with the signature of `dapo_loss` that replaces it; the clip ratios are its own affair.
        resume: go on from the last checkpoint in `config.run_dir`.
        progress: where progress is shown; None shows it on standard output.

    Raises:
        ConfigError: something does not fit; nothing was started.
        ShortfallError: dynamic sampling found too few informative groups.
    """
    config = config if isinstance(config, TrainConfig) else load_config(Path(config))
    use_compilation_cache(config.compilation_cache)
    run_dir = Path(config.run_dir).expanduser()
    check_run_dir(run_dir, config, resume=resume)
    run = Run(config, reward=reward, prompts=prompts, eval_rows=eval_rows, objective=objective)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(to_yaml(config))
    with ExitStack() as stack:
        shown = stack.enter_context(progress or Progress(config.steps))
        checkpointer = stack.enter_context(Checkpointer(run_dir / "checkpoints", keep=config.checkpoint.keep))
        state, position = run.start(checkpointer, resume=resume)
        # Without a checkpoint to go on from, the evaluation before training is repeated too: no line stays.
        kept = position.step if position.step else -1
        records = stack.enter_context(Records(config, run_dir, resume_step=kept if resume else None))

        def after_step(result: StepResult) -> None:
            step, last = result.position.step, result.position.step == config.steps
            metrics = {**result.metrics}
            shown.step(step, metrics)
            if run.evaluates and (last or _due(step, config.eval.every_steps)):
                metrics |= show(step, run.evaluate(result.state))
            records.step(step, metrics, result.collected)
            if last or _due(step, config.checkpoint.every_steps):
                shown.phase("checkpoint")
                save(checkpointer, result.state, result.position, config)
            if on_step is not None:
                on_step(step, metrics)

        def show(step: int, scores: dict[str, float]) -> dict[str, float]:
            shown.evaluation(config.data.source, scores, step)
            return scores

        if position.step == 0 and run.evaluates:
            shown.phase("evaluate")
            records.step(0, show(0, run.evaluate(state)), None)
        state = run_steps(
            state, position, steps=config.steps, pipe=run.pipe, after_step=after_step, on_phase=shown.phase
        )
        checkpointer.wait()
    policy = replace(run.policy, params=state.params)
    policy.save(run_dir / "model")
    return TrainResult(run_dir=run_dir, policy=policy, metrics=records.read())


class Run:
    """The objects of a training run, made from its configuration."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        reward: RewardFunction | None = None,
        prompts: Rows | None = None,
        eval_rows: Rows | None = None,
        objective: Objective | None = None,
    ) -> None:
        self.config, model, data = config, config.model, config.data
        self.policy = load_policy(model, seed=config.seed)
        self._mesh = mesh_of(config.parallel, rows_per_microbatch=config.batch.rows_per_microbatch)
        self._optimizer = optimizer_of(config.optimizer)
        self._prompts = self._prompt_source(prompts)
        limit = config.sampling.max_response_tokens
        self._grade = grading(config.reward, self.policy, max_response_tokens=limit, reward=reward)
        self._rollouts = Rollouts(
            self.policy,
            self._mesh,
            config.sampling,
            seed=config.seed,
            max_prompt_tokens=data.max_prompt_tokens,
            compute_dtype=model.compute_dtype,
            group_size=config.batch.group_size,
        )
        self.evaluates = prompts is None or eval_rows is not None
        self._eval_prompts = (
            eval_prompts(
                config.eval,
                self.policy,
                source=data.source,
                split=data.eval_split,
                data_dir=data.data_dir,
                prompt_template=data.prompt_template,
                max_prompt_tokens=data.max_prompt_tokens,
                rows=eval_rows,
            )
            if self.evaluates
            else []
        )
        self.pipe = self._pipe(objective)

    def start(self, checkpointer: Checkpointer, *, resume: bool) -> tuple[TrainState, Position]:
        """The state and position to go on from: the last checkpoint's if there is one to resume, else the first."""
        if not resume or checkpointer.latest_step() is None:
            return init_state(self.policy.params, self._optimizer, self._mesh), Position()
        found = checkpointer.restore(state_structs(self.policy, self._optimizer, self._mesh))
        carry = carry_groups(found.carry, lambda ordinal: self._prompts[ordinal])
        return found.state, Position(step=found.step, cursor=found.progress["cursor"], carry=carry)

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """Scores of the held-out prompts."""
        weights = self._rollouts.transfer(state.params)
        groups = self._rollouts.evaluate(weights, self._eval_prompts, self._grade, self.config.eval)
        return summarize(groups, name=self.config.data.source)

    def _prompt_source(self, rows: Rows | None) -> PromptSource:
        data = self.config.data
        try:
            found = (
                load_rows(data.source, data.train_split, data.data_dir)
                if rows is None
                else checked_rows(rows)
            )
            return PromptSource(
                found,
                self.policy.tokenizer,
                seed=self.config.seed,
                max_prompt_tokens=data.max_prompt_tokens,
                prompt_template=data.prompt_template,
                shuffle=data.shuffle,
            )
        except ValueError as error:
            raise ConfigError(f"data.source={data.source!r}, split {data.train_split!r}: {error}") from error

    def _pipe(self, objective: Objective | None) -> Pipe:
        config, dynamic = self.config, self.config.dynamic_sampling
        rate, updater = config.optimizer.learning_rate, self._updater(objective)
        return Pipe(
            transfer=self._rollouts.transfer,
            collector=lambda position: Collector(
                needed=config.batch.prompts_per_step,
                cursor=position.cursor,
                prompts_per_wave=dynamic.prompts_per_wave,
                max_waves=dynamic.max_waves,
                carried=position.carry,
                metric=dynamic.metric,
                enabled=dynamic.enabled,
            ),
            sample=self._sample,
            finish=lambda collector: collector.finish(
                on_shortfall=dynamic.on_shortfall, surplus=dynamic.surplus
            ),
            minibatches=self._minibatches,
            prepare=updater.prepare,
            update=updater.update,
            learning_rate=lambda step: warmed_up(rate, step=step, warmup_steps=config.optimizer.warmup_steps),
            clock=time.perf_counter,
        )

    def _updater(self, objective: Objective | None) -> Updater:
        loss, model = self.config.loss, self.config.model
        clipped = partial(
            dapo_loss,
            clip_ratio_low=loss.clip_ratio_low,
            clip_ratio_high=loss.clip_ratio_high,
            dual_clip=loss.dual_clip,
        )
        return Updater(
            self.policy.graph(compute_dtype=model.compute_dtype, remat=model.remat),
            self.policy.params,
            self._optimizer,
            self._mesh,
            objective=objective or clipped,
            options=UpdateOptions(
                temperature=self.config.sampling.temperature,
                logprob_chunk_tokens=model.logprob_chunk_tokens,
                old_logprobs=loss.old_logprobs,
                importance_cap=loss.importance_cap,
                kl_coef=loss.kl_coef,
            ),
            # The policy that training starts from; with kl_coef 0 there is no reference at all.
            reference=self._reference() if loss.kl_coef else None,
        )

    def _reference(self) -> nnx.State:
        return init_state(self.policy.params, self._optimizer, self._mesh).params

    def _sample(self, weights: Any, draw: Callable[[int], list[int]]) -> Any:
        sampled = self._rollouts.sample(
            weights,
            lambda count: [self._prompts[ordinal] for ordinal in draw(count)],
            how=decoding(temperature=self.config.sampling.temperature),
            samples=self.config.batch.group_size,
            domain=TRAINING,
        )
        return (self._grade(prompt, responses) for prompt, responses in sampled)

    def _minibatches(self, groups: Sequence[Group], step: int) -> list[list[Microbatch]]:
        config = self.config
        split = split_minibatches(
            groups, groups_per_update=config.batch.groups_per_update, seed=(config.seed, step)
        )
        packed = []
        for minibatch in split:
            rows = rows_of(
                minibatch,
                normalize_std=config.loss.normalize_std,
                filter_truncated=config.reward.overlong.filter_truncated,
            )
            if not any(row.in_loss for row in rows):
                continue  # overlong filtering left nothing: an update would only decay the weights
            weights = row_weights(
                rows,
                aggregation=config.loss.aggregation,
                max_response_tokens=config.sampling.max_response_tokens,
            )
            packed.append(
                pack(
                    rows,
                    weights,
                    row_tokens=config.row_tokens,
                    rows_per_microbatch=config.batch.rows_per_microbatch,
                    pad_id=self.policy.tokenizer.pad_id,
                )
            )
        return packed


def save(checkpointer: Checkpointer, state: TrainState, position: Position, config: TrainConfig) -> None:
    """Starts saving a step boundary."""
    progress = {"cursor": position.cursor, "seed": config.seed}
    checkpointer.save(position.step, state, progress, carry_arrays(position.carry))


def check_run_dir(run_dir: Path, config: TrainConfig, *, resume: bool) -> None:
    """Refuses to write over a run, or to resume one under another configuration.

    Raises:
        ConfigError: `run_dir` holds a run and `resume` is False, or `resume` would change what the run learns.
    """
    kept = run_dir / "config.yaml"
    if kept.exists() and not resume:
        raise ConfigError(
            f"run_dir={config.run_dir} already holds a run; resume it with --resume (from Python: resume=True), or "
            "choose another run_dir"
        )
    if kept.exists():
        changed = changed_keys(load_config(kept), config)
        bad = {key: pair for key, pair in changed.items() if not key.startswith(FREE_TO_CHANGE)}
        if bad:
            lines = "; ".join(f"{key} was {old!r}, is {new!r}" for key, (old, new) in bad.items())
            raise ConfigError(
                f"resuming {config.run_dir} under another configuration would change the run: {lines}"
            )


def _due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0
