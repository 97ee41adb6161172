"""On-policy distillation: the advantages and the loss of a teacher, as pure functions of arrays."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dapo_jax.dapo.losses import MaskedTokens
from dapo_jax.dapo.metrics import Metric, token_mean


def teacher_advantages(
    advantages: Float[Array, "batch seq"],
    teacher_logprobs: Float[Array, "batch seq"],
    old_logprobs: Float[Array, "batch seq"],
    mask: Bool[Array, "batch seq"],
    *,
    coef: float = 1.0,
) -> tuple[Float[Array, "batch seq"], dict[str, Metric]]:
    r"""Adds the advantages of on-policy distillation, which are $\text{coef} (\log \pi_\text{teacher} - \log \pi_\text{old})$ for each token, in nats.

    Because the policy samples the tokens, the policy gradient of these advantages is an unbiased estimate of the gradient of
    $-\text{coef}\, \mathrm{KL}(\pi \Vert \pi_\text{teacher})$ of each token's distribution (Agarwal et al. 2023, https://arxiv.org/abs/2306.13649).
    Also returns the metric `teacher/reverse_kl`, the mean of $\log \pi_\text{old} - \log \pi_\text{teacher}$ over the mask.
    """
    tokens = MaskedTokens(teacher_logprobs, mask, old_logprobs=old_logprobs)
    difference = tokens.clean(teacher_logprobs) - tokens.clean(old_logprobs)
    return advantages + coef * difference, {"teacher/reverse_kl": token_mean(-difference, mask)}


def teacher_divergence(
    divergence: Float[Array, "batch seq"],
    mask: Bool[Array, "batch seq"],
    *,
    weights: Float[Array, "batch seq"],
    coef: float = 1.0,
) -> tuple[Float[Array, ""], dict[str, Metric]]:
    r"""Returns the loss $\text{coef} \sum w\, \mathrm{KL}(\pi \Vert \pi_\text{teacher})$, and the metric `teacher/reverse_kl`, the mean of the divergence over the mask.

    `divergence` is the divergence over the whole vocabulary at each token, in nats.
    """
    loss = coef * jnp.sum(weights * divergence, where=mask)
    return loss, {"teacher/reverse_kl": token_mean(divergence, mask)}
