"""Length shaping of the reward. Token counts in, penalties out."""

import numpy as np


def overlong_penalty(
    response_tokens: int | np.integer | np.ndarray,
    *,
    max_response_tokens: int,
    buffer_tokens: int,
    penalty_factor: float = 1.0,
) -> float | np.ndarray:
    r"""Soft overlong punishment (DAPO Eq. 13), to be added to the reward.

    Nothing up to `max_response_tokens - buffer_tokens`, then a straight line down to `-penalty_factor` at
    `max_response_tokens`, and no further beyond it.

    Args:
        response_tokens: length of the response in *tokens*, the end token included; one or an array of them.
        max_response_tokens: L_max, where the full penalty is reached.
        buffer_tokens: L_cache, the length of the ramp before it.
        penalty_factor: the full penalty, as a positive number.

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
