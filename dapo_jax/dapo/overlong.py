"""Length shaping of the reward: from numbers of tokens to penalties."""

import numpy as np


def overlong_penalty(
    response_tokens: int | np.integer | np.ndarray,
    *,
    max_response_tokens: int,
    buffer_tokens: int,
    penalty_factor: float = 1.0,
) -> float | np.ndarray:
    r"""Soft overlong punishment (DAPO Eq. 13), to be added to the reward.

    The penalty is 0 up to `max_response_tokens - buffer_tokens` tokens, then falls linearly to `-penalty_factor` at `max_response_tokens`, and is
    constant beyond.

    Args:
        response_tokens: length of the response in *tokens*, the end token included; one or an array of them.
        max_response_tokens: L_max, the length with the full penalty.
        buffer_tokens: L_cache, the length of the ramp before L_max.
        penalty_factor: the full penalty, a positive number.

    Returns:
        A float in [-penalty_factor, 0]; a float64 array for an array.

    Raises:
        ValueError: a negative length, a buffer outside (0, max_response_tokens], a factor below 0.

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
    lengths = np.asarray(response_tokens)
    if lengths.size and lengths.min() < 0:
        raise ValueError(f"response_tokens must be 0 or more, got {lengths.min()}")

    free_tokens = max_response_tokens - buffer_tokens
    used_frac = np.clip((lengths - free_tokens) / buffer_tokens, 0.0, 1.0)
    penalty = 0.0 - penalty_factor * used_frac  # 0.0 - x rather than -x: no negative zero
    return penalty if isinstance(response_tokens, np.ndarray) else float(penalty)
