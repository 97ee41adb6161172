"""Trains the base model of a study, unless there is one, and then a run for each row and seed. Each core has one run at a time."""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import machine
from benchmarks.study.ladder import Study


def make_runs(
    study: Study, out: Path, names: Sequence[str], seeds: Sequence[int], *, cores: Sequence[int]
) -> None:
    """Trains the runs that are missing in `out`, each with one core and one thread. Finished runs are not repeated.

    All rows of a seed run before the next seed, so that a change in the machine's speed affects all rows alike.

    Raises:
        RuntimeError: a run failed; the message names its log.
    """
    out.mkdir(parents=True, exist_ok=True)
    model = study.base_model or out / "base_model" / "model"
    if not model.exists():
        _call(["sft", study.base_model_config, f"run_dir={model.parent}"], out / "base_model.log", cores)
    waiting: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    for seed in seeds:
        for name in names:
            if not _done(out / f"{name}_{seed}"):
                waiting.put((name, seed))
    failed: list[str] = []

    def work(core: int) -> None:
        while not failed:
            try:
                name, seed = waiting.get_nowait()
            except queue.Empty:
                return
            run_dir = out / f"{name}_{seed}"
            resumed = ["--resume"] if (run_dir / "config.yaml").exists() else []
            command = ["train", study.config, *study.overrides(name), f"seed={seed}", f"model.source={model}"]
            began = time.monotonic()
            try:
                _call([*command, f"run_dir={run_dir}", *resumed], run_dir.with_suffix(".log"), [core])
            except RuntimeError as error:
                failed.append(str(error))
                return
            took = {"wall_s": round(time.monotonic() - began, 1), "machine": machine()}
            (run_dir / "took.json").write_text(json.dumps(took) + "\n")
            print(f"{name} seed {seed}: {took['wall_s']:.0f} s", flush=True)

    threads = [threading.Thread(target=work, args=(core,)) for core in cores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise RuntimeError("; ".join(failed))


def _done(run_dir: Path) -> bool:
    return (run_dir / "took.json").exists()


def _call(arguments: Sequence[str], log: Path, cores: Sequence[int]) -> None:
    """Runs `dapo-jax` on the given cores, with one thread per core."""
    one_thread = "--xla_cpu_multi_thread_eigen=false" if len(cores) == 1 else ""
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {one_thread}".strip(),
        "OMP_NUM_THREADS": str(len(cores)),
    }
    with log.open("a") as printed:
        code = subprocess.run(
            [sys.executable, "-m", "dapo_jax.cli", *arguments],
            env=environment,
            stdout=printed,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        ).returncode
    if code:
        raise RuntimeError(f"dapo-jax {' '.join(arguments)} ended with status {code}; see {log}")
