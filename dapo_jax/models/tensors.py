"""Tensors with the names and orientations of transformers' Llama, Qwen2 and Qwen3, one at a time.

`TensorFile` is the interface of checkpoints of any format. `place` builds decoder parameters from one, and
`exported` converts them back. Both hold at most one tensor on the host.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, PyTree

from dapo_jax.models.decoder import Decoder, unstacked
from dapo_jax.models.lora import LORA_PARTS, parted
from dapo_jax.models.presets import DecoderConfig

Shape = tuple[int, ...]
Cut = tuple[slice, ...]
Rows = Callable[[int, int], np.ndarray]
"""A function of (start, stop) that returns these rows of a tensor."""
ByRows = Callable[[Rows, Shape, Shape, NamedSharding], jax.Array]
"""Makes an array of a tensor; each process reads a share of its rows. The arguments are the rows, the tensor's shape, the array's
shape (the same values in the same order) and its sharding. Every process makes the same calls."""

_LAYER_TENSORS = {
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "output": "self_attn.o_proj.weight",
    "query_bias": "self_attn.q_proj.bias",
    "key_bias": "self_attn.k_proj.bias",
    "value_bias": "self_attn.v_proj.bias",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_END_TENSORS = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
_TABLES = ("embedding", "lm_head")
"""Parameters with a row for each entry of the vocabulary, and perhaps more rows."""


@runtime_checkable
class TensorFile(Protocol):
    """Named tensors that are read on access."""

    where: str
    """The path, for messages."""
    shapes: Mapping[str, Shape]
    """The shape of every tensor."""

    def read(self, name: str, cut: Cut) -> np.ndarray:
        """Returns the part `cut` of a tensor in its stored float type.

        Raises:
            ValueError: it cannot be read; the message names the path.
        """
        ...


class Tensor(NamedTuple):
    """A tensor to be written; its values are fetched by `fetch`."""

    name: str
    shape: Shape
    fetch: Callable[[], np.ndarray]


def shapes_of(config: DecoderConfig) -> nnx.State:
    """Returns the shapes of the decoder's parameters, including adapters, without using memory."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))[1]


def tensor_names(layers: int) -> list[str]:
    """Returns the names of all tensors that a decoder of so many layers may have."""
    of_layers = [_layer_name(name, layer) for layer in range(layers) for name in _LAYER_TENSORS]
    return [*_END_TENSORS.values(), *of_layers]


