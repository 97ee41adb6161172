"""Runs one small training step, then grades its responses, runs an evaluation, and saves and restores a checkpoint.

The step uses the same objects and loop as a run (`dapo_jax.run.build.Run`, `run_steps`), with smaller sizes. In each group, half of the
responses are graded as correct regardless of their text, so every group is informative. Another check tests the configured grader.
"""

import hashlib
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import jax
import numpy as np
from jaxtyping import PyTree

from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.checkpoints.manifest import flattened
from dapo_jax.config import ClusterConfig, DynamicSamplingConfig, EnvironmentConfig, TrainConfig
from dapo_jax.config.loading import replaced
from dapo_jax.dapo.dynamic_sampling import Collected
from dapo_jax.dapo.metrics import to_scalars
from dapo_jax.dapo.rollouts import DrawnTurn, Group, Prompt, Rollout, Verdict
from dapo_jax.doctor.check import Found
from dapo_jax.doctor.subject import Subject
from dapo_jax.parallel.mesh import batch_shards
from dapo_jax.rewards import whole_group
from dapo_jax.rewards.sample import Sample
from dapo_jax.rewards.shaping import samples_of
from dapo_jax.rollout.collector import Position
from dapo_jax.run.build import Run
from dapo_jax.run.disk_space import gib, room_for
from dapo_jax.run.grader_setup import environment_of, episodes_of, grading
from dapo_jax.run.loop import Metrics, Observer, StepResult, run_steps
from dapo_jax.run.meshes import meshes_of
from dapo_jax.run.resume_point import IDENTITY
from dapo_jax.sampling.engine import BLOCK_SLOTS
from dapo_jax.training.minibatch import Minibatch
from dapo_jax.training.state import TrainState

PROMPTS, GROUP, RESPONSE_TOKENS, SLOTS = 2, 4, 16, 8
"""The sizes of the tiny step. The mesh may require larger sizes."""

_NUMBERS = (
    "set model.compute_dtype=float32 and model.attention=xla to find out whether the weights or a kernel are the cause; weights that "
    "were trained in float32 may overflow in another dtype"
)


class TinyStep(ExitStack, Observer):
    """A small training step and the checks that use its results. Leaving the context manager removes the step's files."""

    def weights(self, subject: Subject) -> Found:
        """Loads the model onto the run's mesh, as a run does. Weights with NaN or infinity raise an error."""
        prompts = subject.prompts(PROMPTS)
        rows = [dict(prompt.row) for prompt in prompts]
        self._whole, self.config = subject.config, reduced(subject.config, prompts)
        self._run = Run(self.config, reward=half_are_right, prompts=rows, eval_rows=rows)
        self.callback(self._run.close)
        folder = self.enter_context(tempfile.TemporaryDirectory(prefix="dapo_jax_doctor_"))
        self._checkpointer = self.enter_context(Checkpointer(folder, keep=1))
        self._state = self._started(resume=False)
        size = _bytes((self._state.params, self._run.policy.frozen))
        return Found(f"{gib(size)} loaded, all values are finite")

    def step(self) -> Found:
        """Runs a step: transfers the weights to the sampler, samples responses, and applies two updates."""
        run = self._run
        self._phase, self._updates = "sampling", list[Metrics]()
        try:
            self._state = run_steps(
                self._state, Position(), steps=1, observers=[self], sampling=run.sampling, batches=run.batches,
                updater=run.updater, learning_rate=run.learning_rate,
            )  # fmt: skip
        except Exception as error:
            error.add_note(f"in the tiny step, while {self._phase}")
            raise
        rollouts, metrics = _rollouts(self._collected.groups), self._metrics
        if not all(np.isfinite(rollout.response.logprobs).all() for rollout in rollouts):
            return Found("log-probabilities of sampled tokens are NaN or infinite", "failed", _NUMBERS)
        loss, norm = metrics["update/loss"], metrics["update/grad_norm"]
        if metrics["update/skipped_frac"] or not math.isfinite(loss):
            return Found("loss or gradient is NaN or infinite", "failed", _NUMBERS)
        if not norm:
            return Found("the gradient is zero", "failed", _NUMBERS)
        tokens, limit = (
            sum(rollout.response_tokens for rollout in rollouts),
            self.config.sampling.max_response_tokens,
        )
        return Found(
            f"{len(rollouts)} responses of at most {limit} tokens, {tokens} in total, {metrics['time/sample_s']:.1f} s; "
            f"{len(self._updates)} updates, loss {loss:.3g}, gradient norm {norm:.3g}, {metrics['time/update_s']:.1f} s; times include compilation"
        )

    def after_sampling(self, step: int, collected: Collected) -> None:
        self._phase, self._collected = "updating", collected

    def after_update(self, minibatch: Minibatch, metrics: Metrics, *, learning_rate: float) -> None:
        self._updates.append(metrics)

    def after_step(self, result: StepResult) -> None:
        self._metrics = result.metrics

    def agree(self) -> Found:
        """Compares the sampler's and the trainer's log-probabilities in the first update, when both have the same weights."""
        first, dtype = to_scalars(self._updates[:1]), self.config.model.compute_dtype
        kl, largest = first["sync/sampler_trainer_kl"], first["sync/logprob_diff_max"]
        return agreement(kl=kl, largest=largest, compute_dtype=dtype, platform=jax.default_backend())

    def shapes(self) -> Found:
        """Computes the log-probabilities of the step's tokens again, with several times as many rows in a microbatch. Only rounding may differ."""
        score, noise = partial(self._run.updater.logprobs, self._state), dict[int, float]()
        updates = self._run.batches.minibatches(self._collected.groups, 1, score)
        single = [microbatch for update in updates for microbatch in update]
        expected = score(single)
        for count in (2, 4):
            joined = [
                jax.tree.map(lambda *rows: np.concatenate(rows), *single[first : first + count])
                for first in range(0, len(single) - count + 1, count)
            ]
            if joined:
                found = score(joined)
                mask = np.stack([microbatch.mask for microbatch in joined])
                differences = np.abs(found - expected[: len(joined) * count].reshape(found.shape))
                noise[count * single[0].tokens.shape[0]] = float(differences[mask].mean())
        sampler = to_scalars(self._updates[:1])["sync/logprob_diff_mean"]
        rows, dtype = single[0].tokens.shape[0], self.config.model.compute_dtype
        return shape_noise(noise, rows=rows, sampler=sampler, compute_dtype=dtype)

    def grade(self) -> Found:
        """Grades the sampled responses with the configured grader or environment."""
        if self._whole.environment.source:
            return self._first_turns()
        limit = self.config.sampling.max_response_tokens
        grader = grading(self.config, self._run.policy)
        sampled = [(g.prompt, tuple(r.response for r in g.rollouts)) for g in self._collected.groups]
        try:
            began = time.monotonic()
            rollouts = _rollouts(list(grader.groups(sampled)))
        finally:
            grader.close()
        lost, right = sum(bool(r.verdict.lost) for r in rollouts), sum(r.correct for r in rollouts)
        by_score, rewards = self.config.dynamic_sampling.metric == "score", [r.reward for r in rollouts]
        scores = f"rewards from {min(rewards):.3g} to {max(rewards):.3g}"
        message = f"{scores if by_score else f'{right} of {len(rollouts)} are correct'}, {lost} got no verdict, {time.monotonic() - began:.1f} s"
        if lost:
            return Found(message, "warning", "raise workers.timeout_s")
        if by_score or right or not self._whole.learnt_metric:
            return Found(message)
        if self.config.model.source.startswith("preset:"):
            return Found(f"{message}; with random weights, a response is correct only by chance")
        if limit < self._whole.sampling.max_response_tokens and all(r.truncated for r in rollouts):
            return Found(f"{message}; all were cut off after {limit} tokens, fewer than a run allows")
        return Found(
            message,
            "warning",
            "so few responses may all be wrong by chance; read the model's responses (dapo-jax sample), and check that the grader accepts "
            "their format. If all responses of a run are wrong, it learns nothing: first teach the model the task (dapo-jax sft)",
        )

    def _first_turns(self) -> Found:
        """Passes each sampled response to the environment as the first turn of an episode."""
        policy, began = self._run.policy, time.monotonic()
        episodes = episodes_of(environment_of(self._whole), self._whole, policy.tokenizer)
        assert episodes is not None
        decode = getattr(policy.tokenizer, "spelled", policy.tokenizer.decode)
        example, verdicts = "", list[Verdict]()
        with episodes:
            for group in self._collected.groups:
                responses = [rollout.response for rollout in group.rollouts]
                for index, response in enumerate(responses):
                    turn = DrawnTurn(record=response.record, finish_reason=response.finish_reason)
                    if (before := episodes.start(group.prompt, index).result()) is None:
                        continue
                    after = episodes.step(group.prompt, index, turn).result()
                    answer = "the end" if after is None else f"{decode(after.tokens)!r:.200}"
                    context = (group.prompt.text if not before.new_context else "") + decode(before.tokens)
                    shown = f"the turn {decode(response.tokens)!r:.200} after {context!r:.200} with {answer}"
                    example = example or shown
                samples = samples_of(group.prompt, responses, tokenizer=policy.tokenizer)
                verdicts += episodes.verdicts(samples).result()
        if lost := [verdict for verdict in verdicts if verdict.lost]:
            return Found(
                f"{len(lost)} of {len(verdicts)} episodes were lost at their first turn: {lost[0].reason}",
                "failed" if len(lost) == len(verdicts) else "warning",
                "fix environment.source, or raise workers.timeout_s",
            )
        answered = f"the environment answered {len(verdicts)} first turns in {time.monotonic() - began:.1f} s"
        return Found(f"{answered}, for example {example}")

    def evaluate(self) -> Found:
        """Evaluates on the step's prompts. The verdicts do not depend on the responses, so accuracies are not shown."""
        began, datasets = time.monotonic(), self._run.sampling.evaluate(self._state.params, 0)
        groups = [group for graded in datasets.values() for group in graded]
        seconds = time.monotonic() - began
        return Found(f"{len(groups)} prompts, {len(_rollouts(groups))} responses, {seconds:.1f} s")

    def checkpoint(self) -> Found:
        """Saves the train state to a temporary folder, restores it, and compares it bit for bit."""
        size = _bytes(self._state)
        message, room, remedy = room_for({"TMPDIR": (tempfile.gettempdir(), size)})
        if room != "ok":
            return Found(message, "skipped", remedy)
        before, began = _digests(self._state), time.monotonic()
        self._checkpointer.save(1, self._state, {"cursor": 0, IDENTITY: self._run.identity}, {})
        self._checkpointer.wait()
        del self._state  # two train states may not fit in memory
        self._state = self._started(resume=True)
        seconds = time.monotonic() - began
        changed = [name for name, digest in _digests(self._state).items() if digest != before[name]]
        if changed:
            message = f"{len(changed)} arrays differ from the saved ones, such as {changed[0]}"
            return Found(message, "failed", "the disk of the temporary folder, or the memory, is faulty")
        return Found(f"{gib(size)} saved, restored and equal bit for bit, {seconds:.1f} s")

    def _started(self, *, resume: bool) -> TrainState:
        # There is no earlier checkpoint to fall back to, so a damaged checkpoint raises an error.
        return self._run.start(self._checkpointer, resume=resume, say=lambda _: None).state


