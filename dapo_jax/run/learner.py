"""The learner of a DAPO run or a warm start: the trained policy with its meshes, training pass and optimizer."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import optax

from dapo_jax.config import OptimizerConfig, SftConfig, TrainConfig
from dapo_jax.models.lora import parted
from dapo_jax.models.tensors import shapes_of
from dapo_jax.parallel.device_memory import bytes_on_device
from dapo_jax.parallel.mesh import Meshes
from dapo_jax.rollout.response_sampler import ResponseSampler
from dapo_jax.run.policy import Policy, check_trains, load_policy
from dapo_jax.run.sampler_programs import sharing
from dapo_jax.run.sampler_setup import SamplerSpec, response_sampler
from dapo_jax.run.sources import lora_of
from dapo_jax.run.training_pass import TrainingPass, training_pass
from dapo_jax.training.optimizer import make_optimizer, scheduled_rate
from dapo_jax.training.state import TrainState, init_state, state_structs


def optimizer_of(config: OptimizerConfig) -> optax.GradientTransformation:
    """Returns the optimizer that `config` describes."""
    return make_optimizer(
        name=config.name,
        beta1=config.beta1,
        beta2=config.beta2,
        epsilon=config.epsilon,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
    )


@dataclass(frozen=True, kw_only=True)
class Learner:
    """The trained policy of a run with its meshes, training pass and optimizer."""

    config: TrainConfig | SftConfig
    meshes: Meshes
    policy: Policy
    """The policy with its initial weights, or with shapes in place of weights."""

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """The optimizer that `config.optimizer` describes."""
        return optimizer_of(self.config.optimizer)

    @cached_property
    def training_pass(self) -> TrainingPass:
        """The layout of attention and rows. Raises ConfigError if row length, mesh and attention do not fit together."""
        config, decoder = self.config, self.policy.decoder
        mesh, row_tokens = self.meshes.train, config.row_tokens
        return training_pass(config.model, config.batch, mesh, decoder, row_tokens=row_tokens)

    @cached_property
    def state_structs(self) -> TrainState:
        """The train state as shapes with shardings."""
        offload = self.config.optimizer.offload
        return state_structs(self.policy.params, self.optimizer, self.meshes.train, offload=offload)

    def learning_rate(self, step: int) -> float:
        """Returns the learning rate of a step, by the schedule of the run."""
        config = self.config.optimizer
        return scheduled_rate(
            config.learning_rate,
            step=step,
            steps=self.config.steps,
            warmup_steps=config.warmup_steps,
            schedule=config.schedule,
            steps_before_decay=config.steps_before_decay(self.config.steps),
            end_factor=config.end_factor,
        )

    def without_weights(self) -> "Learner":
        """Returns a copy with shapes in place of the trained weights."""
        shapes = parted(shapes_of(self.policy.decoder))[0]
        return replace(self, policy=replace(self.policy, params=shapes))

    def sampler(self, spec: SamplerSpec, *, others: Any = (), **options: Any) -> ResponseSampler:
        """Builds a sampler of the policy. `others` are arrays on the training mesh, or their shapes, that are in memory during sampling in addition to the train state and
        the LoRA base. For `options`, see `response_sampler`."""
        in_memory = (self.state_structs, self.policy.unshared, others)
        resident = bytes_on_device(in_memory, self.meshes.train.shape)
        seed = self.config.seed
        return response_sampler(self.policy, self.meshes, spec, seed=seed, resident=resident, **options)

    def initial_state(self, *, copy: bool) -> TrainState:
        """Returns the state of a new run with the policy's weights (see `init_state`)."""
        offload = self.config.optimizer.offload
        return init_state(self.policy.params, self.optimizer, self.meshes.train, offload=offload, copy=copy)


def load_learner(config: TrainConfig | SftConfig, meshes: Meshes, *, weights: bool = True) -> Learner:
    """Loads the policy of `model.source` onto the training mesh. Without `weights`, the policy has shapes in place of weights. Raises ConfigError if the policy
    cannot be loaded or trained with this configuration."""
    policy = load_policy(
        config.model,
        lora=lora_of(config.lora),
        seed=config.seed,
        mesh=meshes.train,
        sampler=meshes.sampler,
        weights=weights,
        shares=sharing(meshes, config.sampling, dtype=config.model.compute_dtype),
        longest=config.sequence_tokens,
    )
    check_trains(policy, config.lora, config.model.source)
    return Learner(config=config, meshes=meshes, policy=policy)
