"""Joins matrices of a layer that multiply the same tokens, so that the sampler computes one product in place of several.

XLA would join them itself on a GPU, and would copy the matrices in every decoding step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Num

from dapo_jax.dapo.quantization import Quantized
from dapo_jax.models.layout import BATCH_AXES

OF_ATTENTION, OF_MLP = ("query", "key", "value", "value_gate", "write", "forget"), ("gate", "up")
"""The matrices of a layer that are joined, as far as the layer has them, except matrices of experts. Only Gated DeltaNet has the last three."""


@partial(jax.tree_util.register_dataclass, data_fields=["whole"], meta_fields=["shapes"])
@dataclass(frozen=True)
class Joined:
    """Several matrices in one array. It is the value of the first matrix' parameter. The parameters of the other matrices have the value None."""

    whole: Float[Array, "parts rows inputs"] | Quantized | Any
    """One part for each device along `tensor`, with this device's rows of the first matrix, of the second matrix, and so on."""
    shapes: Sequence[tuple[int, ...]]
    """The output dimensions of each matrix."""

    def split(self, rows: Num[Array, "parts rows last"]) -> list[Num[Array, "*outputs last"]]:
        """Splits the joined matrix, or a product with it, into arrays of the separate matrices."""
        ends = np.cumsum([math.prod(shape) // len(rows) for shape in self.shapes])[:-1]
        pairs = zip(jnp.split(rows, ends.tolist(), axis=1), self.shapes, strict=True)
        return [each.reshape(*shape, rows.shape[2]) for each, shape in pairs]


def joined(layer: nnx.State, parts: int) -> nnx.State:
    """Joins the matrices of a layer, and the first matrices of their adapters. `parts` is the number of devices along `tensor`."""
    made: dict[Any, Any] = dict(layer)
    for names, suffix in product((OF_ATTENTION, OF_MLP), ("", "_lora_a")):
        there = {name: layer[name] for each in names if (name := each + suffix) in layer}
        first, *others = there or [""]
        if not others or (axes := there[first].get_metadata()["axes"])[0] in BATCH_AXES:
            continue
        count = 1 if axes[0] == "rank" else parts
        matrices = [variable.get_value() for variable in there.values()]
        whole = jax.tree.map(
            lambda *each, count=count: jnp.concatenate(
                [x.reshape(count, -1, x.shape[-1]) for x in each], axis=1
            ),
            *matrices,
        )
        shapes = tuple(getattr(matrix, "values", matrix).shape[:-1] for matrix in matrices)
        made |= {name: there[name].replace(None) for name in others}
        made[first] = there[first].replace(Joined(whole, shapes), axes=(axes[0], "head_dim", axes[-1]))
    return nnx.State(made)