def agreement(*, kl: float, largest: float, compute_dtype: str, platform: str) -> Found:
    """Checks that sampler and trainer assign the same log-probabilities to the same tokens, except for rounding errors.

    `kl` is KL(sampler || trainer), averaged over the sampled tokens, and `largest` is the largest difference for one token, in nats. The
    limits are well above rounding errors, and far below the effect of different weights, positions or temperatures. For logits of about
    20 and a few dozen layers, float32's relative error of 6e-8 grows to about 1e-5 nats, a KL of 1e-10. In bfloat16, this error is 4e-3, and
    SmolLM2-135M showed 0.011 nats and a KL of 1.7e-4 (docs/metrics.md). Accelerators also round the operands of float32 products.
    """
    most_kl, most, why = 1e-3, 0.5, f"rounding of float32 operands on a {platform}"
    if compute_dtype == "bfloat16":
        why = "bfloat16 rounding"
    elif platform == "cpu":
        most_kl, most, why = 1e-6, 1e-3, "the order of float32 sums"
    message = f"KL {kl:.1e}, largest difference of log-probabilities {largest:.1e} nats; {why} explains up to {most_kl:g} and {most:g}"
    if kl <= most_kl and largest <= most:  # false for NaN
        return Found(message)
    return Found(
        message,
        "failed",
        "do not train: sampler and trainer are different policies, so the ratio would be wrong. To find the cause, try "
        "model.attention=xla, model.compute_dtype=float32, or one device",
    )


