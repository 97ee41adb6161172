"""`token_weights` compared with numbers by hand and a float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.dapo.aggregation import AGGREGATIONS, token_weights
from tests import oracle
from tests.dapo.losses_test import unchecked_annotations

SHAPE = (8, 6)
GROUP_IDS = np.array([7, 7, 7, 2, 2, 2, 5, 5])
"""Ragged groups, in no order: three prompts of 3, 3 and 2 responses."""


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [[1 / 7] * 3, [1 / 7, 0, 0], [1 / 7] * 3, [0] * 3]),  # 3 + 1 + 3 tokens
        # Two prompts with 3 + 1 and 3 tokens: 1 / 2 / 4 and 1 / 2 / 3. The fourth response is empty, and so is its prompt.
        ("prompt_mean", [[1 / 8] * 3, [1 / 8, 0, 0], [1 / 6] * 3, [0] * 3]),
        ("sequence_mean", [[1 / 9] * 3, [1 / 3, 0, 0], [1 / 9] * 3, [0] * 3]),  # 3 responses
        ("token_sum_norm", [[1 / 30] * 3, [1 / 30, 0, 0], [1 / 30] * 3, [0] * 3]),  # 3 responses of up to 10
        ("sequence_sum", [[1 / 3] * 3, [1 / 3, 0, 0], [1 / 3] * 3, [0] * 3]),  # 3 responses
    ],
)
def test_each_aggregation_by_hand(aggregation, expected):
    mask = np.array([[1, 1, 1], [1, 0, 0], [1, 1, 1], [0, 0, 0]], bool)
    options = {"aggregation": aggregation, "group_ids": np.array([4, 4, 0, 9]), "max_response_tokens": 10}
    np.testing.assert_allclose(token_weights(mask, **options), expected, rtol=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weights_are_the_same_on_host_and_device(aggregation):
    on_device = jax.jit(
        lambda mask, ids: token_weights(mask, aggregation=aggregation, group_ids=ids, max_response_tokens=9)
    )
    for seed in range(5):
        mask = np.random.default_rng(seed).random(SHAPE) < 0.6
        mask[seed] = False
        expected = oracle.token_weights(mask, aggregation, GROUP_IDS, 9)
        on_host = token_weights(mask, aggregation=aggregation, group_ids=GROUP_IDS, max_response_tokens=9)
        assert isinstance(on_host, np.ndarray)
        assert on_host.dtype == np.float64
        np.testing.assert_allclose(on_host, expected, rtol=1e-12)
        weights = on_device(jnp.asarray(mask), jnp.asarray(GROUP_IDS))
        assert isinstance(weights, jax.Array)
        np.testing.assert_allclose(weights, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aggregation": "token-mean"}, "did you mean 'token_mean'"),
        ({"aggregation": "prompt_mean"}, r"group_ids of shape \(8,\).*got none"),
        ({"aggregation": "prompt_mean", "group_ids": GROUP_IDS[:7]}, r"got shape \(7,\)"),
        ({"aggregation": "token_sum_norm"}, "max_response_tokens of 1 or more, got None"),
        ({"aggregation": "token_sum_norm", "max_response_tokens": 0}, "got 0"),
    ],
)
def test_weights_that_cannot_be_computed_are_refused(options, message):
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        token_weights(np.ones(SHAPE, bool), **options)
