"""The shape, logical axes, dtype and initial values of a layer's parameters, and their names in files. The layer's mixer and MLP list them (`models.layer_kinds`)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from dapo_jax.models.architecture import Architecture

BATCH_AXES = ("experts",)
"""Logical axes that number matrices. In a stack of layers, an axis for layers without a name precedes them."""


def output_dimensions(axes: tuple[str, ...]) -> range:
    """Returns the output dimensions of a matrix with these logical axes. A matrix product sums over later dimensions. Earlier ones number matrices."""
    first = sum(axis in BATCH_AXES for axis in axes)
    return range(first, first + 1 + (axes[first + 1 : first + 2] == ("head_dim",)))


def is_matrix(axes: tuple[str, ...]) -> bool:
    """Returns whether a parameter with these logical axes is a weight matrix of a layer. Norms, biases and filters are not, and neither are embeddings."""
    return "vocab" not in axes and axes[-1] != "taps" and output_dimensions(axes).stop < len(axes)


def is_float32(variable: nnx.Variable) -> bool:
    """Returns whether a parameter stays float32 whatever the dtype of products is."""
    return variable.get_metadata("float32", False)


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of a layer."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    """The logical axis of each dimension, outputs before inputs. `parallel.sharding` maps it to a mesh axis."""
    tensor: str = ""
    """The name of its tensor in a layer of a file, which `Family.tensors` may replace. Parameters with the same name are parts of one tensor, one below the other."""
    blocks: int = 0
    """If above 0, the tensor consists of this number of blocks, and each block has the same number of rows of each part, one part below the other."""
    is_transposed: bool = False
    """Whether its tensor has inputs before outputs. Only the matrices of experts may be transposed."""
    fan_in: int = 0
    """If above 0, initial values are normal with variance 1 / fan_in."""
    start: float | Callable[[Array], Array] = 0.0
    """Otherwise, the initial value, or a function that maps a random key to initial values."""
    float32: bool = False
    """Whether the parameter stays float32 whatever the dtype of products is, such as norms and routers."""
    target: str = ""
    """The name of the matrix in PEFT if it may have an adapter."""
    joins: tuple[str, ...] = ()
    """The parameters with which a sampler may join this one, because they multiply the same tokens (see `models.joined`)."""
    is_trained: bool = True
    """Whether training changes the parameter. Otherwise it is only stored, such as the bias of a router's choice."""
    file_dtype: str = ""
    """Its dtype in files, if that does not depend on the dtype of the other tensors."""
    is_rotated: bool = False
    """Whether the rotary embedding applies to its outputs. The order of these outputs may differ in files."""

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    def variable(self, rngs: nnx.Rngs) -> nnx.Param[Array]:
        """Returns the parameter with its initial values."""
        if self.fan_in:
            value = jax.random.normal(rngs.params(), self.shape) * self.fan_in**-0.5
        elif callable(self.start):
            value = self.start(rngs.params())
        else:
            # Without an explicit dtype, the arrays would be weakly typed, and all programs would be compiled again after the first update.
            value = jnp.full(self.shape, self.start, jnp.float32)
        return nnx.Param(
            value, axes=self.axes, float32=self.float32, joins=self.joins, trained=self.is_trained
        )


def repeated_heads(kv_heads: int, shards: int) -> int:
    """Returns the number of key heads of a sampler that splits heads over `shards` devices. Each head is repeated until the devices have equally many. A query
    attends to a copy of its key head, so the results are the same."""
    return math.lcm(kv_heads, shards)


def norm(config: Architecture, *shape: int, axes: tuple[str, ...] = ("norm",), tensor: str = "") -> Parameter:
    """Returns the weight of a norm, whose initial factors are 1."""
    start = 1.0 - config.norm_offset
    return Parameter(shape=shape, axes=axes, start=start, float32=True, tensor=tensor)
