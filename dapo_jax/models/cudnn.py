"""cuDNN's flash attention for packed rows, on NVIDIA GPUs.

cuDNN computes attention for a batch of sequences. Here, a sequence is a segment of a packed row. If responses share a prompt, each response gets
its own copy of the prompt's queries, keys and values before it, so a causal mask is sufficient. Only attention is repeated for each copy. The results
for the prompt are taken from the first response.

Sequences of similar length form batches of a fixed size, which are processed one after the other. Memory therefore does not grow with the number of
segments, but the number of batches depends on the data. The gradient of a prompt is the sum over its copies.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from dapo_jax.models.attention import Sinks

BATCH_TOKENS = 16_384
"""Maximum number of tokens in a batch, including padding. A sequence that is padded to more tokens forms a batch by itself."""

WORKSPACE_BYTES = 2**30
"""Maximum size of cuDNN's workspace for gradients. For long sequences, some of the heads are therefore processed at a time."""

_RATIO, _SHORTEST = 4, 128
"""A sequence is padded to the row length, or to the row length divided by a power of `_RATIO`, but at least to `_SHORTEST` tokens."""

Heads = Float[Array, "tokens _ head_dim"]
Ids = Int[Array, "batch seq"]
PerToken = Int[Array, " tokens"]
Sequences = Float[Array, "batch room _ head_dim"]


class Packed(NamedTuple):
    """The sequences in packed rows, sorted by padded length. It depends only on the segments, so it is computed once for all layers."""

    begin: PerToken
    """Index of the first token of each sequence's own segment, in the concatenated rows. Entries after the last sequence are unused, here and below."""
    prompt: PerToken
    """Index of the first token of its prompt. A segment without a shared prompt is its own prompt."""
    prompt_tokens: PerToken
    length: PerToken
    """Number of tokens of the prompt and the response."""
    ends: Int[Array, " rooms"]
    """Index of the first sequence, and then the index after the last sequence for each padded length in `_rooms`."""


