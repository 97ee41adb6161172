"""The process in which one system runs: `python -m benchmarks.worker NAME WORKLOAD`, started by `benchmarks.pool`.

Requests and replies are lines of JSON on the process's original standard input and output. The system's own output goes to
standard error. A request contains the name of a method of `System`. The reply contains the result and the duration in seconds.
"""

import importlib
import json
import os
import sys
import time
import traceback

from benchmarks.workload import Workload


def main() -> None:
    """Loads the system, reports that it is loaded, and then answers requests until the input ends."""
    name, workload = sys.argv[1], Workload.from_json(sys.argv[2])
    # Set here and not in the parent between fork and exec, because this could deadlock if the parent has initialized jax.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: workload.threads])
    requests, replies = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def reply(**content: object) -> None:
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    def timed(function: object, **arguments: object) -> None:
        start = time.perf_counter()
        try:
            result = function(**arguments)
        except Exception as error:
            traceback.print_exc()
            reply(error=f"{type(error).__name__}: {error}")
        else:
            reply(seconds=time.perf_counter() - start, result=result)

    systems = {}

    def load() -> str:
        systems["it"] = importlib.import_module(f"benchmarks.{name}").System(workload)
        return systems["it"].version

    timed(load)
    for line in requests:
        request = json.loads(line)
        timed(getattr(systems["it"], request["call"]), **request["arguments"])
    # Exits at once, because engines with their own threads and child processes may not terminate normally.
    os._exit(0)


if __name__ == "__main__":
    main()
