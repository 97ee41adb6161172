r"""Score centering (Marek and Ryabinin 2026, https://arxiv.org/abs/2609.20807): removes the push that a policy gets because the sampler is a different policy.

Let $p$ be the policy being trained, $o$ the old policy, $q$ the sampler, $w$ a token's weight and $A$ its advantage. The gradient of an objective at a token $y$ is
$-w A\, c(y)\, \nabla \log p_y$. If $y$ comes from $q$, the mean of $c(y) \nabla \log p_y$ is not 0, even if the token has no effect on the reward. The term

$$ \sum w A \sum_{v \in H} \mathrm{sg}(\kappa_v) \log p_v, \qquad \kappa_v = q_v\, c(v) - \alpha p_v, \qquad \alpha = \frac{q_t}{p_t} c(t) $$

subtracts this mean. $H$ is the head, the tokens that the sampler finds most probable. All other tokens are the tail $t$, with the probability $q_t = 1 - \sum_H q$, and $p_t$ and $o_t$ in the same
way. Inside the tail, $q$ and $o$ are assumed to be proportional to $p$. The tail then has one coefficient, so it is treated as one more token. If $H$ is the whole vocabulary, the term is exact.

The coefficients $c$ are not written down for any objective: $-w A\, c(v)$ is the derivative of the objective by $\log p_v$.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from dapo_jax.dapo.metrics import Max, Metric, token_mean

FLOOR = 1e-6
"""Smallest probability of a tail."""

MOST_HEAD = 1.0001
"""Largest sum of the probabilities of a head. A larger sum means that they were not normalized over the whole vocabulary."""

HEAD_MAX = "center/sampler_head_max"
"""Name of the largest probability of a head under the sampler."""

_Heads = Float[Array, "rows seq heads"]


def centering_term(
    objective: Callable[[Array, Array, Array], Array],
    logprobs: _Heads,
    old_logprobs: _Heads,
    sampler_logprobs: _Heads,
    mask: Bool[Array, "rows seq"],
    scale: Float[Array, "rows seq"],
) -> tuple[Float[Array, ""], dict[str, Metric]]:
    r"""Returns the term to add to the loss, and the metrics `center/*`. Only `logprobs` is differentiated.

    Args:
        objective: maps log-probabilities under the policy, the old policy and the sampler to the loss. Each is [rows, seq, heads + 1], and the last entry is the tail. The
            loss must be a sum over entries, and the entries of a position have its weight and advantage.
        logprobs: log-probabilities of the heads under the policy being trained, in nats. The ids of a head must differ.
        old_logprobs: the same under the old policy.
        sampler_logprobs: the same under the sampler.
        mask: True on response tokens. Other positions are ignored, and their values may be NaN.
        scale: $w A$ of each position, for the metric `center/push`.

    Returns:
        The term, whose value has no meaning, and metrics. `center/push` is the mean of $\sum_H |q_v c(v) - E p_v|$ over the positions in the mask. This is the gradient of
        the term by the logits of the head, divided by $w A$, and $E$ is the mean of $c$ under $q$. It is 0 where $w A$ is 0. `center/sampler_head` and `center/trainer_head` are the mean probabilities
        of the head.
    """

    def known(values: Array) -> Array:
        return jnp.where(mask[..., None], values.astype(logprobs.dtype), 0.0)

    def with_tail(values: Array) -> Array:
        values = known(lax.stop_gradient(values))
        tail = jnp.maximum(1.0 - jnp.exp(values).sum(-1, keepdims=True), FLOOR)
        return jnp.concatenate([values, jnp.log(tail)], -1)

    current, old, sampler = map(with_tail, (logprobs, old_logprobs, sampler_logprobs))
    p, q = jnp.exp(current), jnp.exp(sampler)
    slopes = q * lax.stop_gradient(jax.grad(objective)(current, old, sampler))
    pull = slopes[..., -1:] * (p / p[..., -1:]) - slopes
    term = jnp.sum(pull[..., :-1] * known(logprobs))
    push = jnp.abs(slopes - slopes.sum(-1, keepdims=True) * p)[..., :-1].sum(-1)
    pushed = mask & (scale != 0)
    push = jnp.where(pushed, push / jnp.where(pushed, jnp.abs(scale), 1.0), 0.0)
    heads = [each[..., :-1].sum(-1) for each in (q, p)]
    return term, {
        "center/push": token_mean(push, mask),
        "center/sampler_head": token_mean(heads[0], mask),
        "center/trainer_head": token_mean(heads[1], mask),
        HEAD_MAX: Max(jnp.where(mask, heads[0], 0.0).max()),
    }
