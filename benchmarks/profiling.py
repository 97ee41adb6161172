"""Measures where one rollout and one update spend their time: `python -m benchmarks.profiling MODEL`.

MODEL is a folder, or a preset such as qwen3-0.6b, which gets random weights.

JAX's profiler records when each operation of the compiled programs ran. XLA's dump of these programs shows from which function
of this library an operation originates. Operations that run at the same time share the wall time, and time without any operation
is attributed to the host, so the shares add up to 100%. A fusion is attributed to its matrix products, if it has any, otherwise to
the function of its last part (`hlo_sources`). Reading weights from memory is attributed to the product that uses them. On a GPU,
the operations are its kernels. In a command buffer (CUDA graph), kernels do not have the name of their operation, so command
buffers are switched off. The command also lists kernels and gaps, and refuses to print a table if too much time has no function.

(The file is not called profile.py, because this name would shadow a module of Python.)
"""

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import report, systems
from benchmarks.hlo_sources import ANY, Source, Sources
from benchmarks.trace import Slice, gaps, shares
from dapo_jax.parallel import gpu_settings

HOST, LOOPS, OTHER, CUBLAS = (
    "host: Python, transfers, waiting",
    "between operations of a loop",
    "XLA's own: copies, layouts",
    "cuBLAS, for a function that the trace does not give",
)

GPU = "/device:GPU"
"""Prefix of the names of the profiler's GPU planes."""

MOST = 0.1
"""Maximum share of the time of operations whose function is unknown."""

LISTED = 20
"""Number of kernels in the printed list. The JSON file contains all kernels."""

SMALL = 0.005
"""Parts with a smaller share are printed as one line. The JSON file contains all parts."""

