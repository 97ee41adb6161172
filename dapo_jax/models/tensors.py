"""Conversion between decoder parameters and tensors with the names and shapes of transformers.

`TensorFile` is the interface for weight files of any format. `place` builds decoder parameters from a `TensorFile`, and
`exported` converts parameters back to tensors. Both keep at most one tensor on the host at a time.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Int, PyTree

from dapo_jax.models.decoder import Decoder, end_parameters, is_apart, stacks_of, unstacked
from dapo_jax.models.families import FAMILIES
from dapo_jax.models.layer_kinds import LayerKind
from dapo_jax.models.lora import LORA_PARTS, parted
from dapo_jax.models.parameters import Parameter
from dapo_jax.models.presets import DecoderConfig, preset

Shape = tuple[int, ...]
Cut = tuple[slice, ...]
Rows = Callable[[int, int], np.ndarray]
"""A function that returns the rows from `start` to `stop` of a tensor. Rows after the tensor's last row are zeros."""
ByRows = Callable[[Rows, Shape, Shape, NamedSharding], jax.Array]
"""A function that creates an array from a tensor in a file. Each process reads only some of the tensor's rows. The arguments are a `Rows` function, the shape
of the tensor, the shape of the array (which has the same values in the same order) and the array's sharding. All processes must make the same calls."""

TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""The prefixes of the text model's tensors in models for images and text (transformers since 4.52, and before), and in text models."""
PEFT_PREFIX = "base_model.model."


@runtime_checkable
class TensorFile(Protocol):
    """A weight file of any format. Its tensors are read on access."""

    where: str
    """The path of the file, for error messages."""
    shapes: Mapping[str, Shape]
    """The shape of every tensor."""

    def read(self, name: str, cut: Cut) -> np.ndarray:
        """Returns the part `cut` of a tensor, in the dtype stored in the file.
        Raises ValueError if the tensor cannot be read. The message contains the path."""
        ...


class Tensor(NamedTuple):
    """A tensor to be written. `fetch` returns its values."""

    name: str
    shape: Shape
    fetch: Callable[[], np.ndarray]
    dtype: str = ""
    """Its dtype in the file, if it differs from the dtype of the other tensors."""

    def bytes(self, dtype: str) -> int:
        """Returns its size in a file whose other tensors have the dtype `dtype`."""
        return math.prod(self.shape) * jnp.dtype(self.dtype or dtype).itemsize


