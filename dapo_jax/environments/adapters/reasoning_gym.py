"""reasoning-gym's place: its tasks have one turn, so they are questions with a grader and no environment.

In 0.1.25 a dataset has `__getitem__` and `score_answer` and nothing that answers a turn; its composites and curricula choose among questions.
"""

from typing import NoReturn


def reasoning_gym_environment(task: str) -> NoReturn:
    """Says how a task is asked.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"reasoning-gym's tasks have one turn and so need no environment: ask {task!r} by data.source=reasoning_gym:{task} with "
        "reward.grader=reasoning_gym, and leave environment.source out"
    )
