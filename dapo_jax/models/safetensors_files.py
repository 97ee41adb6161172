"""safetensors files, single or in shards with an index: read and written tensor by tensor.

A local file is read by the library safetensors, which maps it into memory; of one in a bucket ranges are fetched.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from dapo_jax.models.safetensors_ranges import STORED, StoredTensor, stored_tensors
from dapo_jax.models.tensors import Cut, Shape, Tensor
from dapo_jax.plain_json import read_object
from dapo_jax.storage import AnyPath, check_file, entries, file_bytes, in_bucket, new_file, write_whole

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""Weights as torch saves them."""
A_PICKLE = (
    "a pickle, which runs code when it is opened, and is not read; have the model as safetensors, which transformers "
    "writes: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER, safe_serialization=True)"
)
_CODES = {name: code for code, name in STORED.items()}


class SafetensorsFolder:
    """The tensors of a model folder; implements `tensors.TensorFile`."""

    def __init__(self, folder: AnyPath, *, single: str = SINGLE) -> None:
        """Reads names and shapes, no values. They are in the file `single`, or else in several of which there is an index.

        Raises:
            ValueError: a file is missing or damaged, or holds another type than float32, float16 or bfloat16.
        """
        only = folder / single
        listed = None if single != SINGLE or only.exists() else _read_index(folder)
        self._path = only if listed is None else folder / INDEX
        self._files: dict[str, AnyPath] = {}
        self._shapes: dict[str, Shape] = {}
        self._ranges: dict[str, StoredTensor] = {}
        for path in [only] if listed is None else [folder / file for file in sorted(set(listed.values()))]:
            ranges = _ranges(path) if in_bucket(path) else {}
            self._ranges |= ranges
            shapes = {name: each.shape for name, each in ranges.items()} if in_bucket(path) else _header(path)
            for name, shape in shapes.items():
                self._files[name], self._shapes[name] = path, shape
        for name, file in (listed or {}).items():
            if self._files.get(name) != folder / file:
                raise ValueError(f"{self._path} has the tensor {name!r} in {file}, which does not hold it")

    @property
    def where(self) -> str:
        """The file, or the index of several."""
        return str(self._path)

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """The shape of every tensor."""
        return self._shapes

    def read(self, name: str, cut: Cut) -> np.ndarray:
        """A part of a tensor in the type that it is stored in."""
        path = self._files[name]
        try:
            if name in self._ranges:
                return self._ranges[name].read(cut)
            # Opened anew for each tensor: what an open file has read stays mapped into memory until it is closed.
            with safe_open(path, framework="numpy") as file:
                return file.get_slice(name)[cut]
        except (OSError, SafetensorError) as error:
            raise ValueError(f"cannot read {name} from {path}: {error}") from error


def _read_index(folder: AnyPath) -> dict[str, str]:
    """Tensor name -> file name."""
    path = folder / INDEX
    try:
        content = file_bytes(path)
    except FileNotFoundError as error:
        pickled = [file.name for file in entries(folder) if file.suffix in PICKLED]
        hint = f"; {pickled[0]} is {A_PICKLE}" if pickled else ""
        raise ValueError(
            f"cannot read {folder / SINGLE}: there is no such file, nor {INDEX}{hint}"
        ) from error
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    listed = read_object(content, path).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"{path}: weight_map must name a file for each tensor; got {listed!r}")
    there = {entry.name for entry in entries(folder) if in_bucket(folder) or entry.is_file()}
    for name, file in listed.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{path}: the file of {name!r} must be a name in this folder; got {file!r}")
        if file not in there:
            raise ValueError(f"{path} has the tensor {name!r} in {file}, which is not there")
    return listed


def _ranges(path: AnyPath) -> dict[str, StoredTensor]:
    try:
        return stored_tensors(path)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error


def _header(path: AnyPath) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    try:
        check_file(Path(path))
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                part = file.get_slice(name)
                if part.get_dtype() not in STORED:
                    raise ValueError(
                        f"{path}: {name} is stored as {part.get_dtype()}, which is not covered; {', '.join(STORED)} are"
                    )
                shapes[name] = tuple(part.get_shape())
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    return shapes


def write_tensors(
    folder: AnyPath, tensors: Sequence[Tensor], *, dtype: str = "float32", max_shard_bytes: int = 5 * 2**30
) -> int:
    """Writes the tensors into one file, or into several and an index if they need more than `max_shard_bytes`.

    One tensor at a time is on the host. A file gets its name when it is complete, and files of an earlier model go
    first. Returns the bytes of all tensors.

    Raises:
        ValueError: `dtype` is not float32, float16 or bfloat16.
    """
    _check_dtype(dtype)
    for path in entries(folder):
        if fnmatch(path.name, "model*.safetensors") or path.name == INDEX:
            path.unlink()
    shards = list(_shards(tensors, jnp.dtype(dtype).itemsize, max_shard_bytes))
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [SINGLE]
    total = sum(_write_file(folder / name, shard, dtype) for name, shard in zip(names, shards, strict=True))
    if len(shards) > 1:
        weight_map = {
            tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard
        }
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return total


def write_named(path: AnyPath, tensors: Sequence[Tensor], *, dtype: str = "float32") -> int:
    """Writes one file with all tensors, and returns their bytes.

    Raises:
        ValueError: `dtype` is not float32, float16 or bfloat16.
    """
    _check_dtype(dtype)
    return _write_file(path, tensors, dtype)


def _check_dtype(dtype: str) -> None:
    if dtype not in _CODES:
        raise ValueError(f"dtype={dtype!r} must be one of {', '.join(_CODES)}")


def write_json(path: AnyPath, content: Any) -> None:
    """Writes `path` in one piece: it is never there half."""
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    write_whole(path, text.encode())


def _shards(tensors: Sequence[Tensor], itemsize: int, limit: int) -> Iterator[list[Tensor]]:
    """Fills one shard after another; a tensor above the limit has one of its own."""
    shard: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        size = math.prod(tensor.shape) * itemsize
        if shard and filled + size > limit:
            yield shard
            shard, filled = [], 0
        shard.append(tensor)
        filled += size
    yield shard


def _write_file(path: AnyPath, tensors: Sequence[Tensor], dtype: str) -> int:
    """One file in the safetensors format: the header's length, the header in JSON, the bytes of all tensors."""
    kind, offset = jnp.dtype(dtype), 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for tensor in tensors:
        end = offset + math.prod(tensor.shape) * kind.itemsize
        header[tensor.name] = {"dtype": _CODES[dtype], "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with new_file(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            value = np.ascontiguousarray(tensor.fetch().astype(kind, copy=False))
            if value.shape != tensor.shape:
                raise ValueError(f"{tensor.name} has shape {value.shape}, announced was {tensor.shape}")
            if not np.isfinite(value).all():
                raise ValueError(
                    f"{tensor.name} would hold NaN or infinity in {dtype}; weights must be finite"
                )
            file.write(value.reshape(-1).view(np.uint8).data)
    return offset
