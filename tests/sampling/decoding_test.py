"""Sampled tokens have the right distribution and log-probabilities, and depend only on their key and position.

Samples are compared with probabilities computed in plain Python, by Pearson's chi-square statistic.
"""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.stats import chi2

from dapo_jax.sampling.decoding import (
    DecodingOptions,
    _reached,
    decoding,
    decoding_of_slots,
    draw,
    response_keys,
    truncate,
)

LOGITS = np.array([0.3, 2.0, -1.0, 1.2, 0.0, 1.1, -0.5], np.float32)
DRAWS = 20_000

jitted_draw = jax.jit(draw)


def keys_for(count, seed=0):
    """One key per response: ordinals 0, 1, ... of a run with seed `seed`."""
    ordinals = jnp.arange(count, dtype=jnp.int32)
    return response_keys(jax.random.key(seed), ordinals, jnp.zeros_like(ordinals))


def drawn(how, logits=LOGITS, count=500, seed=0):
    rows = jnp.broadcast_to(jnp.asarray(logits)[None], (count, len(logits)))
    tokens, logprobs = jitted_draw(rows, keys_for(count, seed), jnp.zeros(count, jnp.int32), how)
    return np.asarray(tokens), np.asarray(logprobs)


def tempered(logits, temperature):
    weights = [math.exp(float(logit) / temperature) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def kept_by_sorting(logits, top_p, top_k):
    """Truncation by its definition, in float64: the k likeliest, of these the likeliest until top-p; ties by id."""
    order = np.argsort(-logits, kind="stable")[: top_k or None]
    probabilities = np.exp(logits[order] - logits.max())
    before = np.cumsum(probabilities / probabilities.sum()) - probabilities / probabilities.sum()
    return set(order[before < top_p] if top_p < 1 else order)


def expected(*, temperature=1.0, top_k=0, top_p=1.0):
    """The probabilities of the tokens that are kept, renormalised; the other tokens have 0."""
    kept = kept_by_sorting(LOGITS.astype(np.float64) / temperature, top_p, top_k)
    found = np.array([p if token in kept else 0.0 for token, p in enumerate(tempered(LOGITS, temperature))])
    return found / found.sum()


def are_plausible(tokens, probabilities):
    """Whether fair samples have a larger chi-square statistic (Pearson) in more than one of 10,000 trials."""
    counts, possible = np.bincount(tokens, minlength=len(probabilities)), probabilities > 0
    means = probabilities[possible] * len(tokens)
    statistic = ((counts[possible] - means) ** 2 / means).sum()
    return not counts[~possible].any() and chi2.sf(float(statistic), float(possible.sum() - 1)) > 1e-4


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.5},
        {"temperature": 1.0},
        {"temperature": 2.0},
        {"top_p": 0.8},
        {"top_k": 3},
        {"top_k": 4, "top_p": 0.8},
        {"temperature": 2.0, "top_k": 5, "top_p": 0.7},
    ],
    ids=str,
)
def test_samples_have_the_requested_distribution(options):
    tokens, _ = drawn(decoding(**options), count=DRAWS)
    assert are_plausible(tokens, expected(**options))


@pytest.mark.parametrize("wrong", [{"temperature": 1.1}, {"top_k": 6}], ids=str)
def test_the_statistic_notices_a_slightly_wrong_distribution(wrong):
    """10 % of temperature, or one missing token of seven, is far outside of the plain distribution."""
    assert not are_plausible(drawn(decoding(), count=DRAWS)[0], expected(**wrong))


