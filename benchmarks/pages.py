"""Compares a paged KV cache with a cache of whole slots, in a case that suits pages and in a case that does not.

`python -m benchmarks.pages`. In the first case, responses have very unequal lengths. It compares 32 whole slots of 1,024 tokens with pages in the same
memory for more slots and, as a limit, with as many whole slots, which need several times the memory. In the second case, all responses have the same length and
a slot each, so pages have no advantage. Lengths are fixed in advance and weights are random, so all caches do the same work and nothing is downloaded.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from benchmarks import report
from benchmarks.limited_engine import LimitedEngine
from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.models.decoder import Decoder
from dapo_jax.models.presets import preset
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.weights import WeightTransfer
from dapo_jax.sampling.continuous_batching import Sampler
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.sampling.engine_spec import EngineSpec

PROMPT, CAPACITY, GROUP = 64, 1024, 16


def main() -> None:
    """Measures all caches alternately, prints the results, and writes them to a JSON file."""
    arguments = _arguments()
    config, mesh = replace(preset(arguments.preset), max_positions=CAPACITY), make_mesh()
    params = jax.jit(lambda: nnx.state(Decoder(config, rngs=nnx.Rngs(0))))()
    weights = WeightTransfer(params, mesh, dtype=arguments.dtype)(params)

    def engine(slots: int, **pages: int) -> DecoderEngine:
        return DecoderEngine(
            config,
            mesh,
            EngineSpec(
                slots=slots,
                capacity=CAPACITY,
                steps_per_call=16,
                stop_ids=(),
                compute_dtype=arguments.dtype,
                **pages,
            ),
        )

    rng = np.random.default_rng(arguments.seed)
    tailed = rng.lognormal(np.log(arguments.median_tokens), arguments.sigma, (arguments.prompts, GROUP))
    tailed = np.clip(tailed.round(), 1, CAPACITY - PROMPT).astype(np.int32)
    equal = np.full((arguments.slots // GROUP, GROUP), arguments.equal_tokens, np.int32)
    pool = {"page_tokens": arguments.page_tokens, "cache_tokens": arguments.slots * CAPACITY}
    measured = {
        "unequal": _rates(
            {
                "whole slots": engine(arguments.slots),
                "pages": engine(arguments.paged_slots, **pool),
                "limit": engine(arguments.paged_slots),
            },
            weights, tailed, arguments,
        ),
        "equal": _rates(
            {
                "whole slots": engine(arguments.slots),
                "pages": engine(arguments.slots, page_tokens=arguments.page_tokens),
            },
            weights, equal, arguments,
        ),
    }  # fmt: skip
    print(
        f"\n{arguments.preset}, {arguments.dtype}; {tailed.size} responses of {tailed.mean():.0f} tokens on average, {tailed.max()} at most, to prompts of "
        f"{PROMPT}; memory of {arguments.slots} x {CAPACITY} tokens, under pages of {arguments.page_tokens} {arguments.paged_slots} slots\n"
    )
    rows = [
        [lengths, way, report.spread(rates), report.spread(report.ratios(rates, found["whole slots"]), 2)]
        for lengths, found in measured.items()
        for way, rates in found.items()
    ]
    print(report.table(["lengths", "cache", "tokens/s, median (range)", "it / whole slots"], rows))
    options = {name: str(value) for name, value in vars(arguments).items()}
    report.write(arguments.out / "pages.json", {"options": options, "tokens_per_s": measured})


def _rates(
    engines: dict[str, DecoderEngine], weights: Any, lengths: np.ndarray, arguments: argparse.Namespace
) -> dict[str, list[float]]:
    """Returns the tokens per second of each engine in each round. The rounds of the engines are interleaved."""
    rates: dict[str, list[float]] = {way: [] for way in engines}
    for round_ in range(-1, arguments.rounds):
        # The first round only compiles, so its responses are short.
        asked = lengths if round_ >= 0 else np.minimum(lengths, 4)
        for way, engine in engines.items():
            limited = LimitedEngine(engine, asked)
            sampler = Sampler(limited, prefill_prompts=2)
            start = time.perf_counter()
            sampled = sum(
                len(response.tokens) for group in _groups(sampler, weights, len(asked)) for response in group
            )
            seconds = time.perf_counter() - start
            if sampled != int(asked.sum()):
                raise RuntimeError(f"{way} returned {sampled} tokens, the table has {int(asked.sum())}")
            if round_ >= 0:
                rates[way].append(sampled / seconds)
                print(
                    f"round {round_}, {way}: {rates[way][-1]:.0f} tokens/s, {limited.again} re-prefilled",
                    flush=True,
                )
    return rates


def _groups(sampler: Sampler, weights: Any, prompts: int) -> Iterator[tuple[Any, ...]]:
    waiting = [
        Prompt(ordinal=ordinal, tokens=np.full(PROMPT, 7 + ordinal % 100, np.int32), text="", answer="")
        for ordinal in range(prompts)
    ]

    def draw(count: int) -> list[Prompt]:
        taken, waiting[:] = waiting[:count], waiting[count:]
        return taken

    groups = sampler.sample(
        weights, draw, key=jax.random.key(0), decoding=decoding(temperature=1.0), samples_per_prompt=GROUP,
        max_response_tokens=CAPACITY - PROMPT,
    )  # fmt: skip
    return (group for _, group in groups)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.pages")
    parser.add_argument("--preset", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=16, help="prompts, with 16 responses each")
    parser.add_argument("--slots", type=int, default=32, help="whole slots, which also set the memory")
    parser.add_argument("--paged-slots", type=int, default=128)
    parser.add_argument("--page-tokens", type=int, default=64)
    parser.add_argument("--median-tokens", type=float, default=130.0, help="median length of a response")
    parser.add_argument(
        "--sigma", type=float, default=0.93, help="standard deviation of the logarithm of the length"
    )
    parser.add_argument("--equal-tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0, help="seed of the lengths")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
