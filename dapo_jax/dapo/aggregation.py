"""The weight of each token in the loss, which is 1 / denominator: how token losses are averaged over a minibatch."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dapo_jax.hints import check_choice

AGGREGATIONS = ("token_mean", "prompt_mean", "sequence_mean", "token_sum_norm", "sequence_sum")


def token_weights(
    mask: Bool[Array | np.ndarray, "batch seq"],
    *,
    aggregation: str = "token_mean",
    group_ids: Int[Array | np.ndarray, " batch"] | None = None,
    max_response_tokens: int | None = None,
) -> Float[Array | np.ndarray, "batch seq"]:
    """Computes the weight of each token in the loss from the mask of the whole minibatch.

    | aggregation | weight of a token of response i | |
    |---|---|---|
    | `token_mean` | 1 / (response tokens of the minibatch) | DAPO as released: Eq. 12 over the whole minibatch |
    | `prompt_mean` | 1 / (prompts) / (response tokens of its group) | DAPO, exactly as in Eq. 8 |
    | `sequence_mean` | 1 / (responses) / (tokens of response i) | GRPO |
    | `token_sum_norm` | 1 / (responses * max_response_tokens) | Dr. GRPO |
    | `sequence_sum` | 1 / (responses) | LUSPO (https://arxiv.org/abs/2602.05261) |

    Responses without a token in the mask are not counted, and neither are prompts without a counted response. With these weights, the losses and
    gradients of microbatches and shards add up to the loss and gradient of the minibatch, so sum them instead of averaging them.

    Args:
        mask: True on response tokens. One row per response, for all responses of the minibatch.
        aggregation: one of the five names.
        group_ids: one number per row, the same for all responses to a prompt. Required for `prompt_mean`.
        max_response_tokens: maximum response length during sampling. Required for `token_sum_norm`.

    Returns:
        Weights with the shape of `mask`, as float64 for a numpy mask and as JAX's default float for a JAX mask. They are 0
        where the mask is False.

    Raises:
        ValueError: `aggregation` is unknown, or an argument that it requires is missing.

    References:
        Shao et al., "DeepSeekMath", 2024 (GRPO). Liu et al., "Understanding R1-Zero-Like Training", 2025 (Dr. GRPO).
    """
    check_choice("aggregation", aggregation, AGGREGATIONS)
    check_mask(mask)
    xp: Any = np if isinstance(mask, np.ndarray) else jnp
    dtype = np.float64 if xp is np else jnp.result_type(float)

    def one_over(count: Any) -> Any:
        return 1.0 / xp.maximum(count, 1).astype(dtype)

    tokens = mask.sum(axis=1)
    responses = (tokens > 0).sum()
    if aggregation == "token_mean":
        weight = xp.broadcast_to(one_over(tokens.sum()), tokens.shape)
    elif aggregation == "sequence_mean":
        weight = one_over(responses) * one_over(tokens)
    elif aggregation == "token_sum_norm":
        if max_response_tokens is None or max_response_tokens < 1:
            raise ValueError(
                f"aggregation='token_sum_norm' needs max_response_tokens of 1 or more, got {max_response_tokens}"
            )
        weight = xp.broadcast_to(one_over(responses) / max_response_tokens, tokens.shape)
    elif aggregation == "sequence_sum":
        weight = xp.broadcast_to(one_over(responses), tokens.shape)
    else:
        prompts, group_tokens = _count_groups(xp, tokens, group_ids)
        weight = one_over(prompts) * one_over(group_tokens)
    return xp.where(mask, weight[:, None], xp.zeros((), dtype))


def _count_groups(xp: Any, tokens: Any, group_ids: Any) -> tuple[Any, Any]:
    """Returns the number of groups with tokens in the mask, and for each row the number of tokens of its group.

    All pairs of rows are compared, so that array shapes do not depend on the number of groups.
    """
    if group_ids is None or group_ids.shape != tokens.shape:
        found = "none" if group_ids is None else f"shape {group_ids.shape}"
        raise ValueError(f"aggregation='prompt_mean' needs group_ids of shape {tokens.shape}; got {found}")
    same = xp.asarray(group_ids)[:, None] == xp.asarray(group_ids)[None, :]
    live = tokens > 0
    has_earlier = (xp.tril(same, -1) & live[None, :]).any(axis=1)
    return (live & ~has_earlier).sum(), xp.where(same, tokens[None, :], 0).sum(axis=1)


def check_mask(mask: Array | np.ndarray) -> None:
    """Raises ValueError unless the mask is bool of shape [batch, seq]."""
    if mask.ndim != 2 or mask.dtype != bool:
        raise ValueError(f"mask must be bool of shape [batch, seq], got {mask.dtype} of shape {mask.shape}")
