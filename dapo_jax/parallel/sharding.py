"""The mesh axis of each logical axis of an array: one table and one function for parameters and optimizer."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from dapo_jax.dapo.precision import Quantized
from dapo_jax.parallel.mesh import BATCH_AXES

TRAINER_RULES: Mapping[str, str | None] = {
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "head_dim": None,
    "norm": None,
    "rank": None,
}
"""Logical axis -> mesh axis, for master weights and optimizer moments."""

SAMPLER_RULES: Mapping[str, str | None] = {**TRAINER_RULES, "embed": None}
"""The table for the sampler's copy: whole along `embed`, so that a decode step gathers no weights."""


def shardings(tree: PyTree, mesh: Mesh, rules: Mapping[str, str | None] = TRAINER_RULES) -> PyTree:
    """Returns a `NamedSharding` for every leaf of `tree`, from the logical axes of its `nnx.Variable`.

    Leading dimensions beyond the named axes (stacked layers) are not sharded; a leaf without axes is replicated.

    Raises:
        ValueError: a dimension is not divisible by its mesh axis.
    """

    def place(path: tuple[Any, ...], leaf: Any) -> Any:
        if isinstance(leaf, nnx.Variable) and isinstance(parts := leaf.get_value(), Quantized):
            values = place(path, leaf.replace(parts.values)).get_value()
            cut = zip(parts.scale.shape, values.spec, strict=True)
            scale = PartitionSpec(*(None if size == 1 else axis for size, axis in cut))
            return leaf.replace(Quantized(values, NamedSharding(mesh, scale)))
        axes = leaf.get_metadata().get("axes", ()) if isinstance(leaf, nnx.Variable) else ()
        spec = [None] * (leaf.ndim - len(axes)) + [rules[axis] for axis in axes]
        for size, axis in zip(leaf.shape, spec, strict=True):
            if axis is not None and size % mesh.shape[axis]:
                fits = [str(n) for n in range(1, min(size, mesh.size) + 1) if size % n == 0]
                raise ValueError(
                    f"parameter {jax.tree_util.keystr(path)} of shape {leaf.shape} has a dimension of {size}, which "
                    f"parallel.{axis}={mesh.shape[axis]} does not divide; of up to {mesh.size} devices {', '.join(fits)} do"
                )
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return leaf.replace(sharding) if isinstance(leaf, nnx.Variable) else sharding

    return jax.tree_util.tree_map_with_path(place, tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding with the whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def by_row(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of the first dimension (rows of a batch, slots of a sampler) over the batch axes."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))
