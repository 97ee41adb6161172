"""The browser of this folder's tests, and a page of two runs."""

import random

import pytest

from dapo_jax.config import LossConfig
from dapo_jax.report import report
from dapo_jax.trackers.run_status import write_status
from tests.report.chromium import Shown, chromium, complaints, opened
from tests.report.made import HOSTILE, problem_line, rollout_line, write_evaluation, write_rollouts, write_run


def line(step, ordinal, index, *, rng):
    """Half of the responses are correct; one contains the word walrus."""
    text = f"the walrus said {HOSTILE}" if (step, index) == (7, 1) else None
    row = rollout_line(
        step, ordinal, index, rng=rng, response=text and text.replace("\u2028", " "), correct=index % 2 == 0
    )
    row["ratios"][2] = 1.3
    return row


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Two runs: the first with flipped responses and hostile texts, the second with another clip."""
    folder = tmp_path_factory.mktemp("runs")
    first = write_run(folder / "first", steps=12, line=line)
    asked = {"prompt": f"why? {HOSTILE}", "response": "no", "answer": HOSTILE}
    for step, right in ((13, 0), (14, 3)):
        rows = [
            rollout_line(step, 99, i, rng=random.Random(i), **asked, correct=i < right, advantage=9.0 + i)
            for i in range(4)
        ]
        write_rollouts(first, step, rows)
    second = write_run(folder / "second", steps=8, seed=1, line=line, loss=LossConfig(clip_ratio_high=0.2))
    for step, rights in ((0, (0, 5, 8)), (5, (4, 5, 8)), (10, (7, 2, 8))):
        hostile = {"prompt": f"which? {HOSTILE}", "answer": HOSTILE, "response": f"{HOSTILE} a heron"}
        lines = [problem_line(place, right) for place, right in enumerate(rights[:2])]
        write_evaluation(first, step, [*lines, problem_line(2, rights[2], kept=2, **hostile)])
    write_evaluation(second, 4, [problem_line(1, 1, 4), problem_line(0, 3, 4)])
    write_status(second, "failed", HOSTILE)
    return report(first, second).save(folder / "report.html")


@pytest.fixture
def shown(driver, page):
    """The open page; the console must be empty when the test ends."""
    driver.get("about:blank")
    complaints(driver)
    opened(driver, page)
    yield Shown(driver)
    assert complaints(driver) == []
