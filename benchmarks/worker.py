"""The process that one system runs in: `python -m benchmarks.worker NAME WORKLOAD`, started by `benchmarks.pool`.

Requests and replies are lines of JSON on the standard streams the process was started with. What the system itself prints
goes to standard error. A request names a method of the system's class; the reply has its result and the seconds it took.
"""

import importlib
import json
import os
import sys
import time
import traceback

from benchmarks.workload import Workload


def main() -> None:
    """Loads the system, says so, then answers until the requests end."""
    name, workload = sys.argv[1], Workload.from_json(sys.argv[2])
    # Not in the process that starts this one: a fork could deadlock if that process has initialized jax.
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
    # Not the usual way out: engines with threads and children of their own may not come to an end.
    os._exit(0)


if __name__ == "__main__":
    main()
