"""Sampling a token from logits: temperature, top-k, top-p, for all slots or for each slot, and one key for each token.

The key of a token is folded from the run's key, the prompt's ordinal, the response index and the position in the
response. So a response is the same in any slot, next to any other responses.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray, UInt32

LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-3, 1e3
"""Bounds of a temperature other than 0: logits divided by it stay finite."""
MOST_TOP_K = 2**31 - 1
"""A 32-bit integer on the devices."""

_Bits = UInt32[Array, "slots vocab"]
_SlotBits = UInt32[Array, " slots"]
_Scores = Float[Array, "slots vocab"]
_Masks = Bool[Array, "slots vocab"]
_SlotMask = Bool[Array, " slots"]
_SlotFloats = Float[Array, " slots"]
_SlotInts = Int[Array, " slots"]

_FIRST_TURN = np.uint32(1 << 31)
"""Added to the number of a turn: no position is as large."""

_BLOCK = 256
"""Entries of the vocabulary summed at a time when a token is sampled."""

_SHORTLIST = 512
"""Number of likeliest tokens sorted to find the end of a nucleus (top-p). The whole vocabulary is sorted only if these do not reach it."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Decoding:
    """Temperature and truncation of the distribution: numbers, or arrays [slots]. Values are traced, so changing them compiles
    nothing, except `truncated`, which decides whether top-k and top-p are computed at all.
    """

    temperature: Float[Array, ""] | Any
    top_p: Float[Array, ""] | Any
    top_k: Int[Array, ""] | Any
    truncated: bool = field(metadata={"static": True})


