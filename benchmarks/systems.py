"""Defines the systems, the Python environment of each, and the options that all benchmarks share."""

import argparse
import contextlib
import glob
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.pool import Worker, WorkerError
from benchmarks.workload import Workload

DEFAULT_PEERS = Path("~/.cache/dapo_jax/peers")


@dataclass(frozen=True)
class System:
    """A system that the benchmarks can run."""

    module: str
    """The system's module, relative to the package `benchmarks`."""
    venv: str | None
    """Name of the system's environment in the folder `--peers`, or None for the environment of this process."""


SYSTEMS = {
    "limits": System("limits", None),
    "ours": System("peers.ours", None),
    "tunix": System("peers.tunix", "tunix"),
    "hf": System("peers.hf", "trl"),
    "trl": System("peers.trl", "trl"),
    "vllm": System("peers.vllm", "vllm"),
}


class Failures(dict[str, str]):
    """The error of each system that failed, by name. The other systems continue, and their figures are kept."""

    @contextlib.contextmanager
    def recorded(self, name: str) -> Iterator[None]:
        """Records and prints an error of the system's worker instead of raising it."""
        try:
            yield
        except WorkerError as error:
            self[name] = str(error)
            print(f"{name} failed: {error}", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that all benchmarks of several systems share."""
    parser.add_argument("model", help="a folder in the Hugging Face layout")
    parser.add_argument(
        "--peers", type=Path, default=DEFAULT_PEERS, help="folder where make_peers.py created environments"
    )
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each system")
    parser.add_argument(
        "--warmups", type=int, default=2, help="earlier rounds, which compile and are not measured"
    )
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=16, help="responses to each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2, help="CPUs and threads of every system")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/benchmarks"), help="folder for the JSON file and the logs"
    )


def positive(text: str) -> int:
    """Parses an integer of at least 1. Warm-ups require this, because the first round compiles and must not be measured."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return int(text)


def workload_of(arguments: argparse.Namespace, **more: Any) -> Workload:
    """Returns the workload that the command line describes."""
    return Workload(
        model=str(Path(arguments.model).expanduser().resolve()),
        prompts=arguments.prompts,
        samples=arguments.samples,
        prompt_tokens=arguments.prompt_tokens,
        new_tokens=arguments.new_tokens,
        threads=arguments.threads,
        **more,
    )


def start(
    name: str, workload: Workload, arguments: argparse.Namespace, environment: dict[str, str] | None = None
) -> tuple[Worker, dict[str, Any]]:
    """Starts a worker, and waits until its system is loaded. Returns the worker, and the system's version and loading time.

    `environment` contains more variables for the worker. Without it, vLLM gets the variables that its CPU guide recommends.
    """
    system = SYSTEMS[name]
    if system.venv is None:
        python = Path(sys.executable)
    else:
        folder = arguments.peers.expanduser() / system.venv
        python = folder / "bin" / "python"
        if not python.exists():
            raise SystemExit(
                f"{python} is missing: `python -m benchmarks.make_peers {arguments.peers}` creates it; or leave {name} "
                "out of --systems"
            )
    if environment is None and name == "vllm":
        environment = _vllm_environment(python)
    label = f"{name}-{workload.dtype}"
    worker = Worker(
        system.module,
        python,
        workload,
        log=arguments.out / "logs" / f"{label}.log",
        environment=environment,
    )
    try:
        ready = worker.ready()
    except BaseException:
        worker.close()
        raise
    print(f"{label}: {ready.result}, loaded in {ready.seconds:.0f} s", flush=True)
    return worker, {"version": ready.result, "load_s": ready.seconds}


def _vllm_environment(python: Path) -> dict[str, str]:
    """Returns the environment variables that vLLM's CPU guide recommends, with the libraries that exist on this machine."""
    places = (
        "/usr/lib/*/libtcmalloc_minimal.so.4",
        "/usr/lib*/libtcmalloc_minimal.so.4",
        str(python.parent.parent / "lib" / "libiomp5.so"),
    )
    found = [path for place in places for path in glob.glob(place)]
    if not any("tcmalloc" in path for path in found):
        print("vllm: tcmalloc is missing; its guide recommends it (Debian: libtcmalloc-minimal4)", flush=True)
    return {
        "LD_PRELOAD": ":".join([*found, *filter(None, [os.environ.get("LD_PRELOAD")])]),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # because `pool` selects the CPUs
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
