r"""Importance weights for off-policy tokens.

The ratio in the objective is $\pi_\theta / \pi_\text{prox}$, with the policy at the start of the step in the denominator. Tokens that were sampled
with earlier or rounded weights need a second factor, $\pi_\text{prox} / \pi_\text{sampler}$. This factor is $e^d$, where
$d = \log \pi_\text{prox} - \log \pi_\text{sampler}$ for the token, clamped to +-20. One of three rules bounds the factor. The separation of the two
ratios is from Hilton et al., "Batch size-invariance for policy optimization", 2021.

| correction | weight of a token | |
|---|---|---|
| `truncate` | $\min(e^d, C)$ | Ionides 2008; Yao et al. 2025 |
| `mask` | $e^d$ where $\text{low} \le e^d \le \text{high}$, else 0 | IcePop (Ling Team 2025) |
| `keep_responses` | $e^d$ where $\text{low} \le g \le \text{high}$, else 0; $g$ is the geometric mean of $e^d$ over the response | the mean is as in GSPO (Zheng et al. 2025) |

An episode with several contexts becomes one training example per context, and `keep_responses` computes a separate mean for each example.

Weights are constants without a gradient. Values where the mask is False are ignored and may be NaN.

References:
    Ionides, "Truncated Importance Sampling", 2008. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025,
    https://fengyao.notion.site/off-policy-rl. Ling Team, "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model",
    2025, https://arxiv.org/abs/2510.18855. Zheng et al., "Group Sequence Policy Optimization", 2025, https://arxiv.org/abs/2507.18071.
"""

from collections.abc import Mapping

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dapo_jax.dapo.losses import MAX_LOG_RATIO
from dapo_jax.dapo.metrics import Max, Metric, token_mean
from dapo_jax.dapo.segments import segment_sums
from dapo_jax.hints import nearest

CORRECTIONS = ("none", "truncate", "mask", "keep_responses")

_SQUARE = "importance/weight_square"
"""Name of the mean squared weight. This metric is not logged. It is needed, with the mean weight, to compute the effective sample size."""


def importance_weights(
    logprobs: Float[Array, "rows seq"],
    sampler_logprobs: Float[Array, "rows seq"],
    mask: Bool[Array, "rows seq"],
    segment_ids: Int[Array, "rows seq"],
    *,
    correction: str,
    low: float,
    high: float,
) -> tuple[Float[Array, "rows seq"], dict[str, Metric]]:
    r"""Returns the weight of each token under one of the three rules, and the metrics `importance/*`.

    Args:
        logprobs: $\log \pi_\text{prox}$ of each token, in nats.
        sampler_logprobs: $\log \pi_\text{sampler}$, recorded when the token was sampled.
        mask: True on response tokens that enter the loss.
        segment_ids: index of each token's response in its row. Tokens of a segment are adjacent. Only `keep_responses` uses this argument.
        correction: truncate, mask or keep_responses.
        low: smallest ratio, or geometric mean, that is kept (inclusive). `truncate` ignores it.
        high: largest ratio, or geometric mean, that is kept (inclusive). For `truncate`, this is the cap C.

    Returns:
        The weights, which are 0 outside the mask, and metrics over the tokens in the mask. `with_effective_share` expects the metrics as scalars.

    Raises:
        ValueError: `correction` is "none" or unknown.
    """
    if correction not in CORRECTIONS[1:]:
        near = nearest(correction, CORRECTIONS[1:], least=0.0)[0]
        raise ValueError(f"correction={correction!r} defines no importance weights. Did you mean {near!r}?")
    difference = jnp.where(mask, lax.stop_gradient(logprobs - sampler_logprobs), 0.0)
    ratio = judged = jnp.exp(jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    if correction == "keep_responses":
        mean = response_mean(difference, mask, segment_ids)
        judged = jnp.exp(jnp.clip(mean, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    if correction == "truncate":
        weights, cut = jnp.minimum(ratio, high), ratio > high
    else:
        # A NaN must remain a NaN instead of becoming a weight of 0, so that it is detected later.
        weights = jnp.where((judged < low) | (judged > high), 0.0, ratio)
        cut = weights == 0.0
    weights = jnp.where(mask, weights, 0.0)
    return weights, {
        "importance/weight": token_mean(weights, mask),
        "importance/weight_max": Max(jnp.where(mask, weights, -jnp.inf).max(initial=-jnp.inf)),
        "importance/cut_frac": token_mean(cut.astype(weights.dtype), mask),
        _SQUARE: token_mean(weights * weights, mask),
    }


def with_effective_share(scalars: Mapping[str, float]) -> dict[str, float]:
    r"""Replaces the mean squared weight in a step's scalars with `importance/ess_frac`. Without importance weights, the scalars are returned unchanged.

    The effective sample size of n weighted tokens is $(\sum w)^2 / \sum w^2$ (Kong 1992). As a fraction of n, it is the squared mean weight divided by
    the mean squared weight. Both means are over all microbatches and updates, so the fraction is exact. It is 0 if every weight is 0.
    """
    rest = {name: value for name, value in scalars.items() if name != _SQUARE}
    if (square := scalars.get(_SQUARE)) is not None:
        rest["importance/ess_frac"] = scalars["importance/weight"] ** 2 / square if square else 0.0
    return rest


def response_mean(
    values: Float[Array, "rows seq"], mask: Bool[Array, "rows seq"], segment_ids: Int[Array, "rows seq"]
) -> Float[Array, "rows seq"]:
    """Returns, at each token, the mean of `values` over the tokens of its response that are in the mask, or 0 if there are no such tokens.

    All tokens of a response get the bit-identical mean. The mean of log-ratios is the logarithm of the geometric mean of the ratios.

    Args:
        values: one value per token.
        mask: True on the tokens to average. A prompt may have the same segment id as its response.
        segment_ids: index of each token's response in its row. Tokens of a segment are adjacent.
    """
    total = segment_sums(jnp.where(mask, values, 0.0), segment_ids)
    count = segment_sums(mask.astype(values.dtype), segment_ids)
    return total / jnp.maximum(count, 1.0)
