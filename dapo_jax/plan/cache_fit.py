"""The cache that would fit beside all else: how many tokens, and how many responses side by side that is."""

from collections.abc import Sequence
from dataclasses import dataclass

from dapo_jax.config import TrainConfig
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.plan.memory import Phase
from dapo_jax.plan.workload import Workload
from dapo_jax.run.sampler_setup import logits_bytes
from dapo_jax.sampling.pages import PageSizes


@dataclass(frozen=True, kw_only=True)
class CacheFit:
    """The cache that fits a sampler's devices."""

    tokens: int
    """Tokens of all its pages, over all devices of a sampler: a value for `sampling.cache_tokens`."""
    slots: int
    """Slots that hold as many responses as there is room for: a value for `sampling.slots`."""
    in_flight: float
    """Responses side by side, by the mean context that is assumed."""


def cache_fit(
    config: TrainConfig,
    decoder: DecoderConfig,
    work: Workload,
    pages: PageSizes,
    found: Sequence[Phase],
    *,
    limit: int,
    token_bytes: int,
    spread: int,
) -> CacheFit | None:
    """The largest cache with which every phase that was compiled keeps to `limit`; None if none of them has a cache, or no sequence would fit.

    Responses beyond the slots that there are need slots of their own, and each has its logits.

    Args:
        config: of the run.
        decoder: its sizes.
        work: a step.
        pages: the cache as it is configured.
        found: phases with their parts.
        limit: bytes of a device.
        token_bytes: of one token on each of the devices that share its heads.
        spread: over how many such groups of devices the slots are spread.
    """
    sampling = [phase.total for phase in found if "decode state" in phase.parts]
    if not sampling:
        return None
    pool_tokens = pages.pools * pages.pool_pages * pages.page_tokens // spread
    left = limit - max(sampling) + pool_tokens * token_bytes
    held, logits = work.context + pages.page_tokens / 2, logits_bytes(decoder, 1)
    slots = config.sampling.slots // spread
    tokens, together = left / token_bytes, left / token_bytes / held
    if together > slots:
        together = (left + slots * logits) / (held * token_bytes + logits)
        tokens = together * held
    whole = int(tokens) // pages.page_tokens * pages.page_tokens
    if whole < pages.table_pages * pages.page_tokens:
        return None
    return CacheFit(
        tokens=whole * spread,
        slots=max(config.sampling.slots, int(together) * spread),
        in_flight=together * spread,
    )
