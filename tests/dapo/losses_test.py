"""`dapo_loss` and `kl_penalty` compared with numbers by hand, a float64 oracle and their invariants."""

import functools
import math

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dapo_jax import dapo_loss, kl_penalty, to_scalars, token_weights
from dapo_jax.dapo.aggregation import AGGREGATIONS
from dapo_jax.dapo.losses import k3, supervised_loss
from dapo_jax.training.update_metrics import mismatch_metrics
from tests import oracle

SHAPE = (8, 6)
GROUP_IDS = np.array([7, 7, 7, 2, 2, 2, 5, 5])
"""Ragged groups, in no order: three prompts of 3, 3 and 2 responses."""

seeds = st.integers(0, 2**32 - 1)
share_x64 = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def random_batch(seed, dtype=np.float32):
    """Ragged responses with everything in the padding poisoned; one log-ratio in eight is beyond the clamp."""
    rng = np.random.default_rng(seed)
    old_logprobs = -rng.exponential(1.0, SHAPE)
    log_ratio = rng.normal(0.0, 0.4, SHAPE) * rng.choice([0.01, 1.0, 1.0, 1.0, 60.0], SHAPE)
    for kink in (math.log(0.8), math.log(1.28), math.log(3.0), -20.0, 20.0):
        log_ratio[np.abs(log_ratio - kink) < 1e-3] += 0.01  # rounding may fall on either side of a kink
    start, length = rng.integers(0, 3, SHAPE[0]), rng.integers(0, SHAPE[1] + 1, SHAPE[0])
    column = np.arange(SHAPE[1])
    mask = (column >= start[:, None]) & (column < (start + length)[:, None])

    def poisoned(array):
        poison = rng.choice([np.nan, np.inf, -np.inf, 1e30], SHAPE)
        return np.where(mask, array, poison).astype(dtype)

    return {
        "logprobs": poisoned(old_logprobs + log_ratio),
        "old_logprobs": poisoned(old_logprobs),
        "advantages": poisoned(np.repeat(rng.normal(size=(SHAPE[0], 1)), SHAPE[1], axis=1)),
        "weights": poisoned(rng.random(SHAPE)),
        "mask": mask,
    }


def on_device(batch):
    return {name: jnp.asarray(array) for name, array in batch.items()}


@functools.partial(jax.jit, static_argnames="dual_clip")
def loss_and_gradient(batch, dual_clip=None):
    def loss(logprobs):
        return dapo_loss(**(batch | {"logprobs": logprobs}), dual_clip=dual_clip)

    return jax.value_and_grad(loss, has_aux=True)(batch["logprobs"])


@functools.partial(jax.jit, static_argnames="estimator")
def kl_and_gradient(logprobs, ref_logprobs, mask, weights, estimator, old_logprobs=None):
    def penalty(logprobs):
        how = {"estimator": estimator, "old_logprobs": old_logprobs, "weights": weights}
        return kl_penalty(logprobs, ref_logprobs, mask, **how)[0]

    return jax.value_and_grad(penalty)(logprobs)


def one_token(log_ratio, advantage, old_logprob=-1.0, **options):
    """Loss, gradient and metrics of a single token."""

    def loss(logprobs):
        return dapo_loss(
            logprobs,
            jnp.full((1, 1), old_logprob),
            jnp.full((1,), advantage),
            jnp.ones((1, 1), bool),
            **options,
        )

    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(
        jnp.full((1, 1), old_logprob + log_ratio)
    )
    return float(value), float(gradient[0, 0]), to_scalars(metrics)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected_loss", "expected_gradient"),
    [
        (1.5, 1.0, -1.28, 0.0),  # a good token gains nothing above 1 + 0.28
        (0.5, 1.0, -0.5, -0.5),  # it may be pulled all the way back up: d(-r A) / d logprob = -r A
        (0.5, -1.0, 0.8, 0.0),  # a bad token loses nothing below 1 - 0.2
        (1.5, -1.0, 1.5, 1.5),  # it may be pushed all the way back down
        (1.1, 2.0, -2.2, -2.2),  # between the clips nothing is clipped
    ],
)
def test_clips_only_the_side_the_advantage_pushes_to(ratio, advantage, expected_loss, expected_gradient):
    loss, gradient, _ = one_token(math.log(ratio), advantage)
    np.testing.assert_allclose([loss, gradient], [expected_loss, expected_gradient], rtol=1e-6)


