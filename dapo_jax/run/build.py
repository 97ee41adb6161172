"""The objects of a training run, made from its configuration: the one place where all rooms meet."""

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import jax
import optax
from flax import nnx
from jaxtyping import PyTree

from dapo_jax.checkpoints.checkpointer import Checkpointer, Restored
from dapo_jax.checkpoints.groups import carry_groups, check_carry
from dapo_jax.checkpoints.last import restore_last
from dapo_jax.checkpoints.manifest import DamagedError
from dapo_jax.config import TrainConfig
from dapo_jax.dapo.batching import pack, row_weights, rows_of, split_minibatches
from dapo_jax.dapo.dynamic_sampling import Collected, Collector, InformativeShare
from dapo_jax.dapo.losses import dapo_loss
from dapo_jax.dapo.microbatch import Microbatch
from dapo_jax.dapo.rollouts import Group, Prompt
from dapo_jax.data.stream import PromptStream
from dapo_jax.evaluation import responses_kept
from dapo_jax.health.stalls import Watch
from dapo_jax.health.stopping import Stop
from dapo_jax.models.layout import Layout
from dapo_jax.models.tensors import shapes_of
from dapo_jax.parallel.gather import agreed
from dapo_jax.rewards.functions import Rewards
from dapo_jax.run.end_of_step import SHARE, UNFINISHED, Boundary, check_progress
from dapo_jax.run.grader_setup import check_graders
from dapo_jax.run.identity import check_identity, identity_of, model_files
from dapo_jax.run.policy import Policy, load_policy, mesh_of, meshes_of, optimizer_of, state_structs
from dapo_jax.run.prompt_sets import GivenRows, drawn_too_often, held_out_prompts, training_prompts
from dapo_jax.run.rollout_loop import TRAINING, Rollouts, Sampled, grading
from dapo_jax.run.sampler_share import Samplers
from dapo_jax.run.training_pass import training_pass
from dapo_jax.sampling.decoding import decoding
from dapo_jax.training.loop import Pipe, Position
from dapo_jax.training.state import TrainState, init_state, warmed_up
from dapo_jax.training.update import Objective, UpdateOptions, Updater


