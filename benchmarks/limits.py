"""Measures the machine's limits: matrix products at the shapes of a decode step, one large product, and memory copies.

The limits are measured like a system, in a separate worker and once per round, so that a temporary slowdown of the machine affects
them too. Each rate is the best of JAX and NumPy over several layouts and repetitions, with operands in the processor cache. A decode
step cannot reach this limit, because it must read its weights from memory.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.workload import Workload


class System:
    """Measures the machine, with the same interface as the systems."""

    def __init__(self, workload: Workload) -> None:
        self.workload, self.version = workload, f"jax {jax.__version__}, numpy {np.__version__}"

    def measure(self, dtypes: list[str]) -> dict[str, Any]:
        """Returns GFLOP/s by dtype and shape, the resulting limit in tokens per second, and GB/s of memory copies."""
        return {"copy_gb_s": self._copy_gb_s(), **{dtype: self._products(dtype) for dtype in dtypes}}

    def _products(self, dtype: str) -> dict[str, Any]:
        rows, products, seconds, flops = self.workload.sequences, [], 0.0, 0.0
        for name, count, inner, outer in step_products(self.workload.sizes()):
            rate = _gflop_s(rows, inner, outer, dtype)
            products.append({"name": name, "count": count, "shape": [rows, inner, outer], "gflop_s": rate})
            work = 2e-9 * rows * inner * outer * count
            seconds, flops = seconds + work / rate, flops + work
        return {
            "products": products,
            "large_gflop_s": _gflop_s(2048, 2048, 2048, dtype),
            "gflop_per_token": flops / rows,
            "gflop_s": flops / seconds,
            "tokens_per_s": rows / seconds,
        }

    def _copy_gb_s(self) -> float:
        """Returns the GB read plus the GB written per second while all threads copy parts of a 256 MB array."""
        threads = self.workload.threads
        source = np.ones(2**26, np.float32)
        target = np.zeros_like(source)
        parts = list(zip(np.array_split(source, threads), np.array_split(target, threads), strict=True))
        with ThreadPoolExecutor(threads) as pool:
            seconds = _best(lambda: list(pool.map(lambda pair: np.copyto(pair[1], pair[0]), parts)), 5)
        return 2 * source.nbytes / seconds / 1e9


def step_products(sizes: dict[str, Any]) -> list[tuple[str, int, int, int]]:
    """Returns (name, number per step, inner size, outer size) of each product with weights in a decode step.

    Attention over the cache, norms and token sampling are not included, so the limit is somewhat too high.
    """
    embed, mlp, layers = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_hidden_layers"]
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    dim = sizes.get("head_dim") or embed // heads
    return [
        ("query", layers, embed, heads * dim),
        ("key, value", 2 * layers, embed, kv_heads * dim),
        ("output", layers, heads * dim, embed),
        ("gate, up", 2 * layers, embed, mlp),
        ("down", layers, mlp, embed),
        ("unembedding", 1, embed, sizes["vocab_size"]),
    ]


LAYOUTS = ("ri,io->ro", "ri,oi->ro", "oi,ir->or")
"""Einsum layouts: activations [rows, inner] or transposed, and both orientations of the weight. Sums are in float32."""


def _gflop_s(rows: int, inner: int, outer: int, dtype: str) -> float:
    """Returns the best rate of JAX over all `LAYOUTS` and, for float32, of NumPy."""
    rng = np.random.default_rng(0)
    sizes = {"r": rows, "i": inner, "o": outer}
    work = 2e-9 * rows * inner * outer
    # About 0.3 s per layout, at 200 GFLOP/s.
    repeats = int(np.clip(60 / work, 3, 300))

    def operand(axes: str) -> np.ndarray:
        return rng.normal(size=[sizes[axis] for axis in axes]).astype(np.float32)

    def seconds_in_jax(layout: str) -> float:
        product = jax.jit(lambda a, b: jnp.einsum(layout, a, b, preferred_element_type=jnp.float32))
        a, b = (jnp.asarray(operand(axes), dtype) for axes in layout.split("->")[0].split(","))
        return _best(lambda: product(a, b).block_until_ready(), repeats)

    times = [seconds_in_jax(layout) for layout in LAYOUTS]
    if dtype == "float32":
        left, right, out = operand("ri"), operand("io"), np.empty((rows, outer), np.float32)
        times.append(_best(lambda: np.matmul(left, right, out=out), repeats))
    return work / min(times)


def _best(run: Callable[[], Any], repeats: int) -> float:
    """Returns the shortest duration of several runs in seconds. A first run, which compiles, is not timed."""
    run()
    shortest = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest
