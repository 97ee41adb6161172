"""One worker of the grading pool: `python -m dapo_jax.rewards.worker SETUP`, a process of its own with a bound on its memory.

It reads one call a line and answers each with one line, both JSON with the call's number (`dapo_jax.rewards.worker_process`). It grades in
its main thread, where functions may use signals.
"""

import json
import os
from typing import Any, NoReturn

from dapo_jax.rewards.calls import MAX_ANSWER_BYTES, answer_of, samples_of
from dapo_jax.rewards.functions import GradeFunction, RewardError, grade_function
from dapo_jax.rewards.worker_process import bound_memory, private_pipes, say, setup_of_worker
from dapo_jax.terminal import lasting_streams


def main() -> None:
    """Answers calls until the pipe they come from ends."""
    calls, answers = private_pipes()
    with lasting_streams():  # a grader that prints is not at fault where nobody reads it any more
        _serve(calls, answers)


def _serve(calls: int, answers: int) -> None:
    setup = setup_of_worker()
    try:
        grade = grade_function(
            setup["grader"], answer_marker=setup["answer_marker"], on_nonfinite=setup["on_nonfinite"]
        )
    except ValueError as error:
        say(answers, 0, {"failed": str(error)})
        return
    bound_memory(setup["memory_mb"])
    say(answers, 0, {"ready": True})
    worker = os.getpid()
    with os.fdopen(calls, "rb") as lines:
        for line in lines:
            call = json.loads(line)
            answer = _answer(grade, call["samples"], setup["grader"])
            if os.getpid() != worker:
                _end_fork(answers, call["id"], answer)
            say(answers, call["id"], answer)


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
        say(answers, call, {"forked": reason})
    os._exit(0)


if __name__ == "__main__":
    main()