def shape_noise(noise: Mapping[int, float], *, rows: int, sampler: float, compute_dtype: str) -> Found:
    """Checks that log-probabilities do not depend on the number of rows in a microbatch, except for rounding.

    `noise` maps numbers of rows to the mean difference in nats from microbatches of `rows` rows. Rounding is about as large as the mean difference between `sampler` and
    trainer. If all sums of a small model are equal by chance, it is assumed to be 1e-6 in float32 and 1e-3 in bfloat16. SmolLM2-135M has 0.011 in bfloat16, and a kernel that
    mixes rows changed log-probabilities by 0.07. A token that is compared across shapes in an update has this noise in its ratio.
    """
    if not noise:
        return Found("the step has a single microbatch, so there is nothing to compare", "skipped")
    most = 3 * max(sampler, 1e-3 if compute_dtype == "bfloat16" else 1e-6)
    listed = ", ".join(f"{value:.1e} nats with {count}" for count, value in noise.items())
    message = (
        f"mean difference from microbatches of {rows} rows: {listed}; rounding explains up to {most:.1e}"
    )
    if max(noise.values()) <= most:  # false for NaN
        return Found(message)
    remedy = "log-probabilities of a row depend on other rows, so ratios are wrong: try model.attention=xla, or model.compute_dtype=float32"
    return Found(message, "failed", remedy)


@whole_group
def half_are_right(samples: Sequence[Sample]) -> list[bool]:
    """Grades every second response in a group as correct, so that the group is informative."""
    return [index % 2 == 0 for index in range(len(samples))]


def reduced(config: TrainConfig, prompts: Sequence[Prompt]) -> TrainConfig:
    """Returns a copy of the configuration for a tiny step on `prompts`: with short responses, few slots and few rows."""
    meshes = meshes_of(config.parallel)
    rows, slots = batch_shards(meshes.train.shape), batch_shards(meshes.sampler.shape)
    slots *= BLOCK_SLOTS if config.sampling.batch_invariant else 1
    limit = min(config.sampling.max_response_tokens, RESPONSE_TOKENS)
    longest = config.data.max_prompt_tokens if config.teacher.is_self else max(len(p.tokens) for p in prompts)
    return replaced(
        config,
        {
            "environment": EnvironmentConfig(),  # none, because `TinyStep.grade` tests it separately
            "cluster": ClusterConfig(),  # none, because the step examines this machine
            "data.max_prompt_tokens": longest,
            "sampling.max_response_tokens": limit,
            "sampling.slots": -(-SLOTS // slots) * slots,
            "reward.overlong.enabled": False,
            "dynamic_sampling": DynamicSamplingConfig(enabled=False, metric=config.dynamic_sampling.metric),
            "rollout.in_flight": len(prompts) * GROUP if config.rollout.in_flight else 0,
            "rollout.round_tokens": min(config.rollout.round_tokens, limit),
            "rollout.saved": False,
            "batch.keep": 0,
            "advantage.best_of": min(config.advantage.best_of, GROUP),
            "batch.prompts_per_step": len(prompts),
            "batch.group_size": GROUP,
            "batch.groups_per_update": 1,
            "batch.rows_per_microbatch": rows,
            "batch.row_tokens": 0,
            "eval.datasets": [],
            "eval.prompts": 0,
            "eval.samples_per_prompt": 2,
        },
    )


def _rollouts(groups: Sequence[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


def _bytes(tree: PyTree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def _digests(state: PyTree) -> dict[str, str]:
    """Maps the path of each array in the state to a digest of the array's bytes."""
    arrays = flattened(state).items()
    return {name: hashlib.blake2b(np.asarray(array).tobytes()).hexdigest() for name, array in arrays}
