r"""Objectives by name, as pure functions with the signature of `dapo_loss`, and the rules by which an update calls them.

A keyword-only parameter without a default is an array that the update provides (`ARRAYS`). A parameter with a default is an option. Each function removes
values outside the mask, computes a loss per token, and returns the sum of `weights` times this loss.

In the formulas, $p = \exp(\texttt{logprobs})$ and $q = \exp(\texttt{old\_logprobs})$ are the probabilities of a token under the policy being trained and under
the old policy. $u = \log p - \log q$ is clamped to +-20, $r = e^u$ is the ratio, $A$ is the advantage, and $\ell$ is the loss of a token. $\mathrm{mean}_i$ and
$\sum_i$ are over the tokens of response i that are in the mask, and $\mathrm{sg}$ is a stop of the gradient. The value of a loss of the form $w A \log p$ with a
constant $w$ has no meaning: it is not 0 at the optimum, and it does not measure progress.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import jax.numpy as jnp
from jax import lax, nn
from jaxtyping import Array, Bool, Float, Int

from dapo_jax.dapo.losses import MAX_LOG_RATIO, MaskedTokens, clipped_surrogate, dapo_loss, is_clipped
from dapo_jax.dapo.metrics import Metric
from dapo_jax.dapo.responses import response_mean, response_sum
from dapo_jax.hints import check_choice, nearest

Tokens = Float[Array, "rows seq"]
Mask = Bool[Array, "rows seq"]
Ids = Int[Array, "rows seq"]
Result = tuple[Float[Array, ""], dict[str, Metric]]

ARRAYS = (
    "weights", "segment_ids", "positions", "sampler_logprobs", "entropy", "selected", "teacher_logprobs", "ref_logprobs",
)  # fmt: skip
"""Names of the arrays that an update can provide, each of shape [rows, seq]. `docs/write_an_objective.md` describes them."""

SHARED = {f"policy/{name}" for name in ("ratio", "ratio_max", "kl_old_k1", "kl_old_k3", "sampled_prob")}
"""Names of the metrics that training logs for every objective."""


def gspo_loss(
    logprobs: Tokens, old_logprobs: Tokens, advantages: Tokens, mask: Mask, *,
    weights: Tokens, segment_ids: Ids, clip_ratio_low: float = 3e-4, clip_ratio_high: float = 4e-4,
) -> Result:  # fmt: skip
    r"""GSPO (Zheng et al. 2025, https://arxiv.org/abs/2507.18071): the clipped surrogate loss with one ratio per response, the geometric mean of its tokens' ratios.

    $$ \ell = -\min\big(s A, \mathrm{clip}(s, 1-\epsilon_\text{low}, 1+\epsilon_\text{high}) A\big), \qquad s = e^{\mathrm{mean}_i(u)} $$

    Options: `clip_ratio_low` and `clip_ratio_high`, the distances of the clip from 1.
    """
    tokens, _, _, log_ratio, advantages = _cleaned(logprobs, old_logprobs, advantages, mask)
    sequence_ratio = jnp.exp(response_mean(log_ratio, mask, segment_ids))
    return _clipped(tokens, weights, sequence_ratio, advantages, clip_ratio_low, clip_ratio_high)


def gspo_token_loss(
    logprobs: Tokens, old_logprobs: Tokens, advantages: Tokens, mask: Mask, *,
    weights: Tokens, segment_ids: Ids, clip_ratio_low: float = 3e-4, clip_ratio_high: float = 4e-4,
) -> Result:  # fmt: skip
    r"""GSPO-token (Section 4.3 of the GSPO paper): the value of `gspo_loss`, with a gradient through each token's own log-probability only.

    $$ \ell = -\min\big(s A, \mathrm{clip}(s, 1-\epsilon_\text{low}, 1+\epsilon_\text{high}) A\big), \qquad s = e^{\min(10,\ \mathrm{sg}(\mathrm{mean}_i(u)) + \log p - \mathrm{sg}(\log p))} $$

    The gradient equals the gradient of `gspo_loss` if all tokens of a response have the same advantage and weight.
    Options: `clip_ratio_low` and `clip_ratio_high`, the distances of the clip from 1.
    """
    tokens, live, _, log_ratio, advantages = _cleaned(logprobs, old_logprobs, advantages, mask)
    mean = lax.stop_gradient(response_mean(log_ratio, mask, segment_ids))
    sequence_ratio = jnp.exp(jnp.minimum(mean + (live - lax.stop_gradient(live)), 10.0))
    return _clipped(tokens, weights, sequence_ratio, advantages, clip_ratio_low, clip_ratio_high)


def gmpo_loss(
    logprobs: Tokens, old_logprobs: Tokens, advantages: Tokens, mask: Mask, *,
    weights: Tokens, segment_ids: Ids, clip_ratio_low: float = 0.4, clip_ratio_high: float = 0.4,
) -> Result:  # fmt: skip
    r"""GMPO (Zhao et al. 2025, https://arxiv.org/abs/2507.20673): the geometric mean of a response's ratios, each clipped in log space.

    $$ \ell = -A\, e^{\mathrm{mean}_i(u')}, \qquad u' = \min(u, \epsilon_\text{high}) \text{ if } A > 0,\ \max(u, -\epsilon_\text{low}) \text{ if } A < 0,\ 0 \text{ if } A = 0 $$

    Options: `clip_ratio_low` and `clip_ratio_high`, the bounds of the log-ratio. 0.4 allows ratios from 0.67 to 1.49.
    """
    tokens, _, _, log_ratio, advantages = _cleaned(logprobs, old_logprobs, advantages, mask)
    above = (advantages > 0) & (log_ratio > clip_ratio_high)
    below = (advantages < 0) & (log_ratio < -clip_ratio_low)
    bounded = jnp.where(above, clip_ratio_high, jnp.where(below, -clip_ratio_low, log_ratio))
    mean = response_mean(jnp.where(advantages == 0, 0.0, bounded), mask, segment_ids)
    return _summed(tokens, weights, -advantages * jnp.exp(mean)), _clip_shares(tokens, above, below)


def cispo_loss(
    logprobs: Tokens, old_logprobs: Tokens, advantages: Tokens, mask: Mask, *,
    weights: Tokens, floor: float = 0.0, cap: float = 5.0,
) -> Result:  # fmt: skip
    r"""CISPO (MiniMax-M1 2025, https://arxiv.org/abs/2506.13585): the policy gradient of every token, with the ratio as a bounded constant weight.

    $$ \ell = -\mathrm{sg}\big(\mathrm{clip}(r, \text{floor}, \text{cap})\big) A \log p $$

    Options: `floor` and `cap`, the smallest and the largest weight.
    """
    tokens, live, _, log_ratio, advantages = _cleaned(logprobs, old_logprobs, advantages, mask)
    ratio = jnp.exp(lax.stop_gradient(log_ratio))
    loss = _summed(tokens, weights, -jnp.clip(ratio, floor, cap) * advantages * live)
    return loss, _clip_shares(tokens, ratio > cap, ratio < floor)


def sapo_loss(
    logprobs: Tokens, old_logprobs: Tokens, advantages: Tokens, mask: Mask, *,
    weights: Tokens, tau_positive: float = 1.0, tau_negative: float = 1.05,
) -> Result:  # fmt: skip
    r"""SAPO (https://arxiv.org/abs/2511.20347): a sigmoid of the ratio replaces the clip, so the gradient falls smoothly with the distance of the ratio from 1.

    $$ \ell = -\tfrac{4}{\tau}\, \sigma\big(\tau (r - 1)\big) A, \qquad \tau = \tau_\text{positive} \text{ if } A > 0 \text{ else } \tau_\text{negative} $$

    Options: `tau_positive` and `tau_negative`, the steepness for positive and for all other advantages.
    """
    tokens, _, _, log_ratio, advantages = _cleaned(logprobs, old_logprobs, advantages, mask)
    tau = jnp.where(advantages > 0, jnp.full_like(advantages, tau_positive), tau_negative)
    distance = tau * jnp.expm1(log_ratio)
    # The gradient contains 1 - sigmoid, which float32 would round away for large ratios. The sigmoid of a negative number is accurate.
    small = nn.sigmoid(jnp.where(distance > 0, -distance, distance))
    gate = jnp.where(distance > 0, 1.0 - small, small)
    return _summed(tokens, weights, -gate * (4.0 / tau) * advantages), {}


def dppo_loss(
    logprobs: Tokens, old_logprobs: Tokens, advantages: Tokens, mask: Mask, *,
    weights: Tokens, divergence: str = "tv", delta_low: float = 0.2, delta_high: float = 0.2,
    cap: float | None = None, kl: float = 0.0,
) -> Result:  # fmt: skip
    r"""DPPO (https://arxiv.org/abs/2602.04879): drops tokens by the change of their probability instead of their ratio.

    $$ \ell = -m\, r A + \text{kl}\, u^2, \qquad m = [D \le \delta_\text{high}] \text{ if } A > 0 \text{ else } [-D \le \delta_\text{low}], \qquad D_\text{tv} = p - q,\ D_\text{kl} = \mathrm{sign}(p - q)\, \mathrm{KL}(q \,\Vert\, p) $$

    KL(q || p) is the divergence between two choices: this token or any other token. The factor m has no gradient.
    Options: `divergence` (tv or kl), `delta_low` and `delta_high`, the largest fall and rise that are kept, `cap`, with which the first
    term is $-m\, \mathrm{sg}(\min(r, \text{cap})) A \log p$, and `kl`, the coefficient of the second term, which covers all tokens.
    """
    check_choice("divergence", divergence, ("tv", "kl"))
    tokens, live, old, log_ratio, advantages = _cleaned(logprobs, old_logprobs, advantages, mask)
    now = lax.stop_gradient(live)
    p, q = jnp.exp(now), jnp.exp(old)
    change = p - q
    if divergence == "kl":
        of_others = -jnp.expm1(old) * jnp.log((1e-8 - jnp.expm1(old)) / (1e-8 - jnp.expm1(now)))
        binary_kl = q * (old - now) + of_others
        change = jnp.where(p > q, binary_kl, -binary_kl)
    above, below = (advantages > 0) & (change > delta_high), (advantages < 0) & (-change > delta_low)
    ratio = jnp.exp(log_ratio)
    gain = ratio if cap is None else lax.stop_gradient(jnp.minimum(ratio, cap)) * live
    token_loss = jnp.where(above | below, 0.0, -gain * advantages) + kl * log_ratio * log_ratio
    return _summed(tokens, weights, token_loss), _clip_shares(tokens, above, below)


def vespo_loss(
    logprobs: Tokens, old_logprobs: Tokens, advantages: Tokens, mask: Mask, *,
    weights: Tokens, segment_ids: Ids, k_positive: float = 2.0, lambda_positive: float = 3.0,
    k_negative: float = 3.0, lambda_negative: float = 2.0,
) -> Result:  # fmt: skip
    r"""VESPO (https://arxiv.org/abs/2602.10693): the policy gradient of every token, weighted by a smooth function of the probability ratio of the whole response.

    $$ \ell = -e^{\lambda + k U - \lambda e^U} A \log p, \qquad U = \mathrm{sg}\big(\mathrm{clip}(\textstyle\sum_i u, \log 10^{-8}, 20)\big) $$

    Use it with `loss.old_logprobs=sampler`, so that the ratio is to the policy that sampled the response.
    Options: `k_positive` and `lambda_positive` for advantages of 0 or more, `k_negative` and `lambda_negative` for negative advantages.
    """
    tokens, live, _, log_ratio, advantages = _cleaned(logprobs, old_logprobs, advantages, mask)
    total = response_sum(lax.stop_gradient(log_ratio), mask, segment_ids)
    w = jnp.clip(total, math.log(1e-8), 20.0)
    good = advantages >= 0
    k = jnp.where(good, jnp.full_like(w, k_positive), k_negative)
    scale = jnp.where(good, jnp.full_like(w, lambda_positive), lambda_negative)
    return _summed(tokens, weights, -jnp.exp(scale + k * w - scale * jnp.exp(w)) * advantages * live), {}


def reinforce_loss(
    logprobs: Tokens, old_logprobs: Tokens, advantages: Tokens, mask: Mask, *,
    weights: Tokens, cap: float | None = 2.0,
) -> Result:  # fmt: skip
    r"""REINFORCE (Williams 1992; GPG, https://arxiv.org/abs/2504.02546, is the form without weights): the policy gradient, with the ratio as a capped constant weight.

    $$ \ell = -\mathrm{sg}\big(\min(r, \text{cap})\big) A \log p $$

    Option: `cap`, the largest weight. If None, all weights are 1.
    """
    if cap is not None:
        return cispo_loss(logprobs, old_logprobs, advantages, mask, weights=weights, cap=cap)
    tokens, live, _, _, advantages = _cleaned(logprobs, old_logprobs, advantages, mask)
    return _summed(tokens, weights, -advantages * live), {}


def dro_loss(
    logprobs: Tokens, old_logprobs: Tokens, advantages: Tokens, mask: Mask, *,
    weights: Tokens, beta: float = 0.1,
) -> Result:  # fmt: skip
    r"""DRO (https://arxiv.org/abs/2405.19107; Kimi k1.5, https://arxiv.org/abs/2501.12599): the policy gradient with a quadratic penalty on the log-ratio.

    $$ \ell = -A \log p + \tfrac{\beta}{2} u^2 $$

    Option: `beta`, the coefficient of the penalty.
    """
    tokens, live, _, log_ratio, advantages = _cleaned(logprobs, old_logprobs, advantages, mask)
    return _summed(tokens, weights, -advantages * live + 0.5 * beta * log_ratio * log_ratio), {}


def topr_loss(
    logprobs: Tokens, old_logprobs: Tokens, advantages: Tokens, mask: Mask, *, weights: Tokens
) -> Result:
    r"""TOPR (Le Roux et al. 2025, https://arxiv.org/abs/2503.14286): the policy gradient, where only tokens with advantages of 0 or less are weighted by their ratio, which is at most 1.

    $$ \ell = -\mathrm{sg}\big(1 \text{ if } A > 0 \text{ else } \min(r, 1)\big) A \log p $$

    The paper uses the ratio of the whole response; this is the form with the ratio of each token. There are no options.
    """
    tokens, live, _, log_ratio, advantages = _cleaned(logprobs, old_logprobs, advantages, mask)
    taper = jnp.exp(lax.stop_gradient(jnp.where(advantages > 0, 0.0, jnp.minimum(log_ratio, 0.0))))
    return _summed(tokens, weights, -taper * advantages * live), {}


def kl_cov_loss(
    logprobs: Tokens, old_logprobs: Tokens, advantages: Tokens, mask: Mask, *,
    weights: Tokens, selected: Mask, coef: float = 1.0,
) -> Result:  # fmt: skip
    r"""KL-Cov (Cui et al. 2025, https://arxiv.org/abs/2505.22617): the surrogate loss without a clip, and a penalty on the log-ratio of the selected tokens.

    $$ \ell = -r A + \text{coef}\, |u|\, [\text{selected}] $$

    `selected` marks the tokens with the largest covariance of advantage and log-probability (`loss.select=high_covariance`).
    Option: `coef`, the coefficient of the penalty.
    """
    tokens, _, _, log_ratio, advantages = _cleaned(logprobs, old_logprobs, advantages, mask)
    # In JAX, the gradient of |u| at 0 is 1, but in a step's first update u is 0 for all tokens, and the penalty must not push them down.
    distance = log_ratio * jnp.sign(lax.stop_gradient(log_ratio))
    penalty = jnp.where(selected, coef * distance, 0.0)
    return _summed(tokens, weights, penalty - jnp.exp(log_ratio) * advantages), {}


OBJECTIVES: dict[str, Callable[..., Any]] = {
    "clip": dapo_loss,
    "gspo": gspo_loss,
    "gspo_token": gspo_token_loss,
    "gmpo": gmpo_loss,
    "cispo": cispo_loss,
    "sapo": sapo_loss,
    "dppo": dppo_loss,
    "vespo": vespo_loss,
    "reinforce": reinforce_loss,
    "dro": dro_loss,
    "topr": topr_loss,
    "kl_cov": kl_cov_loss,
}
"""The objectives of this package, by the names that `loss.objective` accepts."""


def wanted(objective: Callable[..., Any]) -> frozenset[str]:
    """Returns the names of the arrays that an objective requires: its keyword-only parameters without a default. Values set by a `partial` are not required."""
    found = inspect.signature(objective).parameters.values()
    return frozenset(one.name for one in found if one.kind is one.KEYWORD_ONLY and one.default is one.empty)


def options_of(objective: Callable[..., Any]) -> dict[str, Any]:
    """Returns the options of an objective with their defaults: its parameters with a default, except arrays."""
    found = inspect.signature(objective).parameters.items()
    return {name: one.default for name, one in found if one.default is not one.empty and name not in ARRAYS}


def load_objective(spec: str | Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns an objective with its options set.

    Args:
        spec: a name in `OBJECTIVES`, or a function.
        options: values for parameters with a default.

    Raises:
        ValueError: the name is unknown, or the objective does not have an option.
    """
    if isinstance(spec, str) and spec not in OBJECTIVES:
        near, forms = nearest(spec, OBJECTIVES, least=0.0)[0], "module:function and path/to/file.py:function"
        raise ValueError(f"no objective is named {spec!r}; did you mean {near!r}? Other forms are {forms}")
    objective = OBJECTIVES[spec] if isinstance(spec, str) else spec
    known = options_of(objective)
    for unknown in sorted(options.keys() - known.keys()):
        hint = "".join(f"; did you mean {near!r}?" for near in nearest(unknown, known, least=0.0))
        raise ValueError(f"the objective has no option {unknown!r}, only {sorted(known)}{hint}")
    return partial(objective, **options)


def with_shared_metrics(objective: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an objective that also returns the metrics `SHARED`, if `objective` does not return them itself."""

    @wraps(objective)
    def measured(*four: Array, **arrays: Array) -> tuple[Array, Mapping[str, Metric]]:
        loss, metrics = objective(*four, **arrays)
        if metrics.keys() >= SHARED:
            return loss, metrics
        of_ratios = dapo_loss(*four)[1]
        return loss, {name: of_ratios[name] for name in SHARED} | dict(metrics)

    return measured


def _cleaned(
    logprobs: Array, old_logprobs: Array, advantages: Array, mask: Array
) -> tuple[MaskedTokens, Array, Array, Array, Array]:
    """Returns operations on the mask, log p, log q, u and A. The arrays are 0 outside the mask, and only log p and u have a gradient."""
    tokens = MaskedTokens(logprobs, mask, old_logprobs=old_logprobs, advantages=advantages)
    live, old = tokens.clean(logprobs), tokens.constant(old_logprobs)
    log_ratio = jnp.clip(live - old, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return tokens, live, old, log_ratio, tokens.constant(advantages)


def _summed(tokens: MaskedTokens, weights: Array, token_loss: Array) -> Float[Array, ""]:
    return jnp.sum(tokens.weights(weights) * token_loss)


def _clipped(
    tokens: MaskedTokens, weights: Array, ratio: Array, advantages: Array, low: float, high: float
) -> Result:
    """Returns the clipped surrogate loss of a ratio, and the shares of clipped tokens."""
    surrogate = clipped_surrogate(ratio, advantages, low, high)
    shares = _clip_shares(tokens, *is_clipped(ratio, advantages, low, high))
    return _summed(tokens, weights, -surrogate), shares


def _clip_shares(tokens: MaskedTokens, above: Array, below: Array) -> dict[str, Metric]:
    return {"policy/clip_high_frac": tokens.mean(above), "policy/clip_low_frac": tokens.mean(below)}
