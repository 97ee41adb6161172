"""cuDNN's flash attention for packed rows, on NVIDIA GPUs.

cuDNN computes attention for a batch of sequences. Here, a sequence is a segment of a packed row. If responses share a prompt, each response gets
its own copy of the prompt's queries, keys and values before it, so a causal mask is sufficient. Only attention is repeated for each copy.

Sequences of similar length form batches of a fixed size, which are processed one after the other. Memory therefore does not grow with the number of
segments, but the number of batches depends on the data. The gradient of a prompt is the sum over its copies.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

BATCH_TOKENS = 16_384
"""Maximum number of tokens in a batch, including padding. A sequence that is padded to more tokens forms a batch by itself."""

WORKSPACE_BYTES = 2**30
"""Maximum size of cuDNN's workspace for gradients. Long sequences may need more for all heads, so some heads are processed at a time, at least one."""

_RATIO, _SHORTEST = 4, 128
"""A sequence is padded to the row length, or to the row length divided by a power of `_RATIO`, but at least to `_SHORTEST` tokens."""

Heads = Float[Array, "tokens _ head_dim"]
Ids = Int[Array, "batch seq"]
PerToken = Int[Array, " tokens"]
Sequences = Float[Array, "batch room _ head_dim"]


def packed_attention(
    query: Float[Array, "heads head_dim batch seq"],
    key: Float[Array, "kv_heads head_dim batch seq"],
    value: Float[Array, "kv_heads head_dim batch seq"],
    segment_ids: Ids,
    prefix_ids: Ids,
    *,
    window: int = 0,
    dtype: str,
) -> Float[Array, "heads head_dim batch seq"]:
    """Computes `attention.causal_attention` with cuDNN, in bfloat16 or float16. The result at padding is 0.

    A query attends to the last `window` tokens including its own, or to all if `window` is 0.

    The responses to a shared prompt must directly follow it, as `row_packing.pack` writes them.
    """
    q, k, v = (
        part.astype(dtype).transpose(2, 3, 0, 1).reshape(-1, *part.shape[:2]) for part in (query, key, value)
    )
    out = _attention(window, q, k, v, segment_ids, prefix_ids).reshape(*segment_ids.shape, *query.shape[:2])
    return out.transpose(2, 3, 0, 1).astype(query.dtype)


class _Batch(NamedTuple):
    """A batch of sequences that are padded to the same length, `room`."""

    lengths: Int[Array, " batch"]
    token: Int[Array, "batch room"]
    """Index of each token in the concatenated rows."""
    own: Bool[Array, "batch room"]
    """True for tokens of the sequence's own segment, and False for its copy of a shared prompt and for padding."""
    prompt: Bool[Array, "batch room"]
    """True for tokens of the prompt. A segment without a shared prompt is its own prompt."""
    first: Bool[Array, "batch batch"]
    """Entry (a, b) is True if sequences a and b have the same prompt, and a is the first sequence in the batch with this prompt."""

    def target(self, where: Bool[Array, "batch room"], tokens: int) -> Int[Array, "batch room"]:
        """Returns indices for a scatter: the index of each token, or a unique out-of-range index if `where` is False, so that the value is dropped."""
        beyond = jnp.arange(tokens, tokens + where.size, dtype=jnp.int32).reshape(where.shape)
        return jnp.where(where, self.token, beyond)

    def summed(self, grad: Sequences) -> Sequences:
        """Sums a gradient over all copies of each prompt in the batch, in float32. The first copy gets the sum, and the other copies get zero."""
        prompt = self.prompt[..., None, None]
        copies = {"preferred_element_type": jnp.float32}
        total = jnp.einsum(
            "ab,btkh->atkh", self.first.astype(grad.dtype), jnp.where(prompt, grad, 0), **copies
        )
        return jnp.where(prompt, total, grad.astype(jnp.float32))


BatchOf = Callable[[Array], _Batch]

