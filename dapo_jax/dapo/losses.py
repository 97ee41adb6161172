"""The DAPO objective, a KL penalty and a supervised loss, as pure functions of arrays.

Nothing here depends on models, optimizers, meshes or configurations. All functions are safe under `jit`, `grad`, `vmap` and `shard_map`. Column `t` of
every argument belongs to the token *at* `t`. The log-probability of this token comes from the logits at `t - 1`, and the caller has already aligned the
two. Values where the mask is False are ignored and may be NaN. Equation numbers refer to DAPO, https://arxiv.org/abs/2503.14476.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from dapo_jax.dapo.aggregation import check_mask
from dapo_jax.dapo.metrics import Max, Mean, Metric
from dapo_jax.hints import check_choice

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp, so that squares and sums of the ratios (at most e^20 = 4.9e8) do not overflow float32."""


def dapo_loss(
    logprobs: Float[Array, "batch seq"],
    old_logprobs: Float[Array, "batch seq"],
    advantages: Float[Array, " batch"] | Float[Array, "batch seq"],
    mask: Bool[Array, "batch seq"],
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.28,
    dual_clip: float | None = None,
    weights: Float[Array, "batch seq"] | None = None,
) -> tuple[Float[Array, ""], dict[str, Metric]]:
    r"""Computes the token-level clipped surrogate loss, with a higher upper clip (Eq. 8, 10 and 12).

    $$ \mathcal{L} = -\sum_{i,t} w_{i,t} \min\big(r_{i,t} \hat A_i,\;
       \mathrm{clip}(r_{i,t}, 1-\epsilon_\text{low}, 1+\epsilon_\text{high}) \hat A_i\big),
       \qquad r_{i,t} = \exp(\texttt{logprobs} - \texttt{old\_logprobs}) $$

    Only `logprobs` is differentiated. The loss is computed in float32, or in float64 if `logprobs` is float64.

    Args:
        logprobs: log-probability of each token under the policy being trained, in nats.
        old_logprobs: log-probability of each token under the policy in the denominator of the ratio.
        advantages: one per response, or one per token.
        mask: True on response tokens that enter the loss, False on prompt and padding.
        clip_ratio_low: eps_low. How far the ratio of a token with a negative advantage may fall below 1 before its gradient becomes 0.
        clip_ratio_high: eps_high. How far the ratio of a token with a positive advantage may rise above 1 before its gradient
            becomes 0. If it is larger than `clip_ratio_low`, unlikely tokens have more room to gain probability (Clip-Higher).
        dual_clip: if the advantage is negative, the loss of a token is at most `dual_clip * |A|`. If None, there is no cap.
        weights: w, the weight of each token. Defaults to the mean over this mask, w = 1 / (tokens in `mask`). If the
            arguments are only a microbatch or a shard, compute `token_weights` for the whole minibatch, pass the weights
            of this part, and *sum* the losses and gradients of all parts.

    Returns:
        The loss to minimize, which is 0 for an empty mask, and metrics over the tokens in the mask. The weights do not affect the metrics.

    Raises:
        ValueError: shapes do not match, the mask is not bool, a clip is below 0, or the dual clip is not above 1.

    References:
        Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", 2025.
        Ye et al., "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning", 2020 (dual clip).
    """
    for name, value in (("clip_ratio_low", clip_ratio_low), ("clip_ratio_high", clip_ratio_high)):
        if not value >= 0:
            raise ValueError(f"{name} is a distance from 1 and must be 0 or more, got {value}")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be above 1, the ratio of an on-policy token; got {dual_clip}")
    if advantages.shape == mask.shape[:1]:
        advantages = jnp.broadcast_to(advantages[:, None], mask.shape)
    tokens = MaskedTokens(logprobs, mask, old_logprobs=old_logprobs, advantages=advantages, weights=weights)
    logprobs = tokens.clean(logprobs)
    advantages = tokens.constant(advantages)

    log_ratio = jnp.clip(logprobs - tokens.constant(old_logprobs), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = jnp.exp(log_ratio)
    surrogate = clipped_surrogate(ratio, advantages, clip_ratio_low, clip_ratio_high)
    dual_clipped = jnp.zeros_like(mask)
    if dual_clip is not None:
        floor = dual_clip * advantages
        dual_clipped = (advantages < 0) & (surrogate < floor)
        surrogate = jnp.where(dual_clipped, floor, surrogate)
    loss = jnp.sum(tokens.weights(weights) * -surrogate)  # negating the sum itself would turn 0.0 into -0.0

    clipped_high, clipped_low = is_clipped(ratio, advantages, clip_ratio_low, clip_ratio_high)
    probability = jnp.exp(logprobs)
    return loss, {
        "policy/ratio": tokens.mean(ratio),
        "policy/ratio_max": tokens.max(ratio),
        "policy/clip_high_frac": tokens.mean(clipped_high),
        "policy/clip_low_frac": tokens.mean(clipped_low),
        # The mean probability of clipped tokens, as in the paper's Fig. 3a.
        "policy/clipped_high_prob": replace(tokens.mean(probability, where=clipped_high), rare=True),
        "policy/dual_clip_frac": tokens.mean(dual_clipped),
        # Two estimates of KL(old || new); see `k3`.
        "policy/kl_old_k1": tokens.mean(-log_ratio),
        "policy/kl_old_k3": tokens.mean(k3(log_ratio)),
        "policy/sampled_prob": tokens.mean(probability),
    }


def clipped_surrogate(ratio: Array, advantages: Array, low: float, high: float) -> Array:
    """Returns the smaller of ratio times advantage and clipped ratio times advantage (Eq. 8), for each token."""
    clipped_ratio = jnp.clip(ratio, 1.0 - low, 1.0 + high)
    return jnp.minimum(ratio * advantages, clipped_ratio * advantages)


def is_clipped(ratio: Array, advantages: Array, low: float, high: float) -> tuple[Array, Array]:
    """Returns where `clipped_surrogate` clips the ratio from above, and where from below.

    The minimum selects the clipped term only where the ratio has already moved in the direction of the advantage. There, the gradient is 0.
    """
    return (advantages > 0) & (ratio > 1.0 + high), (advantages < 0) & (ratio < 1.0 - low)


def k3(log_ratio: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    r"""The k3 estimator of the Kullback-Leibler divergence KL(p || q), $e^d - 1 - d$. It is never negative, and unbiased for tokens sampled from p.

    Near 0 it is about $d^2 / 2$, which is far below the rounding error of $e^d$, so $e^d - 1$ is computed with `expm1`. In float32, if $d$ is about 1e-5 for
    all tokens, the mean estimate then has a relative error of 1e-4. Without `expm1`, the error is larger than the value.

    Args:
        log_ratio: $d = \log q - \log p$ of a token, in nats.

    Returns:
        The estimate of KL(p || q), in nats.

    References:
        Schulman, "Approximating KL Divergence", 2020, http://joschu.net/blog/kl-approx.html
    """
    return jnp.expm1(log_ratio) - log_ratio


def kl_penalty(
    logprobs: Float[Array, "batch seq"],
    ref_logprobs: Float[Array, "batch seq"],
    mask: Bool[Array, "batch seq"],
    *,
    estimator: str = "k3",
    old_logprobs: Float[Array, "batch seq"] | None = None,
    weights: Float[Array, "batch seq"] | None = None,
) -> tuple[Float[Array, ""], dict[str, Metric]]:
    r"""Estimates KL(policy || reference) from the sampled tokens. DAPO does not use a KL penalty (Section 2.3).

    Let $d = \log \pi_\text{ref} - \log \pi_\theta$ of a token sampled by the policy. `k1` is $-d$, which is unbiased
    but may be negative. `k3` is $e^d - 1 - d$ (see `k3`), which is unbiased, never negative and less noisy. To train with a
    penalty, add `coefficient * penalty` with `k3` to the loss. `k1` cannot be used for this: its *gradient* with respect to the
    log-probability is 1 for every token, does not depend on the reference, and is zero on average. The value of `k3` is
    unbiased, but its gradient is not the gradient of the KL divergence. `k3_unbiased` is $r (e^d - 1 - d)$ with the ratio
    $r = \pi_\theta / \pi_\text{old}$, whose gradient is unbiased too (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556).

    Args:
        logprobs: log-probability of each token under the policy being trained, in nats. Only this argument is
            differentiated.
        ref_logprobs: log-probability of each token under the reference policy.
        mask: True on response tokens.
        estimator: `k3`, `k3_unbiased` or `k1`.
        old_logprobs: log-probability of each token under the old policy. Required for `k3_unbiased`, otherwise unused.
        weights: the weight of each token, as in `dapo_loss`.

    Returns:
        The penalty, which is 0 for an empty mask, and the unweighted token means of `k1` and `k3`.

    Raises:
        ValueError: the estimator is unknown, `old_logprobs` is missing, shapes do not match, or the mask is not bool.
    """
    check_choice("estimator", estimator, ("k1", "k3", "k3_unbiased"))
    tokens = MaskedTokens(
        logprobs, mask, ref_logprobs=ref_logprobs, old_logprobs=old_logprobs, weights=weights
    )
    difference = tokens.constant(ref_logprobs) - tokens.clean(logprobs)
    log_ratio = jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    by_k1, by_k3 = -log_ratio, k3(log_ratio)
    estimate = by_k1 if estimator == "k1" else by_k3
    if estimator == "k3_unbiased":
        if old_logprobs is None:
            raise ValueError("estimator='k3_unbiased' needs old_logprobs, the denominator of its ratio")
        moved = tokens.clean(logprobs) - tokens.constant(old_logprobs)
        estimate = jnp.exp(jnp.clip(moved, -MAX_LOG_RATIO, MAX_LOG_RATIO)) * by_k3
    penalty = jnp.sum(tokens.weights(weights) * estimate)
    return penalty, {"policy/kl_ref_k1": tokens.mean(by_k1), "policy/kl_ref_k3": tokens.mean(by_k3)}


def supervised_loss(
    logprobs: Float[Array, "batch seq"],
    old_logprobs: Float[Array, "batch seq"],
    advantages: Float[Array, "batch seq"],
    mask: Bool[Array, "batch seq"],
    *,
    weights: Float[Array, "batch seq"],
) -> tuple[Float[Array, ""], dict[str, Metric]]:
    """Computes the weighted negative log-likelihood in nats. It has the signature of `dapo_loss`, but ignores `old_logprobs` and `advantages`."""
    tokens = MaskedTokens(logprobs, mask, weights=weights)
    token_loss = -tokens.clean(logprobs)
    return jnp.sum(tokens.weights(weights) * token_loss), {"sft/token_loss": tokens.mean(token_loss)}


class MaskedTokens:
    """Masked operations that are shared by the losses, in a common dtype. Values outside the mask do not affect any result."""

    def __init__(self, logprobs: Array, mask: Array, **others: Array | None) -> None:
        check_mask(mask)
        for name, array in {"logprobs": logprobs, **others}.items():
            if array is not None and array.shape != mask.shape:
                raise ValueError(f"{name} has shape {array.shape}, but mask has {mask.shape} ([batch, seq])")
        self._mask = mask
        self._dtype = np.promote_types(logprobs.dtype, jnp.float32)

    def clean(self, array: Array, where: Array | None = None) -> Array:
        """Returns `array` with zeros outside the mask. Call it before any arithmetic, because 0 * inf and its gradient are NaN."""
        chosen = self._mask if where is None else self._mask & where
        return jnp.where(chosen, array.astype(self._dtype), jnp.zeros((), self._dtype))

    def constant(self, array: Array) -> Array:
        """Returns `clean(array)` without a gradient."""
        return self.clean(lax.stop_gradient(array))

    def weights(self, weights: Array | None) -> Array:
        """Returns the given weights, or, if None, weights for the plain mean over the mask."""
        if weights is not None:
            return self.constant(weights)
        live = self._mask.astype(self._dtype)
        return live / jnp.maximum(live.sum(), 1.0)

    def mean(self, array: Array, where: Array | None = None) -> Mean:
        """Returns the mean over the mask, or over the part of the mask where `where` is True."""
        chosen = self._mask if where is None else self._mask & where
        return Mean(lax.stop_gradient(self.clean(array, where)).sum(), chosen.sum(dtype=self._dtype))

    def max(self, array: Array) -> Max:
        """Returns the maximum over the mask."""
        chosen = jnp.where(self._mask, lax.stop_gradient(array), -jnp.inf)
        return Max(chosen.max(initial=-jnp.inf))
