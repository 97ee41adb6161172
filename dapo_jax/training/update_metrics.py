"""Metrics of an update that show silent faults: the mismatch between sampler and trainer, and the size of the change of each parameter."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float

from dapo_jax.dapo.losses import k3
from dapo_jax.dapo.metrics import Max, Mean, Metric, token_mean
from dapo_jax.models.parameters import is_float32

LEAST_MISMATCH = 1e-4
"""Mean difference of log-probabilities in nats. Below it, most differences are exactly 0, and the signs of the others are noise."""

LEAST_DIFFERENCE = 1e-5
"""Smallest difference of the log-probabilities of a token, in nats, whose sign counts. Sums of float32 in another order differ by less."""

_BALANCE = "sync/sign_balance"
_NEGATIVE, _POSITIVE = f"{_BALANCE}_negative", f"{_BALANCE}_positive"
_STEP = "update/step_rms"


def mismatch_metrics(
    trainer: Float[Array, "rows seq"],
    sampler: Float[Array, "rows seq"],
    mask: Bool[Array, "rows seq"],
    advantages: Float[Array, "rows seq"],
    first: Bool[Array, ""],
) -> dict[str, Metric]:
    """Returns the metrics `sync/*`: the difference in nats between the trainer's and the sampler's log-probabilities, over the tokens in the mask.

    Before the first update of a step, the trainer still has the weights that the sampler used. The log-probabilities then differ only by rounding, unless
    trainer and sampler have different weights, kernels or dtypes.

    `sync/sign_balance` is the sum of |A| over the tokens that the trainer finds less likely than the sampler, by the sum over the tokens that it finds more likely, in
    the first update. `with_association` expects it as a scalar, with the same quotients for negative and for positive advantages alone.
    """
    delta = jnp.where(mask, trainer - sampler, 0.0)
    size = jnp.where(mask & first, jnp.abs(advantages), 0.0)

    def balance(counted: Bool[Array, "rows seq"] | bool) -> Mean:
        below, above = (
            jnp.where(side & counted, size, 0.0).sum()
            for side in (delta < -LEAST_DIFFERENCE, delta > LEAST_DIFFERENCE)
        )
        return Mean(below, above, rare=True)

    return {
        "sync/logprob_diff_mean": token_mean(jnp.abs(delta), mask),
        "sync/logprob_diff_max": Max(jnp.abs(delta).max()),
        "sync/sampler_trainer_kl": token_mean(k3(delta), mask),
        _BALANCE: balance(True),
        _NEGATIVE: balance(advantages < 0),
        _POSITIVE: balance(advantages > 0),
    }


def with_association(scalars: Mapping[str, float]) -> dict[str, float]:
    """Replaces the sign balances of negative and positive advantages in a step's scalars with their quotient, `sync/advantage_association`.

    It is 1 if the mismatch does not depend on the advantages, as with rounding. If the mean difference is below `LEAST_MISMATCH`, no balance remains. Source: the asymmetry of
    TRIAGE (https://arxiv.org/abs/2610.07043), divided into parts that do not depend on the number of positive and negative advantages.
    """
    rest = {name: value for name, value in scalars.items() if not name.startswith(_BALANCE)}
    if scalars.get("sync/logprob_diff_mean", 0.0) < LEAST_MISMATCH or _BALANCE not in scalars:
        return rest
    rest[_BALANCE] = scalars[_BALANCE]
    if scalars.get(_POSITIVE) and _NEGATIVE in scalars:
        rest["sync/advantage_association"] = scalars[_NEGATIVE] / scalars[_POSITIVE]
    return rest


def change_metrics(
    old: nnx.State, new: nnx.State, changes: Any, learning_rate: Float[Array, ""], *, stored: Any
) -> dict[str, Metric]:
    """Returns how far an update changes the weights.

    Args:
        old, new: the trained parameters before and after the update, in float32.
        changes: the optimizer's changes for learning rate 1.
        learning_rate: the factor of `changes`.
        stored: dtype of the sampler's weights. If it is float32, the shares of stored weights are omitted.

    Returns:
        `update/ratio/NAME`: norm of the change by norm of the weights of a parameter. It has no healthy value; an adapter begins at 0, and then the metric is omitted.
        `update/step_rms/NAME`: root mean square of `changes`. With AdamW it is 1 if gradients agree, as in the first update, and
            sqrt((1 - beta1) / (1 + beta1)) = 0.23 for pure noise. Near 0, the parameter has no gradient.
        `update/stored_changed_frac`: share of the weights whose value in `stored` changes.
        `update/stored_predicted_frac`: its expectation, the mean of min(1, |change| / distance of neighbouring values in `stored`).
    """
    metrics: dict[str, Metric] = {}
    one, changed, predicted, count = jnp.ones((), jnp.float32), [], [], 0
    steps, leaves = nnx.to_flat_state(changes), nnx.to_flat_state(old)
    after = dict(nnx.to_flat_state(new))
    for (path, leaf), (_, step) in zip(leaves, steps, strict=True):
        name, weight, change = ".".join(map(str, path)), leaf[...], step[...]
        square = jnp.mean(change * change)
        norm = jnp.mean(weight * weight)
        metrics[f"{_STEP}/{name}"] = Mean(jnp.sqrt(square), one)
        ratio = learning_rate * jnp.sqrt(square / jnp.where(norm > 0, norm, 1.0))
        metrics[f"update/ratio/{name}"] = Mean(
            jnp.where(norm > 0, ratio, 0.0), (norm > 0).astype(jnp.float32), rare=True
        )
        if jnp.dtype(stored) != jnp.float32 and not is_float32(leaf):
            # The float32 number with the exponent of the weight, and without its fraction.
            power = lax.bitcast_convert_type(
                lax.bitcast_convert_type(weight, jnp.int32) & 0x7F800000, jnp.float32
            )
            distance = power * jnp.float32(jnp.finfo(stored).eps)
            changed.append((weight.astype(stored) != after[path][...].astype(stored)).sum(dtype=jnp.float32))
            predicted.append(
                jnp.minimum(
                    1.0, jnp.abs(learning_rate * change) / jnp.maximum(distance, jnp.finfo(jnp.float32).tiny)
                ).sum()
            )
            count += weight.size
    if count:
        for name, sums in (("changed", changed), ("predicted", predicted)):
            metrics[f"update/stored_{name}_frac"] = Mean(sum(sums) / float(count), one)
    return metrics
