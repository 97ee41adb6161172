"""Plans a run with sample workers: the seconds of each side in a step, and which side waits for the other."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from dapo_jax.config import ConfigError, ParallelConfig, TrainConfig
from dapo_jax.config.loading import replaced
from dapo_jax.plan.plan import Plan, plan
from dapo_jax.plan.topologies import Topology, devices_of, parse
from dapo_jax.plan.workload import Assumptions, Workload, workload_of
from dapo_jax.rollout.virtual_clock import ClockSizes, ResponseId, VirtualClock

_STEPS = 24
"""Number of simulated steps. The first half is not counted, because long responses are still in flight then."""

_GROUPS = 16
"""Minimum number of simulated groups in flight and in a step, if the run has as many."""


@dataclass(frozen=True)
class SplitStep:
    """The mean step with a value of `rollout.weight_rounds`. The share of old tokens is about the share of the rounds that the old weights sample during the update."""

    weight_rounds: int
    seconds: float
    samplers_wait_s: float
    trainer_waits_s: float
    earlier_frac: float


@dataclass(frozen=True, kw_only=True)
class Split:
    """The mean step of a run with sample workers: the rounds that it needs, its seconds on each side, and the suggested `rollout.weight_rounds` (0 if they save no time)."""

    weight_bytes: int
    rounds: float
    sampling_s: float
    update_s: float
    transfer_s: float
    suggested: int
    steps: list[SplitStep]
    """The step with 0, the suggested and the configured number of further rounds."""


def parse_workers(name: str, trainer: Topology) -> tuple[Topology, int]:
    """Returns the devices of a sample worker and the number of workers, from TYPE or TYPE:COUNT. Raises ConfigError if a worker has several hosts, or the processes
    of `trainer` cannot have equal numbers of workers."""
    kind, _, number = name.rpartition(":")
    try:
        worker, count = parse(name, option="--samplers"), 1
    except ConfigError:
        if not number.isdigit() or int(number) < 1:
            raise
        worker, count = parse(kind, option="--samplers"), int(number)
    if worker.hosts > 1:
        remedy = f"write {worker.one_host.name}:{count * worker.hosts}"
        raise ConfigError(f"--samplers {name}: found {worker.hosts} hosts in a worker, needs 1: {remedy}")
    if count % trainer.hosts:
        needs = f"a multiple of {trainer.hosts}, one for each training process on {trainer.name}"
        raise ConfigError(f"--samplers {name}: found {count} workers, needs {needs}")
    return worker, count


def with_samplers(config: TrainConfig, each: int) -> TrainConfig:
    """Returns the configuration with this number of sample workers for each training process."""
    address = config.cluster.address or "auto"
    return replaced(config, {"cluster": replace(config.cluster, address=address, samplers=each)})


def worker_plan(trainer: Plan, topology: Topology, count: int, **options: Any) -> Plan:
    """Plans one of `count` sample workers on `topology`, for the run that `trainer` plans. For `options`, see `plan`."""
    parallel = ParallelConfig(sampler_tensor=trainer.sizes.sampler["tensor"])
    changes = {"parallel": parallel, "batch.rows_per_microbatch": len(devices_of(topology))}
    return plan(replaced(trainer.config, changes), topology=topology, samplers=count, **options)


def split(trainer: Plan, worker: Plan, assumed: Assumptions) -> Split:
    """Simulates steps with the run's virtual clock. All rounds of a step are assumed to take the same time, including prefills."""
    config, alone = trainer.config, trainer.sizes.samplers == 1
    weight_bytes = worker.resident.weights * worker.sizes.sampler["tensor"]
    sampling_s = worker.step_s / assumed.sampling_share
    update_s = trainer.step_s / assumed.update_share
    transfer_s = weight_bytes * 8 / (assumed.transfer_gbit_s * 1e9)
    rounds = own_rounds(config, assumed, 0)
    round_s = sampling_s / rounds
    # If there are several training processes, their further rounds precede the updates.
    suggested = min(math.ceil(update_s / round_s), int(rounds)) if alone else 0
    steps = list[SplitStep]()
    for further in sorted({0, suggested, config.rollout.weight_rounds}):
        own, more_s = own_rounds(config, assumed, further), further * round_s
        seconds = transfer_s + own * round_s + (max(update_s, more_s) if alone else update_s + more_s)
        waits = seconds - own * round_s - more_s, seconds - update_s
        steps.append(SplitStep(further, seconds, *waits, further / (own + further)))
    times = {"sampling_s": sampling_s, "update_s": update_s, "transfer_s": transfer_s}
    return Split(weight_bytes=weight_bytes, rounds=rounds, suggested=suggested, steps=steps, **times)


def own_rounds(config: TrainConfig, assumed: Assumptions, weight_rounds: int) -> float:
    """Returns the mean number of rounds until the groups of a step are chosen, if `weight_rounds` further rounds follow in each step."""
    batch, rollout, work = config.batch, config.rollout, workload_of(config, assumed)
    groups, needed = rollout.in_flight // batch.group_size, batch.prompts_per_step
    # With fewer groups in the same proportion, a step has as many rounds.
    common, most = math.gcd(groups, needed), max(1, min(groups, needed) // _GROUPS)
    scale = max(size for size in range(1, common + 1) if common % size == 0 and size <= most)
    sizes = ClockSizes(
        in_flight=groups // scale * batch.group_size,
        samples_per_prompt=batch.group_size,
        needed=needed // scale,
        answer_rounds=rollout.answer_rounds,
        max_staleness=rollout.max_staleness,
    )
    clock, lengths, left = VirtualClock(sizes), _lengths(config, assumed, work), dict[ResponseId, int]()
    share, counts = needed / work.prompts, list[int]()

    def sample() -> None:
        left.update((response, next(lengths)) for response in clock.start())
        ended = [response for response, rounds in left.items() if rounds == 1]
        for response in left:
            left[response] -= 1
        for response in ended:
            del left[response]
        for ordinal in clock.end_round(ended):
            clock.end_group(ordinal, informative=int((ordinal + 1) * share) > int(ordinal * share))

    for _ in range(_STEPS):
        before = clock.rounds
        while not clock.step_ends:
            sample()
        counts.append(clock.rounds - before)
        clock.choose()
        for _ in range(weight_rounds):
            sample()
        clock.end_step()
    return fmean(counts[_STEPS // 2 :])


def _lengths(config: TrainConfig, assumed: Assumptions, work: Workload) -> Iterator[int]:
    """Yields the number of rounds of each response. Lengths have a gamma distribution. An answer of an environment takes `rollout.answer_rounds`."""
    turns = math.ceil(assumed.turns or config.environment.max_turns) if config.environment.source else 1
    mean, variance, random = work.response_mean, work.response_std**2, np.random.default_rng(0)
    while True:
        tokens = random.gamma(mean**2 / variance, variance / mean) if variance else mean
        tokens = min(max(tokens, 1.0), config.sampling.max_response_tokens)
        each = math.ceil(tokens / (turns * config.rollout.round_tokens))
        yield turns * each + (turns - 1) * config.rollout.answer_rounds
