"""Joins matrices of a layer that multiply the same tokens, so that the sampler computes one product in place of several. On a GPU, XLA would join
them itself, and would copy them in every decoding step."""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Num


def joined(layer: nnx.State, parts: int) -> nnx.State:
    """Joins the matrices of a layer that have the same metadata `joins`, a tuple of their names. `parts` is the number of devices along `tensor`.

    The variable of the first matrix gets the joined matrix, [parts, rows, inputs]. Each part has a device's rows of all matrices, in the order of their names.
    Its metadata `joined` are the output dimensions of each matrix. The other variables get the value None.
    """
    found: dict[Any, Any] = dict(layer)
    for names in dict.fromkeys(variable.get_metadata("joins", ()) for variable in layer.values()):
        names = [name for name in names if name in found]
        if len(names) < 2:
            continue
        axes = found[names[0]].get_metadata()["axes"]
        count = 1 if axes[0] in ("rank", "features") else parts
        matrices = [found[name].get_value() for name in names]
        shapes = tuple(getattr(matrix, "values", matrix).shape[:-1] for matrix in matrices)
        matrices = jax.tree.map(lambda x, count=count: x.reshape(count, -1, x.shape[-1]), matrices)
        whole = jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=1), *matrices)
        found |= {name: found[name].replace(None) for name in names[1:]}
        found[names[0]] = found[names[0]].replace(whole, axes=(axes[0], "head_dim", axes[-1]), joined=shapes)
    return nnx.State(found)


def split(rows: Num[Array, "parts rows last"], shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Splits a joined matrix, or a product with it, into the arrays of the separate matrices."""
    *ends, _ = accumulate(math.prod(shape) // len(rows) for shape in shapes)
    pairs = zip(jnp.split(rows, ends, axis=1), shapes, strict=True)
    return [part.reshape(*shape, rows.shape[2]) for part, shape in pairs]
