"""The optimizer and the learning rate (DAPO Section 4.1): AdamW after clipping of the gradient norm, with a linear warm-up."""

from functools import lru_cache

import optax


@lru_cache
def make_optimizer(
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 0.1,
    max_grad_norm: float = 1.0,
) -> optax.GradientTransformation:
    """Returns global-norm clipping followed by AdamW with learning rate 1; the update multiplies by the step's learning rate.

    All matrices and vectors decay, as in torch's AdamW. Equal arguments return the same object, so that compiled programs can be shared.
    """
    adamw = optax.adamw(1.0, b1=beta1, b2=beta2, eps=epsilon, weight_decay=weight_decay)
    return optax.chain(optax.clip_by_global_norm(max_grad_norm), adamw)


def warmed_up(learning_rate: float, *, step: int, warmup_steps: int) -> float:
    """Returns the learning rate of step `step`, counted from 1: linear over `warmup_steps` rollout steps, then constant.

    >>> [warmed_up(1.0, step=step, warmup_steps=4) for step in (1, 2, 4, 9)]
    [0.25, 0.5, 1.0, 1.0]
    """
    return learning_rate * min(1.0, step / warmup_steps) if warmup_steps else learning_rate
