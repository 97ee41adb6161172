"""Reads and writes safetensors files tensor by tensor. A model is one file, or several shards with an index.

Local files are memory-mapped. From files in a bucket, only the needed byte ranges are fetched.
"""

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from dapo_jax.models import mxfp4
from dapo_jax.models.tensors import PEFT_PREFIX, TEXT_PREFIXES, Cut, Shape, Tensor
from dapo_jax.storage import (
    AnyPath,
    entries,
    file_bytes,
    in_bucket,
    new_file,
    range_bytes,
    size_of,
    write_whole,
)
from dapo_jax.text.plain_json import read_object

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""Suffixes of weight files that PyTorch writes as pickles."""
A_PICKLE = (
    "a pickle, which is not supported because it can run code when it is loaded; convert the model to safetensors with transformers: "
    "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER, safe_serialization=True)"
)
STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The numpy name of each supported tensor type in a safetensors file."""
_CODES = {name: code for code, name in STORED.items()}


class StoredTensor(NamedTuple):
    """A tensor in a file: its type, its shape, and the byte at which it begins."""

    path: AnyPath
    dtype: str
    shape: Shape
    start: int

    def read(self, cut: Cut) -> np.ndarray:
        """Returns the part `cut` of the tensor. From a bucket, only the needed rows are fetched, but with all their columns.
        Raises OSError if the file cannot be read."""
        kind = jnp.dtype(self.dtype)
        if not in_bucket(self.path) and math.prod(self.shape):
            # The mapping ends with this call. Otherwise, the pages that were read would stay in memory.
            return np.array(np.memmap(self.path, kind, "r", self.start, self.shape)[cut])
        first, last, step = cut[0].indices(self.shape[0]) if cut else (0, 1, 1)
        row = math.prod(self.shape[1:]) * kind.itemsize
        data = range_bytes(self.path, self.start + first * row, self.start + max(first, last) * row)
        rows = np.frombuffer(data, kind)
        whole = slice(None, None, step)
        return rows.reshape(-1, *self.shape[1:])[(whole, *cut[1:])] if cut else rows.reshape(())


def stored_tensors(path: AnyPath) -> dict[str, StoredTensor]:
    """Returns the tensors of a file by name. Only the header of the file is read.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is incomplete or damaged, or a tensor is not float32, float16 or bfloat16.
    """
    whole = size_of(path)
    begin = 8 + int.from_bytes(range_bytes(path, 0, min(8, whole)), "little")
    if not 8 < begin <= whole:
        raise ValueError(f"cannot read {path}: the header ends at byte {begin:,}, the file at byte {whole:,}")
    listed = read_object(range_bytes(path, 8, begin), path)
    found, end = {}, begin
    for name, entry in listed.items():
        if name == "__metadata__":
            continue
        try:
            code, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            size, numbers = last - first, math.prod(shape)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"cannot read {path}: the header's entry of {name} is {entry!r:.200}") from error
        kinds = STORED | {"U8": "uint8"} if name.endswith(mxfp4.SUFFIXES) else STORED
        if code not in kinds:
            known = ", ".join(kinds)
            raise ValueError(f"{path}: {name} has type {code}, which is not supported (only {known})")
        if size != numbers * jnp.dtype(kinds[code]).itemsize:
            raise ValueError(f"cannot read {path}: {name} has {size:,} bytes, but shape {shape}")
        found[name] = StoredTensor(path, kinds[code], shape, begin + first)
        end = max(end, begin + last)
    if end != whole:
        raise ValueError(f"cannot read {path}: it has {whole:,} bytes, but its tensors end at byte {end:,}")
    return found


class SafetensorsFolder:
    """The tensors of a model folder. Implements `tensors.TensorFile`."""

    def __init__(
        self, folder: AnyPath, *, single: str = SINGLE, unread: Callable[[str], bool] = lambda name: False
    ) -> None:
        """Reads the names and shapes of the tensors in the file `single`, or in several files with an index, except the tensors that are `unread` (see `tensors.unread`).

        Raises:
            ValueError: a file is missing or damaged, or a tensor is not float32, float16 or bfloat16.
        """
        only = folder / single
        listed = None if single != SINGLE or only.exists() else _read_index(folder)
        self.where = str(only if listed is None else folder / INDEX)
        """Path of the single file, or of the index if there are several files."""
        self._tensors: dict[str, Any] = {}
        for path in [only] if listed is None else [folder / file for file in sorted(set(listed.values()))]:
            try:
                self._tensors |= stored_tensors(path)
            except OSError as error:
                raise ValueError(f"cannot read {path}: {error}") from error
        for name, file in (listed or {}).items():
            if name not in self._tensors or self._tensors[name].path != folder / file:
                raise ValueError(f"{self.where} lists {name!r} in {file}, which does not contain it")
        self._tensors = mxfp4.joined(self._tensors, self.where)
        self._stored = _of_text_model(list(self._tensors))
        self.shapes: Mapping[str, Shape] = {
            name: self._tensors[stored].shape for name, stored in self._stored.items() if not unread(name)
        }
        """The shape of every tensor. Of a model for images and text, only the tensors of the text model, with their names in a text model."""
        self.skipped = len(self._tensors) - len(self.shapes)
        """Number of tensors that do not belong to the text model."""

    def read(self, name: str, cut: Cut) -> np.ndarray:
        """Returns the part `cut` of a tensor, in the dtype stored in the file."""
        stored = self._tensors[self._stored[name]]
        try:
            return stored.read(cut)
        except OSError as error:
            raise ValueError(f"cannot read {name} from {stored.path}: {error}") from error


