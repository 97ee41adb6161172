"""One worker of the grading pool: `python -m dapo_jax.rewards.worker SETUP`, a process of its own with a bound on its memory.

It reads one call a line from its standard input and answers each with one line, both JSON. It grades in its main thread, since
math-verify keeps its own time by signals. What a grader prints goes to the standard error.
"""

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any, TextIO

from dapo_jax.rewards.calls import answer_of, samples_of
from dapo_jax.rewards.functions import GradeFunction, grade_function

_STATM = Path("/proc/self/statm")


def main() -> None:
    """Answers calls until the standard input ends."""
    # Ctrl-C reaches every process of a terminal; the one that was started by hand decides what ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    setup = json.loads(sys.argv[1])
    try:
        grade = grade_function(
            setup["grader"], answer_marker=setup["answer_marker"], on_nonfinite=setup["on_nonfinite"]
        )
    except ValueError as error:
        _say(answers, {"failed": str(error)})
        return
    _bound_memory(setup["memory_mb"])
    _say(answers, {"ready": True})
    for line in sys.stdin:
        _say(answers, _answer(grade, line))


def _answer(grade: GradeFunction, line: str) -> dict[str, Any]:
    try:
        return answer_of(grade(samples_of(json.loads(line))))
    except MemoryError:
        return {"memory": True}
    except Exception as error:
        # A reward function's own exception comes wrapped, with the prompt's name.
        return {"memory": True} if isinstance(error.__cause__, MemoryError) else {"failed": str(error)}


def _bound_memory(memory_mb: int) -> None:
    """No more address space than the process has now and `memory_mb` beyond; asking for more is a MemoryError."""
    if not _STATM.exists():
        return  # not Linux: the time limit alone bounds a call
    pages = int(_STATM.read_text().split()[0])
    limit = pages * resource.getpagesize() + memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _say(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