PARTS = {
    "attention.py": "attention",
    "cudnn.py": "attention",
    "gpu_cache.py": "attention",
    "cache.py:attend": "attention",
    "cache.py:append": "cache update",
    "cache.py:fill": "cache update",
    "decoding.py": "drawing tokens",
    "projections.py:Projections._products": "products with the layers' weights",
    "projections.py:Projections.project": "products with the layers' weights",
    "projections.py:rms_norm": "norms",
    "projections.py:rotary": "rotary",
    "projections.py:rope_tables": "rotary",
    "attention_mixer.py": "activations, residuals",
    "gated.py": "activations, residuals",
    "decoder.py:Block.__call__": "activations, residuals",
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
        # Set before jax is imported, because XLA reads it when it compiles the first program. Other flags are the flags of a run.
        gpu_settings.apply()
        flags = f"--xla_dump_to={dump} --xla_dump_hlo_as_text --xla_gpu_enable_command_buffer="
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
        from benchmarks.gpu import write_model
        from benchmarks.peers.ours import System
        from dapo_jax.models.presets import PRESETS

        if arguments.model in PRESETS:
            (place := Path(folder) / "model").mkdir()
            write_model(place, PRESETS[arguments.model])
            arguments.model = str(place)
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
            results[what] = attributed(_recorded(run, Path(folder) / what), Sources(dump))
            results[what]["seconds_without_profiler"] = plain
            del system
    options = {name: str(value) for name, value in vars(arguments).items()}
    report.write(arguments.out / "profile.json", {"options": options, **results})
    for what, result in results.items():
        print(tables(what, result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.profiling")
    systems.add_arguments(parser)
    parser.add_argument("--what", nargs="+", choices=("rollout", "update"), default=["rollout", "update"])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rows-per-microbatch", type=int, default=16)
    parser.add_argument("--remat", default="dots", help="none, full or dots")
    return parser.parse_args()


def _recorded(run: Callable[[], Any], folder: Path) -> Any:
    """Calls `run` once under the profiler, and returns the recording."""
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 2
    recording = jax.profiler.trace(str(folder), profiler_options=options)
    with recording, jax.profiler.TraceAnnotation("measured"):
        run()
    [path] = folder.rglob("*.xplane.pb")
    return jax.profiler.ProfileData.from_file(str(path))


def attributed(profile: Any, sources: Sources) -> dict[str, Any]:
    """Returns the seconds of each part, and the kernels and the gaps of the measured run, longest first."""
    slices, span = _read(profile)
    parts: dict[str, float] = defaultdict(float)
    for (program, operation), seconds in shares(slices, span).items():
        known = program and _part(sources.of(program, operation), operation)
        parts[known or (HOST if operation == "none" else LOOPS)] += seconds
    calls: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for one in slices:
        if one.end > span[0] and one.start < span[1] and not one.is_container:
            function = sources.of(one.program, one.operation).function or "XLA"
            calls[one.kernel or one.operation, one.operation, function].append((one.end - one.start) / 1e9)
    names = ("kernel", "operation", "function")
    kernels = [
        dict(zip(names, key, strict=True)) | {"calls": len(times), "seconds": sum(times)}
        for key, times in sorted(calls.items(), key=lambda item: -sum(item[1]))
    ]
    return {
        "seconds": sum(parts.values()),
        "parts": dict(parts),
        "unattributed": (parts[OTHER] + parts[CUBLAS]) / sum(parts.values()),
        "kernels": kernels,
        "gaps": [vars(gap) for gap in gaps(slices, span)],
    }


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
                end = event.start_ns + event.duration_ns
                slices.append(Slice(event.start_ns, end, program, str(name), event.name if kernels else ""))
    if span is None or not slices:
        raise RuntimeError(
            f"the profiler recorded {len(slices)} operations and {'no' if span is None else 'the'} measured run; this table "
            "needs the operations of JAX's CPU runtime, or the kernels of a GPU"
        )
    return slices, span


def tables(what: str, result: dict[str, Any]) -> str:
    """Returns the tables of parts, kernels and gaps.

    Raises:
        RuntimeError: more than `MOST` of the time has no function, so the table of parts would mislead.
    """
    if result["unattributed"] > MOST:
        raise RuntimeError(
            f"{result['unattributed']:.1%} of the {what} has no function of this library, need at most {MOST:.0%}; profile.json has all kernels. Check "
            "that XLA_FLAGS contains --xla_gpu_enable_command_buffer= (no value) and that programs are compiled here, not loaded from a compilation cache"
        )
    total = result["seconds"]
    ordered = sorted(result["parts"].items(), key=lambda item: -item[1])
    large = [(name, seconds) for name, seconds in ordered if seconds >= SMALL * total]
    rest = total - sum(seconds for _, seconds in large)
    large.append((f"{len(ordered) - len(large)} parts under {SMALL:.1%} each", rest))
    rows = [[name, f"{seconds:.2f}", f"{seconds / total:.1%}"] for name, seconds in large]
    kernels = [
        [
            f"{one['kernel'][:60]} ({one['function']})",
            str(one["calls"]),
            f"{1e3 * one['seconds']:.1f}",
            f"{1e6 * one['seconds'] / one['calls']:.1f}",
        ]
        for one in result["kernels"][:LISTED]
    ]
    lengths = [gap["length"] / 1e3 for gap in result["gaps"]] or [0.0]
    longest = [[gap["before"], gap["after"], f"{gap['length'] / 1e6:.2f}"] for gap in result["gaps"][:5]]
    return "\n\n".join(
        [
            f"\nOne {what}: {total:.2f} s under the profiler, {result['seconds_without_profiler']:.2f} s without",
            report.table(["part", "seconds", "share"], [*rows, ["sum", f"{total:.2f}", "100.0%"]]),
            "The kernels or operations that take longest:",
            report.table(["kernel (function)", "calls", "ms", "us per call"], kernels),
            f"{len(result['gaps'])} gaps without any operation, {sum(lengths) / 1e3:.1f} ms in total, median {statistics.median(lengths):.1f} us. The longest:",
            report.table(["after", "before", "ms"], longest),
        ]
    )


if __name__ == "__main__":
    main()
