r"""Importance weights of tokens that another policy has drawn than the one that the ratio of the loss is taken to.

The objective's ratio is $\pi_\theta / \pi_\text{prox}$, to the policy at the step's start. Tokens that an earlier version of the weights, or rounded
ones, have drawn need a factor $\pi_\text{prox} / \pi_\text{sampler}$ besides: with $d = \log \pi_\text{prox} - \log \pi_\text{sampler}$ of a token,
the weight is made of $e^d$, by one of three rules that bound it. (Hilton et al., "Batch size-invariance for policy optimization", 2021, decouple the
two ratios.)

| correction | weight of a token | |
|---|---|---|
| `truncate` | $\min(e^d, C)$ | Ionides 2008; Yao et al. 2025 |
| `mask` | $e^d$ where $\text{low} \le e^d \le \text{high}$, else 0 | IcePop (Ling Team 2025) |
| `mask_responses` | $g$, the geometric mean of $e^d$ over its response, where $\text{low} \le g \le \text{high}$, else 0 | the mean is that of GSPO (Zheng et al. 2025) |

An episode with several contexts is a row for each context; `mask_responses` takes the mean over the part in each row by itself.

Weights are constants: nothing here is differentiated. What stands where the mask is False is never looked at and may be NaN.

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
from dapo_jax.nearest import nearest

CORRECTIONS = ("none", "truncate", "mask", "mask_responses")

_SQUARE = "importance/weight_square"
"""The mean of squared weights: not a metric of its own, but with that of the weights it gives the effective sample size."""


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
    r"""The weight of each token by one of three rules, and the metrics `importance/*`.

    Args:
        logprobs: $\log \pi_\text{prox}$ of each token, in nats.
        sampler_logprobs: $\log \pi_\text{sampler}$, as recorded when the token was drawn.
        mask: True on response tokens that enter the loss.
        segment_ids: which response of its row a token belongs to; the tokens of a segment lie side by side. Only `mask_responses` needs them.
        correction: truncate, mask or mask_responses.
        low: the smallest weight that is kept; `truncate` has none.
        high: the largest, and with `truncate` the cap C.

    Returns:
        The weights, 0 outside the mask, and metrics over the tokens in it: `with_effective_share` makes scalars of these complete.

    Raises:
        ValueError: an unknown correction, or none.
    """
    if correction not in CORRECTIONS[1:]:
        near = nearest(correction, CORRECTIONS[1:], least=0.0)[0]
        raise ValueError(f"correction={correction!r} gives no weights. Did you mean {near!r}?")
    difference = jnp.where(mask, lax.stop_gradient(logprobs - sampler_logprobs), 0.0)
    if correction == "truncate":
        weights = truncated_importance_weight(difference, high)
        cut = _ratio(difference) > high
    else:
        if correction == "mask_responses":
            difference = response_mean(difference, mask, segment_ids)
        weights = masked_importance_weight(difference, low, high)
        cut = weights == 0.0
    weights = jnp.where(mask, weights, 0.0)
    return weights, {
        "importance/weight": token_mean(weights, mask),
        "importance/weight_max": Max(jnp.where(mask, weights, -jnp.inf).max(initial=-jnp.inf)),
        "importance/cut_frac": token_mean(cut.astype(weights.dtype), mask),
        _SQUARE: token_mean(weights * weights, mask),
    }


def with_effective_share(scalars: Mapping[str, float]) -> dict[str, float]:
    r"""The scalars of a step, with `importance/ess_frac` in the place of what it is made of; the same where there are no weights.

    The effective sample size of n weighted tokens is $(\sum w)^2 / \sum w^2$ (Kong 1992), and its share of n is the square of the mean weight over the
    mean square. Both means are those of all microbatches and updates, so the share is exact, not a mean of shares. It is 0 where every weight is 0.
    """
    rest = {name: value for name, value in scalars.items() if name != _SQUARE}
    if (square := scalars.get(_SQUARE)) is not None:
        rest["importance/ess_frac"] = scalars["importance/weight"] ** 2 / square if square else 0.0
    return rest


def truncated_importance_weight(
    log_ratio: Float[Array, "*shape"], cap: float | Float[Array, ""]
) -> Float[Array, "*shape"]:
    r"""The weight $\min(e^d, \text{cap})$ of a token that another policy has drawn (Ionides 2008).

    Args:
        log_ratio: $d = \log \pi - \log \mu$, of the policy that learns and of the one that sampled, in nats; beyond +-20 it counts as that.
        cap: the largest weight.
    """
    return jnp.minimum(_ratio(log_ratio), cap)


def masked_importance_weight(
    log_ratio: Float[Array, "*shape"], low: float, high: float
) -> Float[Array, "*shape"]:
    r"""The weight $e^d$ where it is from `low` to `high`, both included, and 0 elsewhere (IcePop: Ling Team 2025).

    Args:
        log_ratio: d of a token, or its mean over a response, in nats; beyond +-20 it counts as that.
        low: the smallest weight that is kept.
        high: the largest.
    """
    ratio = _ratio(log_ratio)
    # A NaN stays one: it must not pass for a token that is left out.
    return jnp.where((ratio < low) | (ratio > high), 0.0, ratio)


def response_mean(
    values: Float[Array, "rows seq"], mask: Bool[Array, "rows seq"], segment_ids: Int[Array, "rows seq"]
) -> Float[Array, "rows seq"]:
    """The mean over the tokens of a response that are in the mask, at each of its tokens the same bits; 0 where it has none.

    Of log-ratios it is the logarithm of their ratios' geometric mean.

    Args:
        values: of each token.
        mask: True on the tokens that count; a prompt may have the segment of its response.
        segment_ids: which response of its row a token belongs to; the tokens of a segment lie side by side.
    """
    total = _segment_sums(jnp.where(mask, values, 0.0), segment_ids)
    count = _segment_sums(mask.astype(values.dtype), segment_ids)
    return total / jnp.maximum(count, 1.0)


def _ratio(log_ratio: Array) -> Array:
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _segment_sums(values: Array, segment_ids: Array) -> Array:
    """The sum over each segment, at every token of it.

    By shifts alone, in an order that is written down: a scatter would add in any order on a GPU, and a row may be split over devices.
    """
    sums = _running_sums(values, segment_ids, 1)
    follows = _shifted(segment_ids, -1, fill=-1)
    whole = jnp.where(
        segment_ids != follows, sums, 0.0
    )  # at the last token; the others get it by adding zeros to it
    return _running_sums(whole, segment_ids, -1)


def _running_sums(values: Array, segment_ids: Array, direction: int) -> Array:
    """At each token the sum over its segment up to there, from the left (direction 1) or from the right (-1). (Hillis and Steele 1986)"""
    reach = 1
    while reach < values.shape[1]:
        same = segment_ids == _shifted(segment_ids, direction * reach, fill=-1)
        values = values + jnp.where(same, _shifted(values, direction * reach, fill=0), 0.0)
        reach *= 2
    return values


def _shifted(array: Array, by: int, *, fill: int) -> Array:
    """The columns moved to the right by `by`, or to the left if it is negative; what comes in is `fill`."""
    kept = array[:, :-by] if by > 0 else array[:, -by:]
    sides = (by, 0) if by > 0 else (0, -by)
    return jnp.pad(kept, ((0, 0), sides), constant_values=fill)
