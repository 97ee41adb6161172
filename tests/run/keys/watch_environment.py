"""Watchers of `environment`: they see the arguments of the run's episodes and the advantages of turns."""

import numpy as np

from dapo_jax.dapo.rollouts import Group, Prompt, Response, Rollout, TurnSpan, Verdict
from dapo_jax.dapo.tokens import Tokens
from tests.run.keys.watching import echoes, watch

GUESS = {"environment.source": "guess"}
AGENT = {"environment.source": "command:true"}


def of_episodes(name):
    """Sees an argument of the episodes of a run."""
    return lambda look: look.made_of("Episodes")[name]


def advantages_of_turns(look):
    """The number of different advantages in episodes of two turns."""

    def rollout(rewards):
        response = Response(
            record=Tokens(np.array([3, 4, 5], np.int32)),
            finish_reason="stop",
            turns=(TurnSpan(0, 1), TurnSpan(2, 3)),
        )
        score = sum(rewards)
        verdict = Verdict(correct=score > 0, score=score, turn_rewards=rewards)
        return Rollout(response=response, text="", verdict=verdict, reward=score)

    prompt = Prompt(ordinal=0, tokens=np.array([2], np.int32), text="", answer="")
    group = Group(prompt=prompt, rollouts=(rollout((1.0, 0.0)), rollout((0.0, 0.0))))
    run = look.run()
    [[packed]] = run.batches.minibatches([group], 1)
    run.close()
    return len(np.unique(packed.advantages[packed.mask]))


def of_workers(name):
    """Sees an argument of the environment; None where it is in the run's own process."""
    return lambda look: getattr(look.made_of("Episodes")["environment"], name, None)


def of_agents(see):
    """Sees the environment of a run whose episodes are agents."""
    return lambda look: see(look.made_of("Episodes")["environment"])


WATCHERS = [
    echoes("environment.concurrency", of_episodes("calls"), 64, 3, also=GUESS),
    echoes(
        "environment.variables",
        of_agents(lambda made: made.play.args[1]),
        ["PATH", "HOME", "LANG"],
        ["A"],
        also=AGENT,
    ),
    watch(
        "environment.history",
        of_agents(lambda made: made.appends),
        ("append", True),
        ("template", False),
        also=AGENT,
    ),
    echoes("environment.episode_tokens", of_episodes("episode_tokens"), 0, 99, also=GUESS),
    watch(
        "workers.timeout_s",
        of_episodes("timeout_s"),
        (None, 30.0),
        (2.5, 2.5),
        what="of an environment",
        also=GUESS,
    ),
    watch(
        "workers.count",
        of_workers("workers"),
        (None, None),
        (1, 1),
        (2, 2),
        what="of an environment",
        also=GUESS,
    ),
    # Two episodes. One has its reward for the first turn; later turns are alike.
    watch("environment.credit", advantages_of_turns, ("episode", 2), ("turn", 3), also=GUESS),
]