def test_each_clip_has_its_own_option():
    """Ratio 2 clipped at 1 + 0.5 is worth 1.5; ratio 0.25 clipped at 1 - 0.5 costs 0.5."""
    np.testing.assert_allclose(one_token(math.log(2.0), 1.0, clip_ratio_high=0.5)[0], -1.5, rtol=1e-6)
    np.testing.assert_allclose(one_token(math.log(0.25), -1.0, clip_ratio_low=0.5)[0], 0.5, rtol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "expected_loss", "expected_gradient"),
    [
        (5.0, -2.0, None, 10.0, 10.0),  # r |A| = 5 * 2, uncapped
        (5.0, -2.0, 3.0, 6.0, 0.0),  # c |A| = 3 * 2, and a constant has no gradient
        (3.1, -2.0, 3.0, 6.0, 0.0),  # just above the cap
        (2.5, -2.0, 3.0, 5.0, 5.0),  # under it
        (5.0, 2.0, 3.0, -2.56, 0.0),  # a good token has the ordinary clip: 1.28 * 2
    ],
)
def test_dual_clip_caps_what_a_bad_token_can_cost(
    ratio, advantage, dual_clip, expected_loss, expected_gradient
):
    loss, gradient, metrics = one_token(math.log(ratio), advantage, dual_clip=dual_clip)
    np.testing.assert_allclose([loss, gradient], [expected_loss, expected_gradient], rtol=1e-6)
    assert metrics["policy/dual_clip_frac"] == float(expected_loss == 6.0)


@pytest.mark.parametrize(
    ("logprob", "old_logprob", "advantage", "expected"),
    [(-1.0, -1001.0, -1.0, math.exp(20.0)), (-1001.0, -1.0, 1.0, -math.exp(-20.0))],
)
def test_log_ratio_is_clamped_before_exp(logprob, old_logprob, advantage, expected):
    loss, gradient, metrics = one_token(logprob - old_logprob, advantage, old_logprob)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert gradient == 0.0
    assert all(math.isfinite(value) for value in metrics.values())


def test_metrics_are_means_over_masked_in_tokens():
    """Five tokens with ratios 2, 0.5, 1, 0.5, 4 and signs +, -, +, +, -; the sixth column is padding.

    Clipped from above: the first only (the fifth is above, but bad). From below: the second only (the fourth
    is below, but good). Their weights are wildly different and must not matter.
    """
    ratios = np.array([[2.0, 0.5, 1.0, 0.5, 4.0, 9.0]])
    old_logprobs = np.log(np.array([[0.1, 0.2, 0.3, 0.4, 0.2, 0.9]]))
    advantages = np.array([[1.0, -1.0, 1.0, 1.0, -1.0, 1.0]])
    mask = np.array([[1, 1, 1, 1, 1, 0]], bool)
    weights = np.array([[1.0, 10.0, 100.0, 0.0, 0.5, 7.0]])
    batch = [jnp.asarray(x, jnp.float32) for x in (old_logprobs + np.log(ratios), old_logprobs, advantages)]
    _, metrics = dapo_loss(
        *batch, jnp.asarray(mask), dual_clip=3.0, weights=jnp.asarray(weights, jnp.float32)
    )
    expected = {
        "policy/ratio": (2.0 + 0.5 + 1.0 + 0.5 + 4.0) / 5,
        "policy/ratio_max": 4.0,
        "policy/clip_high_frac": 1 / 5,
        "policy/clip_low_frac": 1 / 5,
        "policy/clipped_high_prob": 0.1 * 2.0,  # the clipped token's probability now
        "policy/dual_clip_frac": 1 / 5,  # the fifth: 4 |A| over the cap of 3 |A|
        # ln 2 - ln 2 + 0 - ln 2 + 2 ln 2 = ln 2, and k1 is minus that
        "policy/kl_old_k1": -math.log(2.0) / 5,
        "policy/kl_old_k3": (8.0 - 5.0 - math.log(2.0)) / 5,  # sum of r - 1 - log r
        "policy/sampled_prob": (0.2 + 0.1 + 0.3 + 0.2 + 0.8) / 5,
    }
    assert to_scalars(metrics) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("clipped", [False, True])
def test_the_probability_of_clipped_tokens_is_missing_without_clipped_tokens(clipped):
    """Two tokens of probability 0.2. A ratio of e is above 1 + 0.28; a ratio of 1 is not, and a mean over no token is missing."""
    new = jnp.full((1, 2), math.log(0.2))
    _, metrics = dapo_loss(new, new - float(clipped), jnp.ones((1, 2)), jnp.ones((1, 2), bool))
    for measured in (metrics, [metrics, metrics], jax.jit(lambda m: m)(metrics)):
        found = to_scalars(measured)
        assert found["policy/clip_high_frac"] == clipped
        assert found.get("policy/clipped_high_prob") == (pytest.approx(0.2) if clipped else None)


@pytest.mark.parametrize("advantage", [0.0, 1.0], ids=["all zero", "cancelling"])
@pytest.mark.parametrize("counts", [True, False])
def test_a_loss_of_nothing_is_zero_and_not_minus_zero(advantage, counts):
    """With a ratio of 1 everywhere, the advantages of the two responses cancel."""
    same, mask = jnp.log(jnp.full((2, 2), 0.5)), jnp.full((2, 2), counts)
    loss, _ = dapo_loss(same, same, jnp.array([advantage, -advantage]), mask)
    assert str(loss) == "0.0"


def test_a_mask_without_tokens_gives_zero_not_nan():
    nans = jnp.full(SHAPE, jnp.nan)
    batch = {"logprobs": nans, "old_logprobs": nans, "advantages": nans, "mask": jnp.zeros(SHAPE, bool)}
    for weights in (None, nans):
        (loss, metrics), gradient = loss_and_gradient(batch | {"weights": weights}, dual_clip=3.0)
        assert float(loss) == 0.0
        np.testing.assert_array_equal(gradient, np.zeros(SHAPE))
        assert all(math.isnan(value) for value in to_scalars(metrics).values())  # nothing was counted
    for estimator in ("k1", "k3"):
        penalty, gradient = kl_and_gradient(nans, nans, batch["mask"], None, estimator)
        assert float(penalty) == 0.0
        np.testing.assert_array_equal(gradient, np.zeros(SHAPE))


@share_x64
@given(seed=seeds, dual_clip=st.sampled_from([None, 3.0]), weighted=st.booleans())
def test_matches_the_oracle_in_float64(x64, seed, dual_clip, weighted):
    batch = random_batch(seed, np.float64)
    batch["weights"] = batch["weights"] if weighted else None
    (loss, _), gradient = loss_and_gradient(batch, dual_clip=dual_clip)
    expected_loss, expected_gradient = oracle.dapo_loss(**batch, dual_clip=dual_clip)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-9, atol=1e-12)


@given(seed=seeds, dual_clip=st.sampled_from([None, 3.0]))
def test_matches_the_oracle_in_float32(seed, dual_clip):
    """Relative to the sum of absolute terms: terms of opposite sign cancel, their rounding does not."""
    batch = random_batch(seed)
    (loss, _), gradient = loss_and_gradient(on_device(batch), dual_clip=dual_clip)
    expected_loss, expected_gradient = oracle.dapo_loss(**batch, dual_clip=dual_clip)
    scale, _ = oracle.dapo_loss(**(batch | {"advantages": -np.abs(batch["advantages"])}), dual_clip=dual_clip)
    np.testing.assert_allclose(loss, expected_loss, rtol=0, atol=2e-6 * scale)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=2e-6, atol=0)
    np.testing.assert_array_equal(np.asarray(gradient)[~batch["mask"]], 0.0)


@share_x64
@given(seed=seeds, estimator=st.sampled_from(["k1", "k3", "k3_unbiased"]), weighted=st.booleans())
def test_kl_penalty_matches_the_oracle(x64, seed, estimator, weighted):
    batch = random_batch(seed, np.float64)
    weights = batch["weights"] if weighted else None
    arguments = batch["logprobs"], batch["old_logprobs"], batch["mask"]
    old = batch["logprobs"] + np.random.default_rng(seed).normal(0.0, 0.5, SHAPE)
    penalty, gradient = kl_and_gradient(*arguments, weights, estimator, old)
    expected_penalty, expected_gradient = oracle.kl_penalty(*arguments, estimator, weights, old)
    np.testing.assert_allclose(penalty, expected_penalty, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-9, atol=1e-12)


