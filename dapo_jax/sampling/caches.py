"""Chooses the KV cache implementation for the platform of a mesh, and the sizes of the cache (`cache_sizes.py`)."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
from jax.sharding import Mesh, PartitionSpec

from dapo_jax.models.layer_kinds import Paged
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.parallel.mesh import BATCH_AXES, batch_shards
from dapo_jax.sampling import cache, gpu_cache, paged_cache, tpu_cache
from dapo_jax.sampling.cache import DENSE, Cache
from dapo_jax.sampling.cache_sizes import PageSizes, pages_for, slot_pages

Kind = Literal["slots", "pages", "tpu", "gpu"]
"""`slots`: a dense cache, in which every slot has room for the longest sequence. `pages`: a paged cache built from XLA operations. `tpu`, `gpu`: a paged cache with a
kernel for that platform."""
_MODULES: dict[Kind, Any] = {"slots": cache, "pages": cache, "tpu": tpu_cache, "gpu": gpu_cache}

PAGE_TOKENS: dict[Kind, int] = {"pages": 64, "tpu": tpu_cache.LANES, "gpu": 64}
"""Default number of tokens per page."""

MOST_DENSE = 256
"""Maximum capacity of a dense cache on a single CPU. A step reads a longer dense cache in chunks, whose copies take twice as long as reading pages."""


def kind_for(
    mesh: Mesh,
    *,
    dtype: str = "float32",
    capacity: int = 0,
    paged: bool = False,
    states: Sequence[Paged] = (),
) -> Kind:
    """Returns the kind of cache for a mesh. On CPU, the cache is paged only if `paged` is True, the dtype is 8-bit, or `capacity` is above `MOST_DENSE` on a
    single device. `states` are the decoder's states in pages."""
    platform = mesh.devices.flat[0].platform
    if platform in ("tpu", "gpu") and not without_kernel(mesh, dtype, states):
        return platform
    paged = paged or dtype in cache.EIGHT_BITS or (capacity > MOST_DENSE and mesh.size == 1)
    return "slots" if platform == "cpu" and not paged else "pages"


def without_kernel(mesh: Mesh, dtype: str, states: Sequence[Paged] = ()) -> str:
    """Returns a warning if decoding runs on a TPU or a GPU and attention uses XLA operations instead of a kernel, else an empty string."""
    device = mesh.devices.flat[0]
    reason = gpu_cache.without_kernel(device, dtype) if device.platform == "gpu" else ""
    if any(state.value_dim is not None for state in states):
        reason = "the kernels need separate values, and this model stores only a latent for each token"
    if device.platform not in ("tpu", "gpu") or not reason:
        return ""
    return f"decoding on {device.device_kind} uses XLA operations for attention, which are slower than a kernel: {reason}"


def token_bytes(config: DecoderConfig, mesh: Mesh, *, dtype: str, kind: Kind) -> dict[int, int]:
    """Returns, for each number of last tokens that layers read, the size in bytes, per device, of one token's keys, values and scales in these layers. The heads are
    sharded over the devices. The largest number comes first; 0 means all tokens."""

    def size(state: Paged) -> int:
        heads, tokens = state.heads_on(mesh.shape["tensor"]), tpu_cache.LANES
        page = jax.eval_shape(
            lambda: _MODULES[kind].empty(1, heads, tokens, state.head_dim, dtype, **state.options)
        )
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(page)) // tokens

    totals = Counter[int]()
    for state in config.paged:
        totals[state.tokens] += size(state)
    return dict(sorted(totals.items(), key=lambda item: item[0] or math.inf, reverse=True))


def _pages_at_once(config: DecoderConfig, mesh: Mesh, page_tokens: int, dtype: str) -> int:
    """Returns the number of pages that a kernel step on a TPU reads in every layer (see `tpu_cache.pages_at_once`)."""
    tensor = mesh.shape["tensor"]
    shapes = {(state.heads_on(tensor), page_tokens, state.head_dim) for state in config.paged}
    return min(tpu_cache.pages_at_once(*shape, dtype) for shape in shapes)


def page_tokens_for(
    kind: Kind, mesh: Mesh, config: DecoderConfig, *, slots: int, capacity: int, dtype: str
) -> int:
    """Returns the number of tokens per page: `PAGE_TOKENS`, doubled on a TPU until the page tables of `slots` slots fit in a core's scalar memory.

    Raises:
        ValueError: there are too many slots for pages of any size.
    """
    if kind != "tpu":
        return PAGE_TOKENS.get(kind, capacity)

    def most_slots(page_tokens: int) -> int:
        at_once = _pages_at_once(config, mesh, page_tokens, dtype)
        slot_bytes = tpu_cache.scalar_bytes(pages_for(capacity, page_tokens), at_once)
        return tpu_cache.SCALAR_BYTES // slot_bytes * batch_shards(mesh.shape)

    size = PAGE_TOKENS[kind]
    while most_slots(size) < slots and pages_for(capacity, size) > tpu_cache.LANES:
        size *= 2
    if most_slots(size) < slots:
        raise ValueError(
            f"the page tables of sampling.slots={slots} do not fit in the scalar memory of a TPU core: set it to {most_slots(size)} or less"
        )
    return size


