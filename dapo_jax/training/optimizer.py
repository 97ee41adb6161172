"""The optimizer and the learning rate (DAPO Section 4.1): gradient-norm clipping, AdamW or Muon, and a linear warm-up."""

import math
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from optax.contrib import MuonDimensionNumbers, muon

from dapo_jax.models.parameters import BATCH_AXES, is_matrix, output_dimensions

MUON_RMS = 0.2
"""Root mean square of an orthogonalized update, as in an AdamW update (Liu et al. 2025). One learning rate therefore suits both optimizers."""


@lru_cache
def make_optimizer(
    *,
    name: str = "adamw",
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 0.1,
    max_grad_norm: float = 1.0,
) -> optax.GradientTransformation:
    """Returns global-norm clipping followed by AdamW or Muon with learning rate 1. `Updater` multiplies the resulting change by the step's learning rate.

    Weight decay applies to all matrices and vectors, as in PyTorch's AdamW. Calls with the same arguments return the same object and share compiled programs.

    `name="muon"` is `optax.contrib.muon` with Nesterov momentum 0.95. It orthogonalizes the update of each weight matrix of each layer and expert, and of routers, and
    requires parameters with logical axes. Embeddings, norms, filters and biases use AdamW with Nesterov momentum. `beta1` and `beta2` apply to these parameters only.

    References:
        Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024, https://kellerjordan.github.io/posts/muon/
        Liu et al., "Muon is Scalable for LLM Training", 2025, https://arxiv.org/abs/2502.16982 (scale of the update, weight decay)
    """
    if name == "muon":
        rule = muon(
            1.0,
            eps=epsilon,
            weight_decay=weight_decay,
            adam_b1=beta1,
            adam_b2=beta2,
            adam_weight_decay=weight_decay,
            muon_weight_dimension_numbers=_matrices,
            consistent_rms=MUON_RMS,
        )
        rule = _with_experts_first(rule)
    else:
        rule = optax.adamw(1.0, b1=beta1, b2=beta2, eps=epsilon, weight_decay=weight_decay)
    return optax.chain(optax.clip_by_global_norm(max_grad_norm), rule, optax.stateless(_only_trained))


def _only_trained(updates: Any, params: Any) -> Any:
    """Sets the updates of parameters that training does not change to 0 (see `models.parameters.Parameter`)."""

    def update(leaf: Any) -> Any:
        trained = not isinstance(leaf, nnx.Variable) or leaf.get_metadata("trained", True)
        return leaf if trained else jax.tree.map(jnp.zeros_like, leaf)

    return jax.tree.map(update, updates, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def _matrices(params: Any) -> Any:
    """Returns the input and output dimensions of each weight matrix, without the dimensions of layers and experts, and None for all other parameters."""

    def dimensions(leaf: nnx.Variable) -> nnx.Variable:
        axes = leaf.get_metadata()["axes"]
        if not is_matrix(axes):
            return leaf.replace(None)
        outputs = output_dimensions(axes)
        last = tuple(range(-len(axes), 0))  # the dimension of stacked layers is before them
        return leaf.replace(MuonDimensionNumbers(last[outputs.stop :], last[outputs.start : outputs.stop]))

    return jax.tree.map(dimensions, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def _with_experts_first(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """Wraps `muon`, which merges its batch axes. With layers before experts, which may be on several devices, all matrices would be gathered on each device."""

    def turned(tree: Any) -> Any:
        def turn(leaf: Any) -> Any:
            batch = isinstance(leaf, nnx.Variable) and set(BATCH_AXES) & set(leaf.get_metadata()["axes"])
            return jax.tree.map(lambda array: array.swapaxes(0, 1), leaf) if batch else leaf

        return jax.tree.map(turn, tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return turned(rule.update(turned(updates), turned(state), turned(params)))

    return optax.GradientTransformation(lambda params: turned(rule.init(turned(params))), update)


def scheduled_rate(
    learning_rate: float,
    *,
    step: int,
    steps: int,
    warmup_steps: int = 0,
    schedule: str = "constant",
    steps_before_decay: int = 0,
    end_factor: float = 0.0,
) -> float:
    """Returns the learning rate of a step of a run.

    With W = `warmup_steps`, e = `end_factor`, and D decaying steps at the end of the run, the rate is
    `learning_rate` x min(1, step / W) x (e + (1 - e) shape(x)), where x = (step - 1 - `steps_before_decay`) / D, at least 0 and at most 1. The shape is 1 - x (linear)
    or (1 + cos(pi x)) / 2 (cosine), as in `optax.linear_schedule` and `optax.cosine_decay_schedule`.

    Args:
        learning_rate: the rate after the warm-up.
        step: number of the step, counted from 1.
        steps: number of steps of the run.
        warmup_steps: number of first steps over which the rate rises.
        schedule: constant, linear or cosine.
        steps_before_decay: number of steps before the decay.
        end_factor: factor of the rate that a step after the last one would have.

    >>> [scheduled_rate(1.0, step=step, steps=9, warmup_steps=4) for step in (1, 2, 4, 9)]
    [0.25, 0.5, 1.0, 1.0]
    >>> [scheduled_rate(1.0, step=step, steps=6, schedule="linear", steps_before_decay=4) for step in (1, 5, 6)]
    [1.0, 1.0, 0.5]
    """
    rate = learning_rate * min(1.0, step / warmup_steps) if warmup_steps else learning_rate
    passed = step - 1 - steps_before_decay
    if schedule == "constant" or passed <= 0:
        return rate
    share = min(1.0, passed / max(1, steps - steps_before_decay))
    shape = 1 - share if schedule == "linear" else (1 + math.cos(math.pi * share)) / 2
    return rate * (end_factor + (1 - end_factor) * shape)
