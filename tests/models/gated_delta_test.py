"""The inverse that Gated DeltaNet computes in each chunk. tests/models/recurrent_test.py compares the whole kind with its recurrence."""

import jax.numpy as jnp
import numpy as np

from dapo_jax.models.gated_delta import unit_inverse


def test_the_inverse_keeps_its_digits_for_equal_keys():
    """With equal keys and full writes, L has ones below the diagonal, so powers of L up to 1e18 cancel. The inverse has 1 and -1 on two diagonals."""
    lower = np.tri(64, k=-1, dtype=np.float32)
    np.testing.assert_allclose(
        unit_inverse(jnp.asarray(lower)), np.eye(64) - np.eye(64, k=-1), rtol=0, atol=1e-6
    )
