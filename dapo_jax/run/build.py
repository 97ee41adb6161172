"""Builds the objects of a training run from its configuration."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.cluster.engine import Cluster, DiedError
from dapo_jax.cluster.remote_rounds import RemoteWorkers
from dapo_jax.cluster.remote_worker import Places, RemoteWorker
from dapo_jax.config import ConfigError, TrainConfig
from dapo_jax.config.keys import prefixed
from dapo_jax.dapo.advantages import Advantages, step_advantages
from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.environments import Episodes
from dapo_jax.health.stalls import Watch
from dapo_jax.health.stopping import Stop
from dapo_jax.parallel import gpu_settings
from dapo_jax.parallel.mesh import Meshes
from dapo_jax.rewards.code_grader import CodeGrader
from dapo_jax.rewards.functions import Rewards
from dapo_jax.rewards.grading import Grading
from dapo_jax.rewards.judge import Judge
from dapo_jax.rollout.collector import Position
from dapo_jax.rollout.group_sampling import GroupSampling
from dapo_jax.rollout.response_sampler import ResponseSampler
from dapo_jax.run.grader_setup import (
    ConfiguredGrader,
    StartWorker,
    check_graders,
    environment_of,
    episodes_of,
    grading,
    part_weights,
)
from dapo_jax.run.learner import Learner, load_learner
from dapo_jax.run.meshes import meshes_of
from dapo_jax.run.policy import Policy
from dapo_jax.run.prompt_sets import GivenRows, prompt_sets, repeated_prompts
from dapo_jax.run.resume_point import (
    CHECKPOINT,
    ResumePoint,
    check_identity,
    has_checkpoint,
    identity_of,
    resume_point,
    with_weights_of,
)
from dapo_jax.run.sample_workers import remote_workers
from dapo_jax.run.sampler_setup import rollout_spec
from dapo_jax.run.sources import tokenizer_of
from dapo_jax.run.teacher_setup import load_teacher, teacher_model, teacher_prompt
from dapo_jax.run.training_pass import StepBatches
from dapo_jax.run.updater_setup import has_reference, objective_of, record_notes, recorded_values, updater_of
from dapo_jax.sampling.caches import without_kernel
from dapo_jax.training.update import Model, Objective, Updater
from dapo_jax.workers import Worker


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
        self.config = config
        meshes = meshes_of(config.parallel, rows_per_microbatch=config.batch.rows_per_microbatch)
        graders = check_graders(config.reward, config.sandbox, reward=reward)  # before the model loads
        _check_advantages(config, advantages, graders)
        self._cluster, self._worker = _connected(config)
        with ExitStack() as failed:
            failed.callback(self._close_cluster)
            environment = environment_of(config, reward=reward, worker=self._worker)
            say("preparing prompts")  # before the weights load, which takes longer
            self._prompts = prompt_sets(config, tokenizer_of(config.model), rows=prompts, eval_rows=eval_rows)
            self._has_reference = has_reference(config, objective or objective_of(config.loss))
            say(f"loading {config.model.source}")
            self._learner, files = self._load_learner(meshes, resumes)
            self._teacher, teacher_files = self._load_teacher(say)
            self.identity = identity_of(config, prompts=self._prompts.identity, model=files | teacher_files)
            """Stored in every checkpoint to recognise the run that saved it (see `identity_of`)."""
            self.notes = list(self._notes(resumes))
            episodes = episodes_of(environment, config, self.policy.tokenizer, worker=self._worker)
            watch = watch or Watch(0.0, end=lambda status, why: None)
            functions = [grader.loaded.function for grader in graders]
            self.counting = [function for function in functions if isinstance(function, Judge | CodeGrader)]
            self.sampling = self._group_sampling(graders, episodes, stop or Stop(), watch)
            self.batches = self._step_batches(graders, advantages)
            self.updater = self._build_updater(objective)
            failed.pop_all()

    @property
    def policy(self) -> Policy:
        """The policy with its initial weights. After `start`, it has shapes in place of trained weights."""
        return self._learner.policy

    @property
    def held_out(self) -> Mapping[str, Sequence[Prompt]]:
        """Maps the name of each evaluation dataset to its prompts. Empty if the run has no evaluation."""
        return self._prompts.held_out

    def _load_learner(self, meshes: Meshes, resumes: bool) -> tuple[Learner, dict[str, str]]:
        """Returns the learner, and the digests of the files of its model that training uses."""
        adapts = self.config.lora.rank > 0
        # A resumed run uses the initial weights only as the reference policy or as the base model under LoRA adapters.
        has_weights = not resumes or self._has_reference or adapts
        learner = load_learner(self.config, meshes, weights=has_weights)
        files = learner.policy.files(weights=has_weights)
        if resumes and adapts:
            files.pop(CHECKPOINT, None)  # a resumed run does not use the initial adapters
        return learner, files

    def _load_teacher(self, say: Callable[[str], None]) -> tuple[Model | None, dict[str, str]]:
        """Returns the teacher's model, or None without a teacher, and the digests of the teacher's files."""
        config, mesh = self.config, self._learner.meshes.train
        if config.teacher.source in ("", "self"):
            return None, {}
        say(f"loading the teacher {config.teacher.source}")
        teacher = load_teacher(config, self.policy, mesh)
        files = {f"teacher ({name})": digest for name, digest in teacher.files(weights=True).items()}
        return teacher_model(config, teacher, mesh), files

    def _notes(self, resumes: bool) -> Iterator[str]:
        """Yields messages about the devices, the prompts and the model."""
        config, learner, decoder = self.config, self._learner, self.policy.decoder
        mesh, prompts = learner.meshes.train, self._prompts
        device, count = mesh.devices.flat[0], prompts.training.rows_per_epoch
        yield f"training {decoder.trained_parameters:,} parameters on {count:,} prompts with {mesh.size} x {device.device_kind}"
        if device.platform == "cpu" and (unused := gpu_settings.unused()):
            yield f"this run uses the CPU. {unused}"
        yield from prompts.notes
        if self.policy.checkpoint and not resumes:
            yield f"the initial weights are from {self.policy.checkpoint} of {config.model.source}"
        if repeated := repeated_prompts(config, count):
            yield "; ".join(repeated)
        cache_dtype = config.sampling.cache_dtype or config.model.compute_dtype
        slower = without_kernel(learner.meshes.sampler, cache_dtype, decoder.paged)
        yield from filter(None, (learner.training_pass.note, slower, decoder.length_note))

    def _group_sampling(
        self, graders: Sequence[ConfiguredGrader], episodes: Episodes | None, stop: Stop, watch: Watch
    ) -> GroupSampling:
        """Starts the graders, and builds the object that samples and grades groups."""
        config, learner = self.config, self._learner
        grader = self._grading(graders, episodes, watch)
        recorded = recorded_values(config, self.policy.decoder)
        self.notes += record_notes(config, recorded)
        sampler = rollout_sampler(
            learner,
            config,
            has_reference=self._has_reference,
            teacher=self._teacher,
            on_look=lambda: watch.note("sampling tokens"),
        )
        self.notes += sampler.notes
        workers = self._sample_workers(sampler, episodes, watch)
        if not self.held_out and config.eval.every_steps:
            self.notes.append("prompts were given without eval_rows, so there is no evaluation")
        return GroupSampling(
            config,
            sampler=sampler,
            grading=grader,
            prompts=self._prompts.training,
            held_out=self.held_out,
            meshes=learner.meshes,
            stop=stop,
            watch=watch,
            episodes=episodes,
            recorded=recorded,
            workers=workers,
        )

    def _sample_workers(
        self, sampler: ResponseSampler, episodes: Episodes | None, watch: Watch
    ) -> RemoteWorkers | None:
        """Starts the sample workers of this process, if there are any."""
        if self._cluster is None or not self.config.cluster.samplers:
            return None
        limits = sampler.limits(episodes)
        with prefixed("cluster.samplers", DiedError):
            return remote_workers(
                self.config, self._learner, sampler, self._cluster, limits=limits, watch=watch
            )

    def _grading(
        self, graders: Sequence[ConfiguredGrader], episodes: Episodes | None, watch: Watch
    ) -> Grading:
        """Starts the graders. With an environment, checks that the first prompt leaves room for a turn."""
        config = self.config
        if episodes is not None:
            note = episodes.check(self._prompts.training[0], limit=config.episode_tokens)
            self.notes += filter(None, [note])
        return grading(
            config,
            self.policy,
            episodes=episodes,
            max_response_tokens=config.episode_tokens,
            graders=graders,
            on_submit=lambda: watch.note("grading the responses to a prompt"),
            worker=self._worker,
        )

    def _step_batches(
        self, graders: Sequence[ConfiguredGrader], advantages: Advantages | None
    ) -> StepBatches:
        """Builds the object that converts groups to minibatches. `advantages` replaces the configured advantages."""
        config, pad_id = self.config, self.policy.tokenizer.pad_id
        if advantages is None:
            masks, weights = config.reward.overlong.filter_truncated, part_weights(graders)
            options = vars(config.advantage)
            advantages = partial(step_advantages, **options, filter_truncated=masks, weights=weights)
        asked = teacher_prompt(config, self.policy.tokenizer) if config.teacher.is_self else None
        if asked is not None:
            asked(self._prompts.training[0])  # an error in the template is found before the first step
        return StepBatches(
            config, self._learner.training_pass, pad_id=pad_id, advantages=advantages, teacher_prompt=asked
        )

    def _build_updater(self, objective: Objective | None) -> Updater:
        """Builds the updater. The reference policy has the initial weights. With LoRA, it is the base model, which corresponds to adapters of zeros."""
        config, policy = self.config, self.policy
        reference = policy.params if self._has_reference else None
        if reference is not None:
            name = f"the initial {config.model.source}"
            if config.lora.rank:
                reference, name = jax.tree.map(jnp.zeros_like, reference), f"{policy.base} without adapters"
            self.notes.append(f"loss.kl_coef={config.loss.kl_coef:g}: the reference policy is {name}")
        return updater_of(
            config, self._learner, objective=objective, reference=reference, teacher=self._teacher
        )

    def start(self, checkpointer: Checkpointer, *, resume: bool, say: Callable[[str], None]) -> ResumePoint:
        """Returns the point from which training starts: the last intact checkpoint if `resume` is True and there is a checkpoint, otherwise step 0.

        `policy.params` is replaced with shapes, so that only the returned state contains trained weights. The weights of a reference policy stay
        in memory. Damaged checkpoints are renamed and reported through `say`.

        Raises:
            ConfigError: the checkpoint belongs to another run.
            DamagedError: there are checkpoints, but none is intact.
        """
        initial, self._learner = self._learner, self._learner.without_weights()
        if not (resume and has_checkpoint(checkpointer.folder)):
            copy = self._has_reference and not self.config.lora.rank
            return ResumePoint(state=initial.initial_state(copy=copy), position=Position())
        del initial
        target, rows = self._learner.state_structs, self.policy.decoder.vocab_size
        check = partial(check_identity, own=self.identity)

        def restore(step: int) -> ResumePoint:
            restored = checkpointer.restore(target, step, rows=rows, check=check)
            name = f"checkpoint {checkpointer.folder / str(step)}"
            point = resume_point(restored, name, prompt_at=self._prompts.training.__getitem__)
            self.identity = with_weights_of(self.identity, restored.progress)
            return point

        point = checkpointer.restore_last(restore, say=say, aside=True)
        assert point is not None
        return point

    def learning_rate(self, step: int) -> float:
        """Returns the learning rate of a step, with warm-up applied."""
        return self._learner.learning_rate(step)

    def close(self) -> None:
        """Stops the sample workers, the grading workers and their event loop, and leaves the cluster."""
        self.sampling.close()
        self._close_cluster()

    def _close_cluster(self) -> None:
        if self._cluster is not None:
            self._cluster.close()


def _connected(config: TrainConfig) -> tuple[Cluster | None, StartWorker]:
    """Returns the cluster, if one is configured, and the function that starts a worker. Raises ConfigError if there is no connection to the cluster."""
    if not config.cluster.address:
        return None, Worker
    with prefixed(""):
        cluster = Cluster(config.cluster.address)
    return cluster, partial(RemoteWorker, Places(cluster)) if config.cluster.workers else Worker


def _check_advantages(
    config: TrainConfig, advantages: Advantages | None, graders: Sequence[ConfiguredGrader]
) -> None:
    """Raises ConfigError if the function `advantages`, or the configured advantages, do not fit the environment and the graders."""
    if advantages is not None and config.environment.credit == "turn":
        raise ConfigError(
            "environment.credit=turn computes the advantages, but a function was given as well: set environment.credit=episode"
        )
    if advantages is None and config.advantage.rewards == "apart" and len(graders) < 2:
        raise ConfigError(
            f"advantage.rewards=apart needs 2 or more graders, found {len(graders)}: set advantage.rewards=summed"
        )


def rollout_sampler(
    learner: Learner, config: TrainConfig, *, has_reference: bool, teacher: Model | None, **options: Any
) -> ResponseSampler:
    """Builds the sampler of a training run, whose cache leaves room for a reference policy and a teacher. For `options`, see `response_sampler`."""
    recorded = {name for name, *_ in recorded_values(config, learner.policy.decoder)}
    spec = rollout_spec(config, samplers=learner.meshes.count, records_routes="routes" in recorded)
    reference = learner.state_structs.params if has_reference else None
    return learner.sampler(spec, others=(teacher, reference), **options)
