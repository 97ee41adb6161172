"""Measures how many responses per second each grader judges on one core: `python -m benchmarks.grading`.

Each response has 2,000 characters and ends with an answer, which is correct in every second response. A second measurement shows the
cost of hostile responses: a pool grades 1,000 responses. One hangs the grader, one exhausts its memory, and one kills its worker.
"""

import argparse
import os
import signal
import statistics
import time
from contextlib import closing
from pathlib import Path

import numpy as np

from benchmarks import report
from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.rewards import GRADERS, Sample
from dapo_jax.rewards.grading_pool import GradingPool

CHARACTERS = 2000
TIMEOUT_S, WORKERS = 5.0, 2
ENDINGS = {"exact": "={}", "gsm8k": "#### {}"}
"""The form of the answer for graders that do not look for `Answer:`."""


def main() -> None:
    """Runs both measurements, prints the results, and writes them to a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.grading")
    parser.add_argument("--responses", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        everywhere = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(everywhere)})
    rates = {name: _rates(name, arguments.responses, arguments.rounds) for name in GRADERS}
    print(
        report.table(
            ["grader", "responses/s, median (range)"],
            [[name, report.spread(found)] for name, found in rates.items()],
        )
    )
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, everywhere)
    pool = _hostile_pool()
    print(
        f"\n1,000 calls, {WORKERS} workers, limit {TIMEOUT_S:g} s: {pool['wrong']} of 997 wrong; without hostile ones "
        f"{pool['plain_s']:.2f} s, with them {pool['hostile_s']:.2f} s"
    )
    report.write(arguments.out / "grading.json", {"graders": rates, "pool": pool})


def _rates(name: str, count: int, rounds: int) -> list[float]:
    grade = GRADERS[name]
    numbers = np.random.default_rng(0).integers(1000, 10**6, count)
    cases = []
    for place, number in enumerate(numbers):
        ending = "\n" + ENDINGS.get(name, "Answer: {}").format(number)
        text = f"so 3 + {place} is less than that, and thus "
        cases.append(((text * CHARACTERS)[: CHARACTERS - len(ending)] + ending, str(number + place % 2)))
    grade(*cases[0])
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        right = sum(grade(response, answer).correct for response, answer in cases)
        found.append(count / (time.perf_counter() - start))
        if right != (count + 1) // 2:
            raise RuntimeError(f"{name} accepted {right} of {count} responses, but every second is correct")
    return found


def hostile(sample: Sample) -> bool:
    """Reward function for the measurement with hostile responses. It runs in a worker."""
    if sample.response == "hang":
        time.sleep(10**6)
    if sample.response == "eat":
        kept = []
        while True:
            kept.append(bytearray(1 << 24))
    if sample.response == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return sample.response == sample.answer


def _hostile_pool() -> dict[str, float]:
    def seconds(responses: list[str]) -> tuple[float, int]:
        samples = [_sample(response, str(place)) for place, response in enumerate(responses)]
        with closing(
            GradingPool("benchmarks.grading:hostile", workers=WORKERS, timeout_s=TIMEOUT_S, memory_mb=512)
        ) as pool:
            pool.grade(samples[:8])  # the workers are there
            start = time.perf_counter()
            verdicts = pool.grade(samples)
            taken = time.perf_counter() - start
        usual = [verdict for verdict, text in zip(verdicts, responses, strict=True) if text.isdigit()]
        return taken, sum(not verdict.correct for verdict in usual)

    plain = [str(place) for place in range(1000)]
    disturbed = plain.copy()
    disturbed[100], disturbed[500], disturbed[900] = "hang", "eat", "die"
    quiet = statistics.median(seconds(plain)[0] for _ in range(3))
    hostile_s, wrong = seconds(disturbed)
    return {"plain_s": quiet, "hostile_s": hostile_s, "wrong": wrong}


def _sample(response: str, answer: str) -> Sample:
    tokens = np.zeros(8, np.int32)
    prompt = Prompt(ordinal=0, tokens=tokens, text="", answer=answer)
    return Sample(prompt=prompt, response=response, tokens=tokens, finish_reason="stop")


if __name__ == "__main__":
    main()