def test_kl_penalty_by_hand():
    """The policy gives 1/2 and 1/4 where the reference gives 1/4 and 1/2: d = -ln 2 and ln 2.

    k1 = (ln 2 - ln 2) / 2. k3 = ((1/2 - 1 + ln 2) + (2 - 1 - ln 2)) / 2 = 1/4.
    """
    logprobs, ref_logprobs = jnp.log(jnp.array([[0.5, 0.25]])), jnp.log(jnp.array([[0.25, 0.5]]))
    mask = jnp.ones((1, 2), bool)
    for estimator, expected in (("k1", 0.0), ("k3", 0.25)):
        penalty, metrics = kl_penalty(logprobs, ref_logprobs, mask, estimator=estimator)
        np.testing.assert_allclose(penalty, expected, atol=1e-7)
        assert to_scalars(metrics) == pytest.approx(
            {"policy/kl_ref_k1": 0.0, "policy/kl_ref_k3": 0.25}, abs=1e-7
        )
    assert kl_penalty(logprobs, ref_logprobs, mask)[0] == penalty  # k3 is the default
    # The ratios to an old policy that equals the reference are 2 and 1/2: (2 (ln 2 - 1/2) + 1/2 (1 - ln 2)) / 2.
    how = {"estimator": "k3_unbiased", "old_logprobs": ref_logprobs}
    np.testing.assert_allclose(
        kl_penalty(logprobs, ref_logprobs, mask, **how)[0], 0.75 * math.log(2) - 0.25, rtol=1e-6
    )
    with pytest.raises(ValueError, match="old_logprobs"):
        kl_penalty(logprobs, ref_logprobs, mask, estimator="k3_unbiased")


def test_only_logprobs_are_differentiated():
    batch = on_device(random_batch(1))

    def loss(others):
        return dapo_loss(**(batch | others))[0]

    others = {name: batch[name] for name in ("old_logprobs", "advantages", "weights")}
    for name, gradient in jax.grad(loss)(others).items():
        np.testing.assert_array_equal(gradient, np.zeros(SHAPE), err_msg=name)


def test_an_advantage_per_response_is_shared_by_its_tokens():
    batch = on_device(random_batch(2))
    batch["advantages"] = jnp.linspace(-1.0, 1.0, SHAPE[0])
    by_token = batch | {"advantages": jnp.repeat(batch["advantages"][:, None], SHAPE[1], axis=1)}
    assert dapo_loss(**batch)[0] == dapo_loss(**by_token)[0]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_microbatches_add_up_to_the_minibatch(aggregation):
    batch = random_batch(5)
    weights = token_weights(
        batch["mask"], aggregation=aggregation, group_ids=GROUP_IDS, max_response_tokens=6
    )
    batch["weights"] = weights.astype(np.float32)
    (whole_loss, _), whole = loss_and_gradient(on_device(batch))
    for count in (1, 2, 8):
        parts = [{k: x[i] for k, x in batch.items()} for i in np.split(np.arange(SHAPE[0]), count)]
        results = [loss_and_gradient(on_device(part)) for part in parts]
        np.testing.assert_allclose(sum(float(loss) for (loss, _), _ in results), whole_loss, rtol=1e-6)
        np.testing.assert_allclose(np.concatenate([gradient for _, gradient in results]), whole, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_ratio_low": -0.1}, "clip_ratio_low is a distance from 1"),
        ({"clip_ratio_high": float("nan")}, "clip_ratio_high is a distance from 1"),
        ({"dual_clip": 1.0}, "dual_clip must be above 1"),
    ],
)
def test_clips_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        dapo_loss(**on_device(random_batch(0)), **options)


class unchecked_annotations:  # noqa: N801
    """Turns off the checks of annotations, as for a user."""

    def __enter__(self):
        jaxtyping.config.update("jaxtyping_disable", True)

    def __exit__(self, *_):
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "advantages", "weights"])
def test_a_wrong_shape_is_caught_at_the_boundary(name):
    batch = on_device(random_batch(0))
    wrong = batch | {name: batch[name][:1]}  # [1, seq] would broadcast silently
    with pytest.raises(jaxtyping.TypeCheckError):
        dapo_loss(**wrong)
    with unchecked_annotations(), pytest.raises(ValueError, match=rf"{name} has shape \(1, 6\).*\(8, 6\)"):
        dapo_loss(**wrong)


SMALL = np.random.default_rng(0).normal(0.0, 1e-5, (8, 2500)).astype(np.float32)
"""Log-probabilities of 1e-5 nats. The other policy's are 0, so that their difference in float32 is exact."""


def test_a_kl_of_differences_of_1e_5_is_within_a_hundredth_of_float64():
    """The plain formula, exp(d) - 1 - d in float32, has steps of 6e-8; the value is 5e-11. The relative error of `expm1` in float64 is 1e-11."""
    zero, mask = jnp.zeros(SMALL.shape, jnp.float32), jnp.ones(SMALL.shape, bool)
    penalty, of_reference = jax.jit(kl_penalty)(zero, SMALL, mask)
    found = {
        "policy/kl_old_k3": jax.jit(dapo_loss)(SMALL, zero, jnp.ones(8), mask)[1],
        "policy/kl_ref_k3": of_reference,
        "sync/sampler_trainer_kl": jax.jit(mismatch_metrics)(SMALL, zero, mask, zero, jnp.bool_(True)),
    }
    expected = float(np.mean(np.expm1(np.float64(SMALL)) - np.float64(SMALL)))
    estimates = [penalty, *(to_scalars(metrics)[name] for name, metrics in found.items())]
    assert estimates == pytest.approx([expected] * 4, rel=0.01)


def test_k3_is_never_negative():
    """For a sample of all float32 numbers from 2^-60 to 16 with either sign."""
    lowest = jax.jit(lambda x: k3(x).min())
    for exponent in range(-60, 4):
        mantissas = np.arange(0, 1 << 23, 997, dtype=np.uint32)
        numbers = ((np.uint32(exponent + 127) << np.uint32(23)) | mantissas).view(np.float32)
        assert lowest(numbers) >= 0
        assert lowest(-numbers) >= 0


def test_the_supervised_loss_is_the_weighted_negative_log_likelihood():
    """0.5 * 1 + 0.5 * 2 + 0.25 * 3 = 2.25; the plain token mean is (1 + 2 + 3) / 3 = 2. Old policy, advantage and all values outside the mask are NaN."""
    mask = jnp.array([[False, True, True], [False, True, False]])
    logprobs = jnp.where(mask, jnp.array([[-9.0, -1.0, -2.0], [-9.0, -3.0, -9.0]]), jnp.nan)
    weights, unused = jnp.array([[5.0, 0.5, 0.5], [5.0, 0.25, 5.0]]), jnp.full(mask.shape, jnp.nan)

    def loss(logprobs):
        return supervised_loss(logprobs, unused, unused, mask, weights=weights)

    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(logprobs)
    np.testing.assert_allclose(value, 2.25)
    assert to_scalars(metrics) == {"sft/token_loss": 2.0}
    np.testing.assert_array_equal(gradient, jnp.where(mask, -weights, 0.0))


def test_the_supervised_loss_of_bfloat16_is_summed_in_float32_and_shapes_are_checked():
    """1,001 tokens of 1 + 2^-7 nats. The sum in bfloat16 would be 1008."""
    logprobs = jnp.full((1, 1001), -1.0 - 2.0**-7, jnp.bfloat16)
    mask = jnp.ones(logprobs.shape, bool)
    _, metrics = supervised_loss(logprobs, logprobs, logprobs, mask, weights=jnp.full(mask.shape, 1 / 1001))
    assert to_scalars(metrics) == {"sft/token_loss": 1.0 + 2.0**-7}
    with pytest.raises((ValueError, jaxtyping.TypeCheckError)):
        supervised_loss(logprobs, logprobs, logprobs, mask, weights=jnp.ones((1, 1)))
