"""Splash attention, JAX's attention kernel for TPUs.

The kernel does not store the scores in memory. It supports packed segments, but not a prompt that several responses share.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jaxtyping import Array, Float, Int

_BLOCKS = (1024, 512, 256, 128)
"""Block sizes of splash attention in tokens. The largest size that divides the row, and whose blocks fit in the memory of a TPU core, is used."""

_BLOCK_NUMBERS = 1024 * 128
"""Maximum size of a block of queries or keys. With larger blocks, the gradient with capped scores does not compile for v5p."""

SPLASH_TOKENS = _BLOCKS[-1]
"""Splash attention supports only rows whose number of tokens is a multiple of this number."""


def splash_kernel(
    heads: int,
    seq: int,
    *,
    head_dim: int = 128,
    window: int = 0,
    cap: float | None = None,
    parts: int = 1,
    interpret: bool = False,
) -> Any:
    """Returns the kernel for causal attention with `heads` heads over rows of `seq` tokens. Each row's queries are sharded over `parts` devices.

    A query attends to the last `window` tokens including its own, or to all if `window` is 0. `cap` caps the scores.
    Raises ValueError if the rows cannot be split into blocks."""
    most = _BLOCK_NUMBERS // head_dim
    block = next((size for size in _BLOCKS if seq % (parts * size) == 0 and size <= most), None)
    if block is None:
        step = parts * _BLOCKS[-1]
        raise ValueError(
            f"batch.row_tokens: found {seq}, needs a multiple of parallel.context x 128 = {step} for splash attention; "
            f"set it to {-(-seq // step) * step}, or set model.attention=xla"
        )
    shape = (seq, seq)
    one = splash.LocalMask(shape, (window - 1, 0), 0) if window else splash.CausalMask(shape)
    mask = splash.MultiHeadMask([one] * heads)
    sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, block_q_dq=block, block_kv_dq=block
    )  # fmt: skip
    return splash.make_splash_mha(
        mask, block_sizes=sizes, head_shards=1, q_seq_shards=parts, attn_logits_soft_cap=cap, interpret=interpret
    )  # fmt: skip


def splash_attention(
    kernel: Callable[..., Array],
    query: Float[Array, "heads head_dim batch part"],
    key: Float[Array, "kv_heads head_dim batch seq"],
    value: Float[Array, "kv_heads head_dim batch seq"],
    own_ids: Int[Array, "batch part"],
    segment_ids: Int[Array, "batch seq"],
    *,
    sinks: Float[Array, " heads"] | None = None,
    dtype: str,
) -> Float[Array, "heads head_dim batch part"]:
    """Computes causal attention within segments, with a kernel from `splash_kernel`."""
    scaled = query * query.shape[1] ** -0.5
    q, k, v = (part.astype(dtype).transpose(2, 0, 3, 1) for part in (scaled, key, value))
    given = (q, k, v, splash.SegmentIds(own_ids, segment_ids))
    # The kernel's gradient of the sinks has the dtype of the output.
    sinks = None if sinks is None else sinks.astype(dtype)
    out = jax.vmap(lambda *row: kernel(*row, sinks))(*given)
    return out.transpose(1, 3, 0, 2).astype(query.dtype)
