"""Log-probabilities of given tokens: from logits, or from hidden states without ever holding all logits.

Both are of the *tempered* policy, softmax(logits / temperature): the one that sampling draws from.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from dapo_jax.products import product


def token_logprobs(
    logits: Float[Array, "*batch vocab"],
    targets: Int[Array, "*batch"],
    *,
    temperature: float | Float[Array, ""] = 1.0,
) -> Float[Array, "*batch"]:
    """Log-probability of each target under softmax(logits / temperature), in nats.

    For people who hold the logits; `chunked_logprobs` needs far less memory. The softmax is taken in float32
    whatever the logits are (float64 stays float64).

    Args:
        logits: scores of the next token. The logits at position t - 1 belong to the token at t: lining the two
            up is the caller's part.
        targets: token ids. Where they are padding, any id in the vocabulary will do.
        temperature: of the policy whose log-probabilities these are; above 0.

    Raises:
        ValueError: a temperature (as a Python number) that is not above 0.
    """
    _check_temperature(temperature)
    dtype = np.promote_types(logits.dtype, jnp.float32)
    tempered = logits.astype(dtype) / jnp.asarray(temperature, dtype)
    return _pick(tempered, targets) - jax.nn.logsumexp(tempered, axis=-1)


def chunked_logprobs(
    hidden: Float[Array, "tokens embed"],
    unembedding: Float[Array, "vocab embed"],
    targets: Int[Array, " tokens"],
    *,
    temperature: float | Float[Array, ""] = 1.0,
    chunk_tokens: int = 1024,
    compute_dtype: str | None = None,
) -> tuple[Float[Array, " tokens"], Float[Array, " tokens"]]:
    """Log-probability and entropy per token under softmax(hidden @ unembedding.T / temperature).

    Neither the forward nor the backward pass holds more than `chunk_tokens` rows of logits: where there are several
    chunks, the backward pass computes each one's again. Products are in the compute dtype and give float32 (see
    `dapo_jax.products`); the gradient of `unembedding` is summed over chunks in `unembedding`'s own dtype.

    A chunk is made of tokens `tokens / chunk_tokens` apart rather than of neighbours, so that tokens sharded
    over devices leave every device its share of each chunk.

    Args:
        hidden: final hidden states, the one that predicts `targets[i]` in row i.
        unembedding: the output matrix, one row per vocabulary entry.
        targets: token ids.
        temperature: of the policy; above 0. May be traced.
        chunk_tokens: the most rows of logits at one time.
        compute_dtype: of the products with `unembedding`; None is the dtype of `hidden`.

    Returns:
        Log-probabilities, differentiable, and entropies, a metric without gradient; both in nats, float32 or wider.

    Raises:
        ValueError: a temperature (as a Python number) that is not above 0, or chunks of less than one token.
    """
    _check_temperature(temperature)
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be 1 or more, got {chunk_tokens}")
    tokens = targets.shape[0]
    chunks = max(-(-tokens // chunk_tokens), 1)
    rows = -(-tokens // chunks)
    padding = chunks * rows - tokens
    hidden, unembedding = _vary_with(hidden, unembedding), _vary_with(unembedding, hidden)

    def score(chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        chunk_hidden, chunk_targets = chunk
        logits = product("ve,te->tv", unembedding, chunk_hidden, compute_dtype or hidden.dtype.name)
        log_softmax = jax.nn.log_softmax(logits / jnp.asarray(temperature, logits.dtype), axis=-1)
        constant = lax.stop_gradient(log_softmax)
        return _pick(log_softmax, chunk_targets), -jnp.sum(jnp.exp(constant) * constant, axis=-1)

    if chunks == 1:
        # All logits exist at one time as it is: kept for the backward pass, they need not be computed again.
        return score((hidden, targets))
    # Without prevent_cse XLA is free to fuse; a scan needs no barrier to keep the recomputation.
    score = jax.checkpoint(score, prevent_cse=False)
    split_hidden = (
        jnp.pad(hidden, ((0, padding), (0, 0))).reshape(rows, chunks, hidden.shape[1]).swapaxes(0, 1)
    )
    split_targets = jnp.pad(targets, (0, padding)).reshape(rows, chunks).swapaxes(0, 1)
    logprobs, entropy = lax.map(score, (split_hidden, split_targets))
    return logprobs.swapaxes(0, 1).reshape(-1)[:tokens], entropy.swapaxes(0, 1).reshape(-1)[:tokens]


def _pick(scores: Float[Array, "*batch vocab"], targets: Int[Array, "*batch"]) -> Float[Array, "*batch"]:
    """The score of each target. A masked sum rather than a gather: it stays on each device of a sharded
    vocabulary, and its gradient is no scatter into a second [tokens, vocab] array."""
    vocab = lax.broadcasted_iota(targets.dtype, scores.shape, scores.ndim - 1)
    return jnp.sum(scores, axis=-1, where=vocab == targets[..., None])


def _vary_with(array: Array, other: Array) -> Array:
    """`array`, marked inside `shard_map` as different on the devices on which `other` differs.

    A custom gradient must have its operand's marks; the mark's own gradient is the sum over those devices. The
    condition is a constant False that carries `other`'s marks, so the compiler drops the choice.
    """
    never = jnp.zeros_like(other, shape=(), dtype=bool)
    return jnp.where(never, jnp.zeros((), array.dtype), array)


def _check_temperature(temperature: float | Array) -> None:
    if isinstance(temperature, int | float | np.number) and not temperature > 0:
        raise ValueError(
            f"temperature must be above 0, got {temperature}: greedy decoding has no log-probabilities to train on"
        )
