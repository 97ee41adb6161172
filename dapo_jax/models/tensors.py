"""Tensors under the names and in the orientation of transformers' Llama, Qwen2 and Qwen3, one at a time.

`TensorFile` is what a checkpoint of any format looks like from here. `place` builds decoder parameters from one, and
`exported` takes them apart again; neither holds more of the model on the host than one tensor.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, PyTree

from dapo_jax.models.decoder import Decoder
from dapo_jax.models.presets import DecoderConfig

Shape = tuple[int, ...]
Cut = tuple[slice, ...]
Rows = Callable[[int, int], np.ndarray]
"""A function of (start, stop) that gives these rows of a tensor."""
ByRows = Callable[[Rows, Shape, Shape, NamedSharding], jax.Array]
"""A function that makes an array of a tensor of which each process reads a share of the rows: of its rows, its shape, that of the array (the
same values in the same order), and where that lies. Every process makes the same calls."""

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
"""Have a row for each entry of the vocabulary, and perhaps more."""


@runtime_checkable
class TensorFile(Protocol):
    """Named tensors that are read when they are asked for."""

    @property
    def where(self) -> str:
        """The path, for messages."""
        ...

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """The shape of every tensor."""
        ...

    def read(self, name: str, cut: Cut) -> np.ndarray:
        """The part `cut` of a tensor, in whatever float type it is stored.

        Raises:
            ValueError: it cannot be read; the message names the path.
        """
        ...


class Tensor(NamedTuple):
    """A tensor on its way out: its shape is known before its values are fetched."""

    name: str
    shape: Shape
    fetch: Callable[[], np.ndarray]


def shapes_of(config: DecoderConfig) -> nnx.State:
    """The decoder's parameters as shapes: no memory is used."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))[1]


