"""Rollout routing replay (Ma et al. 2025, https://arxiv.org/abs/2510.11370): the trainer uses the experts that the sampler recorded for each token."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dapo_jax.dapo.metrics import Mean, Metric, token_mean
from dapo_jax.dapo.microbatch import Microbatch
from dapo_jax.dapo.tokens import NO_ROUTE
from dapo_jax.models.experts import choices
from dapo_jax.training.minibatch import Stack


def recorded_experts(m: Microbatch) -> Int[Array, "rows seq layers chosen"] | None:
    """Returns the experts that the trained policy uses for each token instead of its own choice, or None if the sampler recorded no experts. Tokens without a
    record have `NO_ROUTE`, and there the policy chooses."""
    routes = m.recorded.get("routes")
    return None if routes is None else choices(routes)


def without_recorded_experts(stack: Stack) -> Stack:
    """Removes the record, because the reference policy and the teacher choose their experts themselves."""
    return stack.with_arrays(recorded={})


def routing_metrics(
    flipped: Float[Array, "rows seq"], load: Float[Array, "parts columns"], m: Microbatch, *, layers: int, experts: int
) -> dict[str, Metric]:  # fmt: skip
    """Returns the metrics `routing/*` of a microbatch without its padding.

    `flipped` is the number of layers in which a token's router chooses other experts than the record. `load` has the tokens of each expert: the arrays
    [layers, experts] of all devices, next to each other in both dimensions.
    """
    load = load.reshape(-1, layers, load.shape[1] // experts, experts).sum((0, 2))
    busiest = load.max(1) / jnp.maximum(load.mean(1), 1e-9)
    metrics: dict[str, Metric] = {
        "routing/busiest_load": Mean(busiest.sum(), jnp.float32(layers)),
        "routing/unused_frac": Mean((load == 0).sum(dtype=jnp.float32), jnp.float32(layers * experts)),
    }
    if (routes := recorded_experts(m)) is None:
        return metrics
    real, recorded = m.segment_ids > 0, routes[..., 0, 0] != NO_ROUTE
    return metrics | {
        "routing/flipped_frac": token_mean(flipped / layers, real & recorded),
        "routing/no_record_frac": token_mean((~recorded).astype(jnp.float32), real),
    }
