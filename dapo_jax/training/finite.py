"""Which parameters hold a NaN or an infinity."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, PyTree

from dapo_jax.parallel.sharding import replicated


def leaf_names(tree: PyTree) -> list[str]:
    """The dotted path of each leaf, in the order of `jax.tree.leaves`, as in a checkpoint: without the box flax puts around it."""
    names = [
        jax.tree_util.keystr(keys, simple=True, separator=".")
        for keys, _ in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]
    return [name.removesuffix(".value") for name in names]


def nonfinite_leaves(tree: PyTree) -> list[str]:
    """The dotted paths of the leaves that are not finite throughout. Of several processes all must ask, and all are told the same.

    Args:
        tree: arrays on one mesh.
    """
    bad = np.asarray(_program(jax.tree.leaves(tree)[0].sharding.mesh)(tree))
    return [name for name, one in zip(leaf_names(tree), bad, strict=True) if one]


@functools.cache
def _program(mesh: Mesh) -> Any:
    return jax.jit(_bad, out_shardings=replicated(mesh))


def _bad(tree: PyTree) -> Bool[Array, " leaves"]:
    return jnp.stack([~jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)])
