r"""Selections by name (`loss.select`): functions that return which tokens of an update enter the loss.

As in an objective, a keyword-only parameter without a default is an array, and a parameter with a default is an option. Arrays contain all tokens of an update: fields
of `Microbatch`, and `logprobs` and `entropy` of the policy at the start of the step. The order of tokens and the number of devices do not change the result, because
tokens are compared with a threshold and only integers are added. Tokens with equal values are treated alike.

In the formulas, $A$ is the advantage and $p$ the probability of a token. $N$ is the number of tokens in the mask, and $\mathrm{mean}$ is the mean over them.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

Tokens = Float[Array, " tokens"]
Mask = Bool[Array, " tokens"]


def at_least_kth(values: Tokens, mask: Mask, k: Array | int) -> Mask:
    """Returns the tokens in the mask whose value is at least the k-th largest in the mask, as float32, or the whole mask if it has fewer than k tokens."""
    order = _ordered(values)
    return mask & (order >= _largest(lambda level: (mask & (order >= level)).sum() >= k))


def high_entropy(mask: Mask, *, entropy: Tokens, frac: float = 0.2) -> Mask:
    r"""Keeps the tokens with the highest entropy (Wang et al. 2025, https://arxiv.org/abs/2506.01939).

    $$ H \ge \mathrm{quantile}_{1 - \text{frac}}(H), \text{ interpolated linearly} $$

    Option: `frac`, the share of tokens to keep. The number of tokens is 1 + floor(frac (N - 1)).
    """
    return at_least_kth(entropy, mask, 1 + _share(frac, mask.sum() - 1))


def low_covariance(
    mask: Mask, *, advantages: Tokens, logprobs: Tokens, noise: Tokens,
    frac: float = 2e-4, low: float = 1.0, high: float = 5.0,
) -> Mask:  # fmt: skip
    r"""Drops random tokens among those with a high covariance of advantage and log-probability (Clip-Cov, Cui et al. 2025, https://arxiv.org/abs/2505.22617).

    $$ \text{all except } \max(1, \lfloor \text{frac}\, N \rfloor) \text{ random tokens with } \text{low} < (A - \mathrm{mean}(A)) (\log p - \mathrm{mean}(\log p)) < \text{high} $$

    Options: `frac`, the share of tokens to drop, and `low` and `high`, the range of the covariance.
    """
    c = _covariance(mask, advantages, logprobs)
    within = mask & (c > low) & (c < high)
    return mask & ~at_least_kth(noise, within, jnp.maximum(1, _share(frac, mask.sum())))


def high_covariance(mask: Mask, *, advantages: Tokens, logprobs: Tokens, frac: float = 2e-4) -> Mask:
    r"""Selects the tokens with the highest covariance of advantage and log-probability (KL-Cov, Cui et al. 2025, https://arxiv.org/abs/2505.22617).

    $$ \max(1, \lfloor \text{frac}\, N \rfloor) \text{ tokens with the largest } (A - \mathrm{mean}(A)) (\log p - \mathrm{mean}(\log p)) $$

    Option: `frac`, the share of tokens to select.
    """
    c = _covariance(mask, advantages, logprobs)
    return at_least_kth(c, mask, jnp.maximum(1, _share(frac, mask.sum())))


def low_second_moment(mask: Mask, *, logprobs: Tokens, sampler_logprobs: Tokens, limit: float = 0.04) -> Mask:
    r"""Drops the tokens on which policy and sampler differ most, until the mean square of the log-ratios is below a limit (M2PO, https://arxiv.org/abs/2510.01161).

    $$ d^2 \le \max \{ t : \mathrm{mean}(d^2 \text{ where } d^2 \le t) < \text{limit} \}, \qquad d = \log p - \log p_\text{sampler} $$

    Option: `limit`, which the mean must not reach.
    """
    square = (logprobs - sampler_logprobs) ** 2
    order = _ordered(square)
    return mask & (order <= _largest(lambda level: _mean(square, mask & (order <= level)) < limit))


_ALL: tuple[Callable[..., Mask], ...] = (high_entropy, low_covariance, high_covariance, low_second_moment)
SELECTIONS = {selection.__name__: selection for selection in _ALL}
"""The selections, by the names that `loss.select` accepts."""


def _covariance(mask: Mask, advantages: Tokens, logprobs: Tokens) -> Tokens:
    return (advantages - _mean(advantages, mask)) * (logprobs - _mean(logprobs, mask))


def _share(frac: float, count: Array) -> Array:
    return jnp.floor(frac * count.astype(jnp.float32)).astype(jnp.int32)


def _mean(values: Tokens, mask: Mask) -> Float[Array, ""]:
    """Returns the mean over the mask, or 0 if it is empty. Values are rounded to 2^-30 of the largest. The sums of their hexadecimal digits are exact up to 10^8 tokens."""
    values = jnp.where(mask, values, 0.0).astype(jnp.float32)
    _, exponent = jnp.frexp(jnp.abs(values).max())
    integers = jnp.round(jnp.ldexp(values, 30 - exponent)).astype(jnp.int32)
    total = (integers >> 28).sum().astype(jnp.float32)
    for shift in range(24, -1, -4):
        total = 16.0 * total + ((integers >> shift) & 15).sum().astype(jnp.float32)
    return jnp.ldexp(total, exponent - 30) / jnp.maximum(1, mask.sum()).astype(jnp.float32)


def _ordered(values: Tokens) -> Array:
    """Maps values to integers of 32 bits with the same order. 0 and -0 are equal."""
    bits = lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values).astype(jnp.float32), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest(holds: Callable[[Array], Array]) -> Array:
    """Returns the largest integer of 32 bits for which `holds` is True, by bisection. `holds` must be True for all smaller integers."""

    def with_bit(i: Array, found: Array) -> Array:
        tried = found | jnp.uint32(1 << 31) >> i.astype(jnp.uint32)
        return jnp.where(holds(tried), tried, found)

    return lax.fori_loop(0, 32, with_bit, jnp.uint32(0))
