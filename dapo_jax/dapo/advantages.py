"""Group-relative advantages, on the host in float64.

In float32 the mean of sixteen equal rewards is off by a rounding error, the standard deviation is a rounding
error too, and their quotient is an advantage of up to 0.26 out of nothing.
"""

import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Float


def group_advantages(
    rewards: npt.ArrayLike | Array, *, normalize_std: bool = True, eps: float = 1e-6
) -> Float[np.ndarray, "prompts group"]:
    r"""How much better each response did than the other responses to its prompt (DAPO Eq. 9).

    $$ \hat A_i = \frac{R_i - \mathrm{mean}(R)}{\mathrm{std}(R) + \mathrm{eps}} $$

    The standard deviation is the unbiased one (ddof = 1). A group of one response has no other to be
    compared with: its mean is taken as 0 and its standard deviation as 1.

    Args:
        rewards: `[prompts, group]`, the shaped rewards of each prompt's responses; any real dtype.
        normalize_std: False leaves the standard deviation out: the advantage is R_i - mean(R).
        eps: keeps the quotient finite for a group of nearly equal rewards.

    Returns:
        float64 advantages of the same shape; exactly 0 in a group of equal rewards.

    Raises:
        ValueError: `rewards` is not two-dimensional, has empty groups or holds a value that is not finite,
            or `eps` is not positive.

    >>> group_advantages([[1.0, -1.0, -1.0, -1.0], [1.0, 1.0, 1.0, 1.0]]).round(3).tolist()
    [[1.5, -0.5, -0.5, -0.5], [0.0, 0.0, 0.0, 0.0]]

    References:
        Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", 2025,
        https://arxiv.org/abs/2503.14476
    """
    values = np.asarray(rewards, dtype=np.float64)
    _check(values, eps)
    if values.shape[1] == 1:
        return values / (1.0 + eps) if normalize_std else values.copy()

    # Measured from the group's first reward, equal rewards are exact zeros, and so is all that follows.
    shifted = values - values[:, :1]
    centered = shifted - shifted.mean(axis=1, keepdims=True)
    if not normalize_std:
        return centered
    return centered / (shifted.std(axis=1, ddof=1, keepdims=True) + eps)


def _check(values: np.ndarray, eps: float) -> None:
    if values.ndim != 2 or values.shape[1] == 0:
        raise ValueError(
            f"rewards must be [prompts, group] with a group of 1 or more, got shape {values.shape}"
        )
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        prompt, response = bad[0]
        raise ValueError(
            f"rewards[{prompt}, {response}] is {values[prompt, response]}, the first of {len(bad)} values that are "
            "not finite; one of them makes its whole group's advantages NaN. Fix the reward function."
        )
    if not eps > 0:
        raise ValueError(f"eps must be positive, got {eps}: a group of equal rewards would divide 0 by 0")
