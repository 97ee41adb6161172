"""The mismatch of sampler and trainer, and the weights that correct it, against their closed forms."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.dapo.metrics import to_scalars
from dapo_jax.dapo.microbatch import Microbatch
from dapo_jax.training.minibatch import Stack
from dapo_jax.training.sync_metrics import importance_weighted, mismatch_kl


def stack(sampler, old, mask, weights, advantages=None):
    """One microbatch of one row, in room for two; what is not in the mask is NaN."""

    def whole(values):
        values = np.where(mask, np.array(values, np.float32), np.float32("nan"))
        return jnp.asarray(np.stack([values[None], np.zeros_like(values)[None]]))

    ids = jnp.zeros((2, 1, len(mask)), jnp.int32)
    room = jnp.asarray(np.stack([np.array(mask)[None], np.zeros((1, len(mask)), bool)]))
    blank = jnp.zeros((2, 1, len(mask)), jnp.float32)
    given = [0.0] * len(mask) if advantages is None else advantages
    microbatches = Microbatch(
        tokens=ids, segment_ids=ids, prefix_ids=ids, previous=ids, positions=ids, mask=room,
        advantages=jnp.asarray(np.stack([np.array(given, np.float32)[None], np.zeros((1, len(mask)), np.float32)])),
        weights=jnp.asarray(np.stack([np.array(weights, np.float32)[None], np.zeros((1, len(mask)), np.float32)])),
        sampler_logprobs=whole(sampler), old_logprobs=whole(old), ref_logprobs=blank,
    )  # fmt: skip
    return Stack(microbatches, np.int32(1))


MASK = [False, True, True, True]
# pi_trainer / pi_sampler of 1/2, 1 and 4
SAMPLER, OLD = [0.0, -1.0, -1.0, -3.0], [0.0, -1.0 - math.log(2), -1.0, -3.0 + math.log(4)]


def test_the_mismatch_is_k3_over_the_tokens_in_the_loss():
    """r - 1 - log r of the ratios 1/2, 1, 4: (-1/2 + log 2) + 0 + (3 - log 4); a second stack adds a token of 0."""
    one, other = (
        stack(SAMPLER, OLD, MASK, [0.0] * 4),
        stack([0.0, -1.0], [0.0, -1.0], [False, True], [0.0] * 2),
    )
    kl = to_scalars(mismatch_kl([(one,), (other,)]))["kl"]
    assert kl == pytest.approx((2.5 - math.log(2)) / 4, rel=1e-6)


def test_advantages_are_weighted_by_the_ratio_up_to_the_cap_and_the_weights_of_tokens_are_not():
    """Ratios 1/2, 1 and 4, cap 2, on advantages -1, 2 and 3. A KL penalty is averaged with the tokens' weights, which stay."""
    weights = [0.0, 0.1, 0.2, 0.3]
    given = stack(SAMPLER, OLD, MASK, weights, advantages=[0.0, -1.0, 2.0, 3.0])
    [(corrected,)] = importance_weighted([(given,)], cap=2.0)
    found = np.asarray(corrected.microbatches.advantages)
    np.testing.assert_allclose(found[0, 0], [0.0, -0.5, 2.0, 6.0], rtol=1e-6)
    assert not found[1].any()
    np.testing.assert_array_equal(corrected.microbatches.weights, given.microbatches.weights)
