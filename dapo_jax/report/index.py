"""Numbers of every rollout as typed columns, which a browser reads at once.

One little-endian array a column, one after the other, compressed together.
"""

import gzip
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

CORRECT, TRUNCATED, FLIPPED, TRAINED, LEFT_OUT = 1, 2, 4, 8, 16
"""Bits of `Index.flags`: flipped is a correct response to a question that was asked at an earlier logged step and then had fewer
than half of its responses right; left out is one that overlong filtering kept from the loss."""


@dataclass
class Index:
    """Numbers of every rollout and of every group, in the order of steps."""

    flags: list[int] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    advantage: list[float] = field(default_factory=list)
    """NaN where it was not recorded, as all floats."""
    penalty: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """Length of a response."""
    clipped: list[int] = field(default_factory=list)
    """How many of its tokens were clipped."""
    group_step: list[int] = field(default_factory=list)
    group_ordinal: list[int] = field(default_factory=list)
    group_first: list[int] = field(default_factory=list)
    """The place of a group's first rollout."""
    group_question: list[int] = field(default_factory=list)
    """Its place among `heads`; the same prompt and answer have the same."""
    group_before: list[int] = field(default_factory=list)
    """The last group of an earlier logged step with the same question; -1: none."""
    group_chunk: list[int] = field(default_factory=list)
    group_place: list[int] = field(default_factory=list)
    """The place of a group in its chunk."""

    TYPES: ClassVar = {
        "flags": "u1", "clipped": "u4", "reward": "f4", "advantage": "f4", "penalty": "f4", "tokens": "u4",
        "group_step": "u4", "group_ordinal": "u4", "group_first": "u4", "group_question": "u4",
        "group_before": "i4", "group_chunk": "u4", "group_place": "u4",
    }  # fmt: skip

    def packed(self) -> tuple[bytes, list[tuple[str, str, int]]]:
        """The columns, compressed, and (name, type, values) of each. Those of four bytes come first: they stay aligned."""
        order = sorted(self.TYPES, key=lambda name: -int(self.TYPES[name][1]))
        columns = [(name, self.TYPES[name], getattr(self, name)) for name in order]
        content = b"".join(np.array(values, dtype=f"<{kind}").tobytes() for _, kind, values in columns)
        return compressed(content), [(name, kind, len(values)) for name, kind, values in columns]


def compressed(content: bytes) -> bytes:
    """The same bytes for the same content, whenever."""
    return gzip.compress(content, compresslevel=6, mtime=0)
