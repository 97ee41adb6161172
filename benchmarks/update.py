"""Measures the time and the peak memory of a policy update or a whole step in this library, Tunix and TRL.

`python -m benchmarks.update MODEL [--whole-step]`. An update computes the gradient of the clipped objective over all responses,
in microbatches, and takes one AdamW step, without a reference policy. A whole step consists of rollouts, rewards and one update.
"""

import argparse
from typing import Any

from benchmarks import report, systems
from benchmarks.pool import Answer, Worker, end_workers_on_sigterm

TRAINERS = ("ours", "tunix", "trl")


def main() -> None:
    """Measures every system, prints the table, and writes the JSON file."""
    arguments = _arguments()
    end_workers_on_sigterm()
    rows = arguments.rows_per_microbatch
    options: dict[str, dict[str, Any]] = {
        "ours": {"rows_per_microbatch": rows, "remat": arguments.remat,
                 "logprob_chunk_vocab": arguments.logprob_chunk_vocab},
        "tunix": {"prompts_per_microbatch": max(1, rows // arguments.samples)},
        "trl": {"rows_per_microbatch": rows, "gradient_checkpointing": arguments.gradient_checkpointing},
    }  # fmt: skip
    call = "step" if arguments.whole_step else "update"
    results: dict[str, Any] = {name: {"seconds": [], "parts": []} for name in arguments.systems}
    workers: dict[str, Worker] = {}
    failed = systems.Failures()
    try:
        for name in arguments.systems:
            workload = systems.workload_of(arguments, options={"for_training": True, **options[name]})
            with failed.recorded(name):
                workers[name], known = systems.start(name, workload, arguments)
                results[name].update(known, options=options[name])
                for seed in range(arguments.warmups):
                    _once(workers[name], call, 1_000 + seed)
        for round_ in range(arguments.rounds):
            for name in arguments.systems:
                if name in failed:
                    continue
                with failed.recorded(name):
                    answer = _once(workers[name], call, round_)
                    results[name]["seconds"].append(answer.seconds)
                    results[name]["parts"].append(answer.result)
                    print(f"round {round_}, {name}: {answer.seconds:.1f} s {answer.result or ''}", flush=True)
        for name in workers:
            results[name]["peak_gb"] = workers[name].peak_gb
            if name not in failed:
                with failed.recorded(name):
                    results[name]["moved"] = workers[name].call("moved").result
    finally:
        for worker in workers.values():
            worker.close()
    _print(arguments, results, failed, call)
    content = {
        "workload": systems.workload_of(arguments).to_json(),
        "what": call,
        "systems": results,
        "failed": failed,
    }
    report.write(arguments.out / f"{call}.json", content)


def _once(worker: Worker, call: str, seed: int) -> Answer:
    return worker.call(call, timeout_s=3600.0, **({"seed": seed} if call == "step" else {}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.update")
    systems.add_arguments(parser)
    parser.set_defaults(rounds=3, warmups=1)
    parser.add_argument("--systems", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument(
        "--whole-step", action="store_true", help="rollouts, rewards and update instead of the update"
    )
    parser.add_argument(
        "--rows-per-microbatch",
        type=int,
        default=16,
        help="responses in one forward and backward pass; Tunix takes whole groups",
    )
    parser.add_argument("--remat", default="dots", help="ours: none, full or dots")
    parser.add_argument(
        "--logprob-chunk-vocab", type=int, default=2048, help="ours: vocabulary entries at one time"
    )
    parser.add_argument("--gradient-checkpointing", action="store_true", help="TRL: less memory, more time")
    return parser.parse_args()


def _print(arguments: argparse.Namespace, results: dict[str, Any], failed: dict[str, str], call: str) -> None:
    rows = []
    first = results[arguments.systems[0]]["seconds"]
    for name, result in results.items():
        if name in failed:
            rows.append([name, f"failed: {failed[name]}", "-", f"{result.get('peak_gb', 0):.1f}", "-"])
            continue
        share = (
            report.spread(report.ratios(first, result["seconds"]), 2)
            if len(first) == len(result["seconds"])
            else "-"
        )
        rows.append(
            [
                name,
                report.spread(result["seconds"], 1),
                share,
                f"{result['peak_gb']:.1f}",
                f"{result['moved']:.1e}",
            ]
        )
    responses = arguments.prompts * arguments.samples
    print(f"\nOne {call} of {responses} responses, {arguments.prompt_tokens} + {arguments.new_tokens} tokens, float32, "
          f"microbatches of {arguments.rows_per_microbatch}, {arguments.threads} threads\n")  # fmt: skip
    header = ["system", "seconds, median (range)", f"{arguments.systems[0]} / it", "peak GB", "weights moved"]
    print(report.table(header, rows))


if __name__ == "__main__":
    main()
