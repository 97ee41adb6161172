"""What the stubs know and remember: the folder of a test, its scenario, and what was called so far.

FOLDER/scenario.json may hold:
    states    for each time the TPU is created, what `describe` says, one after another; the last stays
    refused   how many `create` are refused
    runs      for each start of the program on a worker, its exit status; or "preempted", once it is followed; the last stays
    drops     how many `follow` lose their connection; gcloud then runs the command again, as the real one does
    workers   of the slice, or tasks of the step
    job       what squeue says of the job
    held      the program goes on until there is FOLDER/released
"""

import fcntl
import json
import os
import sys
from pathlib import Path

FOLDER = Path(os.environ["STUB_FOLDER"])
SCENARIO = {
    "states": [["ACTIVE"]],
    "refused": 0,
    "runs": [0],
    "drops": 0,
    "workers": 1,
    "job": "RUNNING",
    "held": False,
}
SCENARIO |= json.loads((FOLDER / "scenario.json").read_text())


def record(client, words, **more):
    with (FOLDER / "calls.jsonl").open("a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        log.write(json.dumps({"client": client, "words": words, **more}) + "\n")


def counted(name, add=1):
    """How often this was asked before."""
    with (FOLDER / f"count-{name}").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        before = int(file.read() or 0)
        file.truncate(0)
        file.write(str(before + add))
    return before


def at(answers, number):
    return answers[min(number, len(answers) - 1)]


def fail(message, status=1):
    print(f"ERROR: {message}", file=sys.stderr)
    return status
