"""The objective of supervised fine-tuning."""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dapo_jax.dapo.metrics import Mean, Metric


def supervised_loss(
    logprobs: Float[Array, "batch seq"],
    old_logprobs: Float[Array, "batch seq"],
    advantages: Float[Array, "batch seq"],
    mask: Bool[Array, "batch seq"],
    *,
    weights: Float[Array, "batch seq"],
) -> tuple[Float[Array, ""], Mapping[str, Metric]]:
    """Weighted negative log-likelihood of demonstrations, in nats. It has the signature of an objective, and ignores `old_logprobs` and `advantages`."""
    live = jnp.where(mask, logprobs, 0.0)
    loss = (jnp.where(mask, weights, 0.0) * -live).sum()  # the sum of zeros is 0.0, not -0.0
    return loss, {"sft/token_loss": Mean((-live).sum(), mask.sum(dtype=jnp.float32))}
