"""Sums and means over the tokens of each response.

They work for packed rows, for responses that share a prompt, and for rows that are split over devices (`parallel.context`). All tokens of a response get the
bit-identical result, and this result does not depend on where the row contains the response.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dapo_jax.numerics.segments import segment_sums


def response_sum(
    values: Float[Array, "rows seq"], mask: Bool[Array, "rows seq"], segment_ids: Int[Array, "rows seq"]
) -> Float[Array, "rows seq"]:
    """Returns, at each token, the sum of `values` over the tokens of its response that are in the mask, or 0 if there are no such tokens.

    The sum is differentiable with respect to `values`. It is in float32, or in float64 if the values are. Values outside the mask are ignored and may be NaN.

    Args:
        values: one value per token.
        mask: True on the tokens to add. A prompt may have the same segment id as its response.
        segment_ids: index of each token's response in its row. Tokens of a segment are adjacent.
    """
    dtype = np.promote_types(values.dtype, jnp.float32)
    return segment_sums(jnp.where(mask, values, 0.0).astype(dtype), segment_ids)


def response_mean(
    values: Float[Array, "rows seq"], mask: Bool[Array, "rows seq"], segment_ids: Int[Array, "rows seq"]
) -> Float[Array, "rows seq"]:
    """Returns, at each token, the mean of `values` over the tokens of its response that are in the mask, or 0 if there are no such tokens.

    The mean of log-ratios is the logarithm of the geometric mean of the ratios. The arguments are the same as for `response_sum`.
    """
    total = response_sum(values, mask, segment_ids)
    count = segment_sums(mask.astype(total.dtype), segment_ids)
    return total / jnp.maximum(count, 1.0)
