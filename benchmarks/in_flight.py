"""Compares the time to sample with rollouts in flight and in waves, for responses of very unequal length.

`python -m benchmarks.in_flight MODEL`. The lengths of all responses (log-normal) and their verdicts (half of the groups are informative) are fixed in advance,
so both ways sample the same responses. In waves, a step samples three times the prompts that it trains on, as in the paper's recipe. It waits for the longest
response, and discards surplus informative groups. In flight, a step samples in rounds and discards nothing. It re-prefills unfinished responses, as training
with new weights requires. Nothing is trained here, so only sampling is measured.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import report
from benchmarks.long_tail import LimitedEngine
from benchmarks.workload import Workload
from dapo_jax.dapo.dynamic_sampling import Collected
from dapo_jax.dapo.rollouts import Group, Prompt, Response, Rollout, Verdict
from dapo_jax.models.folder import load_model
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.weights import WeightTransfer
from dapo_jax.rollout.collector import Collector, Position
from dapo_jax.rollout.virtual_clock import ClockSizes
from dapo_jax.sampling.continuous_batching import Sampler
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.sampling.engine_spec import EngineSpec
from dapo_jax.sampling.round_sampler import RoundSampler


@dataclass
class Way:
    """One of the two ways to sample, and its measurements."""

    name: str
    step: Callable[[], Collected]
    """Samples the groups of one step."""
    engine: LimitedEngine
    seconds: list[float] = field(default_factory=list)
    steps: int = 0
    """Number of decode steps."""
    live: int = 0
    """Number of active slots, summed over all decode steps."""
    drawn: int = 0
    trained: int = 0
    """Number of tokens in the groups that a step would train on."""
    discarded: int = 0
    """Number of tokens in informative groups that were discarded."""
    ages: list[int] = field(default_factory=list)

    def run(self) -> None:
        """Runs and measures one step."""
        self.engine.steps = self.engine.live_slot_steps = 0
        began = time.perf_counter()
        found = self.step()
        self.seconds.append(time.perf_counter() - began)
        self.steps += self.engine.steps
        self.live += self.engine.live_slot_steps
        self.drawn += self.engine.live_slot_steps
        self.trained += _tokens(found.groups)
        self.ages += [found.version - group.oldest for group in found.groups]
        if found.drawn_tokens is None:
            informative = [group for group in found.sampled if len({r.correct for r in group.rollouts}) == 2]
            self.discarded += _tokens(informative) - _tokens(found.groups)


class Task:
    """The prompts, response lengths and verdicts, indexed by ordinal."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self._config, params = load_model(str(arguments.model.expanduser().resolve()))
        self._mesh = make_mesh()
        self.weights = WeightTransfer(params, self._mesh, dtype=arguments.dtype)(params)
        count = arguments.most_prompts
        rng = np.random.default_rng(arguments.seed)
        shape = (count, arguments.samples)
        # Responses to one prompt have similar lengths: half of the variance of the log-lengths is between prompts.
        between = rng.normal(0, 1, (count, 1))
        logs = np.log(arguments.median_tokens) + arguments.sigma * (
            between + rng.normal(0, 1, shape)
        ) / np.sqrt(2)
        self.lengths = np.clip(np.exp(logs).round(), 1, arguments.max_tokens).astype(np.int32)
        self.informative = rng.random(count) < arguments.informative
        workload = Workload(
            model=str(arguments.model.expanduser().resolve()),
            prompts=count,
            samples=arguments.samples,
            prompt_tokens=arguments.prompt_tokens,
        )
        self.prompts = [
            Prompt(ordinal=ordinal, tokens=np.array(ids, np.int32), text="", answer="")
            for ordinal, ids in enumerate(workload.prompt_ids())
        ]

    def engine(self, **cache: int) -> LimitedEngine:
        """Returns an engine that counts its steps. Without arguments, its cache has the platform's default form."""
        arguments = self.arguments
        engine = DecoderEngine(
            self._config,
            self._mesh,
            EngineSpec(
                slots=arguments.slots,
                capacity=arguments.prompt_tokens + arguments.max_tokens,
                steps_per_call=arguments.steps_per_call,
                stop_ids=(),  # only the limits end a response
                compute_dtype=arguments.dtype,
                **cache,
            ),
        )
        return LimitedEngine(engine, self.lengths)

    def group(self, ordinal: int, responses: tuple[Response, ...]) -> Group:
        """Returns the group with its verdicts. In an informative group, only the first response is correct."""
        rollouts = tuple(
            Rollout(
                response=response,
                text="",
                verdict=Verdict(correct=bool(self.informative[ordinal]) and index == 0),
                reward=0.0,
            )
            for index, response in enumerate(responses)
        )
        return Group(prompt=self.prompts[ordinal], rollouts=rollouts)


