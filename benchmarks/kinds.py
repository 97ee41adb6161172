"""Compares the log-probabilities of sampler and trainer for tiny presets: `python -m benchmarks.kinds tiny tiny-moe`."""

import argparse
import tempfile
from contextlib import closing
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.config.loading import replaced
from dapo_jax.dapo.losses import k3
from dapo_jax.doctor.check import Found
from dapo_jax.doctor.subject import STAND_IN, SUMS, Subject
from dapo_jax.doctor.tiny_step import PROMPTS, agreement, half_are_right, reduced
from dapo_jax.models.presets import PRESETS
from dapo_jax.rollout.collector import Position
from dapo_jax.run.build import Run


def main() -> None:
    """Prints the name of each preset, and the result of its comparison."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.kinds")
    parser.add_argument("presets", nargs="+", choices=[name for name in PRESETS if name.startswith("tiny")])
    for preset in parser.parse_args().presets:
        found = compared(preset)
        print(f"{preset}: {'' if found.state == 'ok' else f'{found.state}: '}{found.message}", flush=True)


def compared(preset: str) -> Found:
    """Samples a few responses with random weights, and says how far the trainer's log-probabilities are from the sampler's."""
    config = replaced(STAND_IN, {"model.source": f"preset:{preset}"})
    prompts = Subject(config, rows=SUMS).prompts(PROMPTS)
    rows = [dict(prompt.row) for prompt in prompts]
    with (
        tempfile.TemporaryDirectory() as folder,
        Checkpointer(folder, keep=1) as checkpointer,
        closing(Run(reduced(config, prompts), reward=half_are_right, prompts=rows, eval_rows=rows)) as run,
    ):
        state = run.start(checkpointer, resume=False, say=lambda _: None).state
        collector = run.sampling.collector(Position())
        list(run.sampling.groups(run.sampling.transfer(state.params), collector))
        score = partial(run.updater.logprobs, state)
        updates = run.batches.minibatches(collector.choose().groups, 1, score)
        microbatches = [microbatch for update in updates for microbatch in update]
        sampled, mask = (np.stack([getattr(one, name) for one in microbatches]) for name in ("sampler_logprobs", "mask"))  # fmt: skip
        difference = jnp.asarray((score(microbatches) - sampled)[mask])
    return agreement(
        kl=float(k3(difference).mean()), largest=float(abs(difference).max()),
        compute_dtype=config.model.compute_dtype, platform=jax.default_backend(),
    )  # fmt: skip


if __name__ == "__main__":
    main()
