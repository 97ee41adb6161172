"""Watchers of the keys of a whole run, `checkpoint`, `log`, and `guard`: they see its files and its end."""

import json
import os

from tests.run.keys.doubles import mean
from tests.run.keys.looking import ROWS, refusal, rounded
from tests.run.keys.watching import echoes, watch

AT_ONCE = {"steps": 0}
SAVED = {"steps": 2, "checkpoint.every_steps": 1, "checkpoint.keep_best": False}
LOGGED = {"log.rollouts_every_steps": 1}
DRIFTS = {"sync/sampler_trainer_kl": mean(0.5)}


def folders(look):
    look.train()
    return sorted(name for name in os.listdir() if name.startswith("out"))


def steps(look):
    return [line["step"] for line in look.train().metrics]


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


def logged(look):
    """True if the rollouts of step 2 of 3 were written."""
    look.train()
    return "step_000002.jsonl" in look.files("rollouts")


def rollouts(look):
    look.train()
    with open("run/rollouts/step_000001.jsonl") as file:
        return [json.loads(line) for line in file]


def drifting(look):
    return look.train(measured=DRIFTS)


WATCHERS = [
    watch("run_dir", folders, ("out_a", ["out_a"]), ("out_b", ["out_b"]), also=AT_ONCE),
    watch("steps", steps, (1, [1]), (2, [1, 2])),
    echoes("stall_timeout_s", of("Watch", "timeout_s"), 1800.0, 0.0, also=AT_ONCE),
    watch("eval.every_steps", evaluations, (0, [0, 2]), (1, [0, 1, 2]), also={"steps": 2}),
    watch("checkpoint.every_steps", checkpoints, (0, ["2"]), (1, ["1", "2"]), also=SAVED),
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
    watch("log.rollouts_every_steps", logged, (0, False), (2, True), also={"steps": 3}),
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
    *(
        watch(
            "log.trackers",
            lambda look, cls=cls: look.received(cls) is not None,
            ([], False),
            ([name], True),
            what=name,
            also=AT_ONCE,
        )
        for name, cls in (("tensorboard", "TensorBoardTracker"), ("wandb", "WandbTracker"))
    ),
    watch("guard.max_mismatch_kl", refusal(drifting), (1.0, ""), (0.1, "GuardError")),
]
