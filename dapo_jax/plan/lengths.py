"""The lengths of a run's responses, drawn from what is assumed of them, and which groups are informative."""

import math
from collections.abc import Callable, Collection

import numpy as np
from jaxtyping import Int

_CHUNK = 1024
"""Groups whose lengths are drawn at a time."""

_EXACT = 1e-9
"""So that a third of three is one in floating point, too."""

Draw = Callable[[int, int], Int[np.ndarray, "groups samples"]]
"""(which chunk, groups of it) -> the lengths of their responses."""


class Responses:
    """Lengths and verdicts of all responses of a run, by ordinal: the same however they are sampled."""

    def __init__(self, draw: Draw, *, informative: float) -> None:
        """`informative` is the share of groups that are; they are spread evenly, whatever their lengths."""
        self._draw, self._share, self._chunks = draw, informative, list[Int[np.ndarray, "groups samples"]]()

    def lengths(self, ordinals: Collection[int]) -> Int[np.ndarray, "groups samples"]:
        """Tokens of the responses to each of these prompts."""
        wanted = np.fromiter(ordinals, np.int64, len(ordinals))
        while len(self._chunks) * _CHUNK <= wanted.max(initial=0):
            self._chunks.append(self._draw(len(self._chunks), _CHUNK))
        found = np.empty((len(wanted), self._chunks[0].shape[1]), np.int64)
        for chunk in np.unique(wanted // _CHUNK):
            there = wanted // _CHUNK == chunk
            found[there] = self._chunks[chunk][wanted[there] % _CHUNK]
        return found

    def informative(self, ordinal: int) -> bool:
        """Whether the responses to a prompt differ in their verdicts."""
        before, after = (math.floor(count * self._share + _EXACT) for count in (ordinal, ordinal + 1))
        return after > before


def log_normal(*, mean: int | float, std: int | float, limit: int, samples: int, seed: int = 0) -> Draw:
    """Lengths from 1 to `limit`, log-normal and cut at the limit, whose mean is `mean` with the cut; `std` over `mean` is the spread before it.

    Without a spread all are as long as the mean, rounded.
    """
    if not std or mean >= limit:
        return lambda chunk, groups: np.full((groups, samples), max(1, round(mean)))
    sigma = math.sqrt(math.log1p((std / mean) ** 2))
    low, high = math.log(mean) - sigma**2 - 1, math.log(limit) + 40 * sigma
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _cut_mean(middle, sigma, limit) < mean else (low, middle)

    def draw(chunk: int, groups: int) -> Int[np.ndarray, "groups samples"]:
        drawn = np.random.default_rng([seed, chunk]).lognormal(low, sigma, (groups, samples))
        return np.clip(np.rint(np.minimum(drawn, limit)), 1, limit).astype(np.int64)

    return draw


def _cut_mean(mu: float, sigma: float, limit: int) -> float:
    """E[min(X, limit)] of a log-normal X."""
    z = (math.log(limit) - mu) / sigma

    def below(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    return math.exp(mu + sigma**2 / 2) * below(z - sigma) + limit * below(-z)
