"""Compares continuous batching with static batches on the same engine, for responses of very unequal length.

`python -m benchmarks.long_tail MODEL`. The length of every response is sampled in advance (log-normal, with a fixed
seed), so that both ways do the same work: 256 responses in 32 slots. A static batch waits for its longest response.
"""

import argparse
import heapq
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import report
from benchmarks.limited_engine import LimitedEngine
from benchmarks.workload import Workload
from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.models.folder import load_model
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.weights import WeightTransfer
from dapo_jax.sampling.continuous_batching import Sampler
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.sampling.engine_spec import EngineSpec


def main(words: Sequence[str] | None = None) -> None:
    """Measures both ways alternately, prints the results, and writes them to a JSON file."""
    arguments = _arguments(words)
    workload = Workload(
        model=str(arguments.model.expanduser().resolve()),
        prompts=arguments.prompts,
        samples=arguments.samples,
        prompt_tokens=arguments.prompt_tokens,
    )
    lengths = _lengths(arguments)
    engine, weights = _engine(workload, arguments)
    per_batch = arguments.slots // arguments.samples
    if per_batch * arguments.samples != arguments.slots:
        raise SystemExit(f"--slots {arguments.slots} must be a multiple of --samples {arguments.samples}")
    prompts = _prompts(workload)
    batches = {
        "continuous": [prompts],
        "static": [prompts[start : start + per_batch] for start in range(0, len(prompts), per_batch)],
    }
    results: dict[str, dict[str, Any]] = {way: {"seconds": []} for way in batches}
    for round_ in range(-1, arguments.rounds):
        for way, parts in batches.items():
            # The first round only compiles, so its responses are short.
            asked = lengths if round_ >= 0 else np.minimum(lengths, 8)
            limited = LimitedEngine(engine, asked)
            sampler = Sampler(limited, prefill_prompts=per_batch, refill_frac=arguments.refill_frac)
            start = time.perf_counter()
            sampled = sum(_sampled(sampler, weights, part, arguments, round_) for part in parts)
            seconds = time.perf_counter() - start
            if sampled != int(asked.sum()):
                raise RuntimeError(f"{way} returned {sampled} tokens, the table has {int(asked.sum())}")
            if round_ < 0:
                continue
            results[way]["seconds"].append(seconds)
            results[way]["steps"] = limited.steps
            results[way]["live_frac"] = limited.live_slot_steps / (limited.steps * arguments.slots)
            busy = limited.busy_steps * arguments.slots
            results[way]["live_while_waiting_frac"] = limited.busy_live_slot_steps / busy if busy else None
            print(f"round {round_}, {way}: {sampled / seconds:.0f} tokens/s", flush=True)
    _print(arguments, lengths, results)
    options = {name: str(value) for name, value in vars(arguments).items()}
    report.write(arguments.out / "long_tail.json", {"options": options, "systems": results})


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.long_tail")
    parser.add_argument("model", type=Path, help="a folder in the Hugging Face layout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=16, help="responses to each prompt")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--median-tokens", type=float, default=64.0, help="median length of a response")
    parser.add_argument(
        "--sigma", type=float, default=0.6, help="standard deviation of the logarithm of the length"
    )
    parser.add_argument("--max-tokens", type=int, default=448, help="limit on a response's length")
    parser.add_argument("--steps-per-call", type=int, default=16)
    parser.add_argument("--refill-frac", type=float, default=0.125)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0, help="seed of the lengths")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    return parser.parse_args(words)


def _lengths(arguments: argparse.Namespace) -> np.ndarray:
    """Returns the number of response tokens, [prompts, samples]."""
    rng = np.random.default_rng(arguments.seed)
    shape = (arguments.prompts, arguments.samples)
    drawn = rng.lognormal(np.log(arguments.median_tokens), arguments.sigma, shape)
    return np.clip(drawn.round(), 1, arguments.max_tokens).astype(np.int32)


def _engine(workload: Workload, arguments: argparse.Namespace) -> tuple[DecoderEngine, Any]:
    config, params = load_model(workload.model)
    mesh = make_mesh()
    engine = DecoderEngine(
        config,
        mesh,
        EngineSpec(
            slots=arguments.slots,
            capacity=arguments.prompt_tokens + arguments.max_tokens,
            steps_per_call=arguments.steps_per_call,
            stop_ids=(),  # only the limits end a response
            compute_dtype=arguments.dtype,
        ),
    )
    return engine, WeightTransfer(params, mesh, dtype=arguments.dtype)(params)


def _prompts(workload: Workload) -> list[Prompt]:
    return [
        Prompt(ordinal=ordinal, tokens=np.array(ids, np.int32), text="", answer="")
        for ordinal, ids in enumerate(workload.prompt_ids())
    ]


def _sampled(
    sampler: Sampler, weights: Any, prompts: Sequence[Prompt], arguments: argparse.Namespace, seed: int
) -> int:
    """Samples all responses to `prompts`, and returns their number of tokens."""
    waiting = list(prompts)

    def draw(count: int) -> list[Prompt]:
        taken, waiting[:] = waiting[:count], waiting[count:]
        return taken

    groups = sampler.sample(
        weights,
        draw,
        key=jax.random.key(seed + 1),
        decoding=decoding(temperature=1.0),
        samples_per_prompt=arguments.samples,
        max_response_tokens=arguments.max_tokens,
    )
    return sum(len(response.tokens) for _, group in groups for response in group)


def _print(arguments: argparse.Namespace, lengths: np.ndarray, results: dict[str, dict[str, Any]]) -> None:
    total = int(lengths.sum())
    rates = {way: [total / seconds for seconds in result["seconds"]] for way, result in results.items()}
    print(
        f"\n{lengths.size} responses, log-normal around {arguments.median_tokens:.0f} tokens (sigma {arguments.sigma}; mean "
        f"{lengths.mean():.0f}, longest {lengths.max()}) through {arguments.slots} slots, {arguments.dtype}\n"
    )
    rows = [
        [
            way,
            report.spread(rates[way]),
            report.spread(report.ratios(rates["continuous"], rates[way]), 2),
            str(result["steps"]),
            f"{result['live_frac']:.1%}",
            "-" if result["live_while_waiting_frac"] is None else f"{result['live_while_waiting_frac']:.1%}",
        ]
        for way, result in results.items()
    ]
    header = [
        "batches",
        "tokens/s, median (range)",
        "continuous / it",
        "steps",
        "live slots",
        "while any wait",
    ]
    print(report.table(header, rows))
    least = max(int(np.ceil(total / arguments.slots)), int(lengths.max()))
    first_come = _first_come_steps(lengths.reshape(-1), arguments.slots)
    print(
        f"\nWithout knowing the lengths, and with slots refilled in no time: {first_come} steps, "
        f"{total / (first_come * arguments.slots):.1%} live slots. No order of work takes fewer than {least}: "
        f"{total / (least * arguments.slots):.1%}."
    )


def _first_come_steps(lengths: np.ndarray, slots: int) -> int:
    """Returns the number of steps until all responses have ended, if they start in order, each as soon as a slot is free."""
    free_at = [0] * slots
    for length in lengths:
        heapq.heapreplace(free_at, free_at[0] + int(length))
    return max(free_at)


if __name__ == "__main__":
    main()
