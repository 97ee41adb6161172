"""Measures where one rollout and one update spend their time: `python -m benchmarks.profiling MODEL`.

JAX's profiler records when each operation of the compiled programs ran. XLA's dump of these programs shows from which function
of this library an operation originates. Operations that run at the same time share the wall time, and time without any operation
is attributed to the host, so the shares add up to 100%. A fusion is attributed to its matrix products, if it has any, otherwise to
the function of its last part (`hlo_sources`). Reading weights from memory is attributed to the product that uses them. On a GPU,
the operations are its kernels.

(The file is not called profile.py, because this name would shadow a module of Python.)
"""

import argparse
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import report, systems
from benchmarks.hlo_sources import ANY, Source, Sources
from benchmarks.trace import Slice, shares

HOST, LOOPS, OTHER, CUBLAS = (
    "host: Python, transfers, waiting",
    "between operations of a loop",
    "XLA's own: copies, layouts",
    "cuBLAS, for a function that the trace does not give",
)

GPU = "/device:GPU"
"""Prefix of the names of the profiler's GPU planes."""

SMALL = 0.005
"""Parts with a smaller share are printed as one line. The JSON file contains all parts."""

PARTS = {
    "attention.py": "attention",
    "cache.py:attend": "attention",
    "cache.py:append": "cache update",
    "cache.py:fill": "cache update",
    "decoding.py": "drawing tokens",
    "decoder.py:Block._product": "products with the layers' weights",
    "decoder.py:Block._project": "products with the layers' weights",
    "decoder.py:Block._queries_keys_values": "activations, residuals",
    "decoder.py:Block.__call__": "activations, residuals",
    "decoder.py:rms_norm": "norms",
    "decoder.py:rotary": "rotary",
    "decoder.py:rope_tables": "rotary",
    "decoder.py:EmbeddingAndHead.logits": "unembedding",
    "decoder.py:EmbeddingAndHead.unembedding": "unembedding",
    "decoder.py:EmbeddingAndHead.embed": "embedding",
    "joined.py": "products with the layers' weights",
    "logprobs.py": "unembedding and log-probabilities",
    "losses.py": "objective",
    "decoder.py:Decoder.__call__": "scan over layers, residuals",
    "update.py:Updater._apply_program": "optimizer",
    "update.py:Updater._add_program": "sums of gradients",
}
"""Maps the innermost frame's file, or its file and function, to a name in the table. Other functions appear under their own names."""


def main() -> None:
    """Profiles the rollout and the update, prints a table for each, and writes the JSON file."""
    arguments = _arguments()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder) / "hlo"
        # Set before jax is imported, because XLA reads it when it compiles the first program.
        os.environ["XLA_FLAGS"] = (
            f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump} --xla_dump_hlo_as_text"
        ).strip()
        from benchmarks.peers.ours import System

        for what in arguments.what:
            options = {"rows_per_microbatch": arguments.rows_per_microbatch, "remat": arguments.remat}
            training = {"for_training": True, **options} if what == "update" else {}
            system = System(systems.workload_of(arguments, dtype=arguments.dtype, options=training))
            run = system.update if what == "update" else lambda system=system: system.rollout(0)
            for _ in range(arguments.warmups):
                run()
            start = time.perf_counter()
            run()
            plain = time.perf_counter() - start
            results[what] = _profile(run, Path(folder) / what, Sources(dump))
            results[what]["seconds_without_profiler"] = plain
            _print(what, results[what])
            del system
    options = {name: str(value) for name, value in vars(arguments).items()}
    report.write(arguments.out / "profile.json", {"options": options, **results})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.profiling")
    systems.add_arguments(parser)
    parser.add_argument("--what", nargs="+", choices=("rollout", "update"), default=["rollout", "update"])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rows-per-microbatch", type=int, default=16)
    parser.add_argument("--remat", default="dots", help="none, full or dots")
    return parser.parse_args()


