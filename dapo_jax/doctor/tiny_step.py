"""Every phase of a training step once, small: transfer, sample, grade, update, save and restore, evaluate.

The objects are those of a run (`dapo_jax.run.build.Run`), made from its configuration with everything that takes time reduced.
Half of the responses count as right, whatever they say, so that there is something to learn from; the configured grader grades
them too, in a phase of its own.
"""

import hashlib
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.config import (
    BatchConfig,
    DynamicSamplingConfig,
    EnvironmentConfig,
    EvalConfig,
    OverlongConfig,
    TrainConfig,
)
from dapo_jax.dapo.metrics import to_scalars
from dapo_jax.dapo.rollouts import DrawnTurn, Group, Prompt, Rollout, Verdict
from dapo_jax.doctor.check import Found
from dapo_jax.doctor.machine import SPARE, gib
from dapo_jax.doctor.sampler_agreement import agreement
from dapo_jax.parallel.mesh import BATCH_AXES
from dapo_jax.rewards import whole_group
from dapo_jax.rewards.sample import Sample
from dapo_jax.rewards.shaping import samples_of
from dapo_jax.rollout.collector import Position
from dapo_jax.run.build import Run
from dapo_jax.run.environment_setup import environment_of, episodes_of
from dapo_jax.run.grader_setup import grading
from dapo_jax.run.identity import IDENTITY
from dapo_jax.run.policy import mesh_of, meshes_of
from dapo_jax.sampling.engine import BLOCK_SLOTS
from dapo_jax.training.state import TrainState

PROMPTS, GROUP, RESPONSE_TOKENS, SLOTS = 2, 4, 16, 8
"""The sizes to which a step is reduced, as far as the mesh allows."""

_NUMBERS = (
    "with model.compute_dtype=float32 and model.attention=xla, see whether the weights or a kernel are the cause; weights that were "
    "made in float32 may overflow elsewhere"
)


