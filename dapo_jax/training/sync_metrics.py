"""The metrics `sync/*`: the difference between the sampler's and the trainer's log-probabilities before a step's first update.

Both are computed under the weights that sampled, so they differ by rounding alone, unless the sampler has other weights, kernels or dtypes.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dapo_jax.dapo.log_ratios import k3
from dapo_jax.dapo.metrics import Max, Metric, token_mean


def mismatch_metrics(
    trainer: Float[Array, "rows seq"], sampler: Float[Array, "rows seq"], mask: Bool[Array, "rows seq"]
) -> dict[str, Metric]:
    """Returns the metrics `sync/*` of a microbatch.

    Args:
        trainer: log-probability of each token in nats, under the weights that sampled.
        sampler: log-probability of each token in nats, recorded during sampling.
        mask: True for the tokens that count.
    """
    delta = jnp.where(mask, trainer - sampler, 0.0)
    return {
        "sync/logprob_diff_mean": token_mean(jnp.abs(delta), mask),
        "sync/logprob_diff_max": Max(jnp.abs(delta).max()),
        "sync/sampler_trainer_kl": token_mean(k3(delta), mask),
    }
