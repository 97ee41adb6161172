r"""Importance weights for off-policy tokens.

The ratio in the objective is $\pi_\theta / \pi_\text{prox}$, with the policy at the start of the step in the denominator. Tokens that were sampled
with earlier or rounded weights need a second factor, $\pi_\text{prox} / \pi_\text{sampler}$. This factor is $e^d$, where
$d = \log \pi_\text{prox} - \log \pi_\text{sampler}$ for the token, clamped to +-20. One of four rules bounds the factor. The separation of the two
ratios is from Hilton et al., "Batch size-invariance for policy optimization", 2021.

| correction | weight of a token | |
|---|---|---|
| `truncate` | $\min(e^d, C)$ | Ionides 2008; Yao et al. 2025 |
| `mask` | $e^d$ where $\text{low} \le e^d \le \text{high}$, else 0 | IcePop (Ling Team 2025) |
| `keep_responses` | $e^d$ where $\text{low} \le g \le \text{high}$, else 0; $g$ is the geometric mean of $e^d$ over the response | the mean is as in GSPO (Zheng et al. 2025) |
| `truncate_responses` | $\min(e^{\sum d}, C)$, with the sum over the response clamped to +-20 | Ionides 2008, for whole responses |

An episode with several contexts becomes one training example per context, and the rules for responses treat each example separately.

`drop_off_policy` is independent of these rules: it excludes responses with negative advantages from which the current policy has moved away.

Weights are constants without a gradient. Tokens and responses of weight 0 count in the baseline and the scale of the advantages, and in the mean over tokens. Values where the mask is False are ignored and may be NaN.

References:
    Ionides, "Truncated Importance Sampling", 2008. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025,
    https://fengyao.notion.site/off-policy-rl. Ling Team, "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model",
    2025, https://arxiv.org/abs/2510.18855. Zheng et al., "Group Sequence Policy Optimization", 2025, https://arxiv.org/abs/2507.18071.
    DeepSeek-AI, "DeepSeek-V3.2", 2025, https://arxiv.org/abs/2512.02556 (off-policy sequence masking).
"""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dapo_jax.dapo.losses import MAX_LOG_RATIO, MaskedTokens
from dapo_jax.dapo.metrics import Max, Metric, token_mean
from dapo_jax.dapo.responses import response_mean, response_sum
from dapo_jax.hints import check_choice

CORRECTIONS = ("none", "truncate", "mask", "keep_responses", "truncate_responses")

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
    r"""Returns the weight of each token under one of the four rules, and the metrics `importance/*`.

    Args:
        logprobs: $\log \pi_\text{prox}$ of each token, in nats.
        sampler_logprobs: $\log \pi_\text{sampler}$, recorded when the token was sampled.
        mask: True on response tokens that enter the loss.
        segment_ids: index of each token's response in its row. Tokens of a segment are adjacent. Only the rules for responses use this argument.
        correction: truncate, mask, keep_responses or truncate_responses.
        low: smallest weight or geometric mean that is kept (inclusive). The two rules that truncate ignore it.
        high: largest weight or geometric mean that is kept (inclusive). For the two rules that truncate, this is the cap C.

    Returns:
        The weights, which are 0 outside the mask, and metrics over the tokens in the mask. `with_effective_share` expects the metrics as scalars.

    Raises:
        ValueError: `correction` is "none" or unknown.
    """
    check_choice("correction", correction, CORRECTIONS[1:])
    tokens = MaskedTokens(logprobs, mask, sampler_logprobs=sampler_logprobs)
    difference = tokens.constant(logprobs) - tokens.constant(sampler_logprobs)
    if correction == "truncate_responses":
        difference = response_sum(difference, mask, segment_ids)
    ratio = jnp.exp(jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    if correction.startswith("truncate"):
        weights, cut = jnp.minimum(ratio, high), ratio > high
    else:
        bounded = ratio
        if correction == "keep_responses":
            mean = response_mean(difference, mask, segment_ids)
            bounded = jnp.exp(jnp.clip(mean, -MAX_LOG_RATIO, MAX_LOG_RATIO))
        # A NaN must remain a NaN instead of becoming a weight of 0, so that it is detected later.
        weights = jnp.where((bounded < low) | (bounded > high), 0.0, ratio)
        cut = weights == 0.0
    weights = jnp.where(mask, weights, 0.0)
    return weights, {
        "importance/weight": token_mean(weights, mask),
        "importance/weight_max": Max(jnp.where(mask, weights, -jnp.inf).max(initial=-jnp.inf)),
        "importance/cut_frac": token_mean(cut.astype(weights.dtype), mask),
        _SQUARE: token_mean(weights * weights, mask),
    }


def drop_off_policy(
    logprobs: Float[Array, "rows seq"],
    sampler_logprobs: Float[Array, "rows seq"],
    advantages: Float[Array, "rows seq"],
    mask: Bool[Array, "rows seq"],
    segment_ids: Int[Array, "rows seq"],
    *,
    delta: float,
) -> tuple[Float[Array, "rows seq"], dict[str, Metric]]:
    r"""Returns 0 for the tokens of responses to drop and 1 for all other tokens, and the share of dropped tokens (off-policy sequence masking).

    A response is dropped if its advantage is negative and the mean of $\log \pi_\text{sampler} - \log \pi_\theta$ over its tokens exceeds `delta`. The mean
    estimates, in nats per token, how far the policy has moved since sampling. Dropped tokens still count in the denominator of the loss.

    Args:
        logprobs: $\log \pi_\theta$ of each token under the policy being trained, in nats. The result has no gradient.
        advantages: one per token.
        delta: largest mean, in nats per token, for which a response with a negative advantage is kept.
        The other arguments are the same as for `importance_weights`.
    """
    tokens = MaskedTokens(logprobs, mask, sampler_logprobs=sampler_logprobs, advantages=advantages)
    difference = tokens.constant(sampler_logprobs) - tokens.constant(logprobs)
    moved = response_mean(difference, mask, segment_ids)
    dropped = mask & (advantages < 0) & (moved > delta)
    kept = 1.0 - dropped.astype(moved.dtype)
    return kept, {"importance/dropped_frac": token_mean(1.0 - kept, mask)}


def with_effective_share(scalars: Mapping[str, float]) -> dict[str, float]:
    r"""Replaces the mean squared weight in a step's scalars with `importance/ess_frac`. Without importance weights, the scalars are returned unchanged.

    The effective sample size of n weighted tokens is $(\sum w)^2 / \sum w^2$ (Kong 1992). As a fraction of n, it is the squared mean weight divided by
    the mean squared weight. Both means are over all microbatches and updates, so the fraction is exact. It is 0 if every weight is 0.
    """
    rest = {name: value for name, value in scalars.items() if name != _SQUARE}
    if (square := scalars.get(_SQUARE)) is not None:
        rest["importance/ess_frac"] = scalars["importance/weight"] ** 2 / square if square else 0.0
    return rest
