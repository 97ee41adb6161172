"""Measures how long Chromium takes to open the report of a run with 1,000 steps, 64 rollouts per step, and an evaluation every 20 steps.

    python -m benchmarks.report_page [--steps 1000] [--rollouts 64] [--repeat 5] [--keep FOLDER]

Prints the time to create the page in seconds, and its size in bytes. Also prints the milliseconds from the start of the navigation until
the curves and the first rollouts are shown, for several new browsers, and their median.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from dapo_jax.report import report
from tests.report.chromium import chromium, complaints, missing, opened
from tests.report.made import problem_line, write_evaluation, write_run


def main() -> int:
    """Writes a run, creates its page, and opens the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rollouts", type=int, default=64, help="rollouts per step, in groups of 16")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--keep", metavar="FOLDER", help="folder that keeps the run and the page")
    arguments = parser.parse_args()
    if reason := missing():
        print(reason, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.keep or temporary)
        run = write_run(folder / "run", steps=arguments.steps, groups=arguments.rollouts // 16, group_size=16)
        for step in range(0, arguments.steps + 1, 20):
            problems = [problem_line(place, (place + step // 20) % 17, 16, kept=2) for place in range(30)]
            write_evaluation(run, step, problems)
        began = time.perf_counter()
        page = report(run).save(folder / "report.html")
        print(f"made in {time.perf_counter() - began:.1f} s, {page.stat().st_size / 1e6:.1f} MB")
        opening = []
        for number in range(arguments.repeat):
            with tempfile.TemporaryDirectory() as profile, chromium(profile) as driver:
                opening.append(opened(driver, Path(page)))
                complained = complaints(driver)
            print(f"opening {number + 1}: {opening[-1]:.0f} ms", *complained, sep="\n    ")
        print(f"median: {statistics.median(opening):.0f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
