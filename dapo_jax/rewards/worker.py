"""One worker of the grading pool: `python -m dapo_jax.rewards.worker SETUP`, a process of its own with a bound on its memory.

It reads one call a line and answers each with one line, both JSON with the call's number, over pipes that no reward function and
nothing it starts gets hold of by accident: standard input is empty, and what a grader prints goes to the standard error. It grades in
its main thread, where functions may use signals. It ends with the process that started it, whatever it is doing then.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from dapo_jax.rewards.calls import MAX_ANSWER_BYTES, answer_of, samples_of
from dapo_jax.rewards.functions import GradeFunction, RewardError, grade_function
from dapo_jax.terminal import lasting_streams

_STATM = Path("/proc/self/statm")
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Answers calls until the pipe they come from ends."""
    # Ctrl-C reaches every process of a terminal; the one that was started by hand decides what ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    calls, answers = _private_pipes()
    with lasting_streams():  # a grader that prints is not at fault where nobody reads it any more
        _serve(calls, answers)


def _serve(calls: int, answers: int) -> None:
    setup = json.loads(sys.argv[1])
    _end_with(setup["parent"])
    _search_like(setup["path"])
    try:
        grade = grade_function(
            setup["grader"], answer_marker=setup["answer_marker"], on_nonfinite=setup["on_nonfinite"]
        )
    except ValueError as error:
        _say(answers, 0, {"failed": str(error)})
        return
    _bound_memory(setup["memory_mb"])
    _say(answers, 0, {"ready": True})
    worker = os.getpid()
    with os.fdopen(calls, "rb") as lines:
        for line in lines:
            call = json.loads(line)
            answer = _answer(grade, call["samples"], setup["grader"])
            if os.getpid() != worker:
                _end_fork(answers, call["id"], answer)
            _say(answers, call["id"], answer)


def _private_pipes() -> tuple[int, int]:
    """Descriptors of calls and answers that are passed on to no program; the standard streams no longer lead to them."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    try:
        os.fstat(2)
    except OSError:  # the trainer was started without a standard error
        os.dup2(nowhere, 2)
    calls, answers = os.dup(0), os.dup(1)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)
    os.close(nowhere)
    return calls, answers


def _end_with(parent: int) -> None:
    """Has this process end when `parent`, which started it, is gone: a busy grader would otherwise go on for ever."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_end_when_gone, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it went before the line above
        os._exit(1)


def _end_when_gone(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _answer(grade: GradeFunction, call: list[Any], grader: str) -> dict[str, Any]:
    try:
        answer = answer_of(grade(samples_of(call)))
        size = len(json.dumps(answer))
    except MemoryError:
        return {"memory": True}
    except Exception as error:
        # A reward function's own exception comes wrapped, with the prompt's name.
        if isinstance(error.__cause__, MemoryError):
            return {"memory": True}
        named = (
            "" if isinstance(error, RewardError) else f"reward function {grader}: {type(error).__name__}: "
        )
        return {"failed": f"{named}{error}"[:10_000], "left": isinstance(error.__cause__, SystemExit)}
    except BaseException as error:  # KeyboardInterrupt and GeneratorExit: Ctrl-C is not for this process
        return {"failed": f"reward function {grader} raised {type(error).__name__}"}
    if size > MAX_ANSWER_BYTES:
        return {
            "failed": f"a reward function returned verdicts of {size:,} bytes, at most {MAX_ANSWER_BYTES:,} can be kept; shorten "
            "`reason` and `extracted`"
        }
    return answer


def _end_fork(answers: int, call: int, answer: dict[str, Any]) -> NoReturn:
    """Ends a child that a reward function forked and that came back from it; one that only left by sys.exit does so in silence."""
    if not answer.get("left"):
        reason = (
            f"it forked, and the child (process {os.getpid()}) returned from it as well: that would be a second verdict on one "
            "response; end the child inside the function, with os._exit"
        )
        _say(answers, call, {"forked": reason})
    os._exit(0)


def _search_like(path: list[str]) -> None:
    """Has the user's modules found where the process that started this one finds them, and at last in the current folder."""
    sys.path[:] = [*path, ""]


def _bound_memory(memory_mb: int) -> None:
    """No more address space than the process has now and `memory_mb` beyond; asking for more is a MemoryError."""
    if not _STATM.exists():
        return  # not Linux: the time limit alone bounds a call
    pages = int(_STATM.read_text().split()[0])
    limit = pages * resource.getpagesize() + memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _say(answers: int, call: int, message: dict[str, Any]) -> None:
    left = memoryview(json.dumps({"id": call, **message}).encode() + b"\n")
    while left:
        left = left[os.write(answers, left) :]


if __name__ == "__main__":
    main()
