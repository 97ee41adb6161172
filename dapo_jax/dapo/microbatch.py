"""The batch that crosses from the host to the device: rollouts packed into rows of one static shape.

The fields are annotated `... | Any` because on the host they are numpy, and JAX rebuilds a registered dataclass around shapes
and shardings too.
"""

from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Arrays for one forward and backward pass: rollouts packed into rows of one static length.

    A row may hold several rollouts, told apart by `segment_ids`, and several responses may follow one prompt. Column `t` of
    `old_logprobs`, `mask`, `advantages` and `weights` is about the token *at* `t`; its log-probability comes from
    the logits at `previous[t]`.
    """

    tokens: Int[Array, "rows seq"] | Any
    segment_ids: Int[Array, "rows seq"] | Any
    """1, 2, ... for the rollouts of a row; 0 is padding, which attends to nothing that counts. A prompt that several
    responses follow is a segment of its own."""
    prefix_ids: Int[Array, "rows seq"] | Any
    """The segment that a token sees beside its own: that of its prompt. Its own where prompt and response are one."""
    previous: Int[Array, "rows seq"] | Any
    """The column whose logits predict the token: the one before it, or the last of its prompt."""
    positions: Int[Array, "rows seq"] | Any
    """Position of each token inside its own rollout, from 0."""
    mask: Bool[Array, "rows seq"] | Any
    """True on response tokens that enter the loss."""
    advantages: Float[Array, "rows seq"] | Any
    weights: Float[Array, "rows seq"] | Any
    """Each token's weight in the loss, computed from the whole minibatch: microbatch losses add up to the minibatch's."""
    sampler_logprobs: Float[Array, "rows seq"] | Any
    """Log-probabilities recorded while sampling."""
    old_logprobs: Float[Array, "rows seq"] | Any
    """Log-probabilities that the importance ratio is taken to; zeros until they are scored."""
    ref_logprobs: Float[Array, "rows seq"] | Any
    """Log-probabilities under the reference policy; zeros when there is none."""


def microbatch_structs(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> Microbatch:
    """Microbatches of `shape` ([rows, seq], or stacked) as shapes alone: what a program is compiled for."""
    integers = ("tokens", "segment_ids", "prefix_ids", "previous", "positions")
    kinds = {"mask": jnp.bool_, **dict.fromkeys(integers, jnp.int32)}
    return Microbatch(
        **{
            field.name: jax.ShapeDtypeStruct(shape, kinds.get(field.name, jnp.float32), sharding=sharding)
            for field in fields(Microbatch)
        }
    )