class Run:
    """The objects of a training run, made from its configuration."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        reward: Rewards | None = None,
        prompts: GivenRows | None = None,
        eval_rows: GivenRows | None = None,
        objective: Objective | None = None,
        stop: Stop | None = None,
        watch: Watch | None = None,
        say: Callable[[str], None] = lambda what: None,
    ) -> None:
        """Reads the model and the data, and starts the graders; `say` is told what is done meanwhile."""
        self.config, model, data = config, config.model, config.data
        self._mesh = mesh_of(config.parallel, rows_per_microbatch=config.batch.rows_per_microbatch)
        meshes = meshes_of(config.parallel, self._mesh)
        self._stop = stop or Stop()
        watch = watch or Watch(0.0, end=lambda status, why: None)
        self._samplers = Samplers(meshes, self._stop)
        check_graders(config.reward, reward=reward)  # a model may take long to load
        say(f"loading {model.source}")
        self.policy = load_policy(model, seed=config.seed, mesh=self._mesh, sampler=meshes.sampler)
        self._pass = training_pass(model, config.batch, self._mesh, row_tokens=config.row_tokens)
        self._optimizer = optimizer_of(config.optimizer)
        say("preparing prompts")
        self._prompts, asked = training_prompts(data, self.policy.tokenizer, seed=config.seed, rows=prompts)
        self.notes = [*asked.notes]
        if often := drawn_too_often(config, self._prompts.rows_per_epoch):
            self.notes.append("; ".join(often))
        self.identity = identity_of(
            config, prompts=asked.identity, model=model_files(self.policy.folder, weights=True)
        )
        """The identity of this run that a checkpoint keeps."""
        self._stream = PromptStream(self._prompts, host=meshes.index, hosts=meshes.count)
        limit = config.sampling.max_response_tokens
        self._grading = grading(
            config.reward, self.policy, max_response_tokens=limit, stop=config.sampling.stop, reward=reward
        )
        self._rollouts = Rollouts(
            self.policy,
            meshes,
            config.sampling,
            seed=config.seed,
            max_prompt_tokens=data.max_prompt_tokens,
            compute_dtype=model.compute_dtype,
            group_size=config.batch.group_size,
            on_look=lambda: watch.note("sampling: drawing tokens"),
        )
        self._grading = replace(
            self._grading, submit=watch.before("grading the responses to a prompt", self._grading.submit)
        )
        self._prompt_at = watch.before("reading prompts", self._stream.at)
        for_others = "waiting for the groups of the other processes"
        self._gathered = watch.before(for_others, self._samplers.gathered, for_others=True)
        self._gathered_whole = watch.before(for_others, self._samplers.whole, for_others=True)
        self.evaluates = prompts is None or eval_rows is not None
        if config.eval.every_steps and not self.evaluates:
            self.notes.append("no eval_rows were given with prompts: there is no evaluation")
        self.held_out = (
            held_out_prompts(data, config.eval, self.policy.tokenizer, rows=eval_rows)
            if self.evaluates
            else {}
        )
        # The reference is the policy that training starts from; with kl_coef 0 there is none at all.
        self.updater = updater_of(
            config,
            self.policy,
            self._optimizer,
            self._mesh,
            layout=self._pass.layout,
            objective=objective,
            reference=self.policy.params if config.loss.kl_coef else None,
        )
        self.pipe = self._pipe()

    def start(self, checkpointer: Checkpointer, *, resume: bool, say: Callable[[str], None]) -> Boundary:
        """The last intact checkpoint if there is one to resume, else the beginning. Called once.

        The initial weights become the state, or make room for that of a checkpoint: from here on `policy` has their shapes alone. With a
        KL penalty they stay as the reference.

        `say` is told of damaged checkpoints, which are set aside.

        Raises:
            ConfigError: the checkpoint is of another run.
            DamagedError: none is as it was written.
        """
        offload = self.config.optimizer.offload
        initial, decoder = self.policy.params, self.policy.decoder
        self.policy = replace(self.policy, params=shapes_of(decoder))
        # As the first process sees it, or one might make room for a checkpoint that another does not find.
        if resume and agreed(b"checkpoints" if checkpointer.steps() else b""):
            del initial
            target = state_structs(self.policy, self._optimizer, self._mesh, offload=offload)
            check = partial(self._check, say=say)

            def restore(step: int) -> Boundary:
                found = checkpointer.restore(target, step, rows=decoder.vocab_size, check=check)
                return self._boundary(found, f"checkpoint {checkpointer.folder / str(step)}")

            found = restore_last(checkpointer, restore, say=say, aside=True)
            assert found is not None
            return found
        copy = bool(self.config.loss.kl_coef)
        state = init_state(initial, self._optimizer, self._mesh, offload=offload, copy=copy)
        return Boundary(state=state, position=Position())

    def _check(self, where: str, progress: Mapping[str, Any], *, say: Callable[[str], None]) -> None:
        check_identity(where, progress, self.identity, say=say)
        check_progress(where, progress)

    def _boundary(self, found: Restored, where: str) -> Boundary:
        cursor, unfinished = found.progress["cursor"], found.progress.get(UNFINISHED)
        try:
            check_carry(found.carry, cursor=cursor, vocabulary=self.policy.decoder.vocab_size)
        except ValueError as error:
            raise DamagedError(f"{where} is damaged: of the groups that it carries over, {error}") from error
        carry = carry_groups(found.carry, self._prompts.__getitem__)
        share = InformativeShare(**found.progress.get(SHARE, {}))  # older ones have none
        return Boundary(
            state=found.state,
            position=Position(step=found.step, cursor=cursor, carry=carry, share=share),
            unfinished=None if unfinished is None else json.loads(unfinished),
        )

    def evaluate(self, state: TrainState, step: int) -> dict[str, list[Group]]:
        """Name of each dataset to evaluate on -> the graded groups of its prompts, after step `step`.

        Raises:
            StoppedError: the run was told to stop; in every process.
        """
        weights = self._rollouts.transfer(state.params)
        return {
            name: self._evaluated(weights, prompts, name=name, step=step)
            for name, prompts in self.held_out.items()
        }

    def _evaluated(self, weights: PyTree, prompts: Sequence[Prompt], *, name: str, step: int) -> list[Group]:
        samplers, grade = self._samplers, self._grading.groups
        mine = [prompt for prompt in prompts if samplers.takes(prompt.ordinal)]
        groups = self._rollouts.evaluate(
            weights,
            mine,
            lambda sampled: samplers.graded(sampled, grade),
            self.config.eval,
            name=name,
            step=step,
        )
        if samplers.alone:
            self._stop.check()
            return groups
        by_ordinal = {prompt.ordinal: prompt for prompt in prompts}
        kept = responses_kept(len(prompts), self.config.log.eval_responses)
        return self._gathered(groups, by_ordinal.__getitem__, texts=max(kept, default=0))

    def close(self) -> None:
        """Ends the grading workers and their event loop."""
        self._grading.close()

    def _pipe(self) -> Pipe:
        config, dynamic, updater = self.config, self.config.dynamic_sampling, self.updater
        rate = config.optimizer.learning_rate
        return Pipe(
            transfer=self._rollouts.transfer,
            collector=lambda position: Collector(
                needed=config.batch.prompts_per_step,
                cursor=position.cursor,
                prompts_per_wave=config.prompts_per_wave,
                max_waves=dynamic.max_waves,
                carried=position.carry,
                share=position.share,
                surplus=dynamic.surplus,
                max_age_steps=dynamic.max_age_steps,
                metric=dynamic.metric,
                enabled=dynamic.enabled,
            ),
            sample=self._sample if self._samplers.alone else self._sample_together,
            finish=self._finish,
            minibatches=self._minibatches,
            prepare=updater.prepare,
            update=updater.update,
            learning_rate=lambda step: warmed_up(rate, step=step, warmup_steps=config.optimizer.warmup_steps),
            clock=time.perf_counter,
        )

    def _sample(self, weights: Any, draw: Callable[[int], list[int]]) -> Iterator[Group]:
        """Graded groups, until no further ordinals are drawn once the last verdict is in."""
        ahead: deque[int] = deque()

        def prompts(count: int) -> list[Prompt]:
            ordinals = [ahead.popleft() for _ in range(min(count, len(ahead)))] or draw(count)
            return [self._prompt_at(ordinal) for ordinal in ordinals]

        # The sampler is done when nothing more is drawn. Verdicts that are still on their way may then call for another wave.
        while ordinals := draw(self._rollouts.prompts_at_once):
            ahead.extend(ordinals)
            yield from self._stop.watched(self._grading.groups(self._sampled(weights, prompts)))

    def _sample_together(self, weights: Any, draw: Callable[[int], list[int]]) -> Iterator[Group]:
        """The graded groups of all samplers, a wave at a time: what one found, the others know at its end.

        Waves that are certain to be needed are sampled as one, and a further one is opened by what they gave: as many as when
        it is opened while groups are still on their way, which happens only once it is certain.
        """
        while ordinals := list(chain.from_iterable(iter(lambda: draw(1024), []))):
            mine = deque(filter(self._samplers.takes, ordinals))

            def prompts(count: int, mine: deque[int] = mine) -> list[Prompt]:
                return [self._prompt_at(mine.popleft()) for _ in range(min(count, len(mine)))]

            groups = self._samplers.graded(self._sampled(weights, prompts), self._grading.groups)
            yield from self._gathered(groups, self._prompts.__getitem__)

    def _sampled(self, weights: Any, prompts: Callable[[int], list[Prompt]]) -> Sampled:
        return self._rollouts.sample(
            weights,
            prompts,
            how=decoding(temperature=self.config.sampling.temperature),
            samples=self.config.batch.group_size,
            domain=TRAINING,
        )

    def _finish(self, collector: Collector) -> Collected:
        dynamic, logged = self.config.dynamic_sampling, self.config.log.rollout_groups
        collected = collector.finish(on_shortfall=dynamic.on_shortfall)
        if self._samplers.alone:
            return collected
        return self._gathered_whole(collected, logged=logged)

    def split(self, groups: Sequence[Group], step: int) -> list[list[Group]]:
        """The groups of each update of a step."""
        config, filtered = self.config, self.config.reward.overlong.filter_truncated
        split = split_minibatches(
            groups, groups_per_update=config.batch.groups_per_update, seed=(config.seed, step)
        )
        # Where overlong filtering left nothing, an update would only decay the weights.
        return [
            minibatch
            for minibatch in split
            if any(not (filtered and rollout.truncated) for group in minibatch for rollout in group.rollouts)
        ]

    def _minibatches(self, groups: Sequence[Group], step: int) -> list[list[Microbatch]]:
        config = self.config
        packed = []
        for minibatch in self.split(groups, step):
            rows = rows_of(
                minibatch,
                normalize_std=config.loss.normalize_std,
                filter_truncated=config.reward.overlong.filter_truncated,
            )
            weights = row_weights(
                rows,
                aggregation=config.loss.aggregation,
                max_response_tokens=config.sampling.max_response_tokens,
            )
            packed.append(
                pack(
                    rows,
                    weights,
                    row_tokens=self._pass.row_tokens,
                    rows_per_microbatch=config.batch.rows_per_microbatch,
                    pad_id=self.policy.tokenizer.pad_id,
                    **self._pass.packing,
                )
            )
        return packed


def updater_of(
    config: TrainConfig,
    policy: Policy,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    *,
    layout: Layout,
    objective: Objective | None = None,
    reference: nnx.State | None = None,
) -> Updater:
    """The programs of the update that `config` describes; of `policy` and `reference`, the parameters may be shapes alone."""
    loss, model = config.loss, config.model
    clipped = partial(
        dapo_loss,
        clip_ratio_low=loss.clip_ratio_low,
        clip_ratio_high=loss.clip_ratio_high,
        dual_clip=loss.dual_clip,
    )
    return Updater(
        policy.graph(compute_dtype=model.compute_dtype, remat=model.remat, layout=layout),
        policy.params,
        optimizer,
        mesh,
        objective=objective or clipped,
        options=UpdateOptions(
            temperature=config.sampling.temperature,
            logprob_chunk_vocab=model.logprob_chunk_vocab,
            old_logprobs=loss.old_logprobs,
            importance_cap=loss.importance_cap,
            kl_coef=loss.kl_coef,
            score_first=config.guard.on_mismatch == "correct",
            offload=config.optimizer.offload,
        ),
        reference=reference,
    )
