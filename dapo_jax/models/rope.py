"""Angles of rotary position embedding (RoPE), optionally scaled for contexts that are longer than in the original training."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Array, Float, Float32

RopeTables = tuple[Array, ...]
"""Cosine and sine of the RoPE angles, each [rotated / 2, tokens], and with `query_growth`, also the factor of each query, [1, tokens]."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of RoPE frequencies for long contexts. Each kind of scaling uses some of the fields.

    `linear` divides every frequency by `factor` (Chen et al. 2023, https://arxiv.org/abs/2306.15595). `llama3` (section
    3.2 of https://arxiv.org/abs/2407.21783; the formula is in Meta's release of Llama 3.1) and `yarn` (Peng et al. 2023,
    https://arxiv.org/abs/2309.00071) divide only low frequencies, which complete few or no turns within the original
    context. The transition to high frequencies is smooth. `longrope` (Ding et al. 2024, https://arxiv.org/abs/2402.13753)
    has a divisor for each frequency.
    """

    kind: str
    """The kind of scaling: linear, llama3, yarn or longrope."""
    factor: float
    """Divisor of the scaled frequencies. The context becomes longer by about the same factor."""
    original_max_positions: int = 8192
    """Context length in the original training, in tokens (llama3, yarn)."""
    low_freq_factor: float = 1.0
    """Frequencies with fewer turns than this within the original context are divided by the full factor (llama3)."""
    high_freq_factor: float = 4.0
    """Frequencies with more turns than this within the original context are not changed (llama3)."""
    beta_fast: float = 32.0
    """For yarn: frequencies that complete at least this many turns within the original context are not changed."""
    beta_slow: float = 1.0
    """For yarn: frequencies that complete at most this many turns within the original context are divided by the full factor."""
    truncate: bool = True
    """For yarn: whether the first and the last dimension pair of the transition are rounded to whole numbers."""
    attention_factor: float | None = None
    """Factor by which cosine and sine are multiplied (yarn, longrope). None: 0.1 ln(factor) + 1 for yarn, as in the paper, and
    sqrt(1 + ln(factor) / ln(original_max_positions)) for longrope."""
    mscale_all_dim: float = 0.0
    """For yarn with latent attention: a number s by which scores grow by the factor (0.1 s ln(factor) + 1)^2. Other attention does not read it."""
    short_factor: tuple[float, ...] = ()
    """For longrope: divisor of each frequency if no sequence is longer than `original_max_positions`."""
    long_factor: tuple[float, ...] = ()
    """For longrope: divisor of each frequency if sequences may be longer."""
    long: bool = True
    """For longrope: whether `long_factor` is used. It is chosen once for a run, because cached keys must not change."""

    def __post_init__(self) -> None:
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.factor < 1.0 or self.original_max_positions < 1 or low >= high:
            raise ValueError(
                f"factor={self.factor} and original_max_positions={self.original_max_positions} of a RoPE scaling must be at least 1, "
                f"and low_freq_factor={low} must be below high_freq_factor={high}"
            )

    @property
    def amplitude(self) -> float:
        """The factor by which cosine and sine are multiplied."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "yarn":
            return 0.1 * math.log(self.factor) + 1.0
        return math.sqrt(1.0 + math.log(self.factor) / math.log(self.original_max_positions))


@dataclass(frozen=True, kw_only=True)
class Rope:
    """The rotation of a layer's queries and keys."""

    theta: float = 10_000.0
    scaling: RopeScaling | None = None
    """Scaling of the angles for long contexts. If None, angles are not scaled."""
    share: float = 1.0
    """Share of each head's dimensions that are rotated, from the first on. The others pass unchanged."""
    proportional: bool = False
    """Whether `share` is the share of pairs that are rotated, of the pairs of dimension i and i + head_dim / 2. Others have the frequency 0 (Gemma 4)."""
    head_dim: int = 0
    """Number of dimensions of a head, if it differs from the decoder's."""

    def width(self, head_dim: int) -> int:
        """Returns the number of rotated dimensions of a head."""
        head_dim = self.head_dim or head_dim
        return head_dim if self.proportional else int(head_dim * self.share)

    def frequencies(self, head_dim: int) -> Float32[np.ndarray, " half"]:
        """Returns the frequency of each pair of rotated dimensions."""
        found = rope_frequencies(width := self.width(head_dim), self.theta, self.scaling)
        rotated = int(self.share * width // 2) if self.proportional else len(found)
        return np.where(np.arange(len(found)) < rotated, found, np.float32(0.0))


def rope_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None
) -> Float32[np.ndarray, " half"]:
    """Returns the head_dim / 2 frequencies in radians per position: theta^(-2i / head_dim), with scaling applied.

    `head_dim` is the number of rotated dimensions.

    They are computed in float64 on the host, so that they are the same on all devices.
    """
    frequencies = theta ** (-2.0 * np.arange(head_dim // 2) / head_dim)
    if scaling is not None and scaling.kind == "longrope":
        frequencies = frequencies / np.array(scaling.long_factor if scaling.long else scaling.short_factor)
    elif scaling is not None:
        slowed = frequencies / scaling.factor
        kept = _kept(frequencies, head_dim, theta, scaling)
        frequencies = kept * frequencies + (1.0 - kept) * slowed
    return frequencies.astype(np.float32)


def _kept(
    frequencies: Float[np.ndarray, " half"], head_dim: int, theta: float, scaling: RopeScaling
) -> Float[np.ndarray, " half"]:
    """Returns the interpolation weight of each original frequency: 1 if it is unchanged, 0 if it is divided by the full factor."""
    if scaling.kind == "linear":
        return np.zeros_like(frequencies)
    if scaling.kind == "llama3":
        turns = scaling.original_max_positions * frequencies / (2.0 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        return np.clip((turns - low) / (high - low), 0.0, 1.0)

    def pair_of(turns: float) -> float:
        """Returns the (fractional) index of the dimension pair that completes `turns` turns within the original context."""
        ratio = math.log(scaling.original_max_positions / (turns * 2.0 * math.pi)) / math.log(theta)
        return head_dim * ratio / 2.0

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    # As in the published code, 0.001 avoids a division by 0.
    width = last - first if last != first else 0.001
    return 1.0 - np.clip((np.arange(head_dim // 2) - first) / width, 0.0, 1.0)
