"""Importance weights compared with numbers by hand and with loops in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from dapo_jax.config.schema import TrainConfig
from dapo_jax.config.section import rules_by_key
from dapo_jax.dapo.corrections import (
    CORRECTIONS,
    drop_off_policy,
    importance_weights,
    with_effective_share,
)
from dapo_jax.dapo.metrics import to_scalars
from dapo_jax.dapo.responses import response_mean
from dapo_jax.parallel.mesh import make_mesh
from tests import oracle

KINDS = CORRECTIONS[1:]

# One row: a prompt, two responses to it, then a prompt with its response in one segment, then padding.
SEGMENTS = [1, 1, 2, 2, 2, 3, 3, 4, 4, 4, 0]
MASK = [False, False, True, True, True, True, True, False, True, True, False]
# pi_prox / pi_sampler of the tokens in the mask. Geometric means: (4 x 1/2 x 1/2)^(1/3) = 1, (1.5 x 0.96)^(1/2) = 1.2, (4 x 2.25)^(1/2) = 3.
RATIOS = [4.0, 0.5, 0.5, 1.5, 0.96, 4.0, 2.25]
BY_HAND = {
    "truncate": [2.0, 0.5, 0.5, 1.5, 0.96, 2.0, 2.0],
    # 1/2 is rounded on its way through a logarithm, so the range begins just below it.
    "mask": [0.0, 0.5, 0.5, 1.5, 0.96, 0.0, 0.0],
    "keep_responses": [4.0, 0.5, 0.5, 1.5, 0.96, 0.0, 0.0],
    # Products: 4 x 1/2 x 1/2 = 1, 1.5 x 0.96 = 1.44, 4 x 2.25 = 9.
    "truncate_responses": [1.0, 1.0, 1.0, 1.44, 1.44, 2.0, 2.0],
}


def one_row(ratios=RATIOS):
    """Returns log-probabilities of trainer and sampler with these ratios in the mask and NaN elsewhere, the mask, and segments."""
    mask = np.array([MASK])
    trainer, sampler = np.full(mask.shape, np.nan, np.float32), np.full(mask.shape, np.nan, np.float32)
    trainer[mask], sampler[mask] = -3.0, -3.0 - np.log(ratios)
    return trainer, sampler, mask, np.array([SEGMENTS], np.int32)


def weighted(correction, arrays, low=0.49, high=2.0):
    weigh = jax.jit(importance_weights, static_argnames=("correction", "low", "high"))
    return weigh(*map(jnp.asarray, arrays), correction=correction, low=low, high=high)


@pytest.mark.parametrize("correction", KINDS)
def test_weights_by_hand(correction):
    weights, _ = weighted(correction, one_row())
    np.testing.assert_allclose(weights[0][np.array(MASK)], BY_HAND[correction], rtol=2e-6)
    assert not np.asarray(weights[0])[~np.array(MASK)].any()


@pytest.mark.parametrize(
    ("correction", "weight", "largest", "cut", "square"),
    [
        # 2 + 0.5 + 0.5 + 1.5 + 0.96 + 2 + 2 = 9.46 over 7; squares 4 + 0.25 + 0.25 + 2.25 + 0.9216 + 4 + 4 = 15.6716; three are cut.
        ("truncate", 9.46 / 7, 2.0, 3 / 7, 15.6716 / 7),
        # 0.5 + 0.5 + 1.5 + 0.96 = 3.46; squares 0.25 + 0.25 + 2.25 + 0.9216 = 3.6716; three are 0.
        ("mask", 3.46 / 7, 1.5, 3 / 7, 3.6716 / 7),
        # 4 + 0.5 + 0.5 + 1.5 + 0.96 = 7.46; squares 16 + 0.25 + 0.25 + 2.25 + 0.9216 = 19.6716; two are 0.
        ("keep_responses", 7.46 / 7, 4.0, 2 / 7, 19.6716 / 7),
        # 3 x 1 + 2 x 1.44 + 2 x 2 = 9.88; squares 3 + 2 x 2.0736 + 8 = 15.1472; two are cut.
        ("truncate_responses", 9.88 / 7, 2.0, 2 / 7, 15.1472 / 7),
    ],
)
def test_metrics_by_hand(correction, weight, largest, cut, square):
    _, metrics = weighted(correction, one_row())
    assert with_effective_share(to_scalars(metrics)) == pytest.approx(
        {
            "importance/weight": weight,
            "importance/weight_max": largest,
            "importance/cut_frac": cut,
            "importance/ess_frac": weight**2 / square,
        },
        rel=1e-5,
    )


@pytest.mark.parametrize("correction", KINDS)
def test_bfloat16_is_summed_in_float32(correction):
    """Both log-probabilities are exact in bfloat16. The log-ratio of each of 1,001 tokens is 2^-7. In bfloat16, the sum would be 1000 / 128, and the ratio 1 + 2^-7."""
    trainer = jnp.full((1, 1001), -1.0, jnp.bfloat16)
    mask, ids = np.ones(trainer.shape, bool), np.ones(trainer.shape, np.int32)
    weights, metrics = weighted(correction, (trainer, trainer - 2.0**-7, mask, ids), high=1e4)
    expected = math.exp(1001 / 128 if correction == "truncate_responses" else 1 / 128)
    np.testing.assert_allclose(weights, expected, rtol=2e-6)
    assert to_scalars(metrics)["importance/weight"] == pytest.approx(expected, rel=2e-6)


def test_the_effective_share_is_over_all_tokens_not_a_mean_of_shares():
    """Ratios 1/2, 1/2, 1/2 and 2, which is not cut: (3.5)^2 / (4 x 4.75) of them together. Apart, as 1 and 3 tokens, each part's share is 1."""
    three, one = (0.5, 0.5, 0.5), (2.0,)

    def part(ratios):
        zeros = np.zeros((1, len(ratios)), np.float32)
        mask, ids = np.ones(zeros.shape, bool), np.ones(zeros.shape, np.int32)
        arrays = zeros, -np.log(np.array([ratios], np.float32)), mask, ids
        return weighted("truncate", arrays, high=3.0)[1]

    found = [with_effective_share(to_scalars(part(ratios)))["importance/ess_frac"] for ratios in (three, one)]
    assert found == pytest.approx([1.0, 1.0])
    both = with_effective_share(to_scalars([part(three), part(one)]))
    assert both["importance/ess_frac"] == pytest.approx(3.5**2 / (4 * 4.75), rel=1e-6)


