"""Builds the objects of a training run from its configuration."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.config import ConfigError, TrainConfig
from dapo_jax.dapo.advantages import Advantages, step_advantages
from dapo_jax.health.stalls import Watch
from dapo_jax.health.stopping import Stop
from dapo_jax.models.lora import parted
from dapo_jax.models.tensors import shapes_of
from dapo_jax.parallel import gpu_settings
from dapo_jax.parallel.device_memory import bytes_on_device
from dapo_jax.rewards.functions import Rewards
from dapo_jax.rewards.judge import Judge
from dapo_jax.rollout.collector import Position
from dapo_jax.rollout.group_sampling import GroupSampling
from dapo_jax.run.grader_setup import check_graders, environment_of, episodes_of, grading, part_weights
from dapo_jax.run.meshes import mesh_of, meshes_of
from dapo_jax.run.policy import check_trains, load_policy
from dapo_jax.run.prompt_sets import GivenRows, asked_too_often, held_out_prompts, training_prompts
from dapo_jax.run.resume_point import (
    CHECKPOINT,
    ResumePoint,
    check_identity,
    has_checkpoint,
    identity_of,
    resume_point,
    with_weights_of,
)
from dapo_jax.run.sampler_programs import sharing
from dapo_jax.run.sampler_setup import response_sampler
from dapo_jax.run.sources import lora_of
from dapo_jax.run.teacher import load_teacher, taught_by
from dapo_jax.run.training_pass import StepBatches, training_pass
from dapo_jax.run.updater_setup import (
    has_reference,
    objective_of,
    optimizer_of,
    recorded_routes,
    routes_note,
    updater_of,
)
from dapo_jax.sampling.caches import without_kernel
from dapo_jax.training.optimizer import warmed_up
from dapo_jax.training.state import state_structs
from dapo_jax.training.update import Objective


class Run:
    """A training run's policy, prompts, sampler, graders and updater, built from its configuration."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        reward: Rewards | None = None,
        prompts: GivenRows | None = None,
        eval_rows: GivenRows | None = None,
        objective: Objective | None = None,
        advantages: Advantages | None = None,
        stop: Stop | None = None,
        watch: Watch | None = None,
        say: Callable[[str], None] = lambda what: None,
        resumes: bool = False,
    ) -> None:
        """Loads the model and the data, and starts the graders. Reports progress through `say`.

        Set `resumes` if `start` will restore a checkpoint: then initial weights that only a new run would use are not loaded.
        """
        self.config, model, data = config, config.model, config.data
        self._mesh = mesh_of(config.parallel, rows_per_microbatch=config.batch.rows_per_microbatch)
        meshes = meshes_of(config.parallel, self._mesh)
        stop = stop or Stop()
        watch = watch or Watch(0.0, end=lambda status, why: None)
        graders = check_graders(config.reward, reward=reward)  # before the model loads
        self.judges = [each.loaded.function for each in graders if isinstance(each.loaded.function, Judge)]
        if advantages is not None and config.environment.credit == "turn":
            raise ConfigError(
                "environment.credit=turn computes the advantages, but a function was given as well: set environment.credit=episode"
            )
        if advantages is None and config.advantage.rewards == "apart" and len(graders) < 2:
            raise ConfigError(
                f"advantage.rewards=apart needs 2 or more graders, found {len(graders)}: set advantage.rewards=summed"
            )
        environment = environment_of(config.environment, reward=reward)
        say("preparing prompts")  # before the weights load, which takes longer
        tokenizer = load_policy(model, weights=False).tokenizer
        self._prompts, asked = training_prompts(data, tokenizer, seed=config.seed, rows=prompts)
        evaluates = prompts is None or eval_rows is not None
        self.held_out = held_out_prompts(data, config.eval, tokenizer, rows=eval_rows) if evaluates else {}
        """Maps the name of each evaluation dataset to its prompts. Empty if the run has no evaluation."""
        self._has_reference = has_reference(config, objective or objective_of(config.loss))
        say(f"loading {model.source}")
        # A resumed run uses the initial weights only as the reference policy or as the base model under LoRA adapters.
        has_weights = not resumes or self._has_reference or config.lora.rank > 0
        self.policy = load_policy(
            model,
            lora=lora_of(config.lora),
            seed=config.seed,
            mesh=self._mesh,
            sampler=meshes.sampler,
            weights=has_weights,
            shares=sharing(meshes, config.sampling, dtype=model.compute_dtype),
            longest=data.max_prompt_tokens + config.sampling.max_response_tokens,
        )
        check_trains(self.policy, config.lora, model.source)
        files, taught = self.policy.files(weights=has_weights), None
        if resumes and config.lora.rank:
            files.pop(CHECKPOINT, None)  # a resumed run does not use the initial adapters
        if config.teacher.source:
            say(f"loading the teacher {config.teacher.source}")
            teacher = load_teacher(config, self.policy, self._mesh)
            taught = taught_by(config, teacher, self._mesh)
            found = teacher.files(weights=True)
            files |= {f"teacher ({name})": digest for name, digest in found.items()}
        decoder = self.policy.decoder
        how = training_pass(model, config.batch, self._mesh, decoder, row_tokens=config.row_tokens)
        self._optimizer = optimizer_of(config.optimizer)
        device, count = self._mesh.devices.flat[0], self._prompts.rows_per_epoch
        first = f"training {decoder.trained_parameters:,} parameters on {count:,} prompts with {self._mesh.size} x {device.device_kind}"
        unused = gpu_settings.unused() if device.platform == "cpu" else ""
        self.notes = [first, *[f"this run uses the CPU. {unused}"] * bool(unused), *asked.notes]
        if self.policy.checkpoint and not resumes:
            self.notes.append(f"the initial weights are from {self.policy.checkpoint} of {model.source}")
        if often := asked_too_often(config, self._prompts.rows_per_epoch):
            self.notes.append("; ".join(often))
        slower = without_kernel(meshes.sampler, config.sampling.cache_dtype or model.compute_dtype)
        self.notes += filter(None, (how.note, slower, decoder.length_note))
        self.identity = identity_of(config, prompts=asked.identity, model=files)
        """Stored in every checkpoint to recognise the run that saved it (see `identity_of`)."""
        episodes = episodes_of(environment, config, self.policy.tokenizer)
        if episodes is not None:
            self.notes += filter(None, [episodes.check(self._prompts[0], limit=config.episode_tokens)])
        # Memory in use on each device during sampling: train state, reference policy, teacher, and a LoRA base that is not shared.
        offload, sizes = config.optimizer.offload, self._mesh.shape
        state = state_structs(self.policy.params, self._optimizer, self._mesh, offload=offload)
        resident = bytes_on_device((state, self.policy.unshared, taught), sizes)
        if self._has_reference:
            resident += bytes_on_device(state.params, sizes)
        grader = grading(
            config.reward,
            self.policy,
            episodes=episodes,
            max_response_tokens=config.episode_tokens,
            stop=config.sampling.stop,
            graders=graders,
            on_submit=lambda: watch.note("grading the responses to a prompt"),
        )
        routes = recorded_routes(config, decoder)
        route_bytes = 0 if routes is None else math.prod(routes)
        if route_bytes:
            self.notes.append(routes_note(config, route_bytes))
        sampler = response_sampler(
            self.policy,
            meshes,
            config.sampling,
            seed=config.seed,
            max_prompt_tokens=data.max_prompt_tokens,
            compute_dtype=model.compute_dtype,
            group_size=config.batch.group_size,
            in_flight=-(-config.rollout.in_flight // meshes.count),
            has_turns=episodes is not None,
            records_routes=routes is not None,
            resident=resident,
            on_look=lambda: watch.note("sampling tokens"),
        )
        self.notes += sampler.notes
        if not evaluates and config.eval.every_steps:
            self.notes.append("prompts were given without eval_rows, so there is no evaluation")
        self.sampling = GroupSampling(
            config,
            sampler=sampler,
            grading=grader,
            prompts=self._prompts,
            held_out=self.held_out,
            meshes=meshes,
            stop=stop,
            watch=watch,
            episodes=episodes,
            route_bytes=route_bytes,
        )
        masks, weights = config.reward.overlong.filter_truncated, part_weights(graders)
        by_rule = partial(step_advantages, **vars(config.advantage), filter_truncated=masks, weights=weights)
        pad_id = self.policy.tokenizer.pad_id
        self.batches = StepBatches(config, how, pad_id=pad_id, advantages=advantages or by_rule)
        # The reference policy has the initial weights. With LoRA, it is the base model, which corresponds to adapters of zeros.
        reference, named = self.policy.params if self._has_reference else None, f"the initial {model.source}"
        if config.lora.rank and reference is not None:
            reference, named = jax.tree.map(jnp.zeros_like, reference), f"{self.policy.base} without adapters"
        if reference is not None:
            self.notes.append(f"loss.kl_coef={config.loss.kl_coef:g}: the reference policy is {named}")
        self.updater = updater_of(
            config,
            self.policy.decoder,
            self._optimizer,
            self._mesh,
            layout=how.layout,
            objective=objective,
            reference=reference,
            frozen=self.policy.frozen,
            teacher=taught,
        )

    def start(self, checkpointer: Checkpointer, *, resume: bool, say: Callable[[str], None]) -> ResumePoint:
        """Returns the point from which training starts: the last intact checkpoint if `resume` is True and there is a checkpoint, otherwise step 0.

        `policy.params` is replaced with shapes, so that only the returned state contains trained weights. The weights of a reference policy stay
        in memory. Damaged checkpoints are renamed and reported through `say`.

        Raises:
            ConfigError: the checkpoint belongs to another run.
            DamagedError: there are checkpoints, but none is intact.
        """
        offload = self.config.optimizer.offload
        initial, decoder = self.policy, self.policy.decoder
        self.policy = replace(self.policy, params=parted(shapes_of(decoder))[0])
        if resume and has_checkpoint(checkpointer.folder):
            del initial
            target = state_structs(self.policy.params, self._optimizer, self._mesh, offload=offload)
            check = partial(check_identity, own=self.identity)

            def restore(step: int) -> ResumePoint:
                found = checkpointer.restore(target, step, rows=decoder.vocab_size, check=check)
                where = f"checkpoint {checkpointer.folder / str(step)}"
                point = resume_point(found, where, prompt_at=self._prompts.__getitem__)
                self.identity = with_weights_of(self.identity, found.progress)
                return point

            found = checkpointer.restore_last(restore, say=say, aside=True)
            assert found is not None
            return found
        copy = self._has_reference and not self.config.lora.rank
        state = initial.initial_state(self.config, self._optimizer, self._mesh, copy=copy)
        return ResumePoint(state=state, position=Position())

    def learning_rate(self, step: int) -> float:
        """Returns the learning rate of a step, with warm-up applied."""
        config = self.config.optimizer
        return warmed_up(config.learning_rate, step=step, warmup_steps=config.warmup_steps)

    def close(self) -> None:
        """Stops the grading workers and their event loop."""
        self.sampling.close()
