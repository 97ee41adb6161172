"""The memory of a device that is left for the key/value cache, where a configuration does not say how many tokens it holds."""

from collections.abc import Mapping

from dapo_jax.models.presets import DecoderConfig
from dapo_jax.parallel.mesh import BATCH_AXES
from dapo_jax.sampling.pages import PageSizes
from dapo_jax.sampling.prompt_packing import PrefillShape

KNOWN_SHARE = 0.9
"""The part of a device's memory for arrays whose sizes are known before anything is compiled. The rest is for what programs need while they run and for
fragments; vLLM's `gpu_memory_utilization` leaves as much by default."""

_LOGITS = 4
"""Copies of all slots' logits: those that the state keeps, and what drawing makes of them."""


def room_for_cache(
    memory: int,
    decoder: DecoderConfig,
    shape: PrefillShape,
    sizes: Mapping[str, int],
    *,
    resident: int,
    slots: int,
    token_bytes: int,
) -> int:
    """Bytes of a device that the cache may take; 0 or less if nothing is left.

    Args:
        memory: bytes of the device.
        decoder: the sizes of the model.
        shape: what prefill reads at a time.
        sizes: of the sampler's mesh axes.
        resident: bytes on the device while it samples, but for what sampling itself makes.
        slots: decoded side by side.
        token_bytes: of one token's keys and values on a device.
    """
    spread = 1
    for axis in BATCH_AXES:
        spread *= sizes[axis]
    logits = _LOGITS * slots // spread * decoder.vocab_rows * 4
    # Of one call the responses still wait for slots when the next one reads.
    prefixes = 2 * prefix_bytes(decoder, shape, token_bytes=token_bytes)
    return int(KNOWN_SHARE * memory) - resident - logits - prefixes


def prefix_bytes(decoder: DecoderConfig, shape: PrefillShape, *, token_bytes: int) -> int:
    """Bytes of what one call of prefill makes: keys and values of all its rows, and the logits behind each prompt."""
    return shape.rows * (shape.width * token_bytes + shape.row_prompts * decoder.vocab_rows * 4)


def told(sizes: PageSizes, *, token_bytes: int, memory: int) -> str:
    """What a run says of the cache that it has chosen."""
    tokens = sizes.pool_pages * sizes.page_tokens
    whole = sizes.pool_pages == sizes.table_pages * sizes.slots // sizes.pools
    holds = (
        f"all {sizes.slots} slots with {sizes.capacity:,} tokens each"
        if whole
        else f"{tokens * sizes.pools:,} tokens in pages of {sizes.page_tokens}, what fits beside all else"
    )
    return (
        f"the key/value cache has room for {holds}: {tokens * token_bytes / 2**30:.1f} GiB of a device's {memory / 2**30:.1f}; "
        "sampling.cache_tokens sets another size"
    )