def packed(ids: Ids, prefixes: Ids) -> Packed:
    """Finds the sequences in packed rows. The responses to a shared prompt must directly follow it, as `row_packing.pack` writes them."""
    at = jnp.arange(ids.size, dtype=jnp.int32)
    start, stop = _runs(ids)
    head, _ = _runs(prefixes)
    known = stop[head] - head
    length = jnp.where(start == head, known, known + stop - start)
    # A shared prompt is no sequence of its own, because its first response computes it.
    follows = (start == head) & (head.at[stop].get(mode="fill", fill_value=-1) == head)
    begins = (ids.reshape(-1) > 0) & (start == at) & ~follows
    # Sequences are sorted by the number of padded lengths in which they fit. Tokens that do not begin a sequence have 0.
    rooms, sizes = _rooms(ids.size, ids.shape[1])
    fits = (begins[None] & (length[None] <= jnp.array(rooms)[:, None])).sum(0, dtype=jnp.int32)
    order = jnp.argsort(fits, stable=True)
    least = (fits[None] <= jnp.arange(len(rooms) + 1, dtype=jnp.int32)[:, None]).sum(1, dtype=jnp.int32)
    # Shorter sequences fill the last batch of each padded length.
    ends = [least[0]]
    for end, size in zip(least[1:], sizes, strict=True):
        batches = -(-jnp.maximum(end - ends[-1], 0) // size)
        ends.append(jnp.minimum(ends[-1] + batches * size, least[-1]))
    return Packed(start[order], head[order], known[order], length[order], jnp.stack(ends))


def packed_attention(
    query: Float[Array, "heads head_dim batch seq"],
    key: Float[Array, "kv_heads head_dim batch seq"],
    value: Float[Array, "kv_heads head_dim batch seq"],
    segment_ids: Ids,
    prefix_ids: Ids,
    *,
    rows: Packed | None = None,
    window: int = 0,
    sinks: Sinks = None,
    dtype: str,
) -> Float[Array, "heads head_dim batch seq"]:
    """Computes `attention.causal_attention` with cuDNN, in bfloat16 or float16. The result at padding is 0.

    A query attends to the last `window` tokens including its own, or to all if `window` is 0. Without `rows`, the result of `packed`, it is computed.
    """
    rows = packed(segment_ids, prefix_ids) if rows is None else rows
    q, k, v = (
        part.astype(dtype).transpose(2, 3, 0, 1).reshape(-1, *part.shape[:2]) for part in (query, key, value)
    )
    out = _attention(window, query.shape[3], q, k, v, rows, sinks)
    return out.reshape(*segment_ids.shape, *query.shape[:2]).transpose(2, 3, 0, 1).astype(query.dtype)


class _Batch(NamedTuple):
    """A batch of sequences that are padded to the same length, `room`."""

    lengths: Int[Array, " batch"]
    token: Int[Array, "batch room"]
    """Index of each token in the concatenated rows."""
    live: Int[Array, "batch room"]
    """The same for scatters. At padding, the index is out of range and unique, so that the value is dropped."""
    own: Int[Array, "batch room"]
    """The same for the results of queries. Only the first response to a prompt has the prompt's index, and all others are out of range there."""


_ONCE: dict[str, Any] = {"mode": "drop", "unique_indices": True}
"""Scatter options that avoid atomic operations. With atomic operations, sums would depend on the order of threads."""


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(window: int, seq: int, q: Heads, k: Heads, v: Heads, rows: Packed, sinks: Sinks) -> Heads:
    return _forward(window, seq, q, k, v, rows, sinks)[0]


def _forward(
    window: int, seq: int, q: Heads, k: Heads, v: Heads, rows: Packed, sinks: Sinks
) -> tuple[Heads, Any]:
    def add(batch: _Batch, before: tuple[Array, ...]) -> tuple[Array, ...]:
        some, log = attend(q[batch.token], k[batch.token], v[batch.token], batch.lengths, window)
        out, sums = (whole.at[batch.own] for whole in before)
        return out.set(some, **_ONCE), sums.set(log.transpose(0, 2, 1), **_ONCE)

    out, sums = _over_batches(rows, seq, add, (jnp.zeros_like(q), jnp.zeros(q.shape[:2], jnp.float32)))
    if sinks is not None:
        # cuDNN's gradients are those with sinks if it receives the output and the sums with sinks.
        whole = jnp.logaddexp(sums, sinks[None])
        shares = jnp.exp(sums - whole)[..., None]
        out, sums = (out.astype(jnp.float32) * shares).astype(q.dtype), whole
    return out, (q, k, v, rows, sinks, out, sums)


def _backward(window: int, seq: int, saved: Any, d_out: Heads) -> tuple[Any, ...]:
    q, k, v, rows, sinks, out, sums = saved
    d_sinks = None
    if sinks is not None:
        inner = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1)
        d_sinks = -(jnp.exp(sinks[None] - sums) * inner).sum(0)

    def add(batch: _Batch, before: tuple[Array, Array]) -> tuple[Array, Array]:
        some_q, some_k, some_v, some_out, some = (x[batch.token] for x in (q, k, v, before[0], d_out))
        some = jnp.where((batch.own < len(q))[..., None, None], some, 0)
        log = sums[batch.token].transpose(0, 2, 1)
        d_q, d_k, d_v = attend_backward(some_q, some_k, some_v, log, some, some_out, batch.lengths, window)

        def summed(at: Array, total: Array) -> Array:
            """Adds the gradients of one sequence, because several sequences may have copies of the same prompt."""
            change = jnp.concatenate([d_k[at], d_v[at]], axis=1)
            return total.at[batch.live[at]].add(change.astype(jnp.float32), **_ONCE)

        d_q = before[0].at[batch.own].set(d_q, **_ONCE)
        return d_q, lax.fori_loop(0, len(batch.lengths), summed, before[1])

    # The gradient of a query replaces its result, which no later batch needs: at later copies of a prompt, the cotangent is 0.
    # The gradients of keys and values are sums over copies, in float32. They are one array, so that one kernel adds both.
    start = out, jnp.zeros((len(k), 2 * k.shape[1], k.shape[2]), jnp.float32)
    d_q, both = _over_batches(rows, seq, add, start)
    return d_q, *jnp.split(both.astype(q.dtype), 2, axis=1), None, d_sinks


