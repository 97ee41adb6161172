"""Measures how far rewards of pure noise move a policy, with and without score centering: `python -m benchmarks.center`.

The policy of the quickstart is trained on rewards that do not depend on the response: 1 with a probability of 1/4, else -1, without a baseline. So the mean advantage is -1/2, and nothing can be learned. The drift
is KL(policy || initial policy) in nats per token, estimated from the sampled tokens of the last step (`policy/kl_ref_k1`, with a penalty of 1e-9 that only loads the reference). The sampler differs from the policy in two ways: weights in
8 bits, and responses in flight that are several steps old. A step has one update, so that the clip has no part in the
result. Each is trained without importance weights, which a normal run refuses, and with weights of at most 2.

`--task picked_sums` uses the longer task of the second study instead, with responses of up to 128 tokens. `--rewards real` trains on the task's own verdicts with the same
keys, and prints the accuracy on held-out prompts after the last step instead of the drift.

Expectation, written before the first run: without weights, the policy drifts further than with centering for both samplers, because a negative mean advantage pushes it away from the sampler. With
weights, the difference is smaller than the spread over the seeds. Noise itself moves the policy in all ways, so no drift is 0. Real rewards, written before their first run:
no difference in accuracy that is larger than the spread over the seeds, except that in flight without weights a policy that is pushed away from its sampler may lose accuracy.
"""

import argparse
import csv
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.report import table
from benchmarks.stale_rollouts import WithoutWeights
from dapo_jax import train
from dapo_jax.config import TrainConfig, load_config
from dapo_jax.trackers import read_metrics

HEADS = 8
"""Value of `loss.center`. The quickstart's vocabulary has 17 tokens."""

COMMON = (
    "dynamic_sampling.enabled=false", "dynamic_sampling.surplus=discard", "advantage.baseline=none", "advantage.scale=none", "reward.overlong.enabled=false",
    "loss.kl_coef=1e-9", "loss.old_logprobs=trainer", "eval.every_steps=0", "eval.samples_per_prompt=1", "checkpoint.every_steps=0", "checkpoint.keep_best=false",
    "log.rollouts_every_steps=0", "batch.prompts_per_step=8", "batch.group_size=8", "batch.groups_per_update=8", "batch.rows_per_microbatch=16",
    "optimizer.warmup_steps=0",
)  # fmt: skip
TASKS = {"quickstart": "quickstart", "picked_sums": "configs/study/picked_sums.yaml"}
EVALUATED = {"noise": 8, "real": 500}
"""Held-out prompts of an evaluation, by kind of rewards. Noise cannot improve accuracy."""
SAMPLERS = {
    "8 bits": ("sampling.weight_dtype=int8",),
    "in flight": ("rollout.in_flight=64", "rollout.round_tokens=4"),
}
COLUMNS = ("drift", "entropy", "push", "mismatch", "age", "accuracy")
METRICS = ("policy/kl_ref_k1", "policy/entropy", "center/push", "sync/sampler_trainer_kl", "rollout/age_mean")


class Way(NamedTuple):
    """One way to train: how the sampler differs, whether there are importance weights, and whether the objective is centered."""

    sampler: str
    weighted: bool
    centered: bool


WAYS = [
    Way(sampler, weighted, centered)
    for weighted in (False, True)
    for sampler in SAMPLERS
    for centered in (False, True)
]


class Unweighted(WithoutWeights):
    """A configuration without importance weights, which is not refused."""

    def check_together(self) -> None:
        """Accepts all keys. They were checked with importance weights."""


class Experiment(NamedTuple):
    """What all runs have in common: the folder of the runs, the task, the kind of rewards, and the number of steps."""

    runs: Path
    task: str
    rewards: str
    steps: int


