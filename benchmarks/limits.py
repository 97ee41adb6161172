"""What the machine gives: matrix products at the shapes of a decode step, one large product, and copying memory.

Measured like a system, in a worker of its own, once in every round, so that a slow minute of the machine shows in the
limit too. Each rate is the best of JAX's and numpy's, over layouts and several repetitions, with operands in the cache:
a limit that no decode step can reach, since that must read its weights from memory.
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
    """The machine itself."""

    def __init__(self, workload: Workload) -> None:
        self.workload, self.version = workload, f"jax {jax.__version__}, numpy {np.__version__}"

    def measure(self, dtypes: list[str]) -> dict[str, Any]:
        """GFLOP/s by dtype and shape, what follows for tokens per second, and GB/s of copying."""
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
        """Bytes read plus bytes written per second, all threads copying parts of 256 MB."""
        threads = self.workload.threads
        source = np.ones(2**26, np.float32)
        target = np.zeros_like(source)
        parts = list(zip(np.array_split(source, threads), np.array_split(target, threads), strict=True))
        with ThreadPoolExecutor(threads) as pool:
            seconds = _best(lambda: list(pool.map(lambda pair: np.copyto(pair[1], pair[0]), parts)), 5)
        return 2 * source.nbytes / seconds / 1e9


def step_products(sizes: dict[str, Any]) -> list[tuple[str, int, int, int]]:
    """(name, how many in a step, inner size, outer size) of the products with weights in one decode step.

    Attention over the cache, norms, and drawing tokens are left out, so the limit is on the high side.
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
"""Activations [rows, inner] or turned, with the weight either way round; sums are in float32."""


def _gflop_s(rows: int, inner: int, outer: int, dtype: str) -> float:
    """The best of JAX's rates over `LAYOUTS` and (in float32) numpy's."""
    rng = np.random.default_rng(0)
    sizes = {"r": rows, "i": inner, "o": outer}
    work = 2e-9 * rows * inner * outer
    # About 0.3 s for each, at 200 GFLOP/s.
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
    """The shortest of several runs, in seconds, after one that compiles."""
    run()
    shortest = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest
