"""The advantages of on-policy distillation, compared with the numbers that other libraries returned for the same inputs.

`fixtures/distillation.npz` contains two random batches of 20 responses of up to 12 tokens (`s0/in/NAME`, `s1/in/NAME`), and the results of NeMo-RL 7ea279abf
(advantages), verl 0.9.1 and prime-rl 559b44772 (losses and gradients), which computed in float64. verl and prime-rl subtract the log-probabilities of the
current update instead of the old policy's, so these are passed as the old ones. In these tests, all values outside the mask are NaN.
"""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.dapo.distillation import teacher_advantages, teacher_divergence
from dapo_jax.dapo.losses import dapo_loss, kl_penalty
from dapo_jax.dapo.metrics import to_scalars
from dapo_jax.dapo.objectives import dppo_loss

FIXTURES = np.load(Path(__file__).parent / "fixtures" / "distillation.npz")
SEEDS = ("s0", "s1")
EXACT = 1e-14
"""Relative to the largest gradient: the rounding of float64 in ratios and sums of 115 terms."""


def batch_of(seed):
    """Returns the log-probabilities of the current policy, the old policy, the sampler and the teacher, and the mask."""
    mask = jnp.asarray(FIXTURES[f"{seed}/in/mask"])
    names = ("logprobs", "old_logprobs", "sampler_logprobs", "teacher_logprobs")
    return *(jnp.where(mask, FIXTURES[f"{seed}/in/{name}"], jnp.nan) for name in names), mask


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def assert_gradient(seed, key, loss, at, where):
    """The gradient with respect to `at` equals the other library's at the tokens `where`, and is zero outside the mask."""
    value, found = jax.value_and_grad(lambda logprobs: loss(logprobs)[0])(at)
    expected = FIXTURES[f"{seed}/loss/opd/{key}/grad"]
    largest, where = np.abs(expected).max(), np.asarray(where)
    np.testing.assert_allclose(np.asarray(found)[where], expected[where], rtol=0, atol=EXACT * largest)
    assert not np.asarray(found)[~FIXTURES[f"{seed}/in/mask"]].any()
    return float(value), float(FIXTURES[f"{seed}/loss/opd/{key}/loss"])


@pytest.mark.parametrize("seed", SEEDS)
def test_the_advantages_are_those_of_nemo_rl_and_the_metric_is_their_negated_mean(seed):
    _, old, _, teacher, mask = batch_of(seed)
    advantages, metrics = teacher_advantages(jnp.zeros(mask.shape), teacher, old, mask)
    mask = np.asarray(mask)
    expected = FIXTURES[f"{seed}/advantage/opd/nemo_rl/advantages"][mask]
    np.testing.assert_array_equal(np.asarray(advantages)[mask], expected)
    assert to_scalars(metrics)["teacher/reverse_kl"] == pytest.approx(-expected.mean(), rel=1e-14)
    task = jnp.linspace(-1.0, 1.0, mask.size).reshape(mask.shape)
    both, _ = teacher_advantages(task, teacher, old, jnp.asarray(mask), coef=0.25)
    np.testing.assert_allclose(np.asarray(both)[mask], np.asarray(task)[mask] + 0.25 * expected, rtol=1e-15)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_clipped_loss_is_the_policy_gradient_of_verl(seed):
    now, old, _, teacher, mask = batch_of(seed)
    advantages, _ = teacher_advantages(jnp.zeros(mask.shape), teacher, now, mask)
    loss = partial(
        dapo_loss, old_logprobs=old, advantages=advantages, mask=mask, clip_ratio_low=0.2, clip_ratio_high=0.2
    )
    value, expected = assert_gradient(seed, "verl_k1_policy_gradient", loss, now, mask)
    assert value == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("seed", SEEDS)
def test_dppo_is_the_loss_of_prime_rl_except_where_a_wanted_token_has_fallen(seed):
    """prime-rl drops every token whose probability fell by more than 0.2. DPPO drops it only if its advantage is negative."""
    now, _, sampler, teacher, mask = batch_of(seed)
    advantages, _ = teacher_advantages(jnp.zeros(mask.shape), teacher, now, mask)
    options = {
        "delta_low": 0.2,
        "delta_high": jnp.inf,
        "kl": 1e-3,
        "weights": jnp.where(mask, 1.0 / int(mask.sum()), 0.0),
    }
    loss = partial(dppo_loss, old_logprobs=sampler, advantages=advantages, mask=mask, **options)
    fallen = mask & (teacher > now) & (jnp.exp(now) - jnp.exp(sampler) < -0.2)
    assert 0 < fallen.sum() < 10
    assert_gradient(seed, "prime_rl", loss, now, mask & ~fallen)


@pytest.mark.parametrize("seed", SEEDS)
def test_verls_loss_on_k3_is_the_penalty_with_the_teacher_as_reference(seed):
    """verl's gradient is 0 where k3 exceeds 10; ours is not."""
    now, _, _, teacher, mask = batch_of(seed)
    loss = partial(kl_penalty, ref_logprobs=teacher, mask=mask)
    difference = jnp.where(mask, teacher - now, 0.0)
    beyond = jnp.exp(difference) - 1.0 - difference > 10.0
    assert beyond.any()
    assert_gradient(seed, "verl_k3_loss", loss, now, mask & ~beyond)


def ascent(policy, loss):
    """The negated gradient of `loss(logprobs of both entries)` with respect to the logits of a policy over two entries."""
    logits = jnp.log(jnp.array(policy))
    return -np.asarray(jax.grad(lambda z: loss(jax.nn.log_softmax(z)))(logits))


@pytest.mark.parametrize(
    ("policy", "sampled", "full"), [((0.6, 0.4), 0.26548, 0.23540), ((0.8, 0.2), 0.0, 0.0)]
)
def test_saved_tokens_of_an_older_policy_have_another_mean_ascent(policy, sampled, full):
    """Two tokens, each saved once by a policy of (1/2, 1/2). The advantage of entry y is log(pi_T(y) / pi(y)), of the current policy (0.6, 0.4). The gradient of
    log pi(y) with respect to the first logit is 0.4 or -0.6: (0.4 log(0.8 / 0.6) - 0.6 log(0.2 / 0.4)) / 2 = 0.26548. The exact divergence has the weights 0.6 and
    0.4 of the current policy instead of the halves: 0.24 (log(0.8 / 0.6) - log(0.2 / 0.4)) = 0.23540. At pi = pi_T both are 0."""
    teacher, mask, weights = jnp.log(jnp.array([[0.8, 0.2]])), jnp.ones((1, 2), bool), jnp.full((1, 2), 0.5)

    def by_tokens(logprobs):
        now = jax.lax.stop_gradient(logprobs)[None]
        advantages, _ = teacher_advantages(jnp.zeros((1, 2)), teacher, now, mask)
        return dapo_loss(logprobs[None], now, advantages, mask, weights=weights)[0]

    def by_divergence(logprobs):
        divergence = (jnp.exp(logprobs) * (logprobs - teacher[0])).sum()
        return teacher_divergence(jnp.full((1, 2), divergence), mask, weights=weights)[0]

    for loss, expected in ((by_tokens, sampled), (by_divergence, full)):
        np.testing.assert_allclose(ascent(policy, loss), [expected, -expected], atol=5e-6)
