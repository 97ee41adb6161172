"""Group-relative advantages, on the host in float64.

In float32, the mean and the standard deviation of sixteen equal rewards both have rounding errors. Dividing the deviation from the mean by the
standard deviation then yields an advantage of up to 0.26 instead of 0.
"""

import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Float


def group_advantages(
    rewards: npt.ArrayLike | Array, *, normalize_std: bool = True, eps: float = 1e-6
) -> Float[np.ndarray, "prompts group"]:
    r"""Normalizes rewards within the group of responses to a prompt (DAPO Eq. 9).

    $$ \hat A_i = \frac{R_i - \mathrm{mean}(R)}{\mathrm{std}(R) + \mathrm{eps}} $$

    The standard deviation is the sample standard deviation (ddof = 1). For a group of one response, mean 0 and standard deviation 1 are used.

    Args:
        rewards: `[prompts, group]`, the rewards of each prompt's responses after shaping, in any real dtype.
        normalize_std: divide by the standard deviation. If False, the advantage is R_i - mean(R).
        eps: keeps the quotient finite if all rewards of a group are nearly equal.

    Returns:
        float64 advantages of the same shape; exactly 0 in a group of equal rewards.

    Raises:
        ValueError: `rewards` is not two-dimensional, has empty groups or contains a non-finite value,
            or `eps` is not positive.

    >>> group_advantages([[1.0, -1.0, -1.0, -1.0], [1.0, 1.0, 1.0, 1.0]]).round(3).tolist()
    [[1.5, -0.5, -0.5, -0.5], [0.0, 0.0, 0.0, 0.0]]

    References:
        Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", 2025,
        https://arxiv.org/abs/2503.14476
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 2 or values.shape[1] == 0:
        raise ValueError(
            f"rewards must be [prompts, group] with at least one response per group, got shape {values.shape}"
        )
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        prompt, response = bad[0]
        raise ValueError(
            f"rewards[{prompt}, {response}] is {values[prompt, response]}, the first of {len(bad)} values that are "
            "not finite. A single such reward makes the advantages of its whole group NaN. Fix the reward function."
        )
    if not eps > 0:
        raise ValueError(f"eps must be positive, got {eps}: a group of equal rewards would divide 0 by 0")
    if values.shape[1] == 1:
        return values / (1.0 + eps) if normalize_std else values.copy()

    # After the first reward is subtracted, equal rewards are exactly zero, and so are their advantages.
    shifted = values - values[:, :1]
    centered = shifted - shifted.mean(axis=1, keepdims=True)
    if not normalize_std:
        return centered
    return centered / (shifted.std(axis=1, ddof=1, keepdims=True) + eps)
