"""Array sharding: the tables that map logical axes to mesh axes, and the loading of sharded tensors from files."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from dapo_jax.models.tensors import Cut, Rows, Shape
from dapo_jax.numerics.quantization import Quantized
from dapo_jax.parallel.mesh import BATCH_AXES
from dapo_jax.parallel.together import Together, meet

TRAINER_RULES: Mapping[str, str | None] = {
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "head_dim": None,
    "norm": None,
    "features": None,
    "taps": None,
    "rank": None,
    "experts": "fsdp",
    "layer_embed": "fsdp",
}
"""The mesh axis for each logical axis of master weights and optimizer moments. None means that the axis is not sharded."""

SAMPLER_RULES: Mapping[str, str | None] = {
    **TRAINER_RULES,
    "embed": None,
    "experts": None,
    "layer_embed": "data",
}
"""The mesh axis for each logical axis of the sampler's weights. They are not sharded along `embed` and `experts`, so that decoding steps do not have to gather weights. The
table of the layers' own embeddings, with the axis `layer_embed`, is split, because it is large, and a step reads only a few of its rows. A sampler has no axis `fsdp`."""


def shardings(
    tree: PyTree, mesh: Mesh | AbstractMesh, rules: Mapping[str, str | None] = TRAINER_RULES
) -> PyTree:
    """Returns a `NamedSharding` for every leaf of `tree`, from the logical axes of its `nnx.Variable`.

    Additional leading dimensions, such as the dimension of stacked layers, are not sharded. A leaf without logical axes is replicated. Raises ValueError if a
    dimension is not divisible by the size of its mesh axis.
    """

    common, refused = dict[str, int](), list[tuple[str, str]]()

    def place(path: tuple[Any, ...], leaf: Any) -> Any:
        if isinstance(leaf, nnx.Variable) and isinstance(parts := leaf.get_value(), Quantized):
            values = place(path, leaf.replace(parts.values)).get_value()
            cut = zip(parts.scale.shape, values.spec, strict=True)
            scale = PartitionSpec(*(None if size == 1 else axis for size, axis in cut))
            return leaf.replace(Quantized(values, NamedSharding(mesh, scale)))
        if not jax.tree.leaves(leaf):  # a moment that an optimizer does not have for this parameter
            return leaf
        axes = leaf.get_metadata().get("axes", ()) if isinstance(leaf, nnx.Variable) else ()
        over = dict(rules)
        if "experts" in axes and over["experts"]:
            # A device has whole experts. If their number cannot be divided, the matrices are split along `embed` like others.
            whole = leaf.shape[axes.index("experts") - len(axes)] % mesh.shape[over["experts"]] == 0
            over["embed" if whole else "experts"] = None
        names = [None] * (leaf.ndim - len(axes)) + list(axes)
        spec = [None if name is None else over[name] for name in names]
        for name, size, axis in zip(names, leaf.shape, spec, strict=True):
            if axis is not None:
                if name != "vocab":  # it is padded to a multiple of the axis (`for_mesh`)
                    common[axis] = math.gcd(common.get(axis, 0), size)
                if size % mesh.shape[axis]:
                    where = f"{jax.tree_util.keystr(path)} of shape {leaf.shape} has a dimension of {size}"
                    refused.append((axis, where))
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return leaf.replace(sharding) if isinstance(leaf, nnx.Variable) else sharding

    placed = jax.tree_util.tree_map_with_path(
        place, tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    )
    for axis, where in refused[:1]:
        fits = [str(n) for n in range(1, mesh.size + 1) if common.get(axis, 0) % n == 0]
        raise ValueError(
            f"parameter {where}, which is not divisible by parallel.{axis}={mesh.shape[axis]}; "
            f"on up to {mesh.size} devices, use {', '.join(fits)}"
        )
    return placed


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding that replicates an array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def by_row(mesh: Mesh) -> NamedSharding:
    """Returns a sharding that splits the first dimension (batch rows or sampler slots) over the batch axes."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def split(sharding: NamedSharding, dimensions: int) -> list[tuple[str, ...]]:
    """Returns, for each dimension of an array, the mesh axes over which it is sharded."""
    entries = [*sharding.spec, *[None] * (dimensions - len(sharding.spec))]
    return [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in entries]


def read_by_rows(rows: Rows, stored: Shape, shape: Shape, target: NamedSharding) -> jax.Array:
    """Loads a tensor from a file as an array with sharding `target`. Every process must call it. Each process loads the same number of rows per device.

    A file stores a matrix row by row, but most of the trainer's matrices are sharded by columns. To load only the columns for its own devices,
    each process would have to read the whole model. So each process loads some of the rows, and the devices then exchange columns.

    Args:
        rows: function that loads a range of rows, with zeros after the last row.
        stored: shape of the tensor in the file.
        shape: shape of the array. The values are in the same order as in the file, but an axis of `stored` may be split into two axes.
        target: sharding of the array.
    """
    mesh = target.mesh
    whole = (-(-stored[0] // mesh.size) * mesh.size, *stored[1:])

    def range_of(index: Cut | None) -> tuple[int, int]:
        return (index[0] if index else slice(None)).indices(whole[0])[:2]

    by_device = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    held = [range_of(index) for index in by_device.addressable_devices_indices_map(whole).values()]
    # The devices of a process are adjacent in the mesh, so their rows are one range.
    first, last = min(start for start, _ in held), max(stop for _, stop in held)
    own = rows(first, last)

    def part(index: Cut | None) -> np.ndarray:
        start, stop = range_of(index)
        return own[start - first : stop - first]

    spread = jax.make_array_from_callback(whole, by_device, part)
    meet()  # Without this barrier, the collective could time out while another process reads its rows.
    # Waits until this tensor has been transferred, so that tensors in transfer do not fill the host's memory.
    return jax.block_until_ready(_mover(stored, shape, target)(spread))


@functools.lru_cache(maxsize=64)
def _mover(stored: Shape, shape: Shape, target: NamedSharding) -> Together:
    """Returns a program that reshapes an array, sharded by rows over all devices, and moves it to the sharding `target`."""
    _, *columns = split(target, len(shape))
    if len(shape) > len(stored):
        columns.pop(next(axis for axis, size in enumerate(stored) if shape[axis] != size))
    rows = tuple(axis for axis in target.mesh.axis_names if axis not in sum(columns, ()))
    # First, shard the columns over their mesh axes, and the rows over all other axes. Otherwise, the compiler could gather the whole array on every device.
    between = NamedSharding(target.mesh, PartitionSpec(rows, *(axes or None for axes in columns)))

    def move(spread: Array) -> Array:
        return lax.with_sharding_constraint(spread, between)[: stored[0]].reshape(shape)

    return Together(jax.jit(move, out_shardings=target))
