"""Measures how long a sampler needs to draw tokens, with and without its most probable tokens: `python -m benchmarks.top_logprobs`. Needs no model.

The logits are random. A decoding step calls the same function, `dapo_jax.sampling.decoding.draw`.
"""

import argparse
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks import report
from dapo_jax.sampling.decoding import decoding, draw


def seconds(slots: int, vocabulary: int, heads: int, rounds: int) -> list[float]:
    """Returns the seconds of each call, after one that compiles."""
    logits = 3.0 * jax.random.normal(jax.random.key(0), (slots, vocabulary))
    keys, positions = jax.random.split(jax.random.key(1), slots), jnp.zeros(slots, jnp.int32)
    program, found = jax.jit(partial(draw, heads=heads)), list[float]()
    for _ in range(rounds + 1):
        start = time.perf_counter()
        jax.block_until_ready(program(logits, keys, positions, decoding()))
        found.append(time.perf_counter() - start)
    return found[1:]


def main() -> None:
    """Prints a table of milliseconds per call, and writes the seconds to a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.top_logprobs")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[49_152, 151_936])
    parser.add_argument("--heads", type=int, nargs="+", default=[0, 20, 32, 128])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    given = parser.parse_args()
    found = {
        (vocabulary, heads): seconds(given.slots, vocabulary, heads, given.rounds)
        for vocabulary in given.vocabulary
        for heads in given.heads
    }
    rows = [
        [f"{vocabulary:,}", str(heads), report.spread([1e3 * each for each in times], 2), str(8 * heads)]
        for (vocabulary, heads), times in found.items()
    ]
    print(report.table(["vocabulary", "heads", "ms per call, median (range)", "bytes per token"], rows))
    measured = {f"{vocabulary}/{heads}": times for (vocabulary, heads), times in found.items()}
    report.write(given.out / "top_logprobs.json", {"slots": given.slots, "seconds": measured})


if __name__ == "__main__":
    main()