_OTHER_PREFIXES = (
    "vision_tower.", "vision_embedder.", "audio_tower.", "embed_vision.", "embed_audio.", "multi_modal_projector.", "visual.", "mtp.",
)  # fmt: skip
"""The prefixes of all other tensors in these models, which `model.` may precede."""


def _of_text_model(names: Sequence[str]) -> dict[str, str]:
    """Returns the name in the file of each tensor, by its name in a text model. Names of adapters begin with `PEFT_PREFIX`, and keep it."""
    inner = {name: name.removeprefix(PEFT_PREFIX) for name in names}
    if not any(name.startswith((*TEXT_PREFIXES, "mtp.")) for name in inner.values()):
        return {name: name for name in names}
    found = {}
    for stored, name in inner.items():
        if not name.removeprefix("model.").startswith(_OTHER_PREFIXES):
            prefix = next((prefix for prefix in TEXT_PREFIXES if name.startswith(prefix)), "")
            of_text = TEXT_PREFIXES.get(prefix, "") + name.removeprefix(prefix)
            found[stored.removesuffix(name) + of_text] = stored
    return found


def _read_index(folder: AnyPath) -> dict[str, str]:
    """Returns the file name of each tensor, from the folder's index."""
    path = folder / INDEX
    there = {entry.name for entry in entries(folder)} if folder.exists() else set()
    if INDEX not in there:
        pickled = sorted(name for name in there if name.endswith(PICKLED))
        hint = f"; {pickled[0]} is {A_PICKLE}" if pickled else ""
        raise ValueError(f"cannot read {folder / SINGLE}: the folder has neither this file nor {INDEX}{hint}")
    listed = read_json(path).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"{path}: weight_map must name a file for each tensor; got {listed!r}")
    for name, file in listed.items():
        if file not in there:
            raise ValueError(f"{path} lists {name!r} in {file!r}, which is not in this folder")
    return listed


def write_tensors(folder: AnyPath, tensors: Sequence[Tensor], *, dtype: str, max_shard_bytes: int) -> int:
    """Writes tensors to one file, or to several files with an index if their total size exceeds `max_shard_bytes`.

    Only one tensor at a time is on the host. Files of an earlier model are removed first. A file gets its final name only when it is
    complete. Returns the size of all tensors in bytes. Raises the errors of `write_file`.
    """
    for path in entries(folder):
        if fnmatch(path.name, "model*.safetensors") or path.name == INDEX:
            path.unlink()
    shards = list(_shards(tensors, dtype, max_shard_bytes))
    total, weight_map = 0, {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else SINGLE
        total += write_file(folder / name, shard, dtype=dtype)
        weight_map |= {tensor.name: name for tensor in shard}
    if len(shards) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return total


def read_json(path: AnyPath) -> dict[str, Any]:
    """Returns the JSON object in `path`. Raises ValueError if there is no such file, or it is not a JSON object."""
    try:
        content = file_bytes(path)
    except OSError as error:
        raise ValueError(f"cannot read a model from {path}: {error.strerror or error}") from error
    return read_object(content, path)


def write_json(path: AnyPath, content: Any) -> None:
    """Writes `content` to `path` as JSON, atomically."""
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    write_whole(path, text.encode())


def _shards(tensors: Sequence[Tensor], dtype: str, limit: int) -> Iterator[list[Tensor]]:
    """Distributes tensors over shards of at most `limit` bytes. A larger tensor gets its own shard."""
    shard: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        size = tensor.bytes(dtype)
        if shard and filled + size > limit:
            yield shard
            shard, filled = [], 0
        shard.append(tensor)
        filled += size
    yield shard


def check_dtype(dtype: str) -> None:
    """Raises ValueError if tensors cannot be written as `dtype`."""
    if dtype not in _CODES:
        raise ValueError(f"dtype={dtype!r} must be one of {', '.join(_CODES)}")


def write_file(path: AnyPath, tensors: Sequence[Tensor], *, dtype: str) -> int:
    """Writes a safetensors file: the length of the header, the header as JSON, and the data of all tensors. Returns the size of this data in bytes.
    Raises ValueError if `dtype` is not float32, float16 or bfloat16, or a tensor contains NaN or infinity."""
    check_dtype(dtype)
    offset = 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for tensor in tensors:
        end = offset + tensor.bytes(dtype)
        header[tensor.name] = {
            "dtype": _CODES[tensor.dtype or dtype],
            "shape": tensor.shape,
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with new_file(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            kind = jnp.dtype(tensor.dtype or dtype)
            value = np.ascontiguousarray(tensor.fetch().astype(kind, copy=False))
            assert value.shape == tensor.shape, (tensor.name, value.shape, tensor.shape)
            if not np.isfinite(value).all():
                raise ValueError(f"{tensor.name} has NaN or infinity as {kind.name}; weights must be finite")
            file.write(value.reshape(-1).view(np.uint8).data)
    return offset
