"""The batch that is transferred from the host to the device: rollouts packed into rows of one static shape.

The fields are annotated `... | Any` because they are numpy arrays on the host, and JAX also builds registered dataclasses of shapes and shardings.
"""

from dataclasses import dataclass, fields
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Arrays for one forward and backward pass: rollouts packed into rows of one static length.

    A row may hold several rollouts, which `segment_ids` distinguishes, and several responses may share one prompt. Column `t` of `old_logprobs`,
    `mask`, `advantages` and `weights` belongs to the token *at* `t`; its log-probability comes from the logits at `previous[t]`.
    """

    tokens: Int[Array, "rows seq"] | Any
    segment_ids: Int[Array, "rows seq"] | Any
    """1, 2, ... for the rollouts of a row; 0 is padding. A prompt that several responses share is a segment of its own."""
    prefix_ids: Int[Array, "rows seq"] | Any
    """The other segment that a token sees: the segment of its prompt, or its own if prompt and response are one segment."""
    previous: Int[Array, "rows seq"] | Any
    """The column whose logits predict the token: the previous column, or the last column of its prompt."""
    positions: Int[Array, "rows seq"] | Any
    """Position of each token inside its own rollout, from 0."""
    mask: Bool[Array, "rows seq"] | Any
    """True on response tokens that enter the loss."""
    advantages: Float[Array, "rows seq"] | Any
    weights: Float[Array, "rows seq"] | Any
    """Weight of each token in the loss of the whole minibatch: the losses of microbatches add up to the minibatch's."""
    sampler_logprobs: Float[Array, "rows seq"] | Any
    """Log-probabilities recorded during sampling."""
    old_logprobs: Float[Array, "rows seq"] | Any
    """Log-probabilities in the denominator of the importance ratio; zeros until they are computed."""
    ref_logprobs: Float[Array, "rows seq"] | Any
    """Log-probabilities under the reference policy; zeros without a reference policy."""


def blank_microbatch(shape: tuple[int, ...]) -> Microbatch:
    """Returns numpy arrays of zeros of `shape`, [rows, seq] or stacked."""
    integers = ("tokens", "segment_ids", "prefix_ids", "previous", "positions")
    kinds = {"mask": np.bool_, **dict.fromkeys(integers, np.int32)}
    return Microbatch(
        **{field.name: np.zeros(shape, kinds.get(field.name, np.float32)) for field in fields(Microbatch)}
    )
