"""The optimizer and the learning rate (DAPO Section 4.1): gradient-norm clipping, AdamW and a linear warm-up."""

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
    """Returns global-norm clipping followed by AdamW with learning rate 1. `Updater` multiplies the resulting change by the step's learning rate.

    Weight decay applies to all matrices and vectors, as in PyTorch's AdamW. Calls with the same arguments return the same object and share compiled programs.
    """
    adamw = optax.adamw(1.0, b1=beta1, b2=beta2, eps=epsilon, weight_decay=weight_decay)
    return optax.chain(optax.clip_by_global_norm(max_grad_norm), adamw)


def warmed_up(learning_rate: float, *, step: int, warmup_steps: int) -> float:
    """Returns the learning rate of rollout step `step`, counted from 1. The rate grows linearly over `warmup_steps` steps and then stays constant.

    >>> [warmed_up(1.0, step=step, warmup_steps=4) for step in (1, 2, 4, 9)], warmed_up(1.0, step=1, warmup_steps=0)
    ([0.25, 0.5, 1.0, 1.0], 1.0)
    """
    return learning_rate * min(1.0, step / warmup_steps) if warmup_steps else learning_rate
