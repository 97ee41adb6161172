"""Watchers of the keys of a whole run, `checkpoint`, `log`, and `guard`: they see its files and its end."""

import json

from tests.run.keys.looking import ROWS, rounded
from tests.run.keys.watching import echoes, watch

AT_ONCE = {"steps": 0}
SAVED = {"steps": 2, "checkpoint.every_steps": 1, "checkpoint.keep_best": False}
LOGGED = {"log.rollouts_every_steps": 1}


def of(cls, name):
    """Sees an argument of a class; None if it was not made."""

    def see(look):
        made = look.received(cls)
        return made and made[name]

    return see


def checkpoints(look):
    look.train(eval_rows=ROWS)
    return [name for name in look.files("checkpoints") if name.isdigit()]


def evaluations(look):
    look.train(eval_rows=ROWS)
    return [int(name.removeprefix("step_")) for name in look.files("evaluations")]


def rollouts(look):
    look.train()
    with open("run/rollouts/step_000001.jsonl") as file:
        return [json.loads(line) for line in file]


WATCHERS = [
    watch("eval.every_steps", evaluations, (0, [0, 2]), (1, [0, 1, 2]), also={"steps": 2}),
    watch("checkpoint.keep", checkpoints, (3, ["1", "2"]), (1, ["2"]), also=SAVED),
    # All scores are equal: the first evaluation after a step is the best, and is saved.
    watch(
        "checkpoint.keep_best",
        checkpoints,
        (True, ["1", "2"]),
        (False, ["2"]),
        also={"steps": 2, "eval.every_steps": 1},
    ),
    echoes(
        "checkpoint.keep_best", of("Checkpointer", "keep_best"), True, False, what="what stays", also=AT_ONCE
    ),
    # Rewards, with the penalty, of 1, -1, 0 and -2: the first is 1.5 above their mean, with a deviation of (5 / 3) ** 0.5 = 1.291.
    watch(
        "advantage.scale",
        lambda look: rounded([rollouts(look)[0]["advantage"]]),
        ("group_std", [1.1619]),
        ("none", [1.5]),
        what="in the rollout log",
        also=LOGGED,
    ),
    echoes("log.profile_steps", of("Profile", "steps"), [], [2], also=AT_ONCE),
]
