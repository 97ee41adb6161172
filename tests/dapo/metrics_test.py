"""`Mean` and `Max`: adding them is exact, on the device and on the host."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dapo_jax.dapo.metrics import Max, Mean, add_metrics, to_scalars


def mean(total, count):
    return Mean(jnp.float32(total), jnp.float32(count))


def test_a_sum_of_means_weighs_by_count():
    """One token of value 3 and three of value 1/3: 4 / 4, where the mean of the two means is 5/3."""
    total = add_metrics({"policy/ratio": mean(3.0, 1)}, {"policy/ratio": mean(1.0, 3)})
    assert to_scalars(total) == {"policy/ratio": 1.0}


def test_maxima_are_joined_and_an_empty_one_is_ignored():
    parts = [{"m": Max(jnp.float32(value))} for value in (2.0, 5.0, -math.inf)]
    assert to_scalars(parts) == to_scalars(functools.reduce(add_metrics, parts)) == {"m": 5.0}


def test_an_empty_metric_is_nan():
    scalars = to_scalars({"mean": mean(0.0, 0), "max": Max(jnp.float32(-jnp.inf))})
    assert all(math.isnan(value) for value in scalars.values())


def test_a_nan_is_not_hidden():
    records = [{"mean": mean(value, 1), "max": Max(jnp.float32(value))} for value in (1.0, math.nan, 2.0)]
    assert all(math.isnan(value) for value in to_scalars(records).values())


def test_token_counts_beyond_float32_are_added_exactly():
    """float32 cannot represent 2^24 + 1: counted one token at a time, a float32 count stops at 16.7 million."""
    records = [{"m": mean(2**24, 2**24)}, *[{"m": mean(0.0, 1)}] * 3]
    assert np.float32(2**24) + np.float32(1) == 2**24
    assert to_scalars(records) == {"m": 2**24 / (2**24 + 3)}


def test_a_maximum_keeps_float64_on_the_host():
    assert to_scalars([{"m": Max(np.float64(0.1))}, {"m": Max(np.float64(0.0))}]) == {"m": 0.1}


def test_host_numbers_are_metrics_too():
    assert to_scalars({"rollout/response_tokens": Mean(12, 4), "rollout/response_tokens_max": Max(7)}) == {
        "rollout/response_tokens": 3.0,
        "rollout/response_tokens_max": 7.0,
    }


def test_metrics_pass_through_jit_vmap_scan_and_eval_shape():
    def step(carry, x):
        record = {"mean": Mean(x, jnp.float32(1.0)), "max": Max(x)}
        return add_metrics(carry, record), None

    start = {"mean": mean(0.0, 0), "max": Max(jnp.float32(-jnp.inf))}
    final, _ = jax.jit(lambda xs: jax.lax.scan(step, start, xs))(jnp.array([1.0, 5.0, 3.0]))
    assert to_scalars(final) == {"mean": 3.0, "max": 5.0}
    assert jax.vmap(lambda x: Mean(x, x))(jnp.ones(3)).total.shape == (3,)
    assert jax.eval_shape(lambda: start)["mean"].total.shape == ()
    assert jax.tree.map(lambda _: PartitionSpec(), start)["max"] == Max(PartitionSpec())


@pytest.mark.parametrize(
    "other", [{"a": mean(1, 1), "c": mean(1, 1)}, {"a": mean(1, 1), "b": Max(jnp.float32(1))}]
)
def test_dicts_with_other_metrics_cannot_be_added(other):
    for add in (add_metrics, lambda a, b: to_scalars([a, b])):
        with pytest.raises(ValueError, match=r"'b'"):
            add({"a": mean(1, 1), "b": mean(1, 1)}, other)
