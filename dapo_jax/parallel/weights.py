"""Weights from the trainer to the sampler: cast, unstacked, resharded, in one jitted function.

A scan over stacked layers copies each layer's weights on every decode step (measured 1.5 times slower on CPU), so the
sampler's copy has its layers apart: the stack is cut once per transfer instead of once per token.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import PyTree

from dapo_jax.parallel.sharding import SAMPLER_RULES, shardings

SamplerWeights = dict[str, PyTree]
"""`layers`: a tuple with one block's state each; `ends`: embedding, final norm, unembedding."""


def split_layers(params: nnx.State) -> SamplerWeights:
    """Cuts the stacked blocks of decoder parameters into a tuple of single layers."""
    stacked = params["blocks"]
    count = jax.tree.leaves(stacked)[0].shape[0]
    layers = tuple(jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(count))
    return {"layers": layers, "ends": params["ends"]}


def weight_transfer(params: nnx.State, mesh: Mesh, *, dtype: str) -> Callable[[nnx.State], SamplerWeights]:
    """The function that makes sampler weights of trainer parameters; `params` may be shapes alone.

    Norm weights stay in float32, in which the trainer applies them too: rounded, they would double the distance
    between the sampler's log-probabilities and the trainer's.
    One jitted program: calling it again with new parameters compiles nothing.
    """

    def cast(leaf: nnx.Variable[Any]) -> nnx.Variable[Any]:
        return leaf if leaf.get_metadata()["axes"] == ("norm",) else leaf.replace(leaf[...].astype(dtype))

    def transfer(params: nnx.State) -> SamplerWeights:
        return split_layers(jax.tree.map(cast, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)))

    placed = shardings(jax.eval_shape(transfer, params), mesh, SAMPLER_RULES)
    return jax.jit(transfer, out_shardings=placed)