def tensor_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Name and shape of every tensor of the decoder, in the order in which they are written."""
    pure = nnx.to_pure_dict(shapes_of(replace(config, vocab_multiple=1)))
    found = {_END_TENSORS[name]: _theirs_shape(name, like.shape) for name, like in pure["ends"].items()}
    for layer in range(config.layers):
        for name, like in pure["blocks"].items():
            found[_layer_name(name, layer)] = _theirs_shape(name, like.shape[1:])
    return found


def checked(config: DecoderConfig, file: TensorFile) -> None:
    """Checks that `file` holds the decoder's tensors and no others. Of a tied matrix that is there twice both are read.

    Raises:
        ValueError: a tensor is missing, misshapen, or not called for; the message names it.
    """
    there = dict(file.shapes)
    if config.layers > len(there):  # before as many names are made
        raise ValueError(
            f"{file.where} holds {len(there)} tensors, the configuration calls for {config.layers} layers"
        )
    wanted = tensor_shapes(config)
    for name, shape in wanted.items():
        if name not in there:
            raise ValueError(f"{file.where} lacks the tensor {name!r}")
        if there[name] != shape:
            raise ValueError(
                f"{file.where}: {name} has shape {there[name]}, the configuration calls for {shape}"
            )
    # Old checkpoints carry the rotary frequencies, which follow from the configuration.
    extra = [name for name in there if name not in wanted and not name.endswith("rotary_emb.inv_freq")]
    if config.tied_embeddings and "lm_head.weight" in extra:
        # Some publishers write a tied matrix twice.
        extra.remove("lm_head.weight")
        _check_the_same(file, "model.embed_tokens.weight", "lm_head.weight")
    if extra:
        raise ValueError(f"{file.where} holds {sorted(extra)[:3]}, which the configuration does not call for")


def _check_the_same(file: TensorFile, first: str, second: str) -> None:
    same_shape = file.shapes[first] == file.shapes[second]
    rows = file.shapes[first][0]
    # In parts: this is the largest matrix of most models.
    cuts = [(slice(start, min(start + 8192, rows)), slice(None)) for start in range(0, rows, 8192)]
    if not same_shape or any(
        (file.read(first, cut).astype(np.float32) != file.read(second, cut).astype(np.float32)).any()
        for cut in cuts
    ):
        raise ValueError(
            f"{file.where}: {second} is not the embedding, though tie_word_embeddings says that it is"
        )


def place(
    config: DecoderConfig,
    file: TensorFile,
    *,
    shardings: Callable[[nnx.State], PyTree] | None = None,
    dtype: str = "float32",
    by_rows: ByRows | None = None,
) -> nnx.State:
    """Decoder parameters made of `file`, each tensor put at once where `shardings` of the parameters' shapes says.

    Only what the devices of this process hold is read; with `by_rows`, where columns of a tensor cannot be read without its rows, as many
    rows as are this process's share. One tensor is under way at a time: the host needs its bytes as stored, in `dtype`, and turned around,
    and nothing of the others.

    Raises:
        ValueError: a tensor is missing, misshapen or not called for, or cannot be read.
    """
    checked(config, file)
    shapes = shapes_of(config)
    like, pure = nnx.to_pure_dict(shapes), {"ends": {}, "blocks": {}}
    # None for all: on the default device and free to be moved, as an array that a jitted function made.
    where: Any = None if shardings is None else nnx.to_pure_dict(shardings(shapes))
    for name, leaf in like["ends"].items():
        sharding = where and where["ends"][name]
        pure["ends"][name] = _put(file, _END_TENSORS[name], name, leaf.shape, sharding, dtype, by_rows)
    for name, leaf in like["blocks"].items():
        sharding = where and where["blocks"][name]
        stack = jnp.zeros(leaf.shape, dtype, device=sharding)
        for layer in range(config.layers):
            theirs = _layer_name(name, layer)
            of_layer = sharding and _of_a_layer(sharding)
            part = _put(file, theirs, name, leaf.shape[1:], of_layer, dtype, by_rows)
            # Waits, so that the host does not run ahead and fill its memory with tensors under way.
            stack = jax.block_until_ready(_filler(sharding)(stack, part, np.int32(layer)))
        pure["blocks"][name] = stack
    nnx.replace_by_pure_dict(shapes, pure)
    return shapes


def exported(config: DecoderConfig, params: nnx.State) -> Iterator[Tensor]:
    """The tensors of decoder parameters; fetching one gathers that one on the host, whatever its sharding."""
    pure = nnx.to_pure_dict(params)
    for name, value in pure["ends"].items():
        rows = config.vocab_size if name in _TABLES else len(value)
        shape = (rows, *value.shape[1:])
        yield Tensor(_END_TENSORS[name], shape, lambda rows=rows, value=value: _gathered(value)[:rows])
    for layer in range(config.layers):
        for name, stack in pure["blocks"].items():

            def fetch(name: str = name, stack: Array = stack, layer: int = layer) -> np.ndarray:
                return _gathered(stack, layer).reshape(_theirs_shape(name, stack.shape[1:]))

            yield Tensor(_layer_name(name, layer), _theirs_shape(name, stack.shape[1:]), fetch)


def _layer_name(name: str, layer: int) -> str:
    return f"model.layers.{layer}.{_LAYER_TENSORS[name]}"


@functools.cache
def _filler(sharding: Sharding | None) -> Callable[[Array, Array, np.int32], Array]:
    """Puts a layer into a stack, in place."""
    return jax.jit(
        lambda stack, part, layer: jax.lax.dynamic_update_index_in_dim(stack, part, layer, 0),
        donate_argnums=0,
        out_shardings=sharding,
    )


@functools.cache
def _picker(sharding: Sharding | None) -> Callable[[Array, np.int32], Array]:
    """Takes a layer out of a stack."""
    return jax.jit(
        lambda stack, layer: jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False),
        out_shardings=sharding,
    )


def _of_a_layer(sharding: Sharding) -> Sharding:
    """Where one layer of a stack lies. The axis of layers itself is never split."""
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
    """One tensor in our orientation, on the devices; each distinct part of it is read once."""
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
            beyond = (
                name in _TABLES and cut[0].start == cut[0].stop
            )  # all that a device holds may be what fills up
            stored = np.zeros((0, wanted[1])) if beyond else file.read(theirs, cut)
            stored = stored.astype(jnp.dtype(dtype), copy=False)
            missing = wanted[0] - len(stored) if name in _TABLES else 0
            parts[ranges] = np.pad(stored, ((0, missing), (0, 0))) if missing else stored.reshape(wanted)
        return parts[ranges]

    if sharding is None:
        return jnp.asarray(part(None))
    return jax.make_array_from_callback(shape, sharding, part)


def _rows(file: TensorFile, name: str, dtype: str) -> Rows:
    """The rows of a tensor; zeros beyond its last."""
    there, *others = file.shapes[name]

    def rows(start: int, stop: int) -> np.ndarray:
        found = np.zeros((stop - start, *others), jnp.dtype(dtype))
        first, last = min(start, there), min(stop, there)
        if first < last:
            found[: last - first] = file.read(
                name, (slice(first, last), *(slice(0, size) for size in others))
            )
        return found

    return rows


def _gathered(value: Array, layer: int | None = None) -> np.ndarray:
    """The array, or one layer of a stack, on the host."""
    sharding = value.sharding
    whole = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
    if layer is not None:
        value = _picker(whole)(value, np.int32(layer))
    elif not value.is_fully_addressable:
        value = jax.device_put(value, whole)
    return np.asarray(value)


def _merged(name: str) -> int | None:
    """The axis which transformers has as one with the next: heads and their dimensions."""
    return {"query": 0, "key": 0, "value": 0, "output": 1}.get(name.removesuffix("_bias"))


def _theirs_shape(name: str, shape: Shape) -> Shape:
    axis = _merged(name)
    return shape if axis is None else (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


def _theirs_cut(name: str, shape: Shape, whole: Cut) -> Cut:
    """The part of their tensor that is the part `whole` of ours."""
    axis = _merged(name)
    if axis is None:
        return whole
    heads, within, dim = whole[axis], whole[axis + 1], shape[axis + 1]
    if within.stop - within.start != dim:
        raise ValueError(f"{name} can be split along its heads, not within head_dim={dim}")
    return (*whole[:axis], slice(heads.start * dim, heads.stop * dim), *whole[axis + 2 :])