@pytest.mark.parametrize(
    ("options", "probabilities", "support"),
    [
        # The nucleus includes the token that crosses top_p.
        ({"top_p": 0.3}, [0.5, 0.3, 0.2], {0}),
        ({"top_p": 0.55}, [0.5, 0.3, 0.2], {0, 1}),
        ({"top_p": 0.75}, [0.5, 0.3, 0.2], {0, 1}),
        ({"top_p": 0.85}, [0.5, 0.3, 0.2], {0, 1, 2}),
        # 0.4 of the whole does not reach 0.55. Of the two likeliest it is 0.4 / 0.7 = 0.57, which does.
        ({"top_p": 0.55}, [0.4, 0.3, 0.2, 0.1], {0, 1}),
        ({"top_p": 0.55, "top_k": 2}, [0.4, 0.3, 0.2, 0.1], {0}),
        # Ties are broken by token id.
        ({"top_k": 2}, [0.25] * 4, {0, 1}),
        ({"top_p": 0.45}, [0.25] * 4, {0, 1}),
        ({"top_p": 0.55}, [0.25] * 4, {0, 1, 2}),
        ({"temperature": 0.0}, [0.1, 0.45, 0.45], {1}),
    ],
    ids=str,
)
def test_truncation_keeps_the_likeliest(options, probabilities, support):
    assert set(drawn(decoding(**options), np.log(np.array(probabilities, np.float32)))[0]) == support


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}], ids=str)
def test_greedy_takes_the_likeliest(options):
    tokens, logprobs = drawn(decoding(**options))
    assert set(tokens) == {1}
    # Greedy has no temperature: its log-probability is the untempered one, as at temperature 1.
    np.testing.assert_allclose(logprobs, math.log(tempered(LOGITS, 1.0)[1]), rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": -1},
        {"top_k": 1000},
        {"top_p": 0.9999999},
    ],
    ids=str,
)
def test_disabled_truncation_is_plain_sampling_and_never_greedy(options):
    plain, plain_logprobs = drawn(decoding())
    tokens, logprobs = drawn(decoding(**options))
    assert set(plain) == set(range(len(LOGITS)))
    np.testing.assert_array_equal(tokens, plain)
    np.testing.assert_array_equal(logprobs, plain_logprobs)


def test_top_k_alone_drops_no_unlikely_token():
    """Over 8192 tokens the running sum of probabilities reaches 1 before its end, by rounding."""
    logits = jax.random.normal(jax.random.key(0), (4, 8192)) * 4.0
    kept = truncate(logits, jnp.float32(1.0), jnp.int32(8000))
    assert jnp.isfinite(kept).sum(axis=-1).tolist() == [8000] * 4


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 4, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.7])
def test_the_logprob_belongs_to_the_whole_tempered_distribution(temperature, options):
    tokens, logprobs = drawn(decoding(temperature=temperature, **options))
    probabilities = tempered(LOGITS, temperature)
    np.testing.assert_allclose(logprobs, [math.log(probabilities[token]) for token in tokens], rtol=1e-5)


def test_unlikely_tokens_have_their_mass_and_no_more():
    """Of 151,936 entries, 83,146 have less than 1e-9 each, 1.89e-5 together.

    All 2^23 uniform numbers are counted for every sixth block of the vocabulary, in float32 as `draw` computes. With one number
    for block and entry the mass was 1.94 times too large, by rounding at the edges of 594 blocks.
    """
    generator, vocab, size = np.random.default_rng(0), 151_936, 256
    logits = (generator.normal(size=vocab) * 3.0).astype(np.float32)
    logits[generator.choice(vocab, 40, replace=False)] += np.float32(14)
    exact = np.exp(logits.astype(np.float64) - logits.max())
    exact = np.pad(exact / exact.sum(), (0, -vocab % size)).reshape(-1, size)
    blocks = np.pad(logits, (0, -vocab % size), constant_values=-np.inf).reshape(-1, size)
    mass = jnp.exp(jnp.asarray(blocks) - logits.max())
    shares = (np.arange(2**23) * 2.0**-23 + 2.0**-24).astype(np.float32)
    of_block = falling(mass.sum(-1)[None], shares)[0]
    chosen = np.arange(0, len(blocks), 6)
    of_entry = falling(mass[chosen], shares)
    unlikely = (exact > 0) & (exact < 1e-9)
    found = (of_block[chosen, None] * of_entry)[unlikely[chosen]].sum()
    assert found == pytest.approx(exact[chosen][unlikely[chosen]].sum(), rel=0.01)


def test_block_and_entry_are_sampled_with_two_numbers_of_one_key():
    """512 equally likely tokens in two blocks of 256: u takes block floor(2 u), v its entry floor(256 v)."""
    keys, positions = keys_for(200), jnp.arange(200, dtype=jnp.int32)
    tokens, _ = jitted_draw(jnp.zeros((200, 512)), keys, positions, decoding())
    folded = jax.vmap(jax.random.fold_in)(keys, positions)
    pairs = np.asarray(jax.vmap(lambda key: jax.random.uniform(key, (2,)))(folded)) + 2.0**-24
    np.testing.assert_array_equal(tokens, np.floor(2 * pairs[:, 0]) * 256 + np.floor(256 * pairs[:, 1]))


