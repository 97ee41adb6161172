"""Log-probabilities of given tokens, computed from logits, or from hidden states without materializing all logits.

All log-probabilities are under softmax(logits / temperature), the distribution from which tokens are sampled.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dapo_jax.numerics.precision import capped, product


def token_logprobs(
    logits: Float[Array, "*batch vocab"],
    targets: Int[Array, "*batch"],
    *,
    temperature: float | Float[Array, ""] = 1.0,
) -> Float[Array, "*batch"]:
    """Computes the log-probability of each target under softmax(logits / temperature), in nats.

    `chunked_logprobs` returns the same values with much less memory. The softmax is computed in float32, or in float64 if the logits are float64.

    Args:
        logits: next-token logits. The logits at position t - 1 predict the token at t, and the caller must align the two.
        targets: token ids. Padding positions may contain any id in the vocabulary.
        temperature: sampling temperature of the policy, above 0.

    Raises:
        ValueError: the temperature is a Python number and not above 0.
    """
    _check_temperature(temperature)
    dtype = np.promote_types(logits.dtype, jnp.float32)
    tempered = logits.astype(dtype) / jnp.asarray(temperature, dtype)
    # Unlike a gather, a masked sum works with a sharded vocabulary, and its gradient needs no scatter.
    vocab = lax.broadcasted_iota(targets.dtype, tempered.shape, tempered.ndim - 1)
    picked = jnp.sum(tempered, axis=-1, where=vocab == targets[..., None])
    return picked - jax.nn.logsumexp(tempered, axis=-1)


def chunked_logprobs(
    hidden: Float[Array, "tokens embed"],
    unembedding: Float[Array, "vocab embed"],
    targets: Int[Array, " tokens"],
    *,
    temperature: float | Float[Array, ""] = 1.0,
    chunk_vocab: int = 2048,
    compute_dtype: str | None = None,
    vocab_size: int | None = None,
    vocab_axis: str | None = None,
    teachers: Sequence[tuple[Array, Array]] = (),
    caps: Sequence[float | None] = (),
    heads: Int[Array, "tokens heads"] | None = None,
) -> tuple[Array, ...]:
    r"""Computes the log-probability and the entropy of each token under softmax(hidden @ unembedding.T / temperature).

    Neither the forward nor the backward pass stores more than `chunk_vocab` logits per token. The forward pass keeps running sums over the chunks of
    the vocabulary, relative to the largest logit so far (Milakov and Gimelshein 2018). The backward pass recomputes the logits of each chunk. On CPU
    this is also faster, because a chunk fits in the processor cache. Products use the compute dtype and have float32 results (see `dapo_jax.numerics.precision`).

    The entries of a chunk are spread over the whole vocabulary, so that every device has a part of each chunk if the vocabulary is sharded. Except on
    CPU, the number of entries is a multiple of 128, because the fast matrix kernels of accelerators require aligned operands.

    Args:
        hidden: final hidden states; row i predicts `targets[i]`.
        unembedding: the output matrix, one row per vocabulary entry.
        targets: token ids.
        temperature: sampling temperature of the policy, above 0. It may be a traced value, and it has no gradient.
        chunk_vocab: maximum number of vocabulary entries per chunk. Except on CPU, a chunk may have 128 entries even if this is smaller.
        compute_dtype: dtype of the products with `unembedding`. Defaults to the dtype of `hidden`.
        vocab_size: number of rows of `unembedding` that are not padding. Defaults to all rows.
        vocab_axis: inside `shard_map`, the mesh axis over which the rows of `unembedding` are split. All devices along this axis must have the same
            `hidden`, and they return the same values. The gradient of `hidden` on each device is a partial sum.
        teachers: hidden states and unembedding of other models, without gradients. They may have another width, and more vocabulary entries, which are ignored.
        caps: for this model and each teacher, the cap c if its logits x become c tanh(x / c) before the temperature. If empty, no logits are capped.
        heads: ids of further tokens at each position, without repetition. None: only `targets`.

    Returns:
        Differentiable log-probabilities, with `heads` also the differentiable log-probabilities [tokens, heads] of these tokens, entropies without a gradient, and for each
        teacher the differentiable divergence $\mathrm{KL}(\pi \Vert \pi_\text{teacher})$ of the distributions of each token. All are in nats, in float32 or wider.

    Raises:
        ValueError: the temperature is a Python number and not above 0, or `chunk_vocab` is below 1.
    """
    _check_temperature(temperature)
    if chunk_vocab < 1:
        raise ValueError(f"chunk_vocab must be 1 or more, got {chunk_vocab}")
    hidden, unembedding = _vary_with(hidden, unembedding), _vary_with(unembedding, hidden)
    wide = np.promote_types(hidden.dtype, jnp.float32)
    dtype = compute_dtype or hidden.dtype.name
    caps = tuple(caps) or (None,) * (1 + len(teachers))
    how = _Chunks(unembedding.shape[0], chunk_vocab, dtype, vocab_size, vocab_axis, caps)
    hidden, temperature = hidden.astype(wide), jnp.asarray(temperature, wide)
    others = lax.stop_gradient([(its.astype(wide), how.aligned(table)) for its, table in teachers])
    ids = (targets,) if heads is None else (targets, heads)
    (logprobs, *of_heads), entropy, *gaps = _scores(how, hidden, unembedding, ids, temperature, others)
    log_sums = [
        _by_platform(_scan_vocabulary, replace(how, caps=(cap,)), *other, (targets,), temperature, [])[2]
        for other, cap in zip(others, caps[1:], strict=True)
    ]
    return logprobs, *of_heads, entropy, *(gap + log_sum for gap, log_sum in zip(gaps, log_sums, strict=True))


@dataclass(frozen=True)
class _Chunks:
    """How the vocabulary is split into chunks. The rows on this device form parts of equal length. A chunk has consecutive rows of each part."""

    rows: int
    """Number of rows of the unembedding matrix on this device."""
    most: int
    dtype: str
    vocab_size: int | None
    axis: str | None
    caps: tuple[float | None, ...]
    """The caps of this model's logits and of each teacher's."""
    multiple: int = 1
    """The number of entries of a chunk is a multiple of this, unless there are fewer rows."""

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        """The number of chunks, the number of parts, and the number of rows that a chunk has of each part."""
        most = (min(self.most, self.rows) // self.multiple or 1) * self.multiple
        fewest = -(-self.rows // most)
        if not 1 < self.multiple <= self.rows:
            # To avoid a padded copy, the number of chunks divides the rows evenly, unless this requires at least twice the minimum number of chunks.
            count = next((n for n in range(fewest, 2 * fewest) if self.rows % n == 0), fewest)
            return count, -(-self.rows // count), 1
        entries = -(-self.rows // (fewest * self.multiple)) * self.multiple
        # On a TPU, parts that are multiples of 8 rows need no copy of the matrix.
        parts = math.gcd(self.rows, 8 * self.multiple) // 8 or 1
        return -(-self.rows // entries), parts, entries // parts

    def split(self, unembedding: Float[Array, "rows embed"]) -> Float[Array, "parts length embed"]:
        padding = -self.rows % self.sizes[1]
        return jnp.pad(unembedding, ((0, padding), (0, 0))).reshape(self.sizes[1], -1, unembedding.shape[1])

    def start(self, index: Int[Array, ""] | int) -> Int[Array, ""]:
        """Returns the first row of a chunk in each part. The last chunk ends with the part, so chunk 0 may also have rows of chunk 1."""
        count, parts, width = self.sizes
        return jnp.maximum(-(-self.rows // parts) - (count - index) * width, 0)

    def chunk(self, table: Float[Array, "parts length embed"], index: Array) -> Float[Array, "entries embed"]:
        rows = lax.dynamic_slice_in_dim(table, self.start(index), self.sizes[2], axis=1)
        return rows.reshape(-1, table.shape[2])

    def aligned(self, other: Float[Array, "its_rows its_embed"]) -> Float[Array, "rows its_embed"]:
        """Returns the rows of another unembedding for the vocabulary entries of this device."""
        if len(other) == self.rows:
            return other
        whole = other if self.axis is None else lax.all_gather(other, self.axis, tiled=True)
        return lax.dynamic_slice_in_dim(jnp.pad(whole, ((0, self.rows), (0, 0))), self.first(), self.rows)

    def first(self) -> Int[Array, ""]:
        """Returns the vocabulary entry of this device's first row."""
        return jnp.int32(0) if self.axis is None else lax.axis_index(self.axis) * self.rows

    def row(self, index: Int[Array, ""]) -> Int[Array, " entries"]:
        """Returns the row of this device's shard to which each entry of a chunk belongs. It is negative for padding and for rows that chunk 1 also has."""
        part, place = (lax.broadcasted_iota(jnp.int32, self.sizes[1:], dim) for dim in (0, 1))
        row = part * -(-self.rows // self.sizes[1]) + place + self.start(index)
        end = self.rows if self.vocab_size is None else self.vocab_size - self.first()
        used = (row < jnp.minimum(end, self.rows)) & ((index > 0) | (place < self.start(1)))
        return jnp.where(used, row, -(2**31)).reshape(-1)

    def is_target(self, index: Int[Array, ""], targets: Array) -> Bool[Array, "tokens entries"]:
        return self.row(index)[None] == (targets - self.first())[:, None]

    def entry(self, index: Int[Array, ""], tokens: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
        """Returns the entry of a chunk that belongs to each token, or the number of entries if the token is not in the chunk. This is the inverse of `row`."""
        _, parts, width = self.sizes
        row, length = tokens - self.first(), -(-self.rows // parts)
        place = row % length - self.start(index)
        inside = (row >= 0) & (row < self.rows) & (place >= 0) & (place < width)
        inside &= (index > 0) | (place < self.start(1))
        return jnp.where(inside, row // length * width + place, parts * width)

    def logits(
        self,
        index: Int[Array, ""],
        weight: Float[Array, "entries embed"],
        hidden: Float[Array, "tokens embed"],
        temperature: Float[Array, ""],
        model: int = 0,
    ) -> Float[Array, "tokens entries"]:
        """Returns the tempered logits of one chunk. Logits of padding are so low that they do not contribute to sums. `model` is an index into `caps`."""
        logits = capped(product("ve,te->tv", weight, hidden, self.dtype), self.caps[model]) / temperature
        all_real = math.prod(self.sizes) == self.rows and self.vocab_size is None
        return logits if all_real else jnp.where(self.row(index) >= 0, logits, _NEVER)

    def together(
        self, top: Array, total: Array, moment: Array, chosen: tuple[Array, ...], *gaps: Array
    ) -> tuple[Any, ...]:
        """Combines the running sums of all devices over which the vocabulary is sharded."""
        if self.axis is None:
            return top, total, moment, chosen, *gaps
        highest = lax.pmax(top, self.axis)
        shrink = jnp.exp(top - highest)
        moment = shrink * (moment + total * (top - highest))
        terms = (shrink * total, moment, chosen, *(shrink * gap for gap in gaps))
        return highest, *lax.psum(terms, self.axis)


_NEVER = -1e30
"""A logit below all real logits. It is finite, so that its product with a probability of 0 is 0."""

Targets = tuple[Array, ...]
"""The ids of the tokens whose log-probabilities are computed, [tokens], and if there are any, of further tokens at each position, [tokens, heads]."""

Teachers = Sequence[tuple[Float[Array, "tokens its_embed"], Float[Array, "rows its_embed"]]]
"""Hidden states and unembedding of each teacher."""


def _by_platform(function: Callable[..., Any], how: _Chunks, *given: Any) -> Any:
    """Calls `function` with the chunks for the platform for which the program is compiled. On CPU, a smaller program is more important than alignment."""
    aligned = replace(how, multiple=128)
    return lax.platform_dependent(*given, cpu=partial(function, how), default=partial(function, aligned))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scores(how: _Chunks, *given: Any) -> tuple[Any, ...]:
    """Takes the arguments of `_scan_vocabulary`. Returns log-probabilities of targets and heads, entropies, and the mean log-probability minus the mean logit of each teacher."""
    return _scores_forward(how, *given)[0]


def _scan_vocabulary(
    how: _Chunks,
    hidden: Array,
    unembedding: Array,
    targets: Targets,
    temperature: Array,
    teachers: Teachers,
) -> tuple[Any, ...]:
    """Returns log-probabilities of targets and heads, entropies, the log-sum-exp of the logits, and the mean difference from the logits of each teacher."""
    parts, taught = how.split(unembedding), [(its, how.split(table)) for its, table in teachers]
    sampled, *further = targets

    def in_chunk(logits: Array, index: Array, heads: Array) -> Array:
        """Returns the logits of the heads in a chunk, and 0 for the other heads."""
        return jnp.take_along_axis(logits, how.entry(index, heads), axis=1, mode="fill", fill_value=0.0)

    def add(index: Array, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        top, total, moment, (chosen, *of_heads), *gaps = sums
        logits = how.logits(index, how.chunk(parts, index), hidden, temperature)
        new_top = jnp.maximum(top, logits.max(-1))
        below = logits - new_top[:, None]
        weights, shrink = jnp.exp(below), jnp.exp(top - new_top)
        moment = shrink * (moment + total * (top - new_top)) + jnp.sum(weights * below, -1)
        is_target = how.is_target(index, sampled)
        theirs = _teacher_logits(how, index, taught, temperature)
        return (
            new_top,
            total * shrink + weights.sum(-1),
            moment,
            (
                chosen + jnp.sum(logits, axis=-1, where=is_target),
                *(
                    picked + in_chunk(logits, index, heads)
                    for picked, heads in zip(of_heads, further, strict=True)
                ),
            ),
            *(
                gap * shrink + jnp.sum(weights * (logits - its), -1)
                for gap, its in zip(gaps, theirs, strict=True)
            ),
        )

    # The zeros are created from `hidden`, so that inside `shard_map` they are marked as varying over the same mesh axes.
    zeros = jnp.full_like(hidden, 0.0, shape=sampled.shape)
    none_yet = zeros, *(jnp.full_like(hidden, 0.0, shape=heads.shape) for heads in further)
    sums = (zeros + _NEVER, zeros, zeros, none_yet, *[zeros] * len(teachers))
    top, total, moment, (chosen, *of_heads), *gaps = how.together(*lax.fori_loop(0, how.sizes[0], add, sums))
    log_total = jnp.log(total)
    scores = (chosen - top) - log_total, log_total - moment / total, top + log_total
    logprobs = scores[0], *((picked - top[:, None]) - log_total[:, None] for picked in of_heads)
    return logprobs, *scores[1:], *(gap / total for gap in gaps)


def _scores_forward(how: _Chunks, *given: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    logprobs, entropy, log_sum, *gaps = _by_platform(_scan_vocabulary, how, *given)
    return (logprobs, entropy, *(gap - log_sum for gap in gaps)), (*given, log_sum, *gaps)


def _gradients(how: _Chunks, saved: tuple[Any, ...], cotangents: tuple[Any, ...]) -> tuple[Array, Array]:
    """Computes d logprob / d logits = (one_hot(target) - softmax) / temperature, chunk by chunk. Entropy has no gradient.

    The gradient of the divergence is d KL / d logits = softmax (x - mean(x)) / temperature, where x is the difference from the teacher's logits.
    """
    hidden, unembedding, targets, temperature, teachers, log_sum, *gaps = saved
    parts, taught = how.split(unembedding), [(its, how.split(table)) for its, table in teachers]
    (sampled, *further), (of_sampled, *of_heads) = targets, cotangents[0]
    cotangent, *of_gaps = (each[:, None] for each in (of_sampled, *cotangents[2:]))
    if how.axis is not None:
        # Each device's copy of the result may affect the loss.
        cotangent, *of_gaps = (lax.psum(each, how.axis) for each in (cotangent, *of_gaps))
        of_heads = [lax.psum(each, how.axis) for each in of_heads]

    def add(index: Array, gradients: tuple[Array, Array]) -> tuple[Array, Array]:
        chunk = how.chunk(parts, index)
        logits, pull = jax.vjp(lambda w, h: how.logits(index, w, h, temperature), chunk, hidden)
        is_target = how.is_target(index, sampled).astype(logits.dtype)
        softmax = jnp.exp(logits - log_sum[:, None])
        d_logits = (is_target - softmax) * cotangent
        for each, heads in zip(of_heads, further, strict=True):
            tokens = lax.broadcasted_iota(jnp.int32, heads.shape, 0)
            # The heads of a token are different ids, so each logit gets at most one addend, and the order of additions does not matter.
            d_logits = d_logits.at[tokens, how.entry(index, heads)].add(each, mode="drop")
            d_logits = d_logits - softmax * each.sum(-1, keepdims=True)
        theirs = _teacher_logits(how, index, taught, temperature)
        for its, mean, factor in zip(theirs, gaps, of_gaps, strict=True):
            d_logits = d_logits + softmax * (logits - its - mean[:, None]) * factor
        d_chunk, d_part = pull(d_logits)
        # In the rows that chunk 0 has in common with chunk 1, the zeros of chunk 0 are overwritten.
        d_chunk = d_chunk.reshape(how.sizes[1], -1, d_chunk.shape[1])
        d_parts = lax.dynamic_update_slice_in_dim(gradients[1], d_chunk, how.start(index), axis=1)
        return gradients[0] + d_part, d_parts

    begin = jnp.zeros_like(hidden), jnp.zeros_like(parts)
    d_hidden, d_parts = lax.fori_loop(0, how.sizes[0], add, begin)
    return d_hidden, d_parts.reshape(-1, unembedding.shape[1])[: how.rows]


_scores.defvjp(_scores_forward, lambda *given: (*_by_platform(_gradients, *given), None, None, None))


def _teacher_logits(how: _Chunks, index: Array, teachers: Any, temperature: Array) -> list[Array]:
    return [
        how.logits(index, how.chunk(table, index), hidden, temperature, model)
        for model, (hidden, table) in enumerate(teachers, start=1)
    ]


def _vary_with(array: Array, other: Array) -> Array:
    """Returns `array`, marked inside `shard_map` as varying over all mesh axes over which `other` varies.

    A custom gradient must vary over the same mesh axes as its operand. The gradient of this marking is a sum over these axes. The condition of the
    `where` varies over the same axes as `other`, but is always False, so the compiler removes the `where`.
    """
    never = jnp.zeros_like(other, shape=(), dtype=bool)
    return jnp.where(never, jnp.zeros((), array.dtype), array)


def _check_temperature(temperature: float | Array) -> None:
    if isinstance(temperature, int | float | np.number) and not temperature > 0:
        raise ValueError(
            f"temperature must be above 0, got {temperature}: greedy decoding has no log-probabilities to train on"
        )
