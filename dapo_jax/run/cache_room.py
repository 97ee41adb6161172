"""The memory of a device that is left for the key/value cache, where a configuration does not say how many tokens it holds."""

import math

from jax.sharding import Mesh

from dapo_jax.config import SamplingConfig
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.parallel.mesh import BATCH_AXES
from dapo_jax.sampling.caches import kind_for, token_bytes
from dapo_jax.sampling.pages import PageSizes
from dapo_jax.sampling.prompt_packing import PrefillShape

KNOWN_SHARE = 0.9
"""The part of a device's memory for arrays whose sizes are known before anything is compiled. The rest is for what programs need while they run and for
fragments; vLLM's `gpu_memory_utilization` leaves as much by default."""

_LOGITS = 4
"""Copies of a slot's logits: those that the state keeps, and what drawing makes of them."""


def room_for_cache(
    decoder: DecoderConfig,
    mesh: Mesh,
    sampling: SamplingConfig,
    shape: PrefillShape,
    *,
    capacity: int,
    compute_dtype: str,
    resident: int,
    memory: int | None,
    in_flight: int = 0,
    has_turns: bool = False,
) -> int | None:
    """Bytes of a device that the cache may take, 0 or less if nothing is left. None where memory does not decide the size: `sampling.cache_tokens`
    is set, the cache has no pages, or the device does not say how much memory it has.

    Args:
        decoder: the sizes of the model.
        mesh: of the sampler.
        sampling: the configuration's section.
        shape: what prefill reads at a time.
        capacity: tokens of the longest prompt and response together.
        compute_dtype: of the cache, unless `sampling` names another.
        resident: bytes on a device while it samples, but for what sampling itself makes.
        memory: bytes of a device.
        in_flight: responses that go on from round to round, in turns if there are fewer slots.
        has_turns: responses are episodes, which keep their pages while their environments work.
    """
    dtype = sampling.cache_dtype or compute_dtype
    kind = kind_for(
        mesh,
        page_tokens=sampling.page_tokens,
        cache_tokens=sampling.cache_tokens,
        dtype=dtype,
        turns=in_flight > 0 or sampling.batch_invariant or has_turns,
    )
    if memory is None or sampling.cache_tokens or kind == "slots":
        return None
    spread = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    each, computed = (token_bytes(decoder, mesh, dtype=of, kind=kind) for of in (dtype, compute_dtype))
    room = int(KNOWN_SHARE * memory) - resident - logits_bytes(decoder, sampling.slots // spread)
    # Those beside the slots keep the logits of their next tokens, a copy on each device.
    room -= max(0, in_flight - sampling.slots) * decoder.vocab_rows * 4
    # The responses of one call still wait for slots when the next one reads.
    rows = 2 * prefix_bytes(decoder, shape, token_bytes=each)
    # A sequence that is read in parts is kept as it was computed, and at its end as the cache has it.
    width = -(-capacity // shape.width) * shape.width
    parts = width * (computed + each) + shape.row_prompts * decoder.vocab_rows * 4
    if (
        not in_flight
        and shape.longest <= shape.width
        and room - rows >= sampling.slots // spread * capacity * each
    ):
        return room - rows  # all slots fit, so nothing is read again
    return room - max(rows, rows // 2 + parts)


def logits_bytes(decoder: DecoderConfig, slots: int) -> int:
    """Bytes that so many slots take for their logits, with what drawing makes of them."""
    return _LOGITS * slots * decoder.vocab_rows * 4


def prefix_bytes(decoder: DecoderConfig, shape: PrefillShape, *, token_bytes: int) -> int:
    """Bytes of what one call of prefill makes: keys and values of all its rows, and the logits behind each prompt."""
    return shape.rows * (shape.width * token_bytes + shape.row_prompts * decoder.vocab_rows * 4)


def cache_note(sizes: PageSizes, *, room: int, memory: int) -> str:
    """The sentence in which a run says how large a cache it has chosen."""
    tokens, most = (
        sizes.pools * pages * sizes.page_tokens
        for pages in (sizes.pool_pages, sizes.holders // sizes.pools * sizes.table_pages)
    )
    if tokens == most:
        holds = f"all {sizes.holders} responses of up to {sizes.capacity:,} tokens"
    else:
        holds = f"{tokens:,} tokens where all {sizes.holders} responses may come to {most:,}: responses wait, or give way, when it is full"
    return (
        f"the key/value cache holds {holds}; {room / 2**30:.2f} of a device's {memory / 2**30:.2f} GiB were left for it "
        "(sampling.cache_tokens sets another size)"
    )
