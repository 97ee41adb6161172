"""Samples tokens from logits, with temperature, top-k and top-p for all slots or per slot, and a random key per token.

A token's key is folded from the run's key, the prompt's ordinal, the response index and the position in the response. So a response is the same in any slot,
regardless of the other responses in the batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray, UInt32

LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-3, 1e3
"""Bounds of a nonzero temperature. Within these bounds, logits divided by the temperature stay finite."""
MOST_TOP_K = 2**31 - 1
"""Maximum value of top-k, because top-k is a 32-bit integer on the devices."""

_Bits = UInt32[Array, "slots vocab"]
_SlotBits = UInt32[Array, " slots"]
_Scores = Float[Array, "slots vocab"]
_Masks = Bool[Array, "slots vocab"]
_SlotMask = Bool[Array, " slots"]
_SlotFloats = Float[Array, " slots"]
_SlotInts = Int[Array, " slots"]

_FIRST_TURN = np.uint32(1 << 31)
"""Offset added to a turn index before it is folded into a key. The result is larger than any token position, so keys of turns and tokens differ."""

_BLOCK = 256
"""Number of vocabulary entries per block. To sample a token, first a block and then an entry in the block is chosen."""

_SHORTLIST = 512
"""Number of most likely tokens that are sorted to find the end of a nucleus (top-p). If their total probability is below top-p, the whole vocabulary is searched."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Decoding:
    """Temperature, top-p and top-k, as scalars or as arrays [slots]. The values are traced, so changing them does not trigger recompilation. Only `truncated`
    is static; it determines whether top-k and top-p are computed at all."""

    temperature: Float[Array, ""] | Any
    top_p: Float[Array, ""] | Any
    top_k: Int[Array, ""] | Any
    truncated: bool = field(metadata={"static": True})