def _profile(run: Callable[[], Any], folder: Path, sources: Sources) -> dict[str, Any]:
    """Calls `run` once under the profiler. Returns the seconds of each part, and the operations that take longest."""
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 2
    recording = jax.profiler.trace(str(folder), profiler_options=options)
    with recording, jax.profiler.TraceAnnotation("measured"):
        run()
    [path] = folder.rglob("*.xplane.pb")
    slices, span = _read(jax.profiler.ProfileData.from_file(str(path)))
    taken = shares(slices, span)
    parts: dict[str, float] = defaultdict(float)
    operations: dict[str, float] = defaultdict(float)
    for (program, operation), seconds in taken.items():
        if program is None:
            parts[HOST if operation == "none" else LOOPS] += seconds
            continue
        source = sources.of(program, operation)
        parts[_part(source, operation)] += seconds
        operations[f"{operation} ({source.function or 'XLA'}; {program.partition('.')[2]})"] += seconds
    longest = sorted(operations.items(), key=lambda item: -item[1])[:12]
    return {"seconds": sum(parts.values()), "parts": dict(parts), "longest": dict(longest)}


def _part(source: Source, operation: str) -> str:
    function = source.function
    if function is None:
        return CUBLAS if operation.startswith(("nvjet", "cutlass", "cublas")) else OTHER
    name = PARTS.get(function) or PARTS.get(function.partition(":")[0]) or function
    return f"{name}, backward" if source.backward else name


def _read(profile: Any) -> tuple[list[Slice], tuple[float, float]]:
    """Returns when each operation ran, and when the measured run began and ended, in ns.

    A GPU has a plane with one line per stream. If an event there lacks its operation, as in a CUDA graph, the kernel's name is used instead.
    """
    slices: list[Slice] = []
    span = None
    planes = list(profile.planes)
    on_gpu = any(plane.name.startswith(GPU) for plane in planes)
    for plane in planes:
        for line in plane.lines:
            kernels = plane.name.startswith(GPU) and line.name.startswith("Stream")
            for event in line.events:
                if event.name == "measured":
                    span = (event.start_ns, event.start_ns + event.duration_ns)
                stats = dict(event.stats) if event.duration_ns and kernels == on_gpu else {}
                if "hlo_op" in stats and "program_id" in stats:
                    program, name = (
                        f"module_{int(stats['program_id']):04d}.{stats['hlo_module']}",
                        stats["hlo_op"],
                    )
                elif kernels and event.duration_ns:
                    program, name = ANY, event.name
                else:
                    continue
                slices.append(Slice(event.start_ns, event.start_ns + event.duration_ns, program, str(name)))
    if span is None or not slices:
        raise RuntimeError(
            f"the profiler recorded {len(slices)} operations and {'no' if span is None else 'the'} measured run; this table "
            "needs the operations of JAX's CPU runtime, or the kernels of a GPU"
        )
    return slices, span


def _print(what: str, result: dict[str, Any]) -> None:
    total = result["seconds"]
    ordered = sorted(result["parts"].items(), key=lambda item: -item[1])
    print(
        f"\nOne {what}: {total:.2f} s under the profiler, {result['seconds_without_profiler']:.2f} s without\n"
    )
    large = [(name, seconds) for name, seconds in ordered if seconds >= SMALL * total]
    rest = total - sum(seconds for _, seconds in large)
    large.append((f"{len(ordered) - len(large)} parts under {SMALL:.1%} each", rest))
    rows = [[name, f"{seconds:.2f}", f"{seconds / total:.1%}"] for name, seconds in large]
    print(report.table(["part", "seconds", "share"], [*rows, ["sum", f"{total:.2f}", "100.0%"]]))
    print("\nThe operations that take longest:\n")
    longest = [
        [name, f"{seconds:.2f}", f"{seconds / total:.1%}"] for name, seconds in result["longest"].items()
    ]
    print(report.table(["operation (function; program)", "seconds", "share"], longest))


if __name__ == "__main__":
    main()
