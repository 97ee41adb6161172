"""Joins matrices of a layer that multiply the same tokens, so that the sampler computes one product in place of several. On a GPU, XLA would join
them itself, and would copy them in every decoding step."""

import math
from collections.abc import Sequence
from itertools import accumulate, product
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Num

from dapo_jax.models.layout import BATCH_AXES

OF_ATTENTION, OF_MLP = ("query", "key", "value", "value_gate", "write", "forget"), ("gate", "up")
"""The matrices that are joined, as far as a layer has them. The last three of `OF_ATTENTION` are parts of Gated DeltaNet. Matrices of experts are not joined."""


def joined(layer: nnx.State, parts: int) -> nnx.State:
    """Joins the matrices of a layer, and the first matrices of their adapters. `parts` is the number of devices along `tensor`.

    The variable of the first matrix gets the joined matrix, [parts, rows, inputs]. Each part has a device's rows of all matrices, in the order above.
    Its metadata `joined` are the output dimensions of each matrix. The other variables get the value None.
    """
    made: dict[Any, Any] = dict(layer)
    for names, suffix in product((OF_ATTENTION, OF_MLP), ("", "_lora_a")):
        there = [name for each in names if (name := each + suffix) in made]
        axes = made[there[0]].get_metadata()["axes"] if len(there) > 1 else BATCH_AXES
        if axes[0] in BATCH_AXES:
            continue
        count = 1 if suffix else parts
        matrices = [made[name].get_value() for name in there]
        shapes = tuple(getattr(matrix, "values", matrix).shape[:-1] for matrix in matrices)
        matrices = jax.tree.map(lambda x, count=count: x.reshape(count, -1, x.shape[-1]), matrices)
        whole = jax.tree.map(lambda *each: jnp.concatenate(each, axis=1), *matrices)
        made |= {name: made[name].replace(None) for name in there[1:]}
        made[there[0]] = made[there[0]].replace(whole, axes=(axes[0], "head_dim", axes[-1]), joined=shapes)
    return nnx.State(made)


def split(rows: Num[Array, "parts rows last"], shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Splits a joined matrix, or a product with it, into the arrays of the separate matrices."""
    *ends, _ = accumulate(math.prod(shape) // len(rows) for shape in shapes)
    pairs = zip(jnp.split(rows, ends, axis=1), shapes, strict=True)
    return [each.reshape(*shape, rows.shape[2]) for each, shape in pairs]