def shapes_of(config: DecoderConfig) -> nnx.State:
    """Returns the shapes of the decoder's parameters, including adapters, without allocating memory."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))[1]


def tensor_names(layers: int, family: str) -> list[str]:
    """Returns the names of all tensors that can occur in a decoder of this family with this number of layers, all with attention."""
    options: dict[str, Any] = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), True)
    options |= {"norm_place": "both", "qk_norm": "head", "tied_embeddings": False}
    config = replace(preset("tiny"), family=family, layers=layers, **options)
    of_layer = [theirs for tensors in _tensors(config).values() for theirs in tensors.parts if theirs]
    of_layers = [_in_layer(config, theirs, layer) for layer in range(layers) for theirs in of_layer]
    return [*_ends(config).values(), *of_layers]


def _fused(theirs: str) -> str:
    """Converts the name of a tensor of each expert to the name of the tensor of all experts."""
    path, of_experts, name = theirs.partition(".{}.")
    matrix = "down_proj" if name.startswith("down") else "gate_up_proj"
    return f"{path}.{matrix}" if of_experts else theirs


def _in_layer(config: DecoderConfig, theirs: str, layer: int) -> str:
    return f"{FAMILIES[config.family].path('model.layers')}.{layer}.{theirs}"


def _ends(config: DecoderConfig) -> dict[str, str]:
    """Returns the names of the tensors before and after the layers."""
    return {ours: FAMILIES[config.family].path(like.tensor) for ours, like in end_parameters(config).items()}


class _Tensors:
    """The tensors of a decoder's layers in one stack. Several parameters may be parts of one tensor."""

    def __init__(self, config: DecoderConfig, kind: LayerKind) -> None:
        family, self._head_dim = FAMILIES[config.family], config.head_dim
        self.parameters = kind.parameters(config)
        self.parts: dict[str, list[str]] = {}
        """The parameters of each tensor, in the order of their rows."""
        self.name = {
            ours: family.tensors.get(ours, family.path(like.tensor)) for ours, like in self.parameters.items()
        }
        self.in_layer = functools.partial(_in_layer, config)
        if config.fused_experts:
            self.name = {ours: _fused(theirs) for ours, theirs in self.name.items()}
        for ours, theirs in self.name.items():
            self.parts.setdefault(theirs, []).append(ours)
        self.experts = 0 if config.experts is None else config.experts.count
        rope = config.ropes[0]
        self._rotated = rope.width(config.head_dim) if rope and family.neighbours else 0

    def rows(self, ours: str) -> Int[np.ndarray, " rows"]:
        """Returns the row in its tensor for each row of a parameter, or of one expert's part of it. `ours` may be an adapter's `lora_b`.

        Parts are one below the other, in the whole tensor or in each block (see `Parameter.blocks`). Files of some families rotate neighbouring dimensions of a head.
        """
        ours = ours.removesuffix("_lora_b")
        parts, blocks = self.parts[self.name[ours]], self.parameters[ours].blocks or 1
        ends = np.cumsum([0, *(self._count(part) // blocks for part in parts)])
        at = parts.index(ours)
        found = (np.arange(blocks)[:, None] * ends[-1] + np.arange(ends[at], ends[at + 1])).reshape(-1)
        if not self._rotated or not self.parameters[ours].is_rotated:
            return found
        rotated = np.arange(self._rotated).reshape(-1, 2).T.reshape(-1)
        order = np.concatenate([rotated, np.arange(self._rotated, self._head_dim)])
        return found.reshape(-1, self._head_dim)[:, order].reshape(-1)

    def _count(self, ours: str) -> int:
        """Returns the number of rows of a parameter, or of one expert's part of it."""
        return _file_shape(self.parameters[ours])[self.expert_axes(ours)]

    def expert_axes(self, ours: str) -> int:
        """Returns the number of axes of a parameter before its rows: 1 if each expert has a part of it, otherwise 0."""
        return int("experts" in self.parameters[ours].axes)

    def shape(self, theirs: str) -> Shape:
        """Returns the shape of a tensor."""
        parts = self.parts[theirs]
        like, axes = self.parameters[parts[0]], self.expert_axes(parts[0])
        of_one = (sum(map(self._count, parts)), *_file_shape(like)[axes + 1 :])
        of_one = of_one[::-1] if like.is_transposed else of_one
        return (self.experts, *of_one) if axes and "{}" not in theirs else of_one

    def adapter_name(self, name: str, layer: int) -> str:
        """Returns PEFT's name for an adapter parameter of a layer in a text model, such as `query_lora_a`."""
        theirs = self.name[name.removesuffix("_lora_a").removesuffix("_lora_b")].removesuffix("weight")
        return f"{PEFT_PREFIX}{self.in_layer(theirs, layer)}lora_{name[-1].upper()}.weight"


def tensor_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Returns the name and shape of each tensor of the decoder, without adapters, in the order in which they are written."""
    return {tensor.name: tensor.shape for tensor in exported(config, shapes_of(config.base))}


def _tensors(config: DecoderConfig) -> dict[str, _Tensors]:
    """Returns the tensors of each stack (see `DecoderConfig.places`)."""
    return {stack: _Tensors(config, kind) for stack, kind in config.stacks.items()}


def unread(config: DecoderConfig) -> Callable[[str], bool]:
    """Returns a function from the name of a tensor to whether it is not loaded, although files may have it: it belongs to a layer that predicts further tokens, or has
    the keys or values of a layer that reads an earlier layer's."""
    found = set[str]()
    for layer, source in enumerate(config.sources):
        if source != layer:
            kinds = replace(config.kinds[layer], mixer=config.mixers[source]), config.kinds[layer]
            theirs, own = (set(_Tensors(config, kind).parts) for kind in kinds)
            found |= {_in_layer(config, name, layer) for name in theirs - own}

    def is_unread(name: str) -> bool:
        number = name.removeprefix("model.layers.").partition(".")[0]
        further = FAMILIES[config.family].further_layers and number.isdecimal()
        return name in found or (further and int(number) >= config.layers)

    return is_unread


def checked(config: DecoderConfig, file: TensorFile) -> None:
    """Checks that `file` contains the decoder's tensors and no others. If it contains both matrices of tied embeddings, they must be equal.

    Raises:
        ValueError: a tensor is missing, is unexpected or has the wrong shape. The message names the tensor.
    """
    untied = _ends(replace(config, tied_embeddings=False))
    wanted, matrix, again = tensor_shapes(config), untied["embedding"], untied["lm_head"]
    # Some publishers store the matrix of tied embeddings twice.
    twice = config.tied_embeddings and again in file.shapes
    _check_names(file, wanted | ({again: wanted[matrix]} if twice else {}))
    # In most models, these matrices are the largest tensors, so they are compared in parts to save memory.
    for start in range(0, config.vocab_size if twice else 0, 8192):
        cut = (slice(start, min(start + 8192, config.vocab_size)), slice(None))
        if (file.read(matrix, cut).astype(np.float32) != file.read(again, cut).astype(np.float32)).any():
            raise ValueError(f"{file.where}: {again} differs from the embedding (tie_word_embeddings=true)")


def _check_names(file: TensorFile, wanted: Mapping[str, Shape]) -> None:
    """Checks that `file` contains the tensors `wanted`, given as names and shapes, and no others."""
    for name, shape in wanted.items():
        if name not in file.shapes:
            raise ValueError(f"{file.where} lacks the tensor {name!r}")
        if (found := file.shapes[name]) != shape:
            raise ValueError(f"{file.where}: {name} has shape {found}, but the configuration needs {shape}")
    # Old model files contain the RoPE frequencies, which can be computed from the configuration.
    names = (name for name in file.shapes if not name.endswith("rotary_emb.inv_freq"))
    if extra := sorted(set(names) - set(wanted)):
        raise ValueError(f"{file.where} has the tensors {extra[:3]}, which are not part of this model")


def place(
    config: DecoderConfig,
    file: TensorFile,
    *,
    shardings: Callable[[nnx.State], PyTree] | None = None,
    dtype: str = "float32",
    by_rows: ByRows | None = None,
    apart: bool = False,
) -> nnx.State:
    """Loads decoder parameters, without adapters, from `file`.

    Each process reads only the parts that its devices need. From a bucket, only whole rows can be read, so with `by_rows`, each process
    reads a share of the rows. The host holds one tensor at a time, in two copies: one as stored in the file, and one in `dtype`.

    Args:
        config: configuration of the decoder.
        file: tensors of the decoder.
        shardings: a function from the shapes of all parameters to their shardings. None: all parameters are on the default device.
        dtype: dtype of all parameters except those that stay float32 (see `models.parameters.Parameter`).
        by_rows: function that reads a share of the rows (see `ByRows`).
        apart: store the arrays of each layer separately, as in `unstacked`. False: layers are stacked.

    Raises:
        ValueError: a tensor is missing, is unexpected, has the wrong shape, or cannot be read.
    """
    checked(config, file)
    shapes = shapes_of(config.base)
    if apart:
        shapes = jax.eval_shape(unstacked, shapes)
    like, pure = nnx.to_pure_dict(shapes), {"ends": {}, **{stack: {} for stack in stacks_of(shapes)}}
    # Without shardings, arrays are on the default device, but not committed to it, just like results of jitted functions.
    where: Any = (
        jax.tree.map(lambda _: None, like) if shardings is None else nnx.to_pure_dict(shardings(shapes))
    )

    put, tensors = functools.partial(_put, dtype=dtype, by_rows=by_rows), _tensors(config)
    for name, parameter in end_parameters(config).items():
        pure["ends"][name] = put(file, _ends(config)[name], parameter, where["ends"][name])

    def put_layer(name: str, layer: int, sharding: Sharding | None) -> Array:
        own = tensors[config.places[layer][0]]
        theirs, parameter = own.in_layer(own.name[name], layer), own.parameters[name]
        return put(_Part(file, theirs, parameter, own.rows(name)), theirs, parameter, sharding)

    for layer, (stack, index) in enumerate(config.places) if apart else ():
        pure[stack][index] = {
            name: put_layer(name, layer, where[stack][index][name]) for name in like[stack][index]
        }
    for stack in () if apart else tensors:
        for name, parameter in tensors[stack].parameters.items():
            layers, sharding = config.layers_of(stack), where[stack][name]
            shape = len(layers), *parameter.shape
            whole = jnp.zeros(shape, _stored_dtype(parameter, dtype), device=sharding)
            for index, layer in enumerate(layers):
                part = put_layer(name, layer, sharding and _of_a_layer(sharding))
                whole = jax.block_until_ready(_filler(sharding)(whole, part, np.int32(index)))
            pure[stack][name] = whole
    nnx.replace_by_pure_dict(shapes, pure)
    return shapes


def exported(config: DecoderConfig, params: nnx.State, adapters: nnx.State | None = None) -> Iterator[Tensor]:
    """Yields decoder parameters as tensors. A tensor is copied to the host only when its `fetch` is called.

    Args:
        config: configuration of the decoder, including the scale of `adapters`.
        params: all parameters except adapters, with any sharding, and with layers stacked or separate. They may be shapes, if no `fetch` is called.
        adapters: adapters to merge into their matrices, in float32.
    """
    pure = nnx.to_pure_dict(params)
    added = {} if adapters is None else nnx.to_pure_dict(adapters)
    ends = end_parameters(config)
    for name, value in pure["ends"].items():
        rows = config.vocab_size if "vocab" in ends[name].axes else len(value)
        shape = (rows, *value.shape[1:])
        yield Tensor(_ends(config)[name], shape, lambda rows=rows, value=value: _gathered(value)[:rows])
    apart, tensors = is_apart(params), _tensors(config)

    def fetch(name: str, layer: int, *expert: int) -> np.ndarray:
        stack, index = config.places[layer]
        value = pure[stack][index][name] if apart else pure[stack][name]
        found = _gathered(value, *(() if apart else (index,)), *expert)
        of_stack = added.get(stack, {})
        if pair := [of_stack[f"{name}_{part}"] for part in LORA_PARTS if f"{name}_{part}" in of_stack]:
            assert config.lora is not None
            a, b = (_gathered(whole, index) for whole in pair)
            change = (b.reshape(-1, b.shape[-1]) @ a.reshape(len(a), -1)).reshape(found.shape)
            found = found.astype(np.float32) + config.lora.scale * change
        parameter = tensors[stack].parameters[name]
        shape = _file_shape(replace(parameter, shape=found.shape, axes=parameter.axes[-found.ndim :]))
        return found.reshape(shape)

    def joined(parts: list[str], axis: int, layer: int, *expert: int) -> np.ndarray:
        own = tensors[config.places[layer][0]]
        whole = np.concatenate([fetch(name, layer, *expert) for name in parts], axis=axis)
        order = np.argsort(np.concatenate([own.rows(name) for name in parts]))
        if (order[1:] < order[:-1]).any():
            whole = np.take(whole, order, axis=axis)
        return whole.swapaxes(-1, -2) if own.parameters[parts[0]].is_transposed else whole

    for layer, (stack, _) in enumerate(config.places):
        own = tensors[stack]
        for theirs, parts in own.parts.items():
            name, shape = own.in_layer(theirs, layer), own.shape(theirs)
            axis = own.expert_axes(parts[0]) if "{}" not in theirs else 0
            for expert in ((index,) for index in range(own.experts)) if "{}" in theirs else [()]:
                fetched = functools.partial(joined, parts, axis, layer, *expert)
                yield Tensor(name.format(*expert), shape, fetched, own.parameters[parts[0]].file_dtype)


def adapter_tensors(config: DecoderConfig, adapters: nnx.State) -> Iterator[Tensor]:
    """Yields A [rank, inputs] and B [outputs, rank] of each adapted matrix, with PEFT's names for the class of the base model."""
    tensors, stacks = _tensors(config), nnx.to_pure_dict(adapters)
    text, wrapped = PEFT_PREFIX + "model.", PEFT_PREFIX + next(iter(TEXT_PREFIXES))

    def fetch(name: str, layer: int, shape: Shape) -> np.ndarray:
        stack, index = config.places[layer]
        found = _gathered(stacks[stack][name], index).reshape(shape)
        return found if name.endswith("_a") else found[np.argsort(tensors[stack].rows(name))]

    for layer, (stack, _) in enumerate(config.places):
        for name, whole in stacks.get(stack, {}).items():
            shape = _adapter_shape(name, whole.shape[1:])
            theirs = tensors[stack].adapter_name(name, layer)
            theirs = theirs.replace(text, wrapped, 1) if config.wrapped else theirs
            yield Tensor(theirs, shape, functools.partial(fetch, name, layer, shape))


def check_adapters(config: DecoderConfig) -> None:
    """Raises ValueError if adapted matrices of this decoder are parts of one tensor, so that PEFT has one adapter for all of them."""
    targets = () if config.lora is None else config.lora.targets
    for tensors in _tensors(config).values():
        parts = {
            parameter.target: tensors.parts[tensors.name[name]]
            for name, parameter in tensors.parameters.items()
            if parameter.target
        }
        for target in (target for target in targets if len(parts.get(target, ())) > 1):
            separate = [name for name, others in parts.items() if len(others) == 1]
            raise ValueError(
                f"lora.targets={list(targets)}: {target} is a part of the tensor {tensors.name[parts[target][0]]}, which has one adapter in PEFT; this is not supported: "
                f"set lora.targets=[{','.join(separate)}], or train all weights with lora.rank=0"
            )


def place_adapters(
    config: DecoderConfig,
    file: TensorFile,
    *,
    shardings: Callable[[nnx.State], PyTree] | None = None,
) -> nnx.State:
    """Loads adapters from `file` in float32. Because adapters are small, the layers of each adapter are stacked on the host.
    Raises ValueError if a tensor is missing, is unexpected or has the wrong shape. The message names the tensor."""
    shapes = parted(shapes_of(config))[0]
    pure, tensors = nnx.to_pure_dict(shapes), _tensors(config)
    text = replace(config, wrapped=False)  # files are read with the names of the text model
    _check_names(file, {tensor.name: tensor.shape for tensor in adapter_tensors(text, shapes)})
    where = None if shardings is None else nnx.to_pure_dict(shardings(shapes))
    for stack, leaves in pure.items():
        of_stack, layers = tensors[stack], config.layers_of(stack)
        for name, leaf in leaves.items():
            whole = slice(None), slice(None)
            parts = [_finite(file, of_stack.adapter_name(name, layer), whole) for layer in layers]
            parts = parts if name.endswith("_a") else [part[of_stack.rows(name)] for part in parts]
            made = np.stack([part.astype(np.float32).reshape(leaf.shape[1:]) for part in parts])
            leaves[name] = jnp.asarray(made) if where is None else jax.device_put(made, where[stack][name])
    nnx.replace_by_pure_dict(shapes, pure)
    return shapes


def _adapter_shape(name: str, shape: Shape) -> Shape:
    """Converts the shape of one layer's A or B to its shape in PEFT, where both are two-dimensional."""
    return (shape[0], math.prod(shape[1:])) if name.endswith("_a") else (math.prod(shape[:-1]), shape[-1])


def _stored_dtype(parameter: Parameter, dtype: str) -> str:
    """Returns the dtype in which a parameter is stored."""
    return "float32" if parameter.float32 else dtype


@functools.cache
def _filler(sharding: Sharding | None) -> Callable[[Array, Array, np.int32], Array]:
    """Returns a program that writes one layer into a stack of layers, in place."""
    put = functools.partial(jax.lax.dynamic_update_index_in_dim, axis=0)
    return jax.jit(put, donate_argnums=0, out_shardings=sharding)


@functools.cache
def _picker(sharding: Sharding | None) -> Callable[..., Array]:
    """Returns a program that extracts one layer from a stack of layers, or one expert of a layer."""

    def pick(stack: Array, *index: Array) -> Array:
        for at in index:
            stack = jax.lax.dynamic_index_in_dim(stack, at, keepdims=False)
        return stack

    return jax.jit(pick, out_shardings=sharding)


def _of_a_layer(sharding: Sharding) -> Sharding:
    """Returns the sharding of one layer of a stack. The layer axis of a stack is never split."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return sharding


def _put(
    file: TensorFile,
    theirs: str,
    parameter: Parameter,
    sharding: Sharding | None,
    dtype: str,
    by_rows: ByRows | None,
) -> jax.Array:
    """Loads a tensor as `parameter`. A part that several devices need is read only once."""
    dtype, shape = _stored_dtype(parameter, dtype), parameter.shape
    if by_rows is not None and isinstance(sharding, NamedSharding):
        columns = [slice(0, size) for size in file.shapes[theirs][1:]]

        def rows(start: int, stop: int) -> np.ndarray:
            return _padded(file, theirs, (slice(start, stop), *columns), dtype)

        return by_rows(rows, _file_shape(parameter), shape, sharding)
    parts: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def part(index: Cut | None) -> np.ndarray:
        index = index or (slice(None),) * len(shape)
        ranges = tuple(axis.indices(size)[:2] for axis, size in zip(index, shape, strict=True))
        if ranges not in parts:
            cut = _file_cut(parameter, tuple(slice(*ends) for ends in ranges))
            sizes = [stop - start for start, stop in ranges]
            parts[ranges] = _padded(file, theirs, cut, dtype).reshape(sizes)
        return parts[ranges]

    made = jax.make_array_from_callback(shape, sharding, part) if sharding else jnp.asarray(part(None))
    # Wait for each transfer, so that the host's memory does not fill up with tensors in transfer.
    return jax.block_until_ready(made)


class _Part:
    """A parameter of a layer as a tensor of its own. Implements `TensorFile`."""

    def __init__(
        self, file: TensorFile, theirs: str, parameter: Parameter, rows: Int[np.ndarray, " rows"]
    ) -> None:
        """`theirs` is the name of its tensor, or a pattern for one tensor per expert. `rows` is the result of `_Tensors.rows`."""
        self.where, self._file, self._rows = file.where, file, rows
        self._experts, self._is_transposed = "experts" in parameter.axes, parameter.is_transposed
        self.shapes: Mapping[str, Shape] = {theirs: _file_shape(parameter)}

    def read(self, name: str, cut: Cut) -> np.ndarray:
        """Returns the part `cut` of the parameter. Only rows from the first to the last that are needed are read."""
        experts, (rows, *columns) = cut[: self._experts], cut[self._experts :]
        wanted = self._rows[rows]
        first, last = (int(wanted.min()), int(wanted.max())) if len(wanted) else (0, -1)
        step = (last - first) // max(len(wanted) - 1, 1) or 1
        if np.array_equal(wanted, np.arange(first, last + 1, step)):
            near, inner = slice(first, last + 1, step), slice(None)
        else:
            near, inner = slice(first, last + 1), wanted - first
        if "{}" in name:
            each = range(experts[0].start, experts[0].stop)
            found = np.stack([_finite(self._file, name.format(number), (near, *columns)) for number in each])
        elif self._is_transposed:
            found = self._file.read(name, (*experts, *columns, near)).swapaxes(-1, -2)
        else:
            found = self._file.read(name, (*experts, near, *columns))
        return found[:, inner] if experts else found[inner]


def _finite(file: TensorFile, name: str, cut: Cut) -> np.ndarray:
    """Reads the part `cut` of a tensor.

    Raises:
        ValueError: the values contain NaN or infinity.
    """
    values = file.read(name, cut)
    if not np.isfinite(values).all():
        raise ValueError(
            f"{file.where}: {name} contains NaN or infinity, but weights must be finite. The file is damaged, or the model's training diverged. "
            "Use an earlier checkpoint"
        )
    return values


def _padded(file: TensorFile, name: str, cut: Cut, dtype: str) -> np.ndarray:
    """Reads the part `cut` of a tensor like `_finite`. Rows beyond the tensor's last row are zeros."""
    found = np.zeros([axis.stop - axis.start for axis in cut], jnp.dtype(dtype))
    rows = slice(cut[0].start, min(cut[0].stop, file.shapes[name][0]))
    if rows.start < rows.stop:
        found[: rows.stop - rows.start] = _finite(file, name, (rows, *cut[1:]))
    return found


def _gathered(value: Array, *index: int) -> np.ndarray:
    """Copies an array, or the part of a stack with this index, to the host."""
    sharding = value.sharding
    whole = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
    if index:
        value = _picker(whole)(value, *map(np.int32, index))
    elif not value.is_fully_addressable:
        value = jax.device_put(value, whole)
    return np.asarray(value)


def _heads_axis(axes: tuple[str, ...]) -> int | None:
    """Returns the index of the axis of heads, if a parameter has one. Transformers merges this axis with the head_dim axis after it."""
    return axes.index("head_dim") - 1 if "head_dim" in axes else None


def _file_shape(parameter: Parameter) -> Shape:
    """Returns the shape of a parameter in transformers."""
    shape, axis = parameter.shape, _heads_axis(parameter.axes)
    return shape if axis is None else (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


def _file_cut(parameter: Parameter, whole: Cut) -> Cut:
    """Converts `whole`, slices of a parameter, to the corresponding slices of transformers' tensor."""
    axis = _heads_axis(parameter.axes)
    if axis is None:
        return whole
    heads, dim = whole[axis], parameter.shape[axis + 1]  # a head is never split
    return (*whole[:axis], slice(heads.start * dim, heads.stop * dim), *whole[axis + 2 :])
