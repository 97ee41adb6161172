"""The view of a watcher: the objects that a configuration makes, and their results."""

import os
from functools import cached_property

import numpy as np
from rich.console import Console

from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.health.stopping import Stop
from dapo_jax.rollout.collector import Position
from dapo_jax.run import train
from dapo_jax.run.build import Run
from dapo_jax.trackers.progress import Progress
from dapo_jax.training.state import TrainState
from tests.run.keys import doubles
from tests.run.keys.watching import made

ROWS = [{"prompt": question, "answer": "2"} for question in ("0+2", "1+1", "2+0", "2+00")]
FILES = {
    "train.jsonl": [
        {"prompt": f"{n}+1", "answer": f"{n + 1}", "question": f"1+{n}", "solution": f"{n + 1}"}
        for n in range(4)
    ],
    "test.jsonl": [{"prompt": "7+1", "answer": "8"}, {"prompt": "8+1", "answer": "9"}],
    "other.jsonl": [{"prompt": f"{n}+5", "answer": f"{n + 5}"} for n in range(3)],
    "twice.jsonl": [{"prompt": prompt, "answer": "5"} for prompt in ("0+5", "1+4", "0+5")],
    "bad.jsonl": [{"prompt": "0+5", "answer": "5"}, {"prompt": "1+5"}, {"prompt": "2+5", "answer": "7"}],
    "sums.jsonl": [
        {"prompt": f"{n}+1", "question": f"{n}+3", "answer": f"{n}+3={n + 3} #### {n + 3}"} for n in range(3)
    ],
    "long.jsonl": [{"prompt": "0+5", "answer": "5"}, {"prompt": "0+1+5", "answer": "6"}],
}  # fmt: skip
BASE = {
    "run_dir": "run",
    "steps": 1,
    "model.source": "model",
    "data.max_prompt_tokens": 4,
    "sampling.slots": 8,
    "sampling.max_response_tokens": 6,
    "reward.overlong.buffer_tokens": 2,
    "dynamic_sampling.prompts_per_wave": 3,
    "batch.prompts_per_step": 2,
    "batch.group_size": 4,
    "batch.groups_per_update": 1,
    "batch.rows_per_microbatch": 8,
    "eval.every_steps": 0,
    "eval.samples_per_prompt": 4,
    "eval.top_p": 1.0,
    "checkpoint.every_steps": 0,
    "log.rollouts_every_steps": 0,
}  # fmt: skip
_BEGUN = {}
"""Configuration -> the arguments of the classes in its run without a step."""
NO_STATE = TrainState(params=None, opt_state=None)


class Look:
    """The objects of one configuration. `engine` and `updates` are doubles of the device programs."""

    def __init__(self, schema, values, received):
        self._schema, self._values, self._received = schema, values, received
        received.clear()

    @cached_property
    def config(self):
        return made(self._schema, {**BASE, **self._values})

    @property
    def engine(self):
        return self._received["engine"]

    @property
    def updates(self):
        return self._received["updates"]

    def run(self, **how):
        """The run, by default on `ROWS`, graded by the configured grader."""
        return Run(self.config, **{"prompts": ROWS, **how})

    def collected(self, run=None, **how):
        """The sampled and graded groups of the first step."""
        run = run or self.run(**how)
        collector = run.sampling.collector(Position())
        for _ in run.sampling.groups(None, collector):
            pass
        run.close()
        return collector.finish()

    def rollouts(self, **how):
        """The rollouts of the first prompt, one for each of `RESPONSES`."""
        return self.collected(**how).sampled[0].rollouts

    def rewards(self, **how):
        return [rollout.reward for rollout in self.rollouts(**how)]

    def texts(self, **how):
        """The prompts of the first wave as the model reads them. Responses of more than 3 tokens are correct."""
        how = {"prompts": None, "reward": by_length, **how}
        return [group.prompt.text for group in self.collected(**how).sampled]

    def minibatches(self, **how):
        run = self.run(**how)
        return run.batches.minibatches(self.collected(run).groups, 1)

    def held_out(self, **how):
        """Dataset of the evaluation -> texts of its prompts."""
        held_out = self.run(**{"prompts": None, **how}).held_out
        return {name: [prompt.text for prompt in prompts] for name, prompts in held_out.items()}

    def evaluated(self):
        """The evaluation of step 7."""
        return self.run(eval_rows=ROWS).sampling.evaluate(None, 7)

    def train(self, *, measured=None, **how):
        """The whole run; `measured` are the metrics of every update."""
        doubles.Updates.measured = measured or {}
        quiet = Progress(self.config.steps, console=Console(quiet=True))
        return train(self.config, **{"prompts": ROWS, "progress": quiet, **how})

    def files(self, place):
        """The names in a folder of the run."""
        folder = f"{self.config.run_dir}/{place}"
        return sorted(os.listdir(folder)) if os.path.isdir(folder) else []

    def received(self, name, **how):
        """The arguments of a class in a run without a step; None if it was not made."""
        if repr(self.config) not in _BEGUN:
            self.train(**how)
            _BEGUN[repr(self.config)] = dict(self._received)
        return _BEGUN[repr(self.config)].get(name)

    def made_of(self, name, **how):
        """The arguments of a class when the objects of a run are made; None if it was not made."""
        self.run(**how).close()
        return self.noted(name)

    def noted(self, name):
        """The last arguments of a class; None if it was not made."""
        return self._received.get(name)

    def started(self):
        run = self.run()
        with Checkpointer("none") as checkpointer:
            return run.start(checkpointer, resume=False, say=print).state

    def stopped(self):
        stop = Stop()
        self.train(stop=stop)
        return stop


def by_length(sample):
    return len(sample.tokens) > 3


def refusal(see):
    """Sees the kind of error that `see` raises; empty without an error."""

    def refused(look):
        try:
            see(look)
        except (ValueError, RuntimeError) as error:
            return type(error).__name__
        return ""

    return refused


def rounded(values):
    return [round(float(value), 4) for value in np.ravel(values)]