def configuration(way: Way, experiment: Experiment, seed: int) -> TrainConfig:
    """Returns the configuration of one run."""
    name = f"{way.sampler}_{'weighted' if way.weighted else 'plain'}_{'centered' if way.centered else 'not'}_{seed}"
    changes = [
        *COMMON,
        *SAMPLERS[way.sampler],
        "loss.correction=truncate",
        f"loss.center={HEADS * way.centered}",
        f"eval.prompts={EVALUATED[experiment.rewards]}",
        f"steps={experiment.steps}",
        f"seed={seed}",
        f"run_dir={experiment.runs / name.replace(' ', '_')}",
    ]
    config = load_config(TASKS[experiment.task], changes)
    if way.weighted:
        return config
    return Unweighted(**{field.name: getattr(config, field.name) for field in fields(config)})


def measured(way: Way, experiment: Experiment, seed: int) -> list[float]:
    """Trains a run, if it does not exist, and returns the `METRICS` and the accuracy of its last step, NaN if it has none."""
    config, noise = configuration(way, experiment, seed), np.random.default_rng(seed)
    path = Path(config.run_dir)
    if not (path / "model").exists():
        noisy = (
            {"reward": lambda sample: bool(noise.random() < 0.25)} if experiment.rewards == "noise" else {}
        )
        train(config, **noisy, overwrite=path.exists())
    last: dict[str, Any] = list(read_metrics(path / "metrics.jsonl"))[-1]
    [accuracy] = [
        value for name, value in last.items() if name.startswith("eval/") and name.endswith("/avg@1")
    ]
    return [*(float(last.get(metric, "nan")) for metric in METRICS), accuracy]


def summary(rows: list[list[str]], column: str) -> str:
    """Returns a table with the mean and the 95% interval of a column for each sampler and correction, and of the difference that centering makes, by seed."""
    values = {(way, seed): float(row[COLUMNS.index(column)]) for way, seed, *row in rows}
    lines = []
    for way in (way for way in WAYS if not way.centered):
        pairs = [
            (values[str(way), seed], values[str(way._replace(centered=True)), seed])
            for name, seed in values
            if name == str(way) and (str(way._replace(centered=True)), seed) in values
        ]
        if len(pairs) > 1:
            plain, centered = np.array(pairs).T
            cells = [interval(each) for each in (plain, centered, centered - plain)]
            lines.append([way.sampler, "at most 2" if way.weighted else "none", str(len(pairs)), *cells])
    return table(["sampler", "weights", "seeds", column, f"{column}, centered", "difference"], lines)


T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""97.5% quantiles of Student's t distribution for 1 to 10 degrees of freedom."""


def interval(values: np.ndarray) -> str:
    """Returns the mean and its 95% interval by Student's t distribution, which assumes normal values."""
    half = T95[min(len(values) - 1, len(T95)) - 1] * values.std(ddof=1) / np.sqrt(len(values))
    return f"{values.mean():.4f} +- {half:.4f}"


def main() -> None:
    """Trains the runs that are missing, writes a CSV file after each run, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.center")
    parser.add_argument("--runs", type=Path, default=Path("runs/center"), help="folder of the runs")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(8)))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--task", choices=TASKS, default="quickstart")
    parser.add_argument("--rewards", choices=EVALUATED, default="noise")
    parser.add_argument("--out", type=Path, default=Path("runs/center/drift.csv"))
    arguments = parser.parse_args()
    experiment = Experiment(arguments.runs, arguments.task, arguments.rewards, arguments.steps)
    rows = list[list[str]]()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for weighted in (False, True):
        for seed in arguments.seeds:
            for way in (way for way in WAYS if way.weighted == weighted):
                values = measured(way, experiment, seed)
                rows.append([str(way), str(seed), *(f"{value:.5g}" for value in values)])
                with arguments.out.open("w", newline="") as file:
                    csv.writer(file, lineterminator="\n").writerows([["way", "seed", *COLUMNS], *rows])
    print(summary(rows, "drift" if arguments.rewards == "noise" else "accuracy"))


if __name__ == "__main__":
    main()