def test_the_effective_share_is_0_if_all_weights_are_0_and_missing_without_weights():
    _, metrics = weighted("mask", one_row([9.0] * 7))
    scalars = with_effective_share(to_scalars(metrics))
    assert (scalars["importance/ess_frac"], scalars["importance/cut_frac"]) == (0.0, 1.0)
    assert with_effective_share({"update/loss": 1.0}) == {"update/loss": 1.0}
    trainer, sampler, mask, ids = one_row()
    scalars = with_effective_share(to_scalars(weighted("mask", (trainer, sampler, mask & False, ids))[1]))
    assert all(math.isnan(value) for value in scalars.values())  # nothing was counted


@pytest.mark.parametrize("correction", KINDS)
def test_a_weight_at_a_bound_is_not_cut(correction):
    """e^0 is 1 to the bit."""
    zeros = np.zeros((1, 2), np.float32)
    arrays = zeros, zeros, np.ones((1, 2), bool), np.ones((1, 2), np.int32)
    weights, metrics = weighted(correction, arrays, low=1.0, high=1.0)
    assert np.asarray(weights).tolist() == [[1.0, 1.0]]
    assert to_scalars(metrics)["importance/cut_frac"] == 0.0


@pytest.mark.parametrize("correction", KINDS)
def test_log_ratios_are_clamped_at_20_and_nan_stays_nan(correction):
    """A NaN must reach the update, which skips it."""
    sampler = np.array([[-100.0], [100.0], [-np.inf], [np.nan]], np.float32)
    arrays = np.zeros_like(sampler), sampler, np.ones(sampler.shape, bool), np.ones(sampler.shape, np.int32)
    weights, _ = weighted(correction, arrays, low=1e-30, high=1e30)
    np.testing.assert_allclose(weights[:, 0], [np.exp(20), np.exp(-20), np.exp(20), np.nan], rtol=1e-5)


@pytest.mark.parametrize("correction", ["none", "auto", "truncated"])
def test_a_correction_that_gives_no_weights_is_refused(correction):
    with pytest.raises(ValueError, match=f"correction='{correction}' .* did you mean"):
        weighted(correction, one_row())


def test_the_configuration_offers_all_corrections():
    assert rules_by_key(TrainConfig)["loss.correction"].choices == ["auto", *CORRECTIONS]


def packed_rows(rng, rows=4, seq=64, longest=12):
    """Returns rows with adjacent segments of random lengths, some of them prompts, and NaN outside the mask."""
    ids, mask = np.zeros((rows, seq), np.int32), np.zeros((rows, seq), bool)
    for row in range(rows):
        stop, segment = 0, 0
        while stop < seq - longest:
            start, stop, segment = stop, stop + rng.integers(1, longest + 1), segment + 1
            ids[row, start:stop] = segment
            mask[row, start + rng.integers(0, stop - start + 1) : stop] = rng.random() < 0.8
    trainer, sampler = (rng.normal(-2.0, 0.5, (rows, seq)) for _ in range(2))
    return (
        np.where(mask, trainer, np.nan).astype(np.float32),
        np.where(mask, sampler, np.nan).astype(np.float32),
        mask,
        ids,
    )


