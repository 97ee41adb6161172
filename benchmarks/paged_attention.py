"""Measures which share of a GPU's memory bandwidth the kernel of the paged KV cache reaches, by model: `python -m benchmarks.paged_attention`.

The bytes are the keys, values and scales of the tokens in use, read once. A step has several layers, so that their caches do not fit in the GPU's L2 cache. On a CPU, the kernel is interpreted: `--models tiny --slots 2 --tokens 40`.
"""

import argparse
import itertools
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import report
from dapo_jax.plan.chips import CHIPS
from dapo_jax.sampling import gpu_cache
from dapo_jax.sampling.cache import EIGHT_BITS

MODELS = {
    "qwen3-0.6b": (16, 8, 128), "smollm2-135m": (9, 3, 64), "qwen2.5-7b on 4": (7, 1, 128), "llama3.2-1b": (32, 8, 64),
    "gemma3-1b": (4, 1, 256), "tiny": (4, 2, 16),
}  # fmt: skip  # heads, key heads, and head_dim on one device
PAGE, STEPS, LAYERS_BYTES = 64, 20, 1 << 28


def bytes_of(model: str, slots: int, tokens: int, dtype: str) -> int:
    """Returns the bytes of the keys, values and scales that one layer reads."""
    _, kv_heads, head_dim = MODELS[model]
    return 2 * slots * tokens * kv_heads * (head_dim * jnp.dtype(dtype).itemsize + 4 * (dtype in EIGHT_BITS))


def seconds_of(model: str, slots: int, tokens: int, dtype: str) -> float:
    """Returns the seconds of one layer's call, with an addition that makes each call depend on the last: the shortest of four times of `STEPS` steps."""
    (heads, kv_heads, head_dim), on_gpu = MODELS[model], jax.default_backend() == "gpu"
    layers = min(32, 1 + LAYERS_BYTES // bytes_of(model, slots, tokens, dtype)) if on_gpu else 2
    table = np.random.default_rng(0).permutation(slots * (tokens // PAGE + 1)).reshape(slots, -1)
    lengths, live = jnp.full(slots, tokens, jnp.int32), jnp.ones(slots, bool)
    now = gpu_cache.reading(jnp.asarray(table, jnp.int32), lengths, live, page_tokens=PAGE)
    extend = partial(gpu_cache.extend, dtype="bfloat16", interpret=not on_gpu)

    def step(_: Any, carry: Any) -> Any:
        caches, query = carry
        for place, cache in enumerate(caches):
            out, caches[place] = extend(cache, now, query, query[:kv_heads], query[:kv_heads])
            query = query + out * 2.0**-10
        return caches, query

    run = jax.jit(lambda carry: jax.lax.fori_loop(0, STEPS, step, carry), donate_argnums=0)
    empty = partial(gpu_cache.empty, table.size, kv_heads, PAGE, head_dim, dtype)
    query = jnp.ones((heads, head_dim, slots), jnp.bfloat16)
    carry = jax.jit(lambda: [empty() for _ in range(layers)])(), query
    ends = []
    for _ in range(5):
        carry = jax.block_until_ready(run(carry))
        ends.append(time.perf_counter())
    return min(np.diff(ends)) / (STEPS * layers)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.paged_attention")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS)[:-1])
    parser.add_argument("--slots", nargs="+", type=int, default=[256, 8])
    parser.add_argument("--tokens", nargs="+", type=int, default=[264, 4000])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "int8"])
    given, kind, rows = parser.parse_args(words), jax.devices()[0].device_kind, list[list[str]]()
    peaks = [chip.device_hbm_bytes_s for chip in CHIPS.values() if chip.kind and kind.startswith(chip.kind)]
    for case in itertools.product(given.models, given.slots, given.tokens, given.dtypes):
        seconds = seconds_of(*case)
        shares = [f"{bytes_of(*case) / seconds / peak:.0%}" for peak in peaks[:1]] or ["-"]
        rows.append([*map(str, case), f"{1e6 * seconds:.1f}", *shares])
    header = ["model", "slots", "tokens", "cache", "microseconds", "share of the bandwidth"]
    print(f"{kind}, jax {jax.__version__}\n\n{report.table(header, rows)}")


if __name__ == "__main__":
    main()