def decoding(*, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> Decoding:
    """Returns decoding options that apply to all slots. See `DecodingOptions` for the allowed values and errors."""
    DecodingOptions(temperature=temperature, top_p=top_p, top_k=top_k)
    return Decoding(
        jnp.float32(temperature), jnp.float32(top_p), jnp.int32(max(top_k, 0)), truncated=top_p < 1.0 or top_k > 0
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """The decoding options of one response, on the host. Temperature 0 is greedy; top-p 1 and top-k 0 or -1 keep the whole distribution. Raises ValueError if
    the temperature is neither 0 nor in [1e-3, 1e3], top-p is not in (0, 1], or top-k is below -1 or at least 2^31."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature == 0.0 or LEAST_TEMPERATURE <= self.temperature <= MOST_TEMPERATURE):
            raise ValueError(
                f"temperature={self.temperature} must be 0 (greedy) or between {LEAST_TEMPERATURE:g} and {MOST_TEMPERATURE:g}"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]; 1 disables it")
        if not -1 <= self.top_k <= MOST_TOP_K:
            raise ValueError(f"top_k={self.top_k} must be 1 to {MOST_TOP_K}, or 0 or -1 to disable it")


def decoding_of_slots(options: Sequence[DecodingOptions | None]) -> Decoding:
    """Returns decoding options with separate values for each slot. `options` contains None for a free slot.

    The options of one slot do not change another slot's tokens, not even in the last bit, because the same program samples for all slots.
    """
    free = DecodingOptions()
    of_slots = [slot or free for slot in options]
    return Decoding(
        np.array([slot.temperature for slot in of_slots], np.float32),
        np.array([slot.top_p for slot in of_slots], np.float32),
        np.array([max(slot.top_k, 0) for slot in of_slots], np.int32),
        truncated=True,
    )


def response_keys(
    key: PRNGKeyArray,
    ordinals: Int[Array, " responses"],
    indices: Int[Array, " responses"],
    turns: Int[Array, " responses"] | None = None,
) -> Key[Array, " responses"]:
    """Returns one key per response, folded from the prompt's ordinal and the response's index in its group. Each turn of an episode has its own key; the
    first turn has the same key as a response without turns."""
    fold = jax.random.fold_in
    keys = jax.vmap(lambda ordinal, index: fold(fold(key, ordinal), index))(ordinals, indices)
    if turns is None:
        return keys
    # Positions are folded into these keys next. The number folded in here is larger than any position, so no keys coincide.
    later = jax.vmap(jax.random.fold_in)(keys, _FIRST_TURN + turns.astype(jnp.uint32))
    return jnp.where(turns > 0, later, keys)


def truncate(
    logits: _Scores, top_p: Float[Array, ""] | _SlotFloats, top_k: Int[Array, ""] | _SlotInts
) -> _Scores:
    """Sets logits outside top-k or the nucleus to -inf. The most likely token always stays. If top-k and top-p are off, all tokens stay.

    Top-k is applied first, then top-p to the renormalized rest. The nucleus is the smallest set of most likely tokens whose probability reaches `top_p`
    (Holtzman et al. 2020). Ties are broken by token id.
    """
    # Logits are compared with a threshold, because sorting 49,152 entries takes longer than the forward pass of a 135M-parameter model.
    top_p, top_k = (jnp.broadcast_to(value, logits.shape[:1]) for value in (top_p, top_k))
    few, cut = top_k > 0, top_p < 1.0
    logits = jax.lax.cond(
        few.any(), lambda: jnp.where(few[:, None], _likeliest(logits, top_k), logits), lambda: logits
    )
    # For slots without top-p, the target is 0, which the first token already reaches.
    reached = jnp.where(cut, top_p, 0.0)
    return jax.lax.cond(
        cut.any(), lambda: jnp.where(cut[:, None], _nucleus(logits, reached), logits), lambda: logits
    )


def _likeliest(logits: _Scores, top_k: _SlotInts) -> _Scores:
    keys = _ordered(logits)
    threshold = _threshold(keys, lambda keys: keys.sum(-1, dtype=jnp.int32) >= top_k)
    above, equal = keys > threshold[:, None], keys == threshold[:, None]
    return _kept(logits, above, equal, top_k - above.sum(-1, dtype=jnp.int32))


def _nucleus(logits: _Scores, top_p: _SlotFloats) -> _Scores:
    probabilities = jax.nn.softmax(logits, axis=-1)
    crossing = _crossing(probabilities, top_p)
    above, equal = probabilities > crossing[:, None], probabilities == crossing[:, None]
    # The token at which top-p is reached is included. Of equally likely tokens, only as many as needed are kept.
    missing = top_p - jnp.where(above, probabilities, 0.0).sum(-1)
    wanted = jnp.ceil(missing / jnp.maximum(crossing, jnp.finfo(jnp.float32).tiny))
    return _kept(logits, above, equal, jnp.minimum(wanted, logits.shape[-1]).astype(jnp.int32))


def _crossing(probabilities: _Scores, top_p: _SlotFloats) -> _SlotFloats:
    """Returns the probability of the least likely token in the nucleus. This token is usually among the few hundred most likely tokens."""
    listed, _ = jax.lax.top_k(probabilities, min(_SHORTLIST, probabilities.shape[-1]))
    mass = jnp.cumsum(listed, axis=-1)

    def among_them() -> _SlotFloats:
        column = jnp.argmax(mass >= top_p[:, None], axis=-1)[:, None]
        return jnp.take_along_axis(listed, column, axis=-1)[:, 0]

    def among_all() -> _SlotFloats:
        def enough(mask: _Masks) -> _SlotMask:
            return jnp.where(mask, probabilities, 0.0).sum(-1) >= top_p

        threshold = _threshold(_ordered(probabilities), enough)
        return jax.lax.bitcast_convert_type(threshold & jnp.uint32(2**31 - 1), jnp.float32)

    return jax.lax.cond((mass[:, -1] >= top_p).all(), among_them, among_all)


def _ordered(values: _Scores) -> _Bits:
    """Maps floats to integers with the same order. The bits of positive floats already sort like their values; bits of negative floats are inverted."""
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0.0, 0.0, values), jnp.uint32)  # -0 is 0
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _threshold(keys: _Bits, enough: Callable[[_Masks], _SlotMask]) -> _SlotBits:
    """Returns, for each slot, the highest threshold such that the mask of keys at or above it satisfies `enough`, or 0 if no threshold does. The threshold
    is found bit by bit, starting with the highest bit."""

    def next_bit(bit: Array, threshold: _SlotBits) -> _SlotBits:
        trial = threshold | jnp.uint32(1 << 31) >> bit.astype(jnp.uint32)
        return jnp.where(enough(keys >= trial[:, None]), trial, threshold)

    return jax.lax.fori_loop(0, 32, next_bit, jnp.zeros(keys.shape[0], jnp.uint32))


def _kept(logits: _Scores, above: _Masks, equal: _Masks, wanted: _SlotInts) -> _Scores:
    """Keeps the logits in the mask `above` and the first max(`wanted`, 1) logits in the mask `equal`. All other logits become -inf."""
    wanted = jnp.maximum(wanted, 1)

    def first() -> _Masks:
        return equal & (jnp.cumsum(equal, axis=-1, dtype=jnp.int32) <= wanted[:, None])

    # Usually exactly one entry equals the threshold, so entries are counted only if a slot has more ties than needed.
    tied = (equal.sum(-1, dtype=jnp.int32) > wanted).any()
    return jnp.where(above | jax.lax.cond(tied, first, lambda: equal), logits, -jnp.inf)


def draw(
    logits: _Scores, keys: Key[Array, " slots"], positions: _SlotInts, decoding: Decoding, *, heads: int = 0
) -> tuple[Array, ...]:
    """Samples one token per slot. Returns the tokens and their log-probabilities in nats. With `heads`, also returns the ids of that many most probable tokens, most
    probable first, and their log-probabilities, each [slots, heads]. Of equally probable tokens, the lower id comes first.

    `keys` are the keys of the responses, and `positions` are the indices of the new tokens in their responses, from 0. All log-probabilities come from the
    tempered softmax before top-k and top-p, or from the untempered softmax if decoding is greedy.

    Inverse transform sampling turns two uniform random numbers into a token: one selects a block of the vocabulary, the other an entry of the block. A single
    number would have to be rescaled to select within the block, and its rounding error would be as large as the mass of thousands of unlikely tokens.
    """
    temperature = jnp.broadcast_to(decoding.temperature, logits.shape[:1])
    greedy = temperature == 0.0
    scaled = logits / jnp.where(greedy, jnp.float32(1.0), temperature)[:, None]
    tempered = _blocks(scaled)
    peaks = tempered.max(-1)
    top = peaks.max(-1)
    mass = jnp.exp(tempered - top[:, None, None]).sum(-1)
    candidates, masses = tempered, mass
    if decoding.truncated:
        cut = jnp.broadcast_to((decoding.top_p < 1.0) | (decoding.top_k > 0), logits.shape[:1])

        def shortened() -> tuple[Array, Array]:
            left = _blocks(truncate(scaled, decoding.top_p, decoding.top_k))
            # Slots without truncation keep their masses, so that their tokens do not depend on the options of other slots.
            return left, jnp.where(cut[:, None], jnp.exp(left - top[:, None, None]).sum(-1), mass)

        candidates, masses = jax.lax.cond(cut.any(), shortened, lambda: (tempered, mass))
    folded = jax.vmap(jax.random.fold_in)(keys, positions)
    # `uniform` returns multiples of 2^-23, including 0. Half a step is added, so that every number is strictly between 0 and 1.
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(folded) + jnp.float32(2**-24)
    block = _reached(masses, uniform[:, 0])
    inside = jnp.exp(_pick(candidates, block) - top[:, None])
    drawn = block * _BLOCK + _reached(inside, uniform[:, 1])
    best = jnp.argmax(peaks, axis=-1)
    likeliest = best * _BLOCK + jnp.argmax(_pick(tempered, best), axis=-1)
    tokens = jnp.where(greedy, likeliest, drawn).astype(jnp.int32)
    chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0]
    below_top, log_mass = chosen - top, jnp.log(mass.sum(-1))
    if not heads:
        return tokens, below_top - log_mass
    largest, ids = jax.lax.top_k(scaled, heads)
    return tokens, below_top - log_mass, ids, largest - top[:, None] - log_mass[:, None]


def _blocks(scores: _Scores) -> Float[Array, "slots blocks block"]:
    """Reshapes the vocabulary into blocks. The last block is padded with entries that cannot be sampled."""
    slots, vocab = scores.shape
    padded = jnp.pad(scores, ((0, 0), (0, -vocab % _BLOCK)), constant_values=-jnp.inf)
    return padded.reshape(slots, -1, _BLOCK)


def _pick(rows: Float[Array, " slots count *rest"], index: _SlotInts) -> Float[Array, " slots *rest"]:
    """Returns, for each slot, entry `index` of its row."""
    return jax.vmap(lambda row, at: row[at])(rows, index)


def _reached(mass: Float[Array, "slots count"], share: _SlotFloats) -> _SlotInts:
    """Returns each slot's first entry at which the cumulative mass exceeds `share` times the total, with 0 < `share` < 1. Its mass is never 0."""
    running = jnp.where(mass > 0, jnp.cumsum(mass, axis=-1), 0.0)
    whole = running.max(-1)
    target = jnp.minimum(share * whole, jnp.nextafter(whole, jnp.zeros_like(whole)))
    return jnp.argmax(running > target[:, None], axis=-1).astype(jnp.int32)
