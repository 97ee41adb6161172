"""The angles of rotary position embedding: plain, or scaled for contexts longer than in training."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of the angles for long contexts. The kinds use different fields.

    `linear` slows every rotation by `factor` (Chen et al. 2023, https://arxiv.org/abs/2306.15595). `llama3` (section
    3.2 of https://arxiv.org/abs/2407.21783, formula in Meta's release of Llama 3.1) and `yarn` (Peng et al. 2023,
    https://arxiv.org/abs/2309.00071) slow only rotations that turn a few times or never within the original context,
    with a smooth transition.
    """

    kind: str
    """linear, llama3 or yarn."""
    factor: float
    """How many times slower rotations become, and about how many times longer the context."""
    original_max_positions: int = 8192
    """The context of the original training, in tokens (llama3, yarn)."""
    low_freq_factor: float = 1.0
    """Rotations that turn fewer times than this within the original context are slowed in full (llama3)."""
    high_freq_factor: float = 4.0
    """Rotations that turn more often than this are not changed (llama3)."""
    beta_fast: float = 32.0
    """Rotations with at least this many turns within the original context are not changed (yarn)."""
    beta_slow: float = 1.0
    """Rotations with at most this many turns within the original context are slowed in full (yarn)."""
    attention_factor: float | None = None
    """Factor on cosine and sine; None is the paper's 0.1 ln(factor) + 1 (yarn)."""

    def __post_init__(self) -> None:
        if self.factor < 1.0 or self.original_max_positions < 1:
            raise ValueError(
                f"RoPE scaling needs factor of at least 1 and original_max_positions of at least 1; got "
                f"{self.factor} and {self.original_max_positions}"
            )
        if not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"RoPE scaling: low_freq_factor={self.low_freq_factor} must be below "
                f"high_freq_factor={self.high_freq_factor}"
            )

    @property
    def amplitude(self) -> float:
        """The factor of cosine and sine."""
        if self.kind != "yarn":
            return 1.0
        return 0.1 * math.log(self.factor) + 1.0 if self.attention_factor is None else self.attention_factor


def rope_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None
) -> Float32[np.ndarray, " half"]:
    """Returns radians per position of each of the head_dim / 2 rotations: theta^(-2i / head_dim), scaled.

    They are computed in float64 on the host for all devices.
    """
    frequencies = theta ** (-2.0 * np.arange(head_dim // 2) / head_dim)
    if scaling is not None:
        slowed = frequencies / scaling.factor
        kept = _kept(frequencies, head_dim, theta, scaling)
        frequencies = kept * frequencies + (1.0 - kept) * slowed
    return frequencies.astype(np.float32)


def _kept(
    frequencies: Float[np.ndarray, " half"], head_dim: int, theta: float, scaling: RopeScaling
) -> Float[np.ndarray, " half"]:
    """Returns the share of the original speed that each rotation keeps: 1 is unchanged, 0 is slowed in full."""
    if scaling.kind == "linear":
        return np.zeros_like(frequencies)
    if scaling.kind == "llama3":
        turns = scaling.original_max_positions * frequencies / (2.0 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        return np.clip((turns - low) / (high - low), 0.0, 1.0)

    def pair_of(turns: float) -> float:
        """Returns the (fractional) pair that turns `turns` times within the original context."""
        ratio = math.log(scaling.original_max_positions / (turns * 2.0 * math.pi)) / math.log(theta)
        return head_dim * ratio / 2.0

    first = max(math.floor(pair_of(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_of(scaling.beta_slow)), head_dim - 1)
    # As in the published code, 0.001 avoids a division by 0.
    width = last - first if last != first else 0.001
    return 1.0 - np.clip((np.arange(head_dim // 2) - first) / width, 0.0, 1.0)
