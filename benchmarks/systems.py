"""Which systems there are, and where each finds its Python: a table, and the options all benchmarks share."""

import argparse
import glob
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.pool import Worker
from benchmarks.workload import Workload

DEFAULT_PEERS = Path("~/.cache/dapo_jax/peers")


@dataclass(frozen=True)
class System:
    """One row of the table."""

    module: str
    """Below `benchmarks`."""
    venv: str | None
    """The environment's name in the peers' folder; None is the environment that this process runs in."""


SYSTEMS = {
    "limits": System("limits", None),
    "ours": System("peers.ours", None),
    "tunix": System("peers.tunix", "tunix"),
    "hf": System("peers.hf", "trl"),
    "trl": System("peers.trl", "trl"),
    "vllm": System("peers.vllm", "vllm"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that every benchmark of peers has."""
    parser.add_argument("model", help="a folder in the Hugging Face layout")
    parser.add_argument(
        "--peers", type=Path, default=DEFAULT_PEERS, help="where make_peers.py put the environments"
    )
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each system")
    parser.add_argument(
        "--warmups", type=int, default=2, help="rounds before these, which compile and are not counted"
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
    """An integer of at least 1: the first round compiles, so there is no measuring without a warm-up."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return int(text)


def workload_of(arguments: argparse.Namespace, **more: Any) -> Workload:
    """The workload that the command line describes."""
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
    """Starts a system, waits until it is loaded and puts it to sleep; returns its version and loading time too.

    `environment` has more variables for its process. Without it, vLLM gets the variables that its guide for CPUs recommends.
    """
    system = SYSTEMS[name]
    if system.venv is None:
        python = Path(sys.executable)
    else:
        folder = arguments.peers.expanduser() / system.venv
        python = folder / "bin" / "python"
        if not python.exists():
            raise SystemExit(
                f"{python} is missing: `python -m benchmarks.make_peers {arguments.peers}` makes it; or leave {name} "
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
    """What vLLM's guide for CPUs asks for, as far as it is on this machine."""
    places = (
        "/usr/lib/*/libtcmalloc_minimal.so.4",
        "/usr/lib*/libtcmalloc_minimal.so.4",
        str(python.parent.parent / "lib" / "libiomp5.so"),
    )
    found = [path for place in places for path in glob.glob(place)]
    if not any("tcmalloc" in path for path in found):
        print("vllm: no tcmalloc here; its guide asks for it (Debian: libtcmalloc-minimal4)", flush=True)
    return {
        "LD_PRELOAD": ":".join([*found, *filter(None, [os.environ.get("LD_PRELOAD")])]),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # `pool` has chosen the CPUs
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
