"""Programs per processor second, and latency, of three ways to run a program: in the sandbox, in a bubblewrap of its own, and in a bare interpreter.

    python -m benchmarks.sandbox

The three ways take turns, so that the load of the machine is the same for all. Processor time includes the kernel and all child processes.
"""

import asyncio
import ctypes
import os
import resource
import subprocess
import time
from statistics import median

from dapo_jax.sandbox import Program, load_sandbox

PROGRAMS = 40
"""Number of programs in a round."""
ROUNDS = 5
PYTHON = ["/usr/bin/python3", "-I", "-S", "-c", "pass"]
BWRAP = [
    "bwrap",
    "--unshare-all",
    "--die-with-parent",
    "--ro-bind",
    "/usr",
    "/usr",
    "--symlink",
    "usr/lib",
    "/lib",
]
BWRAP += ["--symlink", "usr/lib64", "/lib64", "--proc", "/proc", *PYTHON]


def processor_s() -> float:
    """Returns the processor time of this process and of its descendants. Waits for those whose parent ended without waiting, as bubblewrap does."""
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def commands(command: list[str]) -> list[float]:
    """Returns the latency of each run of a command, in seconds."""
    nobody = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    times = []
    for _ in range(PROGRAMS):
        began = time.perf_counter()
        subprocess.run(command, check=True, cwd="/", **nobody)
        times.append(time.perf_counter() - began)
    return times


def sandboxed() -> list[float]:
    """Returns the latency of each program in a sandbox, in seconds. The server starts before the first of them."""

    async def work() -> list[float]:
        sandbox, times = load_sandbox(slots=1), []
        await sandbox.check()
        for _ in range(PROGRAMS):
            began = time.perf_counter()
            await sandbox.run(Program(source="pass"))
            times.append(time.perf_counter() - began)
        sandbox.close()
        return times

    return asyncio.run(work())


def main() -> None:
    """Prints a table. The processor time of the sandbox without programs, which is its start and its test, is subtracted."""
    global PROGRAMS
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    ways = {
        "sandbox": sandboxed,
        "bubblewrap for each program": lambda: commands(BWRAP),
        "interpreter for each program": lambda: commands(PYTHON),
    }
    used, latencies, many = {name: [] for name in ways}, {name: [] for name in ways}, PROGRAMS
    for _ in range(ROUNDS):
        for name, run in ways.items():
            PROGRAMS = 0
            began = processor_s()
            run()
            start, PROGRAMS = processor_s() - began, many
            began = processor_s()
            latencies[name] += run()
            used[name].append((processor_s() - began - start) / PROGRAMS)
    for name in ways:
        print(
            f"{name:30} {1 / median(used[name]):6.0f} programs per processor second, {1000 * median(latencies[name]):5.1f} ms"
        )


if __name__ == "__main__":
    main()
