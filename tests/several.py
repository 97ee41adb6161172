"""Several processes on loopback."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHECKED = "import sys\nfrom tests import typed\ntyped.install()\n"
"""Before the code of a process: the checks of types that the tests' own process is under. To set them up takes 7 s, so only what trains has them."""
COMMAND = "import sys\nfrom dapo_jax.cli import main\nsys.exit(main(sys.argv[1:]))"


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def start(code, *arguments, processes, devices, **environment):
    """Starts `code` in so many processes with so many devices each; their output is theirs."""
    port = free_port()
    settings = {
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "JAX_NUM_PROCESSES": str(processes),
        "JAX_NUMPY_DTYPE_PROMOTION": "strict",
        "JAX_NUMPY_RANK_PROMOTION": "raise",
        "PYTHONPATH": str(ROOT),
        **environment,
    }
    return [
        subprocess.Popen(
            [sys.executable, "-u", "-c", code, *map(str, arguments)],
            env=os.environ | settings | {"JAX_PROCESS_ID": str(index)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(processes)
    ]


def finish(started, *, within_s):
    """(exit status, output) of each, once all have ended; a failure if one has not in time."""
    end = time.monotonic() + within_s
    try:
        outputs = [each.communicate(timeout=max(0.1, end - time.monotonic()))[0] for each in started]
    finally:
        for each in started:
            if each.poll() is None:
                each.kill()
                each.communicate()
    return [(each.returncode, output) for each, output in zip(started, outputs, strict=True)]


def run(code, *arguments, processes, devices, within_s=120, **environment):
    """The outputs of processes that all end well."""
    done = finish(
        start(code, *arguments, processes=processes, devices=devices, **environment), within_s=within_s
    )
    for index, (status, output) in enumerate(done):
        assert status == 0, f"process {index} ended with {status}:\n{output}"
    return [output for _, output in done]
