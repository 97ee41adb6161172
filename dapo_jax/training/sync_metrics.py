"""The metrics `sync/*`: how far the sampler's log-probabilities are from the trainer's before a step's first update; and truncated importance weights, which correct for it.

Both are under the weights that sampled, so on one stack of mathematics they would be equal. They differ by rounding; by more where
the sampler has other weights, other kernels or another dtype.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dapo_jax.dapo.importance import truncated_importance_weight
from dapo_jax.dapo.log_ratios import k3
from dapo_jax.dapo.metrics import Max, Mean, Metric, token_mean
from dapo_jax.training.minibatch import Minibatch, Stack, with_array


def mismatch_metrics(
    trainer: Float[Array, "rows seq"], sampler: Float[Array, "rows seq"], mask: Bool[Array, "rows seq"]
) -> dict[str, Metric]:
    """The metrics `sync/*` of a microbatch: how far the log-probabilities of sampler and trainer are apart.

    Args:
        trainer: of each token, in nats, under the weights that sampled.
        sampler: as recorded while sampling.
        mask: the tokens that count.
    """
    delta = jnp.where(mask, trainer - sampler, 0.0)
    return {
        "sync/logprob_diff_mean": token_mean(jnp.abs(delta), mask),
        "sync/logprob_diff_max": Max(jnp.abs(delta).max()),
        "sync/sampler_trainer_kl": token_mean(k3(delta), mask),
    }


def mismatch_kl(minibatches: Sequence[Minibatch]) -> list[dict[str, Mean]]:
    """The estimate k3 of KL(sampler || trainer) in nats, over the tokens in the loss; for `to_scalars`, one entry a stack.

    Args:
        minibatches: of a step, all of them with old log-probabilities scored by the trainer (`UpdateOptions.score_first`).
    """
    return [{"kl": _kl(stack)} for minibatch in minibatches for stack in minibatch]


def importance_weighted(minibatches: Sequence[Minibatch], *, cap: float) -> list[Minibatch]:
    r"""The minibatches with each token's advantage times $\min(\pi_\text{trainer} / \pi_\text{sampler}, \text{cap})$.

    In the clipped objective that weighs a token, since the factor is positive; its weight, which a KL to a reference policy is
    averaged with too, stays as it is.

    References:
        Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
        Training", 2025, https://fengyao.notion.site/off-policy-rl
    """

    def advantages(stack: Stack) -> Array:
        # Where the update's programs have them.
        return jax.device_put(_weighted(stack, cap), stack.microbatches.advantages.sharding)

    return [with_array(minibatch, "advantages", advantages) for minibatch in minibatches]


@jax.jit
def _kl(stack: Stack) -> Mean:
    return Mean(k3(_delta(stack)).sum(), stack.microbatches.mask.sum(dtype=jnp.float32))


@jax.jit
def _weighted(stack: Stack, cap: Any) -> Float[Array, "capacity rows seq"]:
    return stack.microbatches.advantages * truncated_importance_weight(_delta(stack), cap)


def _delta(stack: Stack) -> Float[Array, "capacity rows seq"]:
    of = stack.microbatches
    return jnp.where(of.mask, of.old_logprobs - of.sampler_logprobs, 0.0)