def falling(masses, shares):
    """The part of `shares`, ascending, that selects each entry of each row: the inverse of `_reached`."""
    running = np.asarray(jax.jit(lambda mass: jnp.cumsum(mass, axis=-1))(masses))
    running = np.where(np.asarray(masses) > 0, running, np.float32(0))
    parts = []
    for row in running:
        targets = np.minimum(shares * row.max(), np.nextafter(row.max(), np.float32(0)))
        passed = np.searchsorted(targets, np.maximum.accumulate(row), side="left")
        parts.append(np.diff(passed, prepend=0) / len(shares))
    return np.array(parts)


def test_uniform_numbers_are_inside_0_and_1():
    """jax's lowest and highest, 0 and 1 - 2^-23, are moved by 2^-24 without rounding. Neither takes a token of 2e-16."""
    ends = jnp.array([0.0, 1.0 - 2.0**-23], jnp.float32) + jnp.float32(2**-24)
    assert ends.tolist() == [2.0**-24, 1.0 - 2.0**-24]
    for end in ends:
        assert int(_reached(jnp.array([[2e-16, 1.0]], jnp.float32), end[None])[0]) == 1


def test_an_impossible_token_is_never_sampled():
    logits = np.where(np.arange(7) % 2, LOGITS, -np.inf).astype(np.float32)
    tokens, logprobs = drawn(decoding(), logits)
    assert set(tokens) == {1, 3, 5}
    assert np.isfinite(logprobs).all()


def test_a_sample_depends_on_its_key_and_position_not_on_its_slot():
    rows = jnp.broadcast_to(jnp.zeros((1, 1000)), (6, 1000))
    keys, positions = keys_for(6), jnp.array([0, 1, 2, 0, 5, 9], jnp.int32)
    tokens, _ = jitted_draw(rows, keys, positions, decoding())
    order = jnp.array([4, 2, 0, 5, 1, 3])
    moved, _ = jitted_draw(rows, keys[order], positions[order], decoding())
    np.testing.assert_array_equal(moved, tokens[order])


def test_seed_ordinal_index_and_position_each_change_the_sample():
    """1000 equally likely tokens: two of six samples agree by chance in 1.5 % of seeds, but not with this one."""
    seeds, ordinals, indices = [0, 1, 0, 0, 0, 0], [3, 3, 4, 3, 3, 5], [5, 5, 5, 6, 5, 3]
    keys = [
        response_keys(jax.random.key(seed), jnp.array([ordinal], jnp.int32), jnp.array([index], jnp.int32))
        for seed, ordinal, index in zip(seeds, ordinals, indices, strict=True)
    ]
    positions = jnp.array([0, 0, 0, 0, 1, 0], jnp.int32)
    tokens, _ = jitted_draw(jnp.zeros((6, 1000)), jnp.concatenate(keys), positions, decoding())
    assert len(set(tokens.tolist())) == 6


@pytest.mark.parametrize("heads", [1, 7, 40])
def test_heads_are_the_most_probable_tokens_with_ties_by_id(heads):
    """Logits of few values, so that there are ties. 1e-6: a sum of 40 numbers in float32. Top-p changes no log-probability, as for the sampled token."""
    logits = np.random.default_rng(0).integers(-4, 5, (6, 40)).astype(np.float32)
    for how, temperature in (
        (decoding(temperature=0.7), 0.7),
        (decoding(temperature=0.0), 1.0),
        (decoding(top_p=0.5), 1.0),
    ):
        tokens, logprobs, ids, of_heads = draw(
            jnp.asarray(logits), keys_for(6), jnp.zeros(6, jnp.int32), how, heads=heads
        )
        tempered = logits.astype(np.float64) / temperature
        every = tempered - np.logaddexp.reduce(tempered, axis=-1, keepdims=True)
        expected = np.argsort(-logits, axis=-1, kind="stable")[:, :heads]
        np.testing.assert_array_equal(ids, expected)
        np.testing.assert_allclose(of_heads, np.take_along_axis(every, expected, -1), rtol=0, atol=1e-6)
        is_sampled = np.asarray(ids == tokens[:, None])
        np.testing.assert_array_equal(
            np.asarray(of_heads)[is_sampled], np.asarray(logprobs)[is_sampled.any(-1)]
        )


