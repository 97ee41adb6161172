"""Tensors of a safetensors file by ranges of its bytes: of a file in a bucket no more is fetched than what is asked for."""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from dapo_jax.models.tensors import Cut, Shape
from dapo_jax.plain_json import read_object
from dapo_jax.storage import AnyPath, range_bytes, size_of

STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Name of a type in a file -> that of numpy."""

_LENGTH = 8
"""Bytes in front of the header that say how long it is."""

_LONGEST = 100_000_000
"""Bytes of the longest header that the format allows."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """The place of a tensor in a file."""

    name: str
    path: AnyPath
    dtype: str
    shape: Shape
    start: int
    """The file's byte at which it begins."""

    def read(self, cut: Cut) -> np.ndarray:
        """A part of the tensor. Whole rows lie side by side, so of a part of their columns the rows are fetched whole.

        Raises:
            OSError: the file cannot be read.
        """
        kind = jnp.dtype(self.dtype)
        first, last, _ = cut[0].indices(self.shape[0]) if cut else (0, 1, 1)
        row = math.prod(self.shape[1:]) * kind.itemsize
        data = range_bytes(self.path, self.start + first * row, self.start + max(first, last) * row)
        rows = np.frombuffer(data, kind)
        if not cut:
            return rows.reshape(())
        return rows.reshape(-1, *self.shape[1:])[(slice(None), *cut[1:])]


def stored_tensors(path: AnyPath) -> dict[str, StoredTensor]:
    """The tensors of a file by name, from its header alone.

    Raises:
        OSError: the file is not there, or cannot be read.
        ValueError: it is no whole safetensors file, or holds another type than float32, float16 or bfloat16.
    """
    size = size_of(path)
    if size < _LENGTH:
        raise ValueError(f"cannot read {path}: it has {size} bytes, a safetensors file {_LENGTH} at least")
    length = int.from_bytes(range_bytes(path, 0, _LENGTH), "little")
    begin = _LENGTH + length
    if length > _LONGEST or begin > size:
        raise ValueError(
            f"cannot read {path}: its header of {length:,} bytes is longer than the file of {size:,} or than {_LONGEST:,}"
        )
    listed = read_object(range_bytes(path, _LENGTH, begin), path)
    found = {
        name: _stored(path, name, entry, begin=begin)
        for name, entry in listed.items()
        if name != "__metadata__"
    }
    end = begin
    for tensor in sorted(found.values(), key=lambda tensor: tensor.start):
        if tensor.start != end:
            raise ValueError(
                f"cannot read {path}: {tensor.name} begins at byte {tensor.start:,}, and must begin at byte {end:,}, "
                "where what lies before it ends"
            )
        end += math.prod(tensor.shape) * jnp.dtype(tensor.dtype).itemsize
    if end != size:
        raise ValueError(f"cannot read {path}: it has {size:,} bytes, and its header is of a file of {end:,}")
    return found


def _stored(path: AnyPath, name: str, entry: Any, *, begin: int) -> StoredTensor:
    said = entry if isinstance(entry, dict) else {}
    code, shape, offsets = said.get("dtype"), _sizes(said.get("shape")), _sizes(said.get("data_offsets"))
    if isinstance(code, str) and code not in STORED:
        raise ValueError(f"{path}: {name} is stored as {code}, which is not covered; {', '.join(STORED)} are")
    if not isinstance(code, str) or shape is None or offsets is None or len(offsets) != 2:
        raise ValueError(
            f"cannot read {path}: its header describes {name!r:.80} as {entry!r:.80}; a tensor needs a dtype, a shape and two data_offsets"
        )
    first, last = offsets
    needed = math.prod(shape) * jnp.dtype(STORED[code]).itemsize
    if last - first != needed:
        raise ValueError(
            f"cannot read {path}: {name} has {last - first:,} bytes, its shape {shape} needs {needed:,}"
        )
    return StoredTensor(name=name, path=path, dtype=STORED[code], shape=tuple(shape), start=begin + first)


def _sizes(value: Any) -> list[int] | None:
    """The value if it is a list of numbers from 0 on."""
    good = isinstance(value, list) and all(
        isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in value
    )
    return value if good else None