def tensor_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Returns name and shape of every tensor of the decoder without adapters, in the order of writing."""
    pure = nnx.to_pure_dict(shapes_of(replace(config.base, vocab_multiple=1)))
    found = {_END_TENSORS[name]: _theirs_shape(name, like.shape) for name, like in pure["ends"].items()}
    for layer in range(config.layers):
        for name, like in pure["blocks"].items():
            found[_layer_name(name, layer)] = _theirs_shape(name, like.shape[1:])
    return found


def checked(config: DecoderConfig, file: TensorFile) -> None:
    """Checks that `file` has the decoder's tensors and no others. If it has both matrices of a tied model, they must be equal.

    Raises:
        ValueError: a tensor is missing, unexpected or has another shape; the message names it.
    """
    # Some publishers write a tied matrix twice.
    twice = ["lm_head.weight"] if config.tied_embeddings and "lm_head.weight" in file.shapes else []
    _check_names(file, tensor_shapes(config), besides=twice)
    if twice:
        _check_the_same(file, "model.embed_tokens.weight", *twice)


def _check_names(file: TensorFile, wanted: Mapping[str, Shape], besides: Sequence[str] = ()) -> None:
    """Checks that `file` has tensors of these names and shapes, and no others except `besides`."""
    for name, shape in wanted.items():
        if name not in file.shapes:
            raise ValueError(f"{file.where} lacks the tensor {name!r}")
        if (found := file.shapes[name]) != shape:
            raise ValueError(f"{file.where}: {name} has shape {found}, the configuration needs {shape}")
    # Old checkpoints contain the rotary frequencies, which follow from the configuration.
    names = (name for name in file.shapes if not name.endswith("rotary_emb.inv_freq"))
    if extra := sorted(set(names) - set(wanted) - set(besides)):
        raise ValueError(f"{file.where} has the tensors {extra[:3]}, which the configuration does not have")


def _check_the_same(file: TensorFile, first: str, second: str) -> None:
    rows = file.shapes[first][0]
    # In parts, because this is the largest matrix of most models.
    cuts = [(slice(start, min(start + 8192, rows)), slice(None)) for start in range(0, rows, 8192)]
    if file.shapes[first] != file.shapes[second] or any(
        (file.read(first, cut).astype(np.float32) != file.read(second, cut).astype(np.float32)).any()
        for cut in cuts
    ):
        raise ValueError(
            f"{file.where}: {second} differs from the embedding, but tie_word_embeddings is true"
        )


def place(
    config: DecoderConfig,
    file: TensorFile,
    *,
    shardings: Callable[[nnx.State], PyTree] | None = None,
    dtype: str = "float32",
    by_rows: ByRows | None = None,
    apart: bool = False,
) -> nnx.State:
    """Returns decoder parameters without adapters, read from `file`; norms are in float32, all else in `dtype`.

    Each process reads only the parts that its devices hold. With `by_rows`, for files whose columns cannot be read without their rows,
    it reads its share of the rows. The host holds one tensor at a time: as stored, in `dtype`, and transposed.

    Args:
        config: the decoder.
        file: its tensors.
        shardings: returns the sharding of each parameter from their shapes; None: the default device.
        dtype: of all parameters except norms.
        by_rows: reads a share of the rows.
        apart: each layer has its own arrays, see `Decoder`; False: layers are stacked.

    Raises:
        ValueError: a tensor is missing, unexpected, has another shape, or cannot be read.
    """
    checked(config, file)
    shapes = shapes_of(config.base)
    if apart:
        shapes = jax.eval_shape(unstacked, shapes)
    like, pure = nnx.to_pure_dict(shapes), {"ends": {}, "blocks": {}}
    # Without shardings, arrays are on the default device but not committed to it, like results of jitted functions.
    where: Any = (
        jax.tree.map(lambda _: None, like) if shardings is None else nnx.to_pure_dict(shardings(shapes))
    )

    def put(theirs: str, name: str, shape: Shape, sharding: Sharding | None) -> jax.Array:
        # Waits, so that the host does not fill its memory with tensors in transfer.
        return jax.block_until_ready(
            _put(file, theirs, name, shape, sharding, _stored_as(name, dtype), by_rows)
        )

    for name, leaf in like["ends"].items():
        pure["ends"][name] = put(_END_TENSORS[name], name, leaf.shape, where["ends"][name])
    for layer, leaves in like["blocks"].items() if apart else ():
        pure["blocks"][layer] = {
            name: put(_layer_name(name, layer), name, leaf.shape, where["blocks"][layer][name])
            for name, leaf in leaves.items()
        }
    for name, leaf in () if apart else like["blocks"].items():
        sharding = where["blocks"][name]
        stack = jnp.zeros(leaf.shape, _stored_as(name, dtype), device=sharding)
        for layer in range(config.layers):
            part = put(_layer_name(name, layer), name, leaf.shape[1:], sharding and _of_a_layer(sharding))
            stack = jax.block_until_ready(_filler(sharding)(stack, part, np.int32(layer)))
        pure["blocks"][name] = stack
    nnx.replace_by_pure_dict(shapes, pure)
    return shapes


def exported(config: DecoderConfig, params: nnx.State, adapters: nnx.State | None = None) -> Iterator[Tensor]:
    """Yields the tensors of decoder parameters; `fetch` gathers one on the host, with any sharding.

    Args:
        config: sizes, and the scale of `adapters`.
        params: all parameters except adapters; layers stacked, or apart.
        adapters: are added to their matrices in float32.
    """
    pure = nnx.to_pure_dict(params)
    added = {} if adapters is None else nnx.to_pure_dict(adapters)["blocks"]
    for name, value in pure["ends"].items():
        rows = config.vocab_size if name in _TABLES else len(value)
        shape = (rows, *value.shape[1:])
        yield Tensor(_END_TENSORS[name], shape, lambda rows=rows, value=value: _gathered(value)[:rows])
    apart = 0 in pure["blocks"]
    for layer in range(config.layers):
        for name, value in (pure["blocks"][layer] if apart else pure["blocks"]).items():
            shape = _theirs_shape(name, value.shape if apart else value.shape[1:])
            pair = [added[f"{name}_{part}"] for part in LORA_PARTS if f"{name}_{part}" in added]

            def fetch(
                value: Array = value, layer: int = layer, shape: Shape = shape, pair: list[Array] = pair
            ) -> np.ndarray:
                found = _gathered(value, None if apart else layer, shape)
                if not pair:
                    return found
                assert config.lora is not None
                a, b = (_gathered(stack, layer) for stack in pair)
                change = b.reshape(-1, b.shape[-1]) @ a.reshape(len(a), -1)
                return found.astype(np.float32) + config.lora.scale * change

            yield Tensor(_layer_name(name, layer), shape, fetch)


def adapter_tensors(config: DecoderConfig, adapters: nnx.State) -> Iterator[Tensor]:
    """Yields A [rank, inputs] and B [outputs, rank] of each adapted matrix, with the names of `adapter_name`."""
    for layer in range(config.layers):
        for name, stack in nnx.to_pure_dict(adapters)["blocks"].items():
            shape = _adapter_shape(name, stack.shape[1:])
            fetch = functools.partial(_gathered, stack, layer, shape)
            yield Tensor(adapter_name(name, layer), shape, fetch)


def adapter_name(name: str, layer: int) -> str:
    """Returns PEFT's name of an adapter's parameter in a layer, such as `query_lora_a`."""
    matrix, part = name.removesuffix("_lora_a").removesuffix("_lora_b"), name[-1].upper()
    theirs = _LAYER_TENSORS[matrix].removesuffix("weight")
    return f"base_model.model.model.layers.{layer}.{theirs}lora_{part}.weight"


def place_adapters(
    config: DecoderConfig,
    file: TensorFile,
    *,
    shardings: Callable[[nnx.State], PyTree] | None = None,
) -> nnx.State:
    """Returns adapters read from `file`, in float32. They are small, so all layers of one are stacked on the host.

    Raises:
        ValueError: a tensor is missing, unexpected or has another shape; the message names it.
    """
    shapes = parted(shapes_of(config))[0]
    pure = nnx.to_pure_dict(shapes)["blocks"]
    wanted = {
        adapter_name(name, layer): _adapter_shape(name, leaf.shape[1:])
        for name, leaf in pure.items()
        for layer in range(config.layers)
    }
    _check_names(file, wanted)
    where = None if shardings is None else nnx.to_pure_dict(shardings(shapes))["blocks"]
    made = {}
    for name, leaf in pure.items():
        whole = (slice(None), slice(None))
        layers = [_finite(file, adapter_name(name, layer), whole) for layer in range(config.layers)]
        stack = np.stack([part.astype(np.float32).reshape(leaf.shape[1:]) for part in layers])
        made[name] = jnp.asarray(stack) if where is None else jax.device_put(stack, where[name])
    nnx.replace_by_pure_dict(shapes, {"blocks": made})
    return shapes


def _adapter_shape(name: str, shape: Shape) -> Shape:
    """Returns PEFT's shape of A or B from the shape of one layer here."""
    return (shape[0], math.prod(shape[1:])) if name.endswith("_a") else (math.prod(shape[:-1]), shape[-1])