_attention.defvjp(_forward, _backward)


def _rooms(tokens: int, seq: int) -> tuple[list[int], list[int]]:
    """Returns the padded lengths of sequences, longest first, and the number of sequences in a batch of each length."""
    rooms = [seq]
    while rooms[-1] // _RATIO >= _SHORTEST:
        rooms.append(-(-rooms[-1] // _RATIO))
    return rooms, [max(1, min(tokens, BATCH_TOKENS) // room) for room in rooms]


def _over_batches(rows: Packed, seq: int, add: Callable[[_Batch, Any], Any], carry: Any) -> Any:
    """Calls `add` with each batch of sequences and the result for the batch before it."""
    rooms, sizes = _rooms(tokens := len(rows.begin), seq)

    def step(number: int, index: Array, carry: Any) -> Any:
        room, size = rooms[number], sizes[number]
        place = rows.ends[number] + index * size + jnp.arange(size, dtype=jnp.int32)
        begin, prompt, shared, length = (x[jnp.minimum(place, tokens - 1)][:, None] for x in rows[:4])
        length = jnp.where(place[:, None] < rows.ends[number + 1], length, 0)
        within = jnp.arange(room, dtype=jnp.int32)[None]
        token = jnp.where(within < shared, prompt + within, begin + within - shared)
        beyond = jnp.arange(tokens, tokens + size * room, dtype=jnp.int32).reshape(size, room)
        live = jnp.where(within < length, token, beyond)
        own = jnp.where((within >= shared) | (begin - prompt <= shared), live, beyond)
        # cuDNN needs at least one token.
        batch = _Batch(jnp.maximum(length[:, 0], 1), jnp.minimum(token, tokens - 1), live, own)
        # Without the barrier, every gather and scatter would compute the indices again for each of its elements.
        return add(lax.optimization_barrier(batch), carry)

    for number, count in enumerate(rows.ends[1:] - rows.ends[:-1]):
        carry = lax.fori_loop(0, -(-count // sizes[number]), partial(step, number), carry)
    return carry


def _runs(ids: Ids) -> tuple[PerToken, PerToken]:
    """Finds the runs of equal ids in each row. Returns the index of the run's first token, and the index after its last token, for each token."""
    at = jnp.arange(ids.size, dtype=jnp.int32)
    new = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)), constant_values=True).reshape(-1)
    ends = jnp.append(new[1:], True)
    return lax.cummax(jnp.where(new, at, 0)), lax.cummin(jnp.where(ends, at + 1, ids.size), reverse=True)


def attend(
    q: Sequences, k: Sequences, v: Sequences, lengths: Int[Array, " batch"], window: int = 0
) -> tuple[Sequences, Float[Array, "batch heads room"]]:
    """Calls cuDNN for causal attention (see `packed_attention` for `window`). Returns the output and the log-sum-exp of the scores. Values after the end of a sequence are undefined."""
    logs = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
    products = {"bmm1": (3, 2, 3, 2), "bmm2": (3, 1, 1, 2)}
    [out], logs = _call("Softmax", (q, k, v, lengths, lengths), (q,), [logs], products, window)
    return out, logs


def attend_backward(
    q: Sequences, k: Sequences, v: Sequences, logs: Float[Array, "batch heads room"], d_out: Sequences, out: Sequences,
    lengths: Int[Array, " batch"], window: int = 0,
) -> tuple[Sequences, ...]:  # fmt: skip
    """Calls cuDNN for the gradients of q, k and v, given the results of `attend`. Gradients after the end of a sequence are undefined."""
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads > 1 and workspace_bytes(q.shape[0], heads, q.shape[1]) > WORKSPACE_BYTES:
        # Half of the key heads at a time, or half of the query heads if there is only one key head.
        cut = {size: kv_heads // 2 * size // kv_heads or size // 2 for size in (heads, kv_heads)}
        given = (q, 2), (k, 2), (v, 2), (logs, 1), (d_out, 2), (out, 2)
        parts = (jnp.split(x, [at], i) if (at := cut[x.shape[i]]) else (x, x) for x, i in given)
        halves = (attend_backward(*half, lengths=lengths, window=window) for half in zip(*parts, strict=True))
        d_q, *sums = zip(*halves, strict=True)
        joined = (jnp.concatenate(x, 2) if kv_heads > 1 else x[0] + x[1] for x in sums)
        return jnp.concatenate(d_q, 2), *joined
    products = {
        "bmm1_grad_gemm1": (2, 1, 1, 2), "bmm1_grad_gemm2": (3, 1, 1, 2),
        "bmm2_grad_gemm1": (2, 1, 1, 2), "bmm2_grad_gemm2": (3, 2, 3, 2),
    }  # fmt: skip
    operands = (q, k, v, logs, d_out, out, lengths, lengths)
    return tuple(_call("SoftmaxBackward", operands, (q, k, v), [], products, window)[0])


def workspace_bytes(batch: int, heads: int, room: int) -> int:
    """Returns the size of cuDNN's workspace for repeatable gradients on Hopper (source: https://github.com/NVIDIA/cudnn-frontend/pull/398)."""
    return 2 * batch * heads * (-(-room // 64) * 64) ** 2


def _call(
    name: str, operands: tuple[Array, ...], like: tuple[Sequences, ...], others: list[jax.ShapeDtypeStruct],
    products: dict[str, tuple[int, int, int, int]], window: int,
) -> tuple[list[Sequences], Any]:  # fmt: skip
    """Calls cuDNN's attention through XLA, with the same options as `jax.nn.dot_product_attention`. That function can be traced only if a GPU is present.

    `products` maps each matrix product to the contracting dimension and the second batch dimension, first of its left and then of its right operand.
    """
    batch, room, heads, head_dim = operands[0].shape
    unknown = "PRIMITIVE_TYPE_INVALID"
    config = {
        "algorithm": {
            "algo_id": "0", "math_type": "TENSOR_OP_MATH", "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True, "workspace_size": "0",
        },
        "fmha_scale": head_dim**-0.5, "dropout_rate": 0.0, "seed": 42, "sliding_window_length": window,
        "max_seg_per_batch": 1, "is_paged_attention": False, "is_flash_attention": True, "mask_type": "PADDING_CAUSAL",
        "intermediate_tensor_shape": {
            "element_type": {"bfloat16": "BF16", "float16": "F16"}[operands[0].dtype.name],
            "dimensions": [str(size) for size in (batch, heads, room, room)],
            "tuple_shapes": [], "is_dynamic_dimension": [False] * 4,
            "layout": {
                "dim_level_types": [], "dim_unique": [], "dim_ordered": [], "minor_to_major": ["3", "2", "1", "0"],
                "tiles": [], "element_size_in_bits": "0", "memory_space": "0", "index_primitive_type": unknown,
                "pointer_primitive_type": unknown, "dynamic_shape_metadata_prefix_bytes": "0",
            },
        },
        **{
            f"{product}_dot_dimension_numbers": {
                "lhs_contracting_dimensions": [str(left)], "lhs_batch_dimensions": ["0", str(left_batch)],
                "rhs_contracting_dimensions": [str(right)], "rhs_batch_dimensions": ["0", str(right_batch)],
            }
            for product, (left, left_batch, right, right_batch) in products.items()
        },
    }  # fmt: skip
    shapes = [jax.ShapeDtypeStruct((x.shape[0], x.shape[2], x.shape[1], x.shape[3]), x.dtype) for x in like]
    # The last result is cuDNN's workspace. XLA determines its size if it compiles for a present GPU.
    workspace = jax.ShapeDtypeStruct((0,), jnp.uint8)
    found = jax.ffi.ffi_call(
        f"__cudnn$fmha{name}",
        [*shapes, *others, workspace],
        # These results have the shape [batch, heads, room, head_dim], but tokens come before heads in memory.
        output_layouts=[*[(0, 2, 1, 3)] * len(like), *[(0, 1, 2)] * len(others), (0,)],
        custom_call_api_version=2,
        legacy_backend_config=json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": config}),
    )(*operands)
    return [x.transpose(0, 2, 1, 3) for x in found[: len(like)]], found[len(like)]
