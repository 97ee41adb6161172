"""Length shaping of the reward: a penalty that depends on the number of response tokens."""

import numpy as np


def overlong_penalty(
    response_tokens: int | np.integer | np.ndarray,
    *,
    max_response_tokens: int,
    buffer_tokens: int,
    penalty_factor: float = 1.0,
) -> float | np.ndarray:
    r"""Computes the soft overlong punishment (DAPO Eq. 13), which is added to the reward.

    The penalty is 0 up to `max_response_tokens - buffer_tokens` tokens. It then falls linearly to `-penalty_factor` at `max_response_tokens`, and
    stays constant for longer responses.

    Args:
        response_tokens: length of the response in *tokens*, including the end token. Either one number or an array.
        max_response_tokens: L_max, the length from which the full penalty applies.
        buffer_tokens: L_cache, the number of tokens before L_max over which the penalty grows.
        penalty_factor: absolute value of the full penalty.

    Returns:
        A float in [-penalty_factor, 0], or a float64 array if `response_tokens` is an array.

    Raises:
        ValueError: the factor is negative, or the buffer is outside (0, max_response_tokens].

    >>> [overlong_penalty(n, max_response_tokens=100, buffer_tokens=20) for n in (80, 90, 100, 101)]
    [0.0, -0.5, -1.0, -1.0]

    References:
        Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", 2025,
        https://arxiv.org/abs/2503.14476
    """
    if not 0 < buffer_tokens <= max_response_tokens:
        raise ValueError(
            f"buffer_tokens must be in (0, max_response_tokens] = (0, {max_response_tokens}], got {buffer_tokens}"
        )
    if not penalty_factor >= 0:
        raise ValueError(f"penalty_factor must be 0 or more (it is subtracted), got {penalty_factor}")
    free_tokens = max_response_tokens - buffer_tokens
    used_frac = np.clip((np.asarray(response_tokens) - free_tokens) / buffer_tokens, 0.0, 1.0)
    penalty = 0.0 - penalty_factor * used_frac  # unlike -x, 0.0 - x is never negative zero
    return penalty if isinstance(response_tokens, np.ndarray) else float(penalty)