def _stored_as(name: str, dtype: str) -> str:
    """Returns float32 for norms, else `dtype`."""
    return "float32" if name.endswith("norm") else dtype


def _layer_name(name: str, layer: int) -> str:
    return f"model.layers.{layer}.{_LAYER_TENSORS[name]}"


@functools.cache
def _filler(sharding: Sharding | None) -> Callable[[Array, Array, np.int32], Array]:
    """Returns a program that writes a layer into a stack, in place."""
    return jax.jit(
        lambda stack, part, layer: jax.lax.dynamic_update_index_in_dim(stack, part, layer, 0),
        donate_argnums=0,
        out_shardings=sharding,
    )


@functools.cache
def _picker(sharding: Sharding | None) -> Callable[[Array, np.int32], Array]:
    """Returns a program that takes a layer out of a stack."""
    return jax.jit(
        lambda stack, layer: jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False),
        out_shardings=sharding,
    )


def _of_a_layer(sharding: Sharding) -> Sharding:
    """Returns the sharding of one layer of a stack, whose axis of layers is never split."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return sharding


def _put(
    file: TensorFile,
    theirs: str,
    name: str,
    shape: Shape,
    sharding: Sharding | None,
    dtype: str,
    by_rows: ByRows | None,
) -> jax.Array:
    """Returns one tensor in our orientation on the devices; each distinct part is read once."""
    if by_rows is not None and isinstance(sharding, NamedSharding):
        return by_rows(_rows(file, theirs, dtype), _theirs_shape(name, shape), shape, sharding)
    parts: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def part(index: Cut | None) -> np.ndarray:
        index = index or (slice(None),) * len(shape)
        ranges = tuple(axis.indices(size)[:2] for axis, size in zip(index, shape, strict=True))
        if ranges not in parts:
            cut = _theirs_cut(name, shape, tuple(slice(*ends) for ends in ranges))
            wanted = [stop - start for start, stop in ranges]
            if name in _TABLES:
                there = file.shapes[theirs][0]
                cut = (slice(min(cut[0].start, there), min(cut[0].stop, there)), *cut[1:])
            beyond = name in _TABLES and cut[0].start == cut[0].stop  # the device holds only rows of padding
            stored = np.zeros((0, wanted[1])) if beyond else _finite(file, theirs, cut)
            stored = stored.astype(jnp.dtype(dtype), copy=False)
            missing = wanted[0] - len(stored) if name in _TABLES else 0
            parts[ranges] = np.pad(stored, ((0, missing), (0, 0))) if missing else stored.reshape(wanted)
        return parts[ranges]

    if sharding is None:
        return jnp.asarray(part(None))
    return jax.make_array_from_callback(shape, sharding, part)


def _finite(file: TensorFile, name: str, cut: Cut) -> np.ndarray:
    """Reads a part of a tensor.

    Raises:
        ValueError: it has NaN or infinity.
    """
    values = file.read(name, cut)
    if not np.isfinite(values).all():
        raise ValueError(
            f"{file.where}: {name} holds NaN or infinity, and weights must be finite; the file is damaged, or its training diverged: use "
            "an earlier checkpoint"
        )
    return values


def _rows(file: TensorFile, name: str, dtype: str) -> Rows:
    """Returns a function of (start, stop) for the rows of a tensor, with zeros beyond its last row."""
    there, *others = file.shapes[name]

    def rows(start: int, stop: int) -> np.ndarray:
        found = np.zeros((stop - start, *others), jnp.dtype(dtype))
        first, last = min(start, there), min(stop, there)
        if first < last:
            found[: last - first] = _finite(
                file, name, (slice(first, last), *(slice(0, size) for size in others))
            )
        return found

    return rows


def _gathered(value: Array, layer: int | None = None, shape: Shape | None = None) -> np.ndarray:
    """Returns the array, or one layer of a stack, on the host; with `shape` it is reshaped."""
    sharding = value.sharding
    whole = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
    if layer is not None:
        value = _picker(whole)(value, np.int32(layer))
    elif not value.is_fully_addressable:
        value = jax.device_put(value, whole)
    return np.asarray(value).reshape(value.shape if shape is None else shape)


def _merged(name: str) -> int | None:
    """Returns the axis that transformers merges with the next one: heads and their dimensions."""
    return {"query": 0, "key": 0, "value": 0, "output": 1}.get(name.removesuffix("_bias"))


def _theirs_shape(name: str, shape: Shape) -> Shape:
    axis = _merged(name)
    return shape if axis is None else (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


def _theirs_cut(name: str, shape: Shape, whole: Cut) -> Cut:
    """Returns the part of their tensor that equals the part `whole` of ours."""
    axis = _merged(name)
    if axis is None:
        return whole
    heads, within, dim = whole[axis], whole[axis + 1], shape[axis + 1]
    if within.stop - within.start != dim:
        raise ValueError(f"{name} can be split along its heads, not within head_dim={dim}")
    return (*whole[:axis], slice(heads.start * dim, heads.stop * dim), *whole[axis + 2 :])
