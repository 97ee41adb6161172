"""Watchers of `reward`: they see the rewards of the responses =2, =3, 1+1=2 and 111111 to a question with the answer 2."""

import pytest

from dapo_jax.run import grader_setup
from tests.run.keys.watching import echoes, watch

PLAIN = {"reward.overlong.enabled": False}
ALL_WRONG = {**PLAIN, "dynamic_sampling.enabled": False}
"""Groups without a correct response."""
RIGHT = [1, -1, 1, -1]
"""Rewards without the overlong penalty."""
WRONG = [-1, -1, -1, -1]
POOL = {**PLAIN, "reward.grader": "math"}
"""Needs workers."""
CODE = {**PLAIN, "reward.grader": "code"}
"""Needs a sandbox."""


def rewards(look):
    return look.rewards()


def of_pool(name):
    """Sees an argument of the pool of workers; None without a pool."""

    def see(look):
        made = look.made_of("GradingPool")
        return made and made[name]

    return see


def of_calls(name):
    """Sees an argument of the event loop for async functions."""
    return lambda look: look.made_of("AsyncCalls", reward=waits)[name]


async def waits(sample):
    return True


def of_sandbox(name):
    """Sees an argument of the sandbox, or one of its limits, without starting it."""

    def see(look):
        seen = {}

        def load(backend, **options):
            seen.update(backend=backend, **options)

        class Grader:
            def __init__(self, sandbox, limits, path):
                seen["limits"] = limits.cpu_s

            async def __call__(self, sample):
                return True

            def close(self):
                pass

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grader_setup, "load_sandbox", load)
            patch.setattr(grader_setup, "CodeGrader", Grader)
            look.run().close()
        return seen[name]

    return see


def in_the_loss(look):
    """Tokens in the loss, of all minibatches: of two groups of 3 + 3 + 6 + 6 tokens."""
    return sum(int(m.mask.sum()) for minibatch in look.minibatches() for m in minibatch)


WATCHERS = [
    watch("reward.grader", rewards, ("exact", RIGHT), ("dapo", WRONG), also=ALL_WRONG),
    watch(
        "reward.grader",
        rewards,
        ("exact", RIGHT),
        ([{"grader": "exact", "weight": 2.0}], [2, -2, 2, -2]),
        what="with a weight",
        also=PLAIN,
    ),
    # What follows the last + of 1+1=2 is no answer, and without a marker the whole response is one.
    watch("reward.answer_marker", rewards, ("=", RIGHT), ("+", WRONG), also=ALL_WRONG),
    watch("workers.count", of_pool("workers"), (None, 2), (0, None), (3, 3), also=POOL),
    watch("workers.timeout_s", of_pool("timeout_s"), (None, 10.0), (3.0, 3.0), what="of workers", also=POOL),
    watch("workers.timeout_s", of_calls("timeout_s"), (None, 10.0), (3.0, 3.0), what="of async functions"),
    echoes("reward.answer_marker", of_pool("answer_marker"), "=", "+", what="of workers", also=POOL),
    echoes("sandbox.backend", of_sandbox("backend"), "auto", "unsafe", also=CODE),
    echoes("sandbox.slots", of_sandbox("slots"), 0, 3, also=CODE),
    echoes("sandbox.python", of_sandbox("python"), "", "python3.12", also=CODE),
    watch("sandbox.limits", of_sandbox("limits"), ({}, 6.0), ({"cpu_s": 3}, 3.0), also=CODE),
    watch("reward.correct", rewards, (1.0, RIGHT), (3.0, [3, -1, 3, -1]), also=PLAIN),
    watch("reward.incorrect", rewards, (-1.0, RIGHT), (0.0, [1, 0, 1, 0]), also=PLAIN),
    # Limit 6: of a buffer of 2 or 4 tokens all is used up. Of 3 tokens one is in a buffer of 4.
    watch("reward.overlong.buffer_tokens", rewards, (2, [1, -1, 0, -2]), (4, [0.75, -1.25, 0, -2])),
    watch("reward.overlong.penalty_factor", rewards, (1.0, [1, -1, 0, -2]), (0.5, [1, -1, 0.5, -1.5])),
    watch(
        "sampling.max_response_tokens",
        rewards,
        (6, [1, -1, 0, -2]),
        (7, [1, -1, 0.5, -2]),
        what="where the penalty is whole",
    ),
    watch("reward.overlong.filter_truncated", in_the_loss, (False, 36), (True, 24)),
]
