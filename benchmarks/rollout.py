"""Measures the tokens per second of this library's sampler and of other samplers: `python -m benchmarks.rollout MODEL`.

Every system is loaded and warmed up in its own process. Then rounds are interleaved (A B C D, A B C D, ...), and only
one process runs at a time. README.md describes the rules.
"""

import argparse
import statistics
from typing import Any

from benchmarks import report, systems
from benchmarks.pool import Worker, WorkerError, end_workers_on_sigterm
from benchmarks.workload import Workload

SAMPLERS = ("ours", "tunix", "hf", "vllm")


def main() -> None:
    """Measures every system, prints the tables, and writes the JSON file."""
    arguments = _arguments()
    end_workers_on_sigterm()
    workload = systems.workload_of(arguments)
    names = [f"{name}:{dtype}" for dtype in arguments.dtypes for name in arguments.systems]
    workers: dict[str, Worker] = {}
    results: dict[str, Any] = {name: {"seconds": [], "idle_cpu_s": []} for name in names}
    failed = systems.Failures()
    try:
        limits, _ = systems.start("limits", workload, arguments)
        workers["limits"] = limits
        for name in names:
            system, dtype = name.split(":")
            with failed.recorded(name):
                workers[name], known = systems.start(system, workload.with_(dtype=dtype), arguments)
                results[name].update(known)
                for seed in range(arguments.warmups):
                    results[name]["warm"] = workers[name].call("rollout", seed=1_000 + seed).result
        _check(names, workload, workers, results, failed)
        measured = []
        for round_ in range(arguments.rounds):
            measured.append(limits.call("measure", dtypes=arguments.dtypes).result)
            for name in names:
                if name not in failed:
                    with failed.recorded(name):
                        _round(name, round_, workload, workers, results[name])
        for name in workers.keys() & set(names):
            results[name]["peak_gb"] = workers[name].peak_gb
    finally:
        for worker in workers.values():
            worker.close()
    _print([name for name in names if name not in failed], workload, results, measured)
    for name, error in failed.items():
        print(f"\n{name} failed: {error}")
    content = {"workload": workload.to_json(), "limits": measured, "systems": results, "failed": failed}
    report.write(arguments.out / "rollout.json", content)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.rollout")
    systems.add_arguments(parser)
    parser.add_argument("--systems", nargs="+", choices=SAMPLERS, default=list(SAMPLERS))
    parser.add_argument(
        "--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"]
    )
    return parser.parse_args()


def _round(
    name: str, round_: int, workload: Workload, workers: dict[str, Worker], result: dict[str, Any]
) -> None:
    """Runs and measures one round of one system. Also records the CPU time that the other systems used meanwhile."""
    others = [worker for other, worker in workers.items() if other != name]
    before = sum(worker.cpu_s() for worker in others)
    answer = workers[name].call("rollout", seed=round_)
    result["idle_cpu_s"].append(sum(worker.cpu_s() for worker in others) - before)
    lengths = {len(tokens) for tokens in answer.result}
    if len(answer.result) != workload.sequences or lengths != {workload.new_tokens}:
        raise WorkerError(
            f"{name} returned {len(answer.result)} responses of {sorted(lengths)} tokens; the workload is "
            f"{workload.sequences} of {workload.new_tokens}"
        )
    result["seconds"].append(answer.seconds)
    result["distinct"] = len({tuple(tokens) for tokens in answer.result})
    print(f"round {round_}, {name}: {workload.tokens / answer.seconds:.0f} tokens/s", flush=True)


def _check(
    names: list[str],
    workload: Workload,
    workers: dict[str, Worker],
    results: dict[str, Any],
    failed: systems.Failures,
) -> None:
    """Compares greedy responses with the reference system's. Also computes the reference's log-probability of the sampled tokens."""
    greedy: dict[str, Any] = {}
    for name in names:
        if name not in failed:
            with failed.recorded(name):
                greedy[name] = workers[name].call("greedy").result
    reference = "hf:float32" if "hf:float32" in greedy else next(iter(greedy), "")
    for name, found in greedy.items():
        same = [_shared(a, b) for a, b in zip(found, greedy[reference], strict=True)]
        results[name]["greedy_equal_tokens"], results[name]["greedy_reference"] = same, reference
        sampled = results[name].pop("warm")
        if reference == "hf:float32" and reference not in failed:
            with failed.recorded(reference):
                results[name]["mean_logprob"] = workers[reference].call("score", responses=sampled).result


def _shared(a: list[int], b: list[int]) -> int:
    """Returns the number of tokens before the first difference."""
    return next((index for index, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a))


def _print(
    names: list[str], workload: Workload, results: dict[str, Any], measured: list[dict[str, Any]]
) -> None:
    rates = {name: [workload.tokens / seconds for seconds in results[name]["seconds"]] for name in names}
    first = "ours:float32" if "ours:float32" in names else next(iter(names), "")
    rows = []
    for name in names:
        dtype, result = name.split(":")[1], results[name]
        limit = statistics.median(one[dtype]["tokens_per_s"] for one in measured)
        same, logprob = result["greedy_equal_tokens"], result.get("mean_logprob")
        rows.append(
            [
                name,
                report.spread(rates[name]),
                report.spread(report.ratios(rates[first], rates[name]), 2),
                f"{statistics.median(rates[name]) / limit:.0%}",
                f"{sum(n == workload.new_tokens for n in same)} of {len(same)} ({sum(same)}/{len(same) * workload.new_tokens} tokens)",
                "-" if logprob is None else f"{logprob:.3f}",
                f"{result['peak_gb']:.1f}",
                f"{sum(result['idle_cpu_s']):.2f}",
            ]
        )
    header = [
        "system", "tokens/s, median (range)", f"{first} / it", "of the GEMM limit",
        "same greedy", "mean logprob", "peak GB", "CPU s of the others",
    ]  # fmt: skip
    print(f"\n{workload.prompts} prompts of {workload.prompt_tokens} tokens x {workload.samples} responses of "
          f"{workload.new_tokens}, {workload.threads} threads\n")  # fmt: skip
    print(report.table(header, rows))
    for dtype in sorted({name.split(":")[1] for name in names}, reverse=True):
        _print_limit(dtype, workload, measured)
    print(
        f"\nCopying memory: {report.spread([one['copy_gb_s'] for one in measured], 1)} GB/s, read and written."
    )


def _print_limit(dtype: str, workload: Workload, measured: list[dict[str, Any]]) -> None:
    """Prints how the limit in tokens per second follows from the measured products."""
    ones = [one[dtype] for one in measured]
    print(
        f"\nMatrix products in {dtype}, in the shapes of one decode step of {workload.sequences} sequences:\n"
    )
    rows = []
    for index, product in enumerate(ones[0]["products"]):
        rates = [one["products"][index]["gflop_s"] for one in ones]
        m, k, n = product["shape"]
        rows.append(
            [product["name"], str(product["count"]), f"[{m} x {k}] [{k} x {n}]", report.spread(rates)]
        )
    rows.append(
        ["large", "-", "[2048 x 2048] [2048 x 2048]", report.spread([o["large_gflop_s"] for o in ones])]
    )
    print(report.table(["product", "in a step", "shape", "GFLOP/s, median (range)"], rows))
    rate = statistics.median(one["gflop_s"] for one in ones)
    work = ones[0]["gflop_per_token"]
    print(f"\nLimit: {rate:.0f} GFLOP/s (the step's products one after the other) / {work:.4f} GFLOP a token = "
          f"{rate / work:.0f} tokens/s")  # fmt: skip


if __name__ == "__main__":
    main()