def waves(task: Task, engine: LimitedEngine) -> Way:
    """Samples waves of prompts in each step, until every response has ended."""
    arguments = task.arguments
    sizes = ClockSizes(
        in_flight=3 * arguments.groups * arguments.samples,
        samples_per_prompt=arguments.samples,
        needed=arguments.groups,
        answer_rounds=0,
        waves=True,
    )
    position = Position()

    def step() -> Collected:
        nonlocal position
        collector = Collector.after(position, sizes, keeps_surplus=False)
        waiting: list[int] = []

        def draw(count: int) -> list[Prompt]:
            if not waiting:
                waiting.extend(one.ordinal for one in collector.start() if one.index == 0)
            taken, waiting[:] = waiting[:count], waiting[count:]
            return [task.prompts[ordinal] for ordinal in taken]

        sampled = Sampler(engine, prefill_prompts=max(1, arguments.slots // arguments.samples)).sample(
            task.weights,
            draw,
            key=jax.random.key(0),
            decoding=decoding(),
            samples_per_prompt=arguments.samples,
            max_response_tokens=arguments.max_tokens,
            version=position.step,
        )
        for prompt, responses in sampled:
            collector.end_group(task.group(prompt.ordinal, responses))
        found = collector.finish()
        position = Position(step=position.step + 1, cursor=found.cursor)
        return found

    return Way("waves", step, engine)


def in_flight(task: Task, engine: LimitedEngine) -> Way:
    """Keeps rollouts in flight, so that each step continues the unfinished responses of the last step."""
    arguments = task.arguments
    sizes = ClockSizes(
        in_flight=arguments.in_flight, samples_per_prompt=arguments.samples, needed=arguments.groups
    )
    position = Position()

    def step() -> Collected:
        nonlocal position
        collector = Collector.after(position, sizes, prompt_at=task.prompts.__getitem__)
        sampler: RoundSampler | None = None
        while collector.goes_on:
            sampler = sampler or RoundSampler(
                engine,
                task.weights,
                key=jax.random.key(0),
                decoding=decoding(),
                max_response_tokens=arguments.max_tokens,
            )
            collector.start()
            ids = list(collector.clock.in_flight())
            drawn = sampler.draw([collector.responses[one] for one in ids], arguments.round_tokens)
            collector.take(dict(zip(ids, drawn, strict=True)), ids)
            _, _, due = collector.end_round()
            for ordinal in due:
                collector.end_group(task.group(ordinal, collector.responses_to(ordinal)))
        found = collector.finish()
        position = Position(
            step=position.step + 1,
            cursor=found.cursor,
            carry=found.carry,
            in_flight=collector.going_on(),
        )
        return found

    return Way("in flight", step, engine)


def main() -> None:
    """Measures both ways alternately, step by step, prints the results, and writes them to a JSON file."""
    arguments = _arguments()
    task = Task(arguments)
    engines = task.engine(), task.engine(page_tokens=arguments.page_tokens, in_flight=arguments.in_flight)
    # This pass compiles the programs, and its measurements are discarded.
    for way in (waves(task, engines[0]), in_flight(task, engines[1])):
        way.run()
        way.run()
        way.engine.again = 0
    ways = waves(task, engines[0]), in_flight(task, engines[1])
    for round_ in range(arguments.steps):
        for way in ways:
            way.run()
            print(f"step {round_ + 1}, {way.name}: {way.seconds[-1]:.1f} s", flush=True)
    _print(arguments, ways)
    options = {name: str(value) for name, value in vars(arguments).items()}
    systems = {way.name: _row(way, arguments) for way in ways}
    report.write(arguments.out / "in_flight.json", {"options": options, "systems": systems})


def _row(way: Way, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the results to write for one way."""
    seconds = sum(way.seconds)
    return {
        "seconds": way.seconds,
        "groups_an_hour": 3600 * arguments.groups * len(way.seconds) / seconds,
        "idle_slots": 1 - way.live / (way.steps * arguments.slots),
        "decoder_steps": way.steps,
        "tokens_a_step": way.drawn / len(way.seconds),
        "discarded_frac": way.discarded / way.drawn,
        "age_mean": float(np.mean(way.ages)),
        "age_p95": float(np.percentile(way.ages, 95)),
        "age_max": max(way.ages),
        "read_again": way.engine.again,
    }


def _print(arguments: argparse.Namespace, ways: tuple[Way, Way]) -> None:
    rows = {way.name: _row(way, arguments) for way in ways}
    first = rows["waves"]["groups_an_hour"]
    header = [
        "rollouts", "s a step", "groups an hour", "of waves", "idle slots", "decoder steps", "tokens a step", "thrown away", "age: mean, p95, max",
    ]  # fmt: skip
    print()
    print(
        report.table(
            header,
            [
                [
                    name,
                    f"{sum(row['seconds']) / len(row['seconds']):.1f}",
                    f"{row['groups_an_hour']:.0f}",
                    f"{row['groups_an_hour'] / first:.2f}",
                    f"{row['idle_slots']:.1%}",
                    str(row["decoder_steps"]),
                    f"{row['tokens_a_step']:,.0f}",
                    f"{row['discarded_frac']:.1%}",
                    f"{row['age_mean']:.2f}, {row['age_p95']:.0f}, {row['age_max']}",
                ]
                for name, row in rows.items()
            ],
        )
    )
    print(
        f"\n{arguments.steps} steps of {arguments.groups} groups of {arguments.samples}; lengths log-normal around {arguments.median_tokens:.0f} tokens (sigma "
        f"{arguments.sigma}, half of its square between prompts), at most {arguments.max_tokens}; {arguments.informative:.0%} of the groups informative; "
        f"{arguments.slots} slots, {arguments.in_flight} in flight, rounds of {arguments.round_tokens}, {arguments.dtype}"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.in_flight")
    parser.add_argument("model", type=Path, help="a folder in the Hugging Face layout")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--groups", type=int, default=4, help="informative groups that a step trains on")
    parser.add_argument("--samples", type=int, default=8, help="responses to each prompt")
    parser.add_argument(
        "--informative", type=float, default=0.5, help="share of the groups that are informative"
    )
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--in-flight", type=int, default=32)
    parser.add_argument("--round-tokens", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--median-tokens", type=float, default=64.0, help="median length of a response")
    parser.add_argument(
        "--sigma", type=float, default=0.8, help="standard deviation of the logarithm of the length"
    )
    parser.add_argument("--max-tokens", type=int, default=448, help="limit on a response's length")
    parser.add_argument("--steps-per-call", type=int, default=16)
    parser.add_argument("--page-tokens", type=int, default=64)
    parser.add_argument("--most-prompts", type=int, default=512, help="number of prompts available")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0, help="seed of lengths and verdicts")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    return parser.parse_args()


def _tokens(groups: Any) -> int:
    return sum(rollout.response_tokens for group in groups for rollout in group.rollouts)


if __name__ == "__main__":
    main()