def test_other_values_compile_nothing():
    program = jax.jit(lambda *arguments: draw(*arguments))
    rows, keys, positions = jnp.zeros((3, 7)), keys_for(3), jnp.zeros(3, jnp.int32)
    for how in (decoding(), decoding(temperature=0.0), decoding(temperature=0.3)):
        program(rows, keys, positions, how)
    assert program._cache_size() == 1
    for how in (decoding(top_k=2), decoding(top_p=0.3), decoding(top_k=3, top_p=0.5)):
        program(rows, keys, positions, how)
    assert program._cache_size() == 2


@pytest.mark.parametrize(
    ("name", "values"),
    [("temperature", (-0.1, math.nan, 1e-9, 1e9)), ("top_k", (2**31, -2)), ("top_p", (0.0, 1.5, math.nan))],
)
def test_values_without_a_meaning_are_refused(name, values):
    for value in values:
        with pytest.raises(ValueError, match=re.escape(f"{name}={value}")):
            decoding(**{name: value})


@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0], ids=["flat", "usual", "peaked"])
@pytest.mark.parametrize(
    ("top_p", "top_k"), [(0.7, 0), (0.999, 0), (1.0, 50), (0.7, 50), (0.95, 3000), (1e-6, 0)]
)
def test_truncation_equals_sorting_in_a_large_vocabulary(spread, top_p, top_k):
    """A flat nucleus of 0.7 has thousands of tokens, a peaked one few. Rounding may move its end by one token."""
    logits = np.random.default_rng(0).normal(size=(8, 5000)) * spread
    logits = np.round(logits.astype(np.float32), 2).astype(np.float32)  # with many ties
    found = np.asarray(truncate(jnp.asarray(logits), jnp.float32(top_p), jnp.int32(top_k)))
    for row, kept in zip(logits.astype(np.float64), found, strict=True):
        mine = set(np.flatnonzero(np.isfinite(kept)))
        expected = kept_by_sorting(row, top_p, top_k)
        assert len(mine ^ expected) <= (1 if top_p < 1 else 0)
        np.testing.assert_array_equal(kept[list(mine)], row[list(mine)].astype(np.float32))


OF_SLOTS = [
    {"temperature": 0.0}, {}, {"temperature": 0.5}, {"top_k": 2}, {"top_p": 0.7}, {"temperature": 1.7, "top_p": 0.4}, {"top_k": 3, "top_p": 0.5},
]  # fmt: skip


def test_each_slot_samples_with_its_own_options():
    """The same tokens as when all slots have these options."""
    count = 700
    given = [OF_SLOTS[slot % len(OF_SLOTS)] for slot in range(count)]
    tokens, logprobs = drawn(decoding_of_slots([DecodingOptions(**each) for each in given]), count=count)
    for kind, options in enumerate(OF_SLOTS):
        alike, alike_logprobs = drawn(decoding(**options), count=count)
        own = slice(kind, None, len(OF_SLOTS))
        np.testing.assert_array_equal(tokens[own], alike[own])
        np.testing.assert_allclose(logprobs[own], alike_logprobs[own], rtol=0, atol=1e-6)
    assert len({tuple(tokens[kind :: len(OF_SLOTS)]) for kind in range(len(OF_SLOTS))}) > 5


@pytest.mark.parametrize("other", OF_SLOTS)
def test_the_options_of_other_slots_change_no_bit(other):
    """Also next to free slots."""
    logits = np.random.default_rng(0).normal(size=(8, 3000)).astype(np.float32)
    mine = DecodingOptions(temperature=0.8)

    def sampled(others):
        how = decoding_of_slots([mine, *[others] * 7])
        return jitted_draw(jnp.asarray(logits), keys_for(8), jnp.zeros(8, jnp.int32), how)

    for found, expected in zip(sampled(DecodingOptions(**other)), sampled(None), strict=True):
        assert np.asarray(found)[0].tobytes() == np.asarray(expected)[0].tobytes()
