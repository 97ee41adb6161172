"""Prompts of different lengths in a few rows of one width: what prefill reads.

A file of its own: it is host code over lengths, tested without an engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

_NARROWEST = 16
"""Below this many tokens a narrower row would only be one more program to compile."""


@dataclass(frozen=True, kw_only=True)
class PackedPrompts:
    """Prompts side by side in padded rows. The width is rounded up to a power of two, the numbers of rows and of prompts to
    powers of four, so that few programs serve any number of prompts of any lengths."""

    tokens: Int[np.ndarray, "rows width"]
    positions: Int[np.ndarray, "rows width"]
    segment_ids: Int[np.ndarray, "rows width"]
    """1, 2, ... for the prompts of a row; 0 is padding."""
    rows: Int[np.ndarray, " prompts"]
    starts: Int[np.ndarray, " prompts"]
    """Where in its row a prompt begins."""
    lengths: Int[np.ndarray, " prompts"]


def pack_prompts(prompts: Sequence[Int[np.ndarray, " _"]], *, capacity: int) -> PackedPrompts:
    """Packs prompts of 1 to `capacity` tokens; first fit, longest first.

    Raises:
        ValueError: a prompt is empty or longer than `capacity`.
    """
    sizes = [len(prompt) for prompt in prompts]
    for index, size in enumerate(sizes):
        if not 0 < size <= capacity:
            raise ValueError(f"prompt {index} has {size} tokens; a slot has room for 1 to {capacity}")
    width = row_width(max(sizes), capacity=capacity)
    lines = _first_fit(sizes, width)
    shape, count = (padded_count(len(lines)), width), padded_count(len(sizes))
    tokens, positions, segment_ids = (np.zeros(shape, np.int32) for _ in range(3))
    rows, starts, lengths = np.zeros(count, np.int32), np.zeros(count, np.int32), np.ones(count, np.int32)
    for row, line in enumerate(lines):
        start = 0
        for segment, index in enumerate(line, start=1):
            place = slice(start, start + sizes[index])
            tokens[row, place], positions[row, place] = prompts[index], np.arange(sizes[index])
            segment_ids[row, place] = segment
            rows[index], starts[index], lengths[index] = row, start, sizes[index]
            start = place.stop
    return PackedPrompts(
        tokens=tokens, positions=positions, segment_ids=segment_ids, rows=rows, starts=starts, lengths=lengths
    )


def row_width(longest: int, *, capacity: int) -> int:
    """The tokens of a row that holds a prompt of `longest` tokens: a power of two, or all that a slot holds."""
    return min(max(_NARROWEST, _power(2, longest)), capacity)


def padded_count(number: int) -> int:
    """The rows, or prompts, of a program that reads so many: a power of four."""
    return _power(4, number)


def _first_fit(sizes: Sequence[int], room: int) -> list[list[int]]:
    """The indices of `sizes`, longest first, each in the first line that still has room for it; none is over `room`."""
    lines: list[list[int]] = []
    left: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        place = next((line for line, free in enumerate(left) if free >= sizes[index]), None)
        if place is None:
            place = len(lines)
            lines.append([])
            left.append(room)
        lines[place].append(index)
        left[place] -= sizes[index]
    return lines


def _power(base: int, number: int) -> int:
    """The least power of `base` that is not less than `number`."""
    power = 1
    while power < number:
        power *= base
    return power