def decoding(*, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> Decoding:
    """Returns the options of all slots, with the meaning and errors of `DecodingOptions`."""
    DecodingOptions(temperature=temperature, top_p=top_p, top_k=top_k)
    return Decoding(
        jnp.float32(temperature), jnp.float32(top_p), jnp.int32(max(top_k, 0)), truncated=top_p < 1.0 or top_k > 0
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """The options of one response, on the host. Temperature 0 is greedy; top-p 1 and top-k 0 or -1 keep the whole distribution.

    Raises:
        ValueError: a temperature that is neither 0 nor in [1e-3, 1e3], top-p outside (0, 1], top-k below -1 or at least 2^31.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature == 0.0 or LEAST_TEMPERATURE <= self.temperature <= MOST_TEMPERATURE):
            raise ValueError(
                f"temperature={self.temperature} must be 0, which is greedy, or {LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g}"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]; 1 disables it")
        if not -1 <= self.top_k <= MOST_TOP_K:
            raise ValueError(f"top_k={self.top_k} must be 1 to {MOST_TOP_K}, or 0 or -1 to disable it")


def decoding_of_slots(options: Sequence[DecodingOptions | None]) -> Decoding:
    """Returns the options of all slots; None for a free slot.

    One program samples for all slots, so no slot's options change a bit of another slot's tokens.
    """
    free = DecodingOptions()
    of_slots = [each or free for each in options]
    return Decoding(
        np.array([each.temperature for each in of_slots], np.float32),
        np.array([each.top_p for each in of_slots], np.float32),
        np.array([max(each.top_k, 0) for each in of_slots], np.int32),
        truncated=True,
    )


def response_keys(
    key: PRNGKeyArray,
    ordinals: Int[Array, " responses"],
    indices: Int[Array, " responses"],
    turns: Int[Array, " responses"] | None = None,
) -> Key[Array, " responses"]:
    """Returns one key per response, folded from the prompt's ordinal and the response's index in its group. Each turn of an episode
    has a key of its own; the first turn has the key of a response without turns.
    """
    keys = jax.vmap(lambda ordinal, index: jax.random.fold_in(jax.random.fold_in(key, ordinal), index))(
        ordinals, indices
    )
    if turns is None:
        return keys
    # After the numbers of positions, which are folded into the key next.
    later = jax.vmap(jax.random.fold_in)(keys, _FIRST_TURN + turns.astype(jnp.uint32))
    return jnp.where(turns > 0, later, keys)


def truncate(
    logits: _Scores, top_p: Float[Array, ""] | _SlotFloats, top_k: Int[Array, ""] | _SlotInts
) -> _Scores:
    """Sets logits outside top-k and outside the nucleus to -inf. The likeliest token always stays; so do all tokens if both are off.

    Top-k acts first, then top-p on the renormalized rest. The nucleus is the smallest set of likeliest tokens
    whose probability reaches `top_p` (Holtzman et al. 2020). Ties are broken by token id.
    """
    # Sorting 49,152 entries takes longer than a model of 135M parameters; a threshold is enough.
    top_p, top_k = (jnp.broadcast_to(each, logits.shape[:1]) for each in (top_p, top_k))
    few, cut = top_k > 0, top_p < 1.0
    logits = jax.lax.cond(
        few.any(), lambda: jnp.where(few[:, None], _likeliest(logits, top_k), logits), lambda: logits
    )
    # An empty nucleus is found at once.
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
    # The token that crosses top-p is included; of equal tokens, as many as are needed to reach it.
    missing = top_p - jnp.where(above, probabilities, 0.0).sum(-1)
    wanted = jnp.ceil(missing / jnp.maximum(crossing, jnp.finfo(jnp.float32).tiny))
    return _kept(logits, above, equal, jnp.minimum(wanted, logits.shape[-1]).astype(jnp.int32))


def _crossing(probabilities: _Scores, top_p: _SlotFloats) -> _SlotFloats:
    """Returns the probability of the token at which the likeliest tokens reach `top_p`. It is usually among the first few hundred."""
    listed, _ = jax.lax.top_k(probabilities, min(_SHORTLIST, probabilities.shape[-1]))
    mass = jnp.cumsum(listed, axis=-1)

    def among_them() -> _SlotFloats:
        return jnp.take_along_axis(listed, jnp.argmax(mass >= top_p[:, None], axis=-1)[:, None], axis=-1)[
            :, 0
        ]

    def among_all() -> _SlotFloats:
        def enough(taken: _Masks) -> _SlotMask:
            return jnp.where(taken, probabilities, 0.0).sum(-1) >= top_p

        found = _threshold(_ordered(probabilities), enough)
        return jax.lax.bitcast_convert_type(found & jnp.uint32(2**31 - 1), jnp.float32)

    return jax.lax.cond((mass[:, -1] >= top_p).all(), among_them, among_all)


def _ordered(values: _Scores) -> _Bits:
    """Integers in the order of the values: the bits of a float, except the sign, sort like the float."""
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0.0, 0.0, values), jnp.uint32)  # -0 is 0
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _threshold(keys: _Bits, enough: Callable[[_Masks], _SlotMask]) -> _SlotBits:
    """Returns the highest key for which it and all keys above are `enough`, bit by bit from the highest; 0 if all keys are not enough."""

    def next_bit(place: Array, found: _SlotBits) -> _SlotBits:
        trial = found | jnp.uint32(1 << 31) >> place.astype(jnp.uint32)
        return jnp.where(enough(keys >= trial[:, None]), trial, found)

    return jax.lax.fori_loop(0, 32, next_bit, jnp.zeros(keys.shape[0], jnp.uint32))


def _kept(logits: _Scores, above: _Masks, equal: _Masks, wanted: _SlotInts) -> _Scores:
    """Keeps the logits above the threshold, and the first `wanted` (1 or more) that equal it; the others become -inf."""
    wanted = jnp.maximum(wanted, 1)

    def first() -> _Masks:
        return equal & (jnp.cumsum(equal, axis=-1, dtype=jnp.int32) <= wanted[:, None])

    # Nearly always one entry alone is equal to it.
    tied = (equal.sum(-1, dtype=jnp.int32) > wanted).any()
    return jnp.where(above | jax.lax.cond(tied, first, lambda: equal), logits, -jnp.inf)


def draw(
    logits: _Scores, keys: Key[Array, " slots"], positions: _SlotInts, decoding: Decoding
) -> tuple[_SlotInts, _SlotFloats]:
    """Returns one token per slot, and its log-probability under the whole tempered distribution, in nats.

    `keys` are the responses' keys; `positions` count the response's tokens from 0. The log-probability is of the
    tempered softmax before top-k and top-p; for greedy decoding, of the untempered one.

    Two uniform numbers per token become a token by inverting the distribution function: one selects a block of the
    vocabulary, the other an entry of the block. A single number would have to be cut at the edges of blocks, where its
    rounding is as large as the mass of thousands of unlikely tokens. (Gumbel noise needs a random number for every entry of
    the vocabulary: at 49,152 entries that took longer than a model of 135M parameters.)
    """
    given = jnp.broadcast_to(decoding.temperature, logits.shape[:1])
    greedy = given == 0.0
    scaled = logits / jnp.where(greedy, jnp.float32(1.0), given)[:, None]
    tempered = _blocks(scaled)
    peaks = tempered.max(-1)
    top = peaks.max(-1)
    mass = jnp.exp(tempered - top[:, None, None]).sum(-1)
    candidates, masses = tempered, mass
    if decoding.truncated:
        cut = jnp.broadcast_to((decoding.top_p < 1.0) | (decoding.top_k > 0), logits.shape[:1])

        def shortened() -> tuple[Array, Array]:
            left = _blocks(truncate(scaled, decoding.top_p, decoding.top_k))
            # Slots without truncation keep their masses to the bit.
            return left, jnp.where(cut[:, None], jnp.exp(left - top[:, None, None]).sum(-1), mass)

        candidates, masses = jax.lax.cond(cut.any(), shortened, lambda: (tempered, mass))
    folded = jax.vmap(jax.random.fold_in)(keys, positions)
    # Multiples of 2^-23 from 0. Their midpoints are used, so that 0 does not stand for everything below 2^-23.
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(folded) + jnp.float32(2**-24)
    block = _reached(masses, uniform[:, 0])
    inside = jnp.exp(_pick(candidates, block) - top[:, None])
    drawn = block * _BLOCK + _reached(inside, uniform[:, 1])
    best = jnp.argmax(peaks, axis=-1)
    likeliest = best * _BLOCK + jnp.argmax(_pick(tempered, best), axis=-1)
    tokens = jnp.where(greedy, likeliest, drawn).astype(jnp.int32)
    chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0]
    return tokens, chosen - top - jnp.log(mass.sum(-1))


def _blocks(scores: _Scores) -> Float[Array, "slots blocks block"]:
    """Returns the vocabulary in blocks; the last block is padded with entries that cannot be sampled."""
    slots, vocab = scores.shape
    padded = jnp.pad(scores, ((0, 0), (0, -vocab % _BLOCK)), constant_values=-jnp.inf)
    return padded.reshape(slots, -1, _BLOCK)


def _pick(rows: Float[Array, " slots count *rest"], index: _SlotInts) -> Float[Array, " slots *rest"]:
    """Returns entry `index` of each slot."""
    return jax.vmap(lambda row, at: row[at])(rows, index)


def _reached(mass: Float[Array, "slots count"], share: _SlotFloats) -> _SlotInts:
    """Returns the first entry at which the running sum of mass exceeds `share`, in (0, 1), of the whole; never one without mass."""
    running = jnp.where(mass > 0, jnp.cumsum(mass, axis=-1), 0.0)
    whole = running.max(-1)
    target = jnp.minimum(share * whole, jnp.nextafter(whole, jnp.zeros_like(whole)))
    return jnp.argmax(running > target[:, None], axis=-1).astype(jnp.int32)
