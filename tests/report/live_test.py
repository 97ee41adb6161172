"""The served page in a browser: it is kept current, and the reader's position stays."""

import json
import random

import pytest

from tests.report.chromium import Shown, complaints, missing
from tests.report.made import (
    metrics_line,
    problem_line,
    rollout_line,
    write_evaluation,
    write_rollouts,
    write_run,
)
from tests.report.server_test import served

Keys = pytest.importorskip("selenium.webdriver.common.keys", reason=missing() or None).Keys

# Slow: each test starts a server and drives Chromium; server_test.py tests the answers, page_test.py opens one page.
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "there is a browser")]


@pytest.fixture
def run(tmp_path):
    folder = write_run(tmp_path / "run", steps=30)
    write_evaluation(folder, 0, [problem_line(place, 3) for place in range(4)])
    return folder


def opened(driver, server):
    driver.get("about:blank")  # an earlier page would continue to ask
    complaints(driver)
    driver.get(f"http://127.0.0.1:{server.server_port}/")
    shown = Shown(driver)
    shown.until(lambda: shown.one("html").get_attribute("data-ready") == "true")
    return shown


def add_step(run, step):
    rng = random.Random(step)
    write_rollouts(run, step, [rollout_line(step, 900 + step, index, rng=rng) for index in range(4)])
    write_evaluation(run, step, [problem_line(place, 6) for place in range(4)])
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics_line(step, rng)) + "\n")


def test_new_data_arrives_and_the_position_stays(driver, run):
    with served(run) as server:
        shown = opened(driver, server)
        shown.until(lambda: "30 of 30" in shown.one(".summary").text)
        shown.click('[data-series="rollout/accuracy"]')
        plot = '[data-title="Entropy"] svg[role=img]'
        driver.execute_script("arguments[0].scrollIntoView(); arguments[0].focus()", shown.one(plot))
        shown.press(*[Keys.ARROW_RIGHT] * 3)
        before = driver.execute_script("return scrollY"), shown.one('[data-title="Entropy"] .where').text
        add_step(run, 31)
        shown.until(lambda: "31 of 30" in shown.one(".summary").text)
        assert (
            driver.execute_script("return scrollY"),
            shown.one('[data-title="Entropy"] .where').text,
        ) == before
        assert driver.execute_script("return document.activeElement === arguments[0]", shown.one(plot))
        assert shown.one('[data-series="rollout/accuracy"]').get_attribute("aria-pressed") == "false"
        assert complaints(driver) == []


def test_the_open_group_stays_and_new_ones_are_listed(driver, run):
    with served(run) as server:
        shown = opened(driver, server)
        shown.click("#tab-rollouts")
        shown.all("#rollouts .row")[2].click()
        shown.until(lambda: shown.one("#rollouts .heading h2").text == "Step 2")
        prompt = shown.one("#rollouts .question pre").text
        shown.one("#search").send_keys("what is")
        shown.until(lambda: shown.status().startswith("240 responses in 60 groups with"))
        driver.execute_script("document.querySelector('#rollouts .groups').scrollTop = 700")
        add_step(run, 31)
        shown.until(lambda: shown.status().startswith("244 responses in 61 groups with"))
        assert shown.one("#rollouts .question pre").text == prompt
        assert driver.execute_script("return document.querySelector('#rollouts .groups').scrollTop") == 700
        assert driver.execute_script("return document.activeElement.id") == "search"
        shown.click("#tab-evaluations")
        shown.until(lambda: len(shown.all("#evaluations .bar")) == 2)
        assert complaints(driver) == []


def test_the_page_shows_when_its_server_has_ended(driver, run):
    with served(run) as server:
        shown = opened(driver, server)
        shown.until(lambda: shown.one("#made").text.startswith("kept current"))
    shown.until(lambda: "has ended" in shown.one("#made").text)
    assert shown.all('[data-title="Entropy"]')
    complaints(driver)
