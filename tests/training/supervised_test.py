"""The supervised loss against a hand-worked number."""

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.dapo.metrics import to_scalars
from dapo_jax.training.supervised import supervised_loss

LOGPROBS = jnp.array([[-9.0, -1.0, -2.0], [-9.0, -3.0, -9.0]])
MASK = jnp.array([[False, True, True], [False, True, False]])
WEIGHTS = jnp.array([[5.0, 0.5, 0.5], [5.0, 0.25, 5.0]])


def loss_of(logprobs, mask=MASK):
    unused = jnp.full(mask.shape, jnp.nan)
    return supervised_loss(logprobs, unused, unused, mask, weights=WEIGHTS)


def test_the_loss_is_the_weighted_negative_log_likelihood():
    """0.5 * 1 + 0.5 * 2 + 0.25 * 3 = 2.25; the plain token mean is (1 + 2 + 3) / 3 = 2. Old policy and advantage are NaN,
    since the loss ignores them."""
    loss, metrics = loss_of(LOGPROBS)
    np.testing.assert_allclose(loss, 2.25)
    assert to_scalars(metrics) == {"sft/token_loss": 2.0}


def test_only_response_tokens_have_a_gradient():
    poisoned = jnp.where(MASK, LOGPROBS, jnp.nan)
    gradient = jax.grad(lambda logprobs: loss_of(logprobs)[0])(poisoned)
    np.testing.assert_array_equal(gradient, jnp.where(MASK, -WEIGHTS, 0.0))
