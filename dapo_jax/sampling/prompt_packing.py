"""Packs prompts of different lengths into rows of equal width, so that prefill needs few programs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

_NARROWEST = 16
"""Minimum row width. Narrower rows would contain fewer tokens at the same cost."""

_CALL = 128
"""Number of tokens whose prefill takes about as long as the overhead of calling a program."""

_ALONE = 256
"""Maximum row width if each prompt is prefilled alone. Longer prompts are prefilled in chunks, so no row has more padding than this."""

_ROW_PROMPTS = 16
"""Maximum number of prompts per row; limited because the logits of every prompt are stored."""


@dataclass(frozen=True, kw_only=True)
class PrefillShape:
    """The shape of one prefill call. A run prefills with three call shapes: all rows, one row, and one chunk of a longer prompt."""

    rows: int
    width: int
    longest: int
    """Number of tokens in the longest prompt. It may be longer than a row, and a re-prefilled response may be even longer."""
    alone: bool = False
    """If True, each prompt is prefilled alone, so no bit of its result depends on other prompts."""

    @property
    def row_prompts(self) -> int:
        """Maximum number of prompts per row."""
        return 1 if self.alone else min(_ROW_PROMPTS, self.width)


def prefill_shape(
    *, longest: int, capacity: int, prompts: int, tokens: int, alone: bool = False
) -> PrefillShape:
    """Returns a shape with at most `prompts` rows and `tokens` tokens per call. If possible, a row has room for `longest` tokens. With `alone`, there is one
    row of limited width."""
    power_of_two = 1 << max(longest - 1, 0).bit_length()
    width = min(max(_NARROWEST, power_of_two), capacity, max(tokens, 1))
    if alone:
        return PrefillShape(rows=1, width=min(width, _ALONE), longest=longest, alone=True)
    return PrefillShape(rows=max(1, min(tokens // width, prompts)), width=width, longest=longest)


@dataclass(frozen=True, kw_only=True)
class PackedPrompts:
    """Prompts packed next to each other in padded rows, for one prefill call."""

    indices: tuple[int, ...]
    """The indices of the prompts, in the order of the arrays below."""
    tokens: Int[np.ndarray, "rows width"]
    positions: Int[np.ndarray, "rows width"]
    segment_ids: Int[np.ndarray, "rows width"]
    """Segment number of each token: 1, 2, ... for the prompts in a row, and 0 for padding."""
    rows: Int[np.ndarray, " prompts"]
    starts: Int[np.ndarray, " prompts"]
    """Each prompt's first position in its row."""
    lengths: Int[np.ndarray, " prompts"]


def pack_prompts(
    prompts: Sequence[Int[np.ndarray, " _"]], indices: Sequence[int], shape: PrefillShape
) -> list[PackedPrompts]:
    """Packs the prompts at `indices` by first fit, longest first. Each prompt must fit in a row. Each resulting call has `shape.rows` rows or one row."""
    lines = _first_fit({index: len(prompts[index]) for index in indices}, shape)
    calls = [lines[start : start + shape.rows] for start in range(0, len(lines), shape.rows)]
    # The last few rows are prefilled one by one if that is less work than a call that is mostly padding.
    last = len(calls[-1])
    if last <= shape.rows // 2 and last * max(shape.width, _CALL) < shape.rows * shape.width:
        calls[-1:] = [[line] for line in calls[-1]]
    return [_packed(prompts, call, shape) for call in calls]


def _packed(
    prompts: Sequence[Int[np.ndarray, " _"]], lines: Sequence[Sequence[int]], shape: PrefillShape
) -> PackedPrompts:
    rows = 1 if len(lines) == 1 else shape.rows
    tokens, positions, segment_ids = (np.zeros((rows, shape.width), np.int32) for _ in range(3))
    count = rows * shape.row_prompts
    row_of, starts, lengths = np.zeros(count, np.int32), np.zeros(count, np.int32), np.ones(count, np.int32)
    indices: list[int] = []
    for row, line in enumerate(lines):
        start = 0
        for segment, index in enumerate(line, start=1):
            length, entry = len(prompts[index]), len(indices)
            cut = slice(start, start + length)
            tokens[row, cut], positions[row, cut] = prompts[index], np.arange(length)
            segment_ids[row, cut] = segment
            row_of[entry], starts[entry], lengths[entry] = row, start, length
            indices.append(index)
            start = cut.stop
    return PackedPrompts(
        indices=tuple(indices), tokens=tokens, positions=positions, segment_ids=segment_ids,
        rows=row_of, starts=starts, lengths=lengths,
    )  # fmt: skip


def _first_fit(sizes: dict[int, int], shape: PrefillShape) -> list[list[int]]:
    """Packs the keys of `sizes`, longest first, each into the first row with enough room. No size may exceed the row width."""
    lines: list[list[int]] = []
    for index in sorted(sizes, key=lambda index: -sizes[index]):
        room = shape.width - sizes[index]
        open_to = (line for line in lines if len(line) < shape.row_prompts)
        line = next((line for line in open_to if sum(sizes[other] for other in line) <= room), None)
        if line is None:
            lines.append(line := [])
        line.append(index)
    return lines
