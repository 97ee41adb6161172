"""The guard of a run watches for updates that were skipped, weights that are not finite, and a sampler that drifts away, and asks the watchdogs.

Everything is decided at the end of a step, from numbers that are the same in every process; so all of them stop, or none does.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dapo_jax.config import TrainConfig, to_yaml
from dapo_jax.dapo.dynamic_sampling import Collected, ShortfallError
from dapo_jax.dapo.metrics import Metric, to_scalars
from dapo_jax.dapo.rollouts import Group
from dapo_jax.health.watchdogs import Watchdogs
from dapo_jax.parallel.gather import all_gather_bytes, broadcast_from_first
from dapo_jax.parallel.processes import is_first
from dapo_jax.rollout.collector import Collector, Position
from dapo_jax.run.loop import Observer, StepResult
from dapo_jax.run.nonfinite import Update, in_words, leaf_names, nonfinite_leaves, some, strange_responses
from dapo_jax.run.records import Records
from dapo_jax.run.resume_point import ResumePoint
from dapo_jax.run.step_batches import StepBatches
from dapo_jax.storage import AnyPath, entries, path_of
from dapo_jax.trackers.post_mortem import write_post_mortem
from dapo_jax.trackers.progress import Progress
from dapo_jax.training.minibatch import Minibatch
from dapo_jax.training.sync_metrics import importance_weighted, mismatch_kl

IN_A_ROW = "update/skipped_in_a_row"
KL = "sync/sampler_trainer_kl"


class GuardError(RuntimeError):
    """The run was stopped: going on would have been lost work. Says what was found."""

    def __init__(self, message: str, *, whole: StepResult | None = None) -> None:
        """`whole` is the finished step with its metrics, if its state is one to go on from."""
        super().__init__(message)
        self.whole = whole


def _watchdogs(of_run: TrainConfig, history: Sequence[Mapping[str, Any]]) -> Watchdogs | None:
    config = of_run.watchdogs
    if not config.enabled:
        return None
    return Watchdogs(
        window=config.window,
        min_entropy=config.min_entropy,
        min_length_frac=config.min_length_frac,
        max_truncated_frac=config.max_truncated_frac,
        min_mixed_frac=config.min_mixed_frac,
        metric=of_run.dynamic_sampling.metric,
        history=history,
    )


class Guard(Observer):
    """The guard of one run. All processes make the same calls."""

    def __init__(
        self,
        config: TrainConfig,
        run_dir: AnyPath,
        *,
        start: ResumePoint,
        batches: StepBatches,
        records: Records | None,
        shown: Progress,
    ) -> None:
        """Raises GuardError if the weights to start from are not finite."""
        self._config, self._run_dir, self._batches = config, run_dir, batches
        self._records, self._shown = records, shown
        self._updates: list[Update] = []
        self._corrected = self._over = False
        self._strange: list[Group] = []
        written = records.read() if records is not None else []
        history = [*written, start.unfinished] if start.unfinished is not None else written
        dumped = len(entries(run_dir / "post_mortem")) if is_first() else 0
        before = history[-1].get(IN_A_ROW, 0) if history else 0
        self._dumped, self._in_a_row = json.loads(broadcast_from_first(json.dumps([dumped, before]).encode()))
        self._watchdogs = _watchdogs(config, history)
        if bad := nonfinite_leaves(start.state.params):
            step = start.position.step
            whose = f"of the checkpoint of step {step}" if step else f"of model.source={config.model.source}"
            raise GuardError(f"the weights {whose} are not finite: {some(bad)}; start from others")

    def after_step(self, result: StepResult) -> None:
        """Adds the metrics of what was found.

        Raises:
            GuardError: its state is not to be gone on from, or `config.guard` stops here. The step's metrics are written.
        """
        metrics = result.metrics
        skipped, drifted = self._skipped(result), self._drifted(result.position.step, metrics)
        bad = nonfinite_leaves(result.state.params)
        ruined = f"the weights are not finite after step {result.position.step}: {some(bad)}" if bad else ""
        metrics[IN_A_ROW] = self._in_a_row
        self._say_lost(result.collected)
        if self._watchdogs is not None:
            raised, warnings = self._watchdogs.step(metrics)
            metrics |= raised
            for warning in warnings:
                self._say(result.position.step, warning)
        if found := "; ".join(filter(None, (ruined, skipped, drifted))):
            self._shown.step(result.position.step, metrics)
            if self._records is not None:
                self._records.step(result.position.step, metrics)
            raise GuardError(found, whole=None if ruined or drifted else result)

    def before_sampling(self, position: Position, collector: Collector) -> None:
        """Forgets the groups of the step before."""
        self._strange = []

    def on_group(self, group: Group, collector: Collector) -> None:
        """Keeps a group whose log-probabilities are not finite."""
        if strange_responses([group]):
            self._strange.append(group)

    def on_shortfall(self, error: ShortfallError) -> None:
        """Raises GuardError if any process has seen log-probabilities that are not finite: these are why."""
        # Each process has the log-probabilities of its own groups alone, and none may go another way than the others.
        found = all_gather_bytes(json.dumps([group.prompt.ordinal for group in self._strange]).encode())
        if prompts := sorted({ordinal for one in found for ordinal in json.loads(one)}):
            raise GuardError(
                f"the sampler's log-probabilities are not finite (prompt {some(prompts)}), so what it sampled means nothing; "
                f"{error}"
            ) from error

    def before_updates(self, minibatches: Sequence[Minibatch]) -> Sequence[Minibatch]:
        """Corrects the step's minibatches by importance weights, if sampler and trainer differ by too much."""
        self._updates, self._corrected, guard = [], False, self._config.guard
        if guard.on_mismatch == "correct" and guard.max_mismatch_kl is not None and minibatches:
            # Before anything is learnt, so that all updates of the step are corrected or none.
            self._corrected = to_scalars(mismatch_kl(minibatches))["kl"] > guard.max_mismatch_kl
            if self._corrected:
                return importance_weighted(minibatches, cap=guard.mismatch_cap)
        return minibatches

    def after_update(
        self, minibatch: Minibatch, metrics: Mapping[str, Metric], *, learning_rate: float
    ) -> None:
        """Keeps the update until the step ends."""
        self._updates.append(Update(minibatch, learning_rate, metrics))

    def _skipped(self, result: StepResult) -> str:
        """Counts, names and keeps the updates that were skipped; why the run stops, if it does."""
        updates, self._updates = self._updates, []
        most, longest, last = self._config.guard.max_skipped_updates, 0, ""
        for index, update in enumerate(updates):
            if not (flags := update.flags()):
                self._in_a_row = 0
                continue
            self._in_a_row += 1
            groups = self._batches.split(result.collected.groups, result.position.step)[index]
            named = update.named(flags, groups, leaf_names(result.state.params))
            last = f"update {index + 1} of {len(updates)} was skipped: not finite: {in_words(named)}"
            if kept := self._post_mortem(result, index, update, named, groups):
                last += f"; {kept} has the batch"
            self._say(result.position.step, last)
            longest = max(longest, self._in_a_row)
        if longest <= most:
            return ""
        return (
            f"{longest} updates in a row were skipped up to step {result.position.step}, guard.max_skipped_updates={most}; the last "
            f"one: {last}"
        )

    def _post_mortem(
        self,
        result: StepResult,
        index: int,
        update: Update,
        named: Mapping[str, Mapping[str, Any]],
        groups: Sequence[Group],
    ) -> str:
        """Writes the update down unless enough are; where."""
        if self._dumped >= self._config.guard.post_mortems:
            return ""
        self._dumped += 1
        step = result.position.step
        place = f"post_mortem/step_{step:06d}_update_{index + 1}"
        stacks = update.stacks()
        if is_first():
            report = {
                "step": step,
                "update": index + 1,
                "skipped_in_a_row": self._in_a_row,
                "learning_rate": update.learning_rate,
                "nonfinite": named,
            }
            write_post_mortem(
                self._run_dir / place,
                report=report,
                stacks=stacks,
                groups=groups,
                config=to_yaml(self._config),
            )
        return str(path_of(self._config.run_dir) / place)

    def _drifted(self, step: int, metrics: dict[str, float | int]) -> str:
        """Compares the step's mismatch with the limit; why the run stops, if it does."""
        guard, kl = self._config.guard, metrics.get(KL)
        if guard.max_mismatch_kl is None:
            return ""
        before, self._over = self._over, kl is not None and kl > guard.max_mismatch_kl
        if guard.on_mismatch == "correct":
            metrics["sync/corrected"] = int(self._corrected)
            self._over = self._corrected
        if not self._over:
            return ""
        found = (
            f"KL(sampler || trainer) is {kl:.3g} nats a token, over guard.max_mismatch_kl={guard.max_mismatch_kl:g}. Usual causes: "
            "tokens of earlier steps (dynamic_sampling.surplus=carry, rollout.in_flight); rounding to bfloat16; kernels that differ"
        )
        if guard.on_mismatch == "stop":
            return f"step {step}: {found}. Set dynamic_sampling.surplus=discard, raise the limit, or set guard.on_mismatch=correct"
        if not before:
            corrected = guard.on_mismatch == "correct"
            remedy = (
                f"corrected by weights of at most {guard.mismatch_cap:g}" if corrected else "not corrected"
            )
            self._say(step, f"{found}. It is {remedy}")
        return ""

    def _say_lost(self, collected: Collected) -> None:
        """Names what graders gave that is no number, which here counts as wrong (reward.on_nonfinite=lost)."""
        lost = {
            group.prompt.ordinal: rollout.verdict.reason
            for group in collected.sampled
            for rollout in group.rollouts
            if rollout.verdict.lost == "nonfinite"
        }
        if lost:
            reason = next(filter(None, lost.values()), "")
            self._shown.message(
                f"rewards that are not finite count as wrong: prompt {some(list(lost))}: {reason}"
            )

    def _say(self, step: int, text: str) -> None:
        self._shown.message(f"step {step}: {text}")