def check_page_tokens(kind: Kind, page_tokens: int, *, capacity: int, dtype: str) -> None:
    """Raises ValueError if the kernel of a platform does not support a number of tokens per page, or a page is longer than any sequence."""
    tile = tpu_cache.LANES if dtype in cache.EIGHT_BITS else tpu_cache.tile_rows(dtype)
    if kind == "tpu" and page_tokens % tile:
        raise ValueError(
            f"page_tokens={page_tokens} must be a multiple of {tile} for a {dtype} cache on TPU, because TPU memory is tiled; "
            f"for example {-(-page_tokens // tile) * tile}"
        )
    if kind == "gpu" and (page_tokens < gpu_cache.SMALLEST_PAGE or page_tokens & (page_tokens - 1)):
        raise ValueError(
            f"page_tokens={page_tokens} must be a power of two, at least {gpu_cache.SMALLEST_PAGE}, for the GPU kernel, for example 64"
        )
    if page_tokens > (longest := max(capacity, tpu_cache.LANES)):
        raise ValueError(
            f"page_tokens={page_tokens} must be at most {longest}: the longest prompt and response have {capacity} tokens together, so the rest of a page would "
            "stay empty; lower this value, or leave it out"
        )


def sizes_for(
    kind: Kind, mesh: Mesh, *, holders: int, capacity: int, page_tokens: int, cache_tokens: int = 0, call_tokens: int = 0,
    token_bytes: Mapping[int, int] | None = None, room: int | None = None,
) -> PageSizes:  # fmt: skip
    """Returns the sizes of the cache's page pools.

    Args:
        kind: the result of `kind_for`.
        mesh: the sampler's mesh.
        holders: number of sequences that can have pages at the same time. One per slot, or more if sequences take turns in the slots.
        capacity: maximum number of tokens in a prompt and its response together.
        page_tokens: tokens per page.
        cache_tokens: total number of tokens in all pools of the first page table. 0 means as many tokens as fit on the devices.
        call_tokens: maximum number of tokens that a call of the engine adds to a sequence.
        token_bytes: the result of `token_bytes`. Each window has a page table. If None, all layers have the window 0.
        room: number of bytes for the cache in a device's memory. None means that every holder gets room for `capacity` tokens.

    Raises:
        ValueError: a pool cannot hold one sequence of `capacity` tokens.
    """
    token_bytes = token_bytes or {0: 1}
    windows = tuple(token_bytes)
    if kind == "slots":
        return slot_pages(holders, capacity, windows)
    pools, size = batch_shards(mesh.shape), page_tokens
    sizes = PageSizes(
        holders=holders, capacity=capacity, page_tokens=size, pools=pools, pool_pages=0, windows=windows, call_tokens=call_tokens
    )  # fmt: skip
    most = sizes.holder_pages()
    all_of_them = holders // pools * most
    if cache_tokens:
        pool_pages = min(cache_tokens // size // pools, all_of_them)
    else:
        pool_pages = all_of_them if room is None else math.floor(sizes.fitting(room, token_bytes))
    if pool_pages < most and not cache_tokens:
        raise ValueError(
            f"a device has room for {max(pool_pages, 0)} pages of {size} tokens of KV cache next to its other arrays, but a prompt and response of up "
            f"to {capacity} tokens need {most}: lower data.max_prompt_tokens, sampling.max_response_tokens, sampling.slots or sampling.prefill_tokens, set "
            "sampling.cache_dtype=int8, or spread the model over more devices (parallel.fsdp, parallel.sampler_tensor)"
        )
    if pool_pages < most:
        raise ValueError(
            f"sampling.cache_tokens={cache_tokens} is {pool_pages} pages of {size} tokens on each of the {pools} devices over which the "
            f"slots are split, but a prompt and response of up to {capacity} tokens need {most}: "
            f"set it to {most * size * pools} or more, or lower data.max_prompt_tokens or sampling.max_response_tokens"
        )
    return replace(sizes, pool_pages=pool_pages)


def cache_for(
    kind: Kind, mesh: Mesh, sizes: PageSizes, config: DecoderConfig, *, cache_dtype: str, compute_dtype: str
) -> Cache:
    """Returns the functions of a cache of kind `kind`. Keys and values are stored in `cache_dtype`, and attention products are computed in `compute_dtype`.
    On any platform other than its own, a kernel runs in the slow interpret mode."""
    cap = config.score_cap
    if kind == "slots":
        return DENSE if cap is None else replace(DENSE, extend=partial(DENSE.extend, cap=cap))
    heads, slots = PartitionSpec("tensor", None, BATCH_AXES), PartitionSpec(BATCH_AXES)
    layer, columns = PartitionSpec(BATCH_AXES, "tensor"), PartitionSpec(None, None, BATCH_AXES)
    pages = _MODULES[kind]
    step = paged_cache if kind == "pages" else pages
    reading = partial(step.reading, page_tokens=sizes.page_tokens)
    extend = partial(step.extend, dtype=compute_dtype)
    if cap is not None:
        extend = partial(extend, cap=cap)
    if kind == "tpu":
        at_once = _pages_at_once(config, mesh, sizes.page_tokens, cache_dtype)
        extend = partial(extend, at_once=at_once)
        reading = partial(reading, at_once=at_once, windows=[state.tokens for state in config.paged])
    if kind != "pages":
        extend = partial(extend, interpret=mesh.devices.flat[0].platform != kind)
    # Each device processes its own slots and heads, because its page numbers refer to its own pool and XLA cannot partition a kernel.
    spread = partial(jax.shard_map, mesh=mesh, check_vma=False)

    def extend_on(cache: Any, now: Any, *new: Any, **options: int) -> Any:
        # Without separate values, each device along `tensor` has all keys.
        own, news = (layer, heads) if options.get("value_dim") is None else (slots, columns)
        places = own, slots, heads, news, news, PartitionSpec("tensor")
        program = spread(partial(extend, **options), in_specs=places[: 2 + len(new)], out_specs=(heads, own))
        return program(cache, now, *new)

    return Cache(
        empty=pages.empty,
        of_rows=pages.of_rows,
        fill=pages.fill,
        reading=spread(reading, in_specs=(slots, slots, slots), out_specs=slots),
        extend=extend_on,
    )