@pytest.mark.parametrize("correction", KINDS)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_weights_agree_with_loops_in_float64(correction, seed):
    """A log-ratio has an error of 1e-6 in float32, so a value nearer to a bound may be on either side of it."""
    low, high = (0.0, 1.5) if correction.startswith("truncate") else (0.7, 1.5)
    arrays = packed_rows(np.random.default_rng(seed))
    found = np.asarray(weighted(correction, arrays, low, high)[0])
    expected, inside, outside = (
        oracle.importance_weights(*arrays, correction, low * by, high / by)
        for by in (1.0, 1 + 1e-5, 1 - 1e-5)
    )
    sure = np.ones(found.shape, bool) if correction.startswith("truncate") else (inside > 0) == (outside > 0)
    np.testing.assert_allclose(found[sure], expected[sure], rtol=3e-6)


def test_dropped_responses_by_hand():
    """Three responses of two tokens. log(pi_sampler / pi) is 0.1 and 0.5, so 0.3 on average, in the first two, and 0.2 in the third."""
    ids, mask = (
        jnp.asarray([[1, 1, 1, 2, 2, 3, 3, 0]], jnp.int32),
        jnp.asarray([[0, 1, 1, 1, 1, 1, 1, 0]], bool),
    )
    policy = jnp.where(mask, -2.0, jnp.nan)
    sampler = policy + jnp.asarray([[0.0, 0.1, 0.5, 0.1, 0.5, 0.2, 0.2, 0.0]])
    advantages = jnp.asarray([[jnp.nan, -1.0, -1.0, 1.0, 1.0, -1.0, -1.0, jnp.nan]])
    for delta, dropped in ((0.25, [1, 2]), (0.15, [1, 2, 5, 6]), (0.35, [])):
        kept, metrics = drop_off_policy(policy, sampler, advantages, mask, ids, delta=delta)
        assert np.flatnonzero(np.asarray(kept[0]) == 0.0).tolist() == dropped
        assert np.isin(kept, [0.0, 1.0]).all()
        assert to_scalars(metrics) == pytest.approx({"importance/dropped_frac": len(dropped) / 6})


def test_all_tokens_of_a_response_have_the_same_bits():
    """Otherwise a response at a bound could be masked in part."""
    rng = np.random.default_rng(0)
    ids = np.repeat([1, 2, 3, 0], [700, 2900, 300, 196]).astype(np.int32)[None]
    values = rng.normal(0.0, 0.3, ids.shape).astype(np.float32)
    means = np.asarray(jax.jit(response_mean)(jnp.asarray(values), jnp.asarray(ids > 0), jnp.asarray(ids)))
    for segment in (1, 2, 3):
        [mean] = set(means[ids == segment].tolist())
        assert mean == pytest.approx(values[ids == segment].astype(np.float64).mean(), abs=1e-7)


@pytest.mark.parametrize("correction", KINDS)
def test_weights_have_no_gradient_and_support_vmap(correction):
    arrays = [jnp.asarray(array) for array in packed_rows(np.random.default_rng(1), rows=6)]

    def total(trainer, sampler):
        how = {"correction": correction, "low": 0.7, "high": 1.5}
        return importance_weights(trainer, sampler, *arrays[2:], **how)[0].sum()

    for gradient in jax.jit(jax.grad(total, argnums=(0, 1)))(*arrays[:2]):
        np.testing.assert_array_equal(gradient, np.zeros_like(gradient))
    whole = weighted(correction, arrays, 0.7, 1.5)[0]
    pairs = [array.reshape(3, 2, -1) for array in arrays]
    each = jax.vmap(lambda *of: importance_weights(*of, correction=correction, low=0.7, high=1.5)[0])(*pairs)
    np.testing.assert_array_equal(each.reshape(whole.shape), whole)


@pytest.mark.parametrize("correction", KINDS)
def test_rows_split_over_devices_have_the_same_bits(correction):
    """With `context`, a response is on several devices, but its sum has the same order."""
    arrays = packed_rows(np.random.default_rng(2), longest=40)
    mesh = make_mesh(data=2, context=4, fsdp=1)
    place = NamedSharding(mesh, PartitionSpec("data", "context"))
    split, metrics = weighted(correction, [jax.device_put(array, place) for array in arrays], 0.7, 1.5)
    whole, expected = weighted(correction, arrays, 0.7, 1.5)
    np.testing.assert_array_equal(split, whole)
    assert to_scalars(metrics) == pytest.approx(to_scalars(expected), rel=1e-6)