_ONCE: dict[str, Any] = {"mode": "drop", "unique_indices": True}
"""Scatter options that avoid atomic operations. With atomic operations, sums would depend on the order of threads."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(window: int, q: Heads, k: Heads, v: Heads, ids: Ids, prefixes: Ids) -> Heads:
    return _forward(window, q, k, v, ids, prefixes)[0]


def _forward(window: int, q: Heads, k: Heads, v: Heads, ids: Ids, prefixes: Ids) -> tuple[Heads, Any]:
    out, sums = jnp.zeros_like(q), jnp.zeros(q.shape[:2], jnp.float32)
    for batch_of, count in _batches(ids, prefixes):

        def add(
            index: Array, before: tuple[Array, Array], batch_of: BatchOf = batch_of
        ) -> tuple[Array, Array]:
            (out, sums), batch = before, batch_of(index)
            some, log = attend(q[batch.token], k[batch.token], v[batch.token], batch.lengths, window)
            target = batch.target(batch.own, len(q))
            return out.at[target].set(some, **_ONCE), sums.at[target].set(log.transpose(0, 2, 1), **_ONCE)

        out, sums = lax.fori_loop(0, count, add, (out, sums))
    return out, (q, k, v, ids, prefixes, out, sums)


def _backward(window: int, saved: Any, d_out: Heads) -> tuple[Any, ...]:
    q, k, v, ids, prefixes, out, sums = saved
    grads = jnp.zeros_like(q), jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for batch_of, count in _batches(ids, prefixes):

        def add(index: Array, before: tuple[Array, ...], batch_of: BatchOf = batch_of) -> tuple[Array, ...]:
            batch = batch_of(index)
            own, log = batch.own[..., None, None], sums[batch.token].transpose(0, 2, 1)
            some_q, some_k, some_v, some_out = (x[batch.token] for x in (q, k, v, out))
            some = jnp.where(own, d_out[batch.token], 0)
            d_q, d_k, d_v = attend_backward(
                some_q, some_k, some_v, log, some, some_out, batch.lengths, window
            )
            target = batch.target(batch.own, len(q))
            sum_target = batch.target(batch.own | (batch.prompt & batch.first.any(1)[:, None]), len(q))
            return (
                before[0].at[target].set(d_q, **_ONCE),
                before[1].at[sum_target].add(batch.summed(d_k), **_ONCE),
                before[2].at[sum_target].add(batch.summed(d_v), **_ONCE),
            )

        grads = lax.fori_loop(0, count, add, grads)
    return (*(grad.astype(q.dtype) for grad in grads), None, None)


_attention.defvjp(_forward, _backward)


def _batches(ids: Ids, prefixes: Ids) -> Iterator[tuple[BatchOf, Int[Array, ""]]]:
    """Yields, for each padded length, a function that returns the batch with a given index, and the number of batches of this length."""
    tokens, at = ids.size, jnp.arange(ids.size, dtype=jnp.int32)
    start, stop = _runs(ids)
    head, _ = _runs(prefixes)
    known = stop[head] - head
    length = jnp.where(start == head, known, known + stop - start)
    rooms = [ids.shape[1]]
    while rooms[-1] // _RATIO >= _SHORTEST:
        rooms.append(-(-rooms[-1] // _RATIO))
    # Segments are sorted by the number of padded lengths in which they fit. Tokens that do not begin a segment have 0.
    begins = (ids.reshape(-1) > 0) & (start == at)
    fits = sum((begins & (length <= room)).astype(jnp.int32) for room in rooms)
    order = jnp.argsort(fits, stable=True).astype(jnp.int32)
    for number, room in enumerate(rooms, 1):
        size = max(1, min(tokens, BATCH_TOKENS) // room)
        first, count = ((test(fits, number)).sum(dtype=jnp.int32) for test in (jnp.less, jnp.equal))

        def batch_of(
            index: Array, first: Array = first, count: Array = count, size: int = size, room: int = room
        ) -> _Batch:
            place = index * size + jnp.arange(size, dtype=jnp.int32)
            used = place < count
            segment = order[jnp.minimum(first + place, tokens - 1)]
            begin, prompt, shared = (x[segment][:, None] for x in (start, head, known))
            lengths = jnp.where(used, length[segment], 1)
            within = jnp.arange(room, dtype=jnp.int32)[None]
            token = jnp.where(within < shared, prompt + within, begin + within - shared)
            live = used[:, None] & (within < lengths[:, None])
            same = (prompt == prompt.T) & used[:, None] & used[None]
            leads = jnp.argmax(same, axis=1) == jnp.arange(size, dtype=jnp.int32)
            return _Batch(
                lengths=lengths,
                token=jnp.minimum(token, tokens - 1),
                own=live & ((within >= shared) | (begin == prompt)),
                prompt=live & (within < shared),
                first=same & leads[:, None],
            )

        yield batch_of, -(-count // size)


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
