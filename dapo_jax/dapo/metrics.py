"""Metrics that can be summed across microbatches, updates and devices.

A metric consists of one or two scalar arrays on the device, and only `to_scalars` copies them to the host. Metric names have the form `area/quantity` and
end with the unit (`_s`, `_tokens`, `_frac`).
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

# The fields normally contain scalar arrays. However, `eval_shape`, `tree.map` and `vmap` build these dataclasses with shapes, shardings or batched
# arrays as fields, so a type annotation with shape () would be wrong.


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mean:
    """A mean, stored as (total, count) so that means can be combined exactly.

    Averaging the means of two microbatches is wrong if they have different numbers of tokens. Totals and counts can be summed with `+` and `lax.psum`, and
    are divided once, on the host.

    >>> halves = Mean(jnp.array(3.0), jnp.array(1.0)) + Mean(jnp.array(1.0), jnp.array(3.0))
    >>> to_scalars({"policy/ratio": halves})  # (3 + 1) / (1 + 3), not (3 / 1 + 1 / 3) / 2
    {'policy/ratio': 1.0}
    """

    total: Any
    count: Any
    rare: bool = field(default=False, metadata={"static": True})
    """If True, `to_scalars` omits this metric when its count is 0."""

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.count + other.count, self.rare)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Max:
    """A maximum, or -inf if there are no values. `+` returns the larger of two maxima, as `lax.pmax` does across devices."""

    value: Any

    def __add__(self, other: "Max") -> "Max":
        # On the host, values are float64. `jnp.maximum` would round them to float32.
        maximum = np.maximum if isinstance(self.value, np.floating) else jnp.maximum
        return Max(maximum(self.value, other.value))


Metric = Mean | Max


def token_mean(values: Float[Array, "batch seq"], mask: Bool[Array, "batch seq"]) -> Mean:
    """Returns the mean of `values` over the tokens where `mask` is True. Sums are in float32, or in float64 if the values are."""
    dtype = np.promote_types(values.dtype, jnp.float32)
    return Mean(jnp.where(mask, values, 0.0).sum(dtype=dtype), mask.sum(dtype=jnp.float32))


def add_metrics(a: Mapping[str, Metric], b: Mapping[str, Metric]) -> dict[str, Metric]:
    """Adds the metrics in two dicts, name by name. Both dicts must have the same names. Safe under `jit`.
    Raises ValueError if the keys differ, or a metric is a mean in one dict and a maximum in the other."""
    if odd := sorted(name for name in {**a, **b} if type(a.get(name)) is not type(b.get(name))):
        raise ValueError(
            f"metrics differ: {odd} are missing in one dict, or a Mean in one and a Max in the other"
        )
    return {name: operator.add(a[name], b[name]) for name in a}


def to_scalars(metrics: Mapping[str, Metric] | Sequence[Mapping[str, Metric]]) -> dict[str, float]:
    """Copies metrics to the host in one transfer and returns them as floats. If several dicts are given, their metrics are added.

    A metric may contain one value per microbatch, and these values are added too. Sums are computed in float64, because float32 counts are inexact beyond
    2^24 = 16.7 million tokens, and a few updates exceed this number.

    Returns:
        One float per name: total / count for a `Mean`, and the value for a `Max`. A metric without any values is `nan`, or is omitted if it is a `rare` mean.

    Raises:
        ValueError: the keys of the dicts differ, or a metric is a mean in one dict and a maximum in another.
    """
    records = [metrics] if isinstance(metrics, Mapping) else list(metrics)
    if not records:
        return {}
    on_host = [{name: _in_float64(one) for name, one in record.items()} for record in jax.device_get(records)]
    return {
        name: _scalar(metric)
        for name, metric in functools.reduce(add_metrics, on_host).items()
        if not (isinstance(metric, Mean) and metric.rare and metric.count == 0)
    }


def _in_float64(metric: Metric) -> Metric:
    """Converts a metric to float64 numpy scalars. Several values are reduced to their sum (`Mean`) or maximum (`Max`)."""
    join = np.max if isinstance(metric, Max) else np.sum
    return jax.tree.map(lambda values: np.float64(join(np.asarray(values, np.float64))), metric)


def _scalar(metric: Metric) -> float:
    if isinstance(metric, Mean):
        return float(metric.total / metric.count) if metric.count else float("nan")
    return float(metric.value) if metric.value != -np.inf else float("nan")
