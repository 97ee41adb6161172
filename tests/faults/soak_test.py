"""The memory of long runs does not grow, and no process is left."""

import os
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from tests.faults.micro import make_run, started
from tests.several import ROOT

GROWTH = 0.02
"""The growth of memory from half of the steps to the end may be at most this fraction."""
GIVES_BACK = """
import ctypes, sys, threading, time
from dapo_jax.cli import main

libc = ctypes.CDLL("libc.so.6")
libc.mallopt(-8, 1)  # M_ARENA_MAX: several arenas would scatter allocations over many pages

def trim():
    while True:
        libc.malloc_trim(0)
        time.sleep(1)

threading.Thread(target=trim, daemon=True).start()
sys.exit(main(sys.argv[1:]))
"""
"""`dapo-jax` that returns freed memory to the system: the memory that malloc keeps otherwise varies by more than the limit."""


def members(session):
    """Returns the process ids of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (OSError, ValueError):
            continue
        if entry.name.isdigit() and int(fields[3]) == session and fields[0] != "Z":
            found.append(int(entry.name))
    return found


def held(session):
    """Returns the bytes of private memory of a session, without the files of libraries."""
    total = 0
    for pid in members(session):
        try:
            _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
            total += (resident - shared) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            continue
    return total


def soak(process, metrics, every_s):
    """Returns [(steps done, bytes held)] until the process has ended."""
    seen = []
    while process.poll() is None:
        lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        seen.append((lines, held(process.pid)))
        time.sleep(every_s)
    return np.array(seen)


def assert_flat(seen, steps):
    """Compares the least memory in the last twentieth of the steps with the least around half of them."""
    done, memory = seen[:, 0], seen[:, 1]
    half = memory[(done >= 0.50 * steps) & (done < 0.55 * steps)].min()
    last = memory[(done >= 0.95 * steps) & (done < steps)].min()
    growth = last / half - 1
    print(f"{half / 2**20:.1f} MiB at half, {last / 2**20:.1f} MiB at the end: {growth:+.2%}")
    assert growth < GROWTH


@pytest.mark.slow
@pytest.mark.parametrize("name", ["micro", "quickstart"])
def test_memory_is_flat_and_no_process_is_left(name, tmp_path):
    how = {"stdout": subprocess.DEVNULL, "start_new_session": True, "program": ("-c", GIVES_BACK)}
    saves = "checkpoint.every_steps=20"
    if name == "micro":
        run, steps, every_s = make_run(tmp_path, steps=2000, eval_every=50), 2000, 0.2
        process, folder = run.start(saves, **how), run.run_dir
    else:
        folder, steps, every_s = tmp_path / "run", 200, 2.0
        config = ROOT / "configs" / "quickstart.yaml"
        # The task is learnt by step 120 or so: then a step finds too few informative groups.
        solved = ["dynamic_sampling.max_waves=3", "dynamic_sampling.on_shortfall=train_fewer"]
        process = started("train", config, f"run_dir={folder}", f"steps={steps}", saves, *solved, **how)
    session = process.pid
    seen = soak(process, folder / "metrics.jsonl", every_s)
    assert process.returncode == 0
    assert members(session) == []
    assert_flat(seen, steps)
