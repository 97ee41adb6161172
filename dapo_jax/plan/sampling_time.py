"""The least seconds of single decode steps and of what is read, by what is in a sampler's slots: the roofline of sampling, step by step."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from dapo_jax.config import TrainConfig
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.plan.chips import Chip
from dapo_jax.plan.costs import cache_bytes_per_token, forward_flops
from dapo_jax.plan.mesh_sizes import Layout, batch_shards
from dapo_jax.plan.roofline import decode_weight_bytes

READ_UTILISATION = 0.4
"""Share of the peak at which sequences are assumed to be read."""

DecodeTime = Callable[[np.ndarray, np.ndarray], Float[np.ndarray, "..."]]
"""(responses in the slots, tokens in the cache that they attend to) -> seconds of one decode step of a sampler."""

ReadTime = Callable[[np.ndarray, np.ndarray, np.ndarray], Float[np.ndarray, "..."]]
"""(tokens, query-key pairs, sequences) -> seconds in which a sampler reads them."""


class SamplingTime(NamedTuple):
    """The times of a sampler."""

    decode: DecodeTime
    read: ReadTime


IN_STEPS = SamplingTime(
    decode=lambda live, held: np.ones(np.shape(live)), read=lambda tokens, *_: np.zeros(np.shape(tokens))
)
"""Where there is no chip: a decode step takes 1, reading nothing."""


def sampling_time(
    config: TrainConfig, decoder: DecoderConfig, layout: Layout, chip: Chip, *, step_ici_bytes: int | float
) -> SamplingTime:
    """The times on a chip: a decode step is bound by compute, memory or interconnect, whichever takes longest, and what is read by its operations.

    `step_ici_bytes` are what a device receives in one decode step."""
    devices, dtype = layout.sampler_devices, config.model.compute_dtype
    flops_s = devices * chip.device_flops
    token, pair, logits = (
        forward_flops(decoder, tokens=tokens, pairs=pairs, logits=logits) / flops_s
        for tokens, pairs, logits in ((1, 0, 0), (0, 1, 0), (0, 0, 1))
    )
    weights = decode_weight_bytes(config, decoder, layout) / chip.device_hbm_bytes_s
    kept = cache_bytes_per_token(decoder, config.sampling, compute_dtype=dtype) / layout.sampler["tensor"]
    kept /= batch_shards(layout.sampler) * chip.device_hbm_bytes_s
    received = step_ici_bytes / chip.device_ici_bytes_s

    def decode(live: np.ndarray, held: np.ndarray) -> Float[np.ndarray, "..."]:
        return np.maximum(np.maximum((token + logits) * live + pair * held, weights + kept * held), received)

    def read(tokens: np.ndarray, pairs: np.ndarray, sequences: np.ndarray) -> Float[np.ndarray, "..."]:
        return (token * tokens + pair * pairs + logits * sequences) / READ_UTILISATION

    return SamplingTime(decode, read)