class TinyStep:
    """One step, phase by phase: each needs those before it. To be closed."""

    def __init__(self, config: TrainConfig, prompts: Callable[[int], Sequence[Prompt]]) -> None:
        """Nothing is made yet; `prompts(n)` gives the first n that a run would ask."""
        self._whole, self._prompts = config, prompts
        self._stack = ExitStack()
        self._metrics: Mapping[str, float] = {}

    def close(self) -> None:
        """Ends what was started and removes what was written."""
        self._stack.close()

    def weights(self) -> Found:
        """Loads the model as the run does, onto its mesh. Weights with NaN or infinity are refused then."""
        prompts = self._prompts(PROMPTS)
        rows = [dict(prompt.row) for prompt in prompts]
        self.config = reduced(self._whole, prompts)
        self._run = Run(self.config, reward=half_are_right, prompts=rows, eval_rows=rows)
        self._stack.callback(self._run.close)
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="dapo_jax_doctor_"))
        self._checkpointer = self._stack.enter_context(Checkpointer(folder, keep=1))
        self._state = self._started(resume=False)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves((self._state.params, self._run.policy.frozen)))
        return Found(message=f"{gib(size)} loaded, all of them finite numbers")

    def transfer(self) -> Found:
        """The sampler's copy of the weights."""
        self._weights, seconds = _timed(lambda: self._run.sampling.transfer(self._state.params))
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(self._weights))
        return Found(
            message=f"{gib(size)} in {self.config.model.compute_dtype} to the sampler, {seconds:.1f} s"
        )

    def sample(self) -> Found:
        """Some short responses."""
        began = time.monotonic()
        sampling = self._run.sampling
        collector = sampling.collector(Position())
        for _ in sampling.groups(self._weights, collector):
            pass
        self._collected = sampling.finish(collector)
        del self._weights  # as in a run, where the update has their memory
        rollouts = _rollouts(self._collected.groups)
        if not all(np.isfinite(rollout.response.logprobs).all() for rollout in rollouts):
            return Found(
                message="log-probabilities of sampled tokens are NaN or infinite",
                state="failed",
                remedy=_NUMBERS,
            )
        tokens = sum(rollout.response_tokens for rollout in rollouts)
        return Found(
            message=f"{len(rollouts)} responses of at most {self.config.sampling.max_response_tokens} tokens, {tokens} in all, "
            f"{time.monotonic() - began:.1f} s with compiling"
        )

    def grade(self) -> Found:
        """The configured grader on what was sampled, or its environment."""
        if self._whole.environment.source:
            return self._heard()
        grader = grading(
            self.config.reward,
            self._run.policy,
            max_response_tokens=self.config.sampling.max_response_tokens,
            stop=self.config.sampling.stop,
        )
        try:
            sampled = [
                (group.prompt, tuple(r.response for r in group.rollouts)) for group in self._collected.groups
            ]
            rollouts, seconds = _timed(lambda: _rollouts(list(grader.groups(sampled))))
        finally:
            grader.close()
        cut = self.config.sampling.max_response_tokens < self._whole.sampling.max_response_tokens
        random = self.config.model.source.startswith("preset:")
        by_score = self.config.dynamic_sampling.metric == "score"
        return graded(rollouts, seconds, by_score=by_score, cut=cut, random=random)

    def _heard(self) -> Found:
        """The environment's answers to what was sampled, each as the first turn of an episode."""
        environment = environment_of(self._whole.environment)
        episodes = episodes_of(environment, self._whole, self._run.policy)
        assert episodes is not None
        with episodes:
            examples: list[str] = []
            decode = self._run.policy.tokenizer.decode

            def first_turns() -> list[Verdict]:
                verdicts = []
                for group in self._collected.groups:
                    for index, rollout in enumerate(group.rollouts):
                        response = rollout.response
                        turn = DrawnTurn(
                            tokens=response.tokens,
                            logprobs=response.logprobs,
                            finish_reason=response.finish_reason,
                        )
                        if (before := episodes.start(group.prompt, index).result()) is None:
                            continue
                        after = episodes.step(group.prompt, index, turn).result()
                        ends = "is the end" if after is None else f"hears {decode(after.tokens)!r:.200}"
                        examples.append(
                            f"behind {(group.prompt.text if not before.anew else '') + decode(before.tokens)!r:.200} "
                            f"the turn {decode(turn.tokens)!r:.200} {ends}"
                        )
                    responses = [rollout.response for rollout in group.rollouts]
                    samples = samples_of(group.prompt, responses, tokenizer=self._run.policy.tokenizer)
                    verdicts += [verdict.result() for verdict in episodes.verdicts(samples)]
                return verdicts

            verdicts, seconds = _timed(first_turns)
        if lost := [verdict for verdict in verdicts if verdict.lost]:
            return Found(
                message=f"{len(lost)} of {len(verdicts)} episodes were lost at their first turn: {lost[0].reason}",
                state="failed" if len(lost) == len(verdicts) else "warning",
                remedy="mend environment.source, or raise environment.timeout_s",
            )
        return Found(
            message=f"the environment answered {len(verdicts)} first turns, {seconds:.1f} s; {examples[0]}"
        )

    def update(self) -> Found:
        """Two updates: the second is to a policy that is no longer the one that sampled."""
        run, began, measured = self._run, time.monotonic(), []
        rate = run.learning_rate(1)
        minibatches = run.updater.prepare(self._state, run.batches.minibatches(self._collected.groups, 1))
        for index, minibatch in enumerate(minibatches):
            self._state, metrics = run.updater.update(
                self._state, minibatch, learning_rate=rate, first=index == 0
            )
            measured.append(metrics)
        self._metrics, every = to_scalars(measured[0]), to_scalars(measured)
        if every["update/skipped_frac"] or not math.isfinite(every["update/loss"]):
            return Found(message="loss or gradient is NaN or infinite", state="failed", remedy=_NUMBERS)
        norm = every["update/grad_norm"]
        if not norm:
            return Found(message="the gradient is zero", state="failed", remedy=_NUMBERS)
        return Found(
            message=f"{len(measured)} updates, loss {every['update/loss']:.3g}, gradient norm {norm:.3g}, "
            f"{time.monotonic() - began:.1f} s with compiling"
        )

    def agree(self) -> Found:
        """Compares sampler and trainer on the same tokens with the same weights."""
        return agreement(
            kl=self._metrics["sync/sampler_trainer_kl"],
            largest=self._metrics["sync/logprob_diff_max"],
            compute_dtype=self.config.model.compute_dtype,
            platform=jax.default_backend(),
        )

    def evaluate(self) -> Found:
        """An evaluation on the prompts of the step."""
        found, seconds = _timed(lambda: self._run.sampling.evaluate(self._state.params, 0))
        groups = [group for each in found.values() for group in each]
        # Of made-up verdicts a score would say nothing.
        return Found(message=f"{len(groups)} prompts, {len(_rollouts(groups))} responses, {seconds:.1f} s")

    def checkpoint(self) -> Found:
        """The train state saved in a temporary folder, restored, and compared bit for bit."""
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(self._state))
        free = shutil.disk_usage(tempfile.gettempdir()).free
        if free < size + SPARE:
            return Found(
                message=f"because the temporary folder has {gib(free)} free and the checkpoint takes {gib(size)}",
                state="skipped",
                remedy="set TMPDIR to a folder on a larger disk",
            )
        before, began = _digests(self._state), time.monotonic()
        self._checkpointer.save(1, self._state, {"cursor": 0, IDENTITY: self._run.identity}, {})
        self._checkpointer.wait()
        del self._state  # one at a time is in memory
        self._state = self._started(resume=True)
        seconds = time.monotonic() - began
        changed = [name for name, digest in _digests(self._state).items() if digest != before[name]]
        if changed:
            return Found(
                message=f"{len(changed)} arrays are not what was saved, such as {changed[0]}",
                state="failed",
                remedy="the disk below the temporary folder, or the memory, cannot be trusted",
            )
        return Found(message=f"{gib(size)} saved, restored and equal bit for bit, {seconds:.1f} s")

    def _started(self, *, resume: bool) -> TrainState:
        # There is one checkpoint at most: if it is damaged there is nothing to pass over to, which raises.
        return self._run.start(self._checkpointer, resume=resume, say=lambda _: None).state


