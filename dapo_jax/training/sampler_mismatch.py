"""How far the sampler's log-probabilities are from the trainer's before a step's first update, and truncated importance weights.

Both are under the weights that sampled, so on one stack of mathematics they would be equal. They differ by rounding; by more where
the sampler has other weights, other kernels or another dtype.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dapo_jax.dapo.metrics import Mean
from dapo_jax.training.minibatch import Minibatch, Stack, having


def mismatch_kl(minibatches: Sequence[Minibatch]) -> list[dict[str, Mean]]:
    """The estimate k3 of KL(sampler || trainer) in nats, over the tokens in the loss; for `to_scalars`, one entry a stack.

    With d = log pi_trainer - log pi_sampler of a sampled token it is the mean of e^d - 1 - d, never negative.

    Args:
        minibatches: of a step, all of them with old log-probabilities scored by the trainer (`UpdateOptions.score_first`).

    References:
        Schulman, "Approximating KL Divergence", 2020, http://joschu.net/blog/kl-approx.html
    """
    return [{"kl": _kl(stack)} for minibatch in minibatches for stack in minibatch]


def importance_weighted(minibatches: Sequence[Minibatch], *, cap: float) -> list[Minibatch]:
    r"""The minibatches with each token's advantage times $\min(\pi_\text{trainer} / \pi_\text{sampler}, \text{cap})$.

    In the clipped objective that weighs a token, since the factor is positive; its weight, which a KL to a reference policy is
    averaged with too, stays as it is.

    References:
        Ionides, "Truncated Importance Sampling", 2008. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
        Training", 2025, https://fengyao.notion.site/off-policy-rl
    """

    def advantages(stack: Stack) -> Array:
        # Where the update's programs have them.
        return jax.device_put(_weighted(stack, cap), stack.microbatches.advantages.sharding)

    return [having(minibatch, "advantages", advantages) for minibatch in minibatches]


@jax.jit
def _kl(stack: Stack) -> Mean:
    delta, mask = _delta(stack), stack.microbatches.mask
    k3 = jnp.where(mask, jnp.exp(delta) - 1.0 - delta, 0.0)
    return Mean(k3.sum(), mask.sum(dtype=jnp.float32))


@jax.jit
def _weighted(stack: Stack, cap: Any) -> Float[Array, "room rows seq"]:
    return stack.microbatches.advantages * jnp.minimum(jnp.exp(_delta(stack)), cap)


def _delta(stack: Stack) -> Float[Array, "room rows seq"]:
    of = stack.microbatches
    return jnp.where(of.mask, of.old_logprobs - of.sampler_logprobs, 0.0)