def graded(rollouts: Sequence[Rollout], seconds: float, *, by_score: bool, cut: bool, random: bool) -> Found:
    """The finding on the grades of sampled responses, which are shorter than the run's with `cut`, and of `random` weights."""
    lost = sum(rollout.verdict.lost != "" for rollout in rollouts)
    right, count = sum(rollout.correct for rollout in rollouts), len(rollouts)
    rewards = sorted(rollout.reward for rollout in rollouts)
    found = (
        f"rewards from {rewards[0]:.3g} to {rewards[-1]:.3g}" if by_score else f"{right} of {count} are right"
    )
    said = f"{found}, {lost} got no verdict, {seconds:.1f} s"
    if lost:
        return Found(
            message=said, state="warning", remedy="raise reward.timeout_s or reward.worker_memory_mb"
        )
    if by_score or right:
        return Found(message=said)
    if random:
        return Found(message=f"{said}; random weights are right by luck alone")
    if cut and all(rollout.truncated for rollout in rollouts):
        return Found(
            message=f"{said}; all were cut off after {rollouts[0].response_tokens} tokens, which is shorter than in a run"
        )
    return Found(
        message=said,
        state="warning",
        remedy="of so few that may be chance; see what the model writes (dapo-jax sample), and that the grader takes it: a run in which all is "
        "wrong learns nothing. A model that does not know the task is warmed up first (dapo-jax sft)",
    )


@whole_group
def half_are_right(samples: Sequence[Sample]) -> list[bool]:
    """Every other response is right: a group of which training learns."""
    return [place % 2 == 0 for place in range(len(samples))]


def reduced(config: TrainConfig, prompts: Sequence[Prompt]) -> TrainConfig:
    """The configuration with a step of `prompts`, of short responses, few slots and small rows; all else as it is."""
    mesh = mesh_of(config.parallel)
    rows, slots = _spread(mesh), _spread(meshes_of(config.parallel, mesh).sampler)
    limit = min(config.sampling.max_response_tokens, RESPONSE_TOKENS)
    slots *= BLOCK_SLOTS if config.sampling.batch_invariant else 1
    return replace(
        config,
        environment=EnvironmentConfig(),  # of the tiny step; `TinyStep.grade` asks it
        data=replace(config.data, max_prompt_tokens=max(len(prompt.tokens) for prompt in prompts)),
        sampling=replace(
            config.sampling,
            max_response_tokens=limit,
            slots=-(-SLOTS // slots) * slots,
            steps_per_call=min(config.sampling.steps_per_call, limit),
        ),
        reward=replace(config.reward, overlong=OverlongConfig(enabled=False)),
        dynamic_sampling=DynamicSamplingConfig(enabled=False, metric=config.dynamic_sampling.metric),
        rollout=replace(
            config.rollout,
            in_flight=len(prompts) * GROUP if config.rollout.in_flight else 0,
            round_tokens=min(config.rollout.round_tokens, limit),
        ),
        batch=BatchConfig(
            prompts_per_step=len(prompts),
            group_size=GROUP,
            groups_per_update=1,
            rows_per_microbatch=rows,
            packing=config.batch.packing,
        ),
        eval=EvalConfig(
            samples_per_prompt=2,
            temperature=config.eval.temperature,
            top_p=config.eval.top_p,
            top_k=config.eval.top_k,
        ),
    )


def _spread(mesh: jax.sharding.Mesh) -> int:
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def _rollouts(groups: Sequence[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


def _timed(make: Callable[[], Any]) -> tuple[Any, float]:
    """The result of `make` once the device is done with it, and the seconds."""
    began = time.monotonic()
    made = jax.block_until_ready(make())
    return made, time.monotonic() - began


def _digests(state: PyTree) -> dict[str, str]:
    """The digests of each array's bytes, taken on the host."""
    return {name: hashlib.blake2b(np.asarray(leaf).tobytes()).hexdigest() for name, leaf in _named(state)}


def _named(tree: PyTree) -> list[tuple[str, jax.Array]]:
    found = jax.tree_util.tree_leaves_with_path(tree)
    return [
        (jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"), leaf)
        for path, leaf in found
    ]
