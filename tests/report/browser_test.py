"""The page in a browser: what is clicked does what it says, and the console stays empty."""

import json
import random
import re
import subprocess
import sys

import pytest

from dapo_jax.config import LossConfig
from dapo_jax.report import report
from tests.report.chromium import chromium, complaints, missing, opened
from tests.report.made import rollout_line, write_metrics, write_rollouts, write_run
from tests.structure_test import ROOT

Keys = pytest.importorskip("selenium.webdriver.common.keys", reason=missing() or None).Keys

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a browser")

HOSTILE = "</script><img src=x onerror=alert(1)> <!-- & \u2028"


def line(step, ordinal, index, *, rng):
    """Half are right; one response of all speaks of a walrus."""
    text = f"the walrus said {HOSTILE}" if (step, index) == (7, 1) else None
    row = rollout_line(
        step, ordinal, index, rng=rng, response=text and text.replace("\u2028", " "), correct=index % 2 == 0
    )
    row["ratios"][2] = 1.3
    return row


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Two runs: the first with flipped responses and hostile words, the second with another clip and without ratios."""
    folder = tmp_path_factory.mktemp("runs")
    first = write_run(folder / "first", steps=12, line=line)
    asked = {"prompt": f"why? {HOSTILE}", "response": "no", "answer": HOSTILE}
    for step, right in ((13, 0), (14, 3)):
        rows = [
            rollout_line(step, 99, i, rng=random.Random(i), **asked, correct=i < right, advantage=9.0 + i)
            for i in range(4)
        ]
        write_rollouts(first, step, rows)

    def old(step, ordinal, index, *, rng):
        row = line(step, ordinal, index, rng=rng)
        return {key: value for key, value in row.items() if key not in ("ratios", "advantage", "in_loss")}

    second = write_run(folder / "second", steps=8, seed=1, line=old, loss=LossConfig(clip_ratio_high=0.2))
    return report(first, second).save(folder / "report.html")


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def shown(driver, page):
    """The freshly opened page, which must have nothing to complain of when the test is over."""
    driver.get("about:blank")
    complaints(driver)
    opened(driver, page)
    yield Shown(driver)
    assert complaints(driver) == []


class Shown:
    """What a person does with the page."""

    def __init__(self, driver):
        self.driver = driver

    def all(self, selector):
        return self.driver.find_elements("css selector", selector)

    def one(self, selector):
        return self.driver.find_element("css selector", selector)

    def texts(self, selector):
        return [each.text for each in self.all(selector)]

    def click(self, selector):
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", self.one(selector))
        self.one(selector).click()

    def press(self, *keys):
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def until(self, true):
        from selenium.webdriver.support.wait import WebDriverWait

        return WebDriverWait(self.driver, 10, poll_frequency=0.02).until(lambda _: true())

    def lines(self):
        """The paths of one panel."""
        return [each.get_attribute("d") for each in self.all(f"{PANEL} .line")]

    def theme(self):
        return self.one("html").get_attribute("data-theme")

    def paper(self):
        return self.one("html").value_of_css_property("background-color")

    def kinds(self):
        """How the tokens of the first response are shaded."""
        tokens = self.all(".response:first-of-type .tokens .token")
        return [each.get_attribute("class").split()[1] for each in tokens]

    def settings(self):
        """Those of the configurations that are shown."""
        return [text.replace("\n", "") for text in self.texts(".keys tbody th")]

    def status(self):
        return self.one(".status").text

    def choose(self, label, value):
        from selenium.webdriver.support.select import Select

        for field in self.all("label.field"):
            if field.text.startswith(label):
                Select(field.find_element("css selector", "select")).select_by_value(value)
                return


PANEL = '[data-title="Training accuracy"]'


def test_curves_of_both_runs_are_drawn_and_switched(shown):
    before = shown.lines()
    assert len(before) == 4  # two metrics of two runs
    assert all(path.count("L") > 5 for path in before)
    assert len({each.value_of_css_property("stroke") for each in shown.all(f"{PANEL} .line")}) == 2
    shown.click('button.run[data-run="1"]')
    assert len(shown.lines()) == 2
    shown.click('button.run[data-run="1"]')
    shown.click(f'{PANEL} [data-series="rollout/accuracy"]')
    assert len(shown.lines()) == 2
    shown.click(f'{PANEL} [data-series="rollout/accuracy"]')
    assert shown.lines() == before
    shown.click('[data-value="sampled_tokens"]')
    assert shown.lines() != before


def test_a_line_for_each_run_says_where_it_is(shown):
    first, second = (row.text.replace("\n", " ") for row in shown.all(".summary tbody tr"))
    assert first.startswith("first 12 of 12 40.0% → ")
    assert second.startswith("second 8 of 8 40.0% → ")


def test_raw_values_are_behind_smoothed_ones_and_alone_without_smoothing(shown, tmp_path):
    long = report(write_run(tmp_path / "long", steps=60, every=60)).save(tmp_path / "long.html")
    opened(shown.driver, long)
    assert (len(shown.all(f"{PANEL} .raw")), len(shown.all(f"{PANEL} .line"))) == (2, 2)
    shown.click("#smoothing")
    shown.press(Keys.HOME)
    assert shown.one("output").text == "off"
    assert (len(shown.all(f"{PANEL} .raw")), len(shown.all(f"{PANEL} .line"))) == (0, 2)


def test_the_cursor_shows_values_and_is_moved_by_keys(shown, page):
    metrics = [
        json.loads(text) for text in (page.parent / "first" / "metrics.jsonl").read_text().splitlines()
    ]
    shown.driver.execute_script("arguments[0].focus()", shown.one(f"{PANEL} svg[role=img]"))
    shown.press(*[Keys.ARROW_RIGHT] * 4)
    shown.until(lambda: shown.one(f"{PANEL} .where").text == "step 3")
    value = shown.one(f"{PANEL} .entry .value").text
    assert value == f"{100 * metrics[3]['rollout/accuracy']:.1f}%"
    # In all panels at one time.
    assert set(shown.texts(".panel .where")) == {"step 3"}
    shown.press(Keys.END)
    shown.until(lambda: shown.one(f"{PANEL} .where").text == "step 12")


def test_dragging_zooms_and_escape_leaves(shown):
    from selenium.webdriver.common.action_chains import ActionChains

    plot = shown.one(f"{PANEL} svg[role=img]")
    before = shown.one(f"{PANEL} .line").get_attribute("d")
    ActionChains(shown.driver).move_to_element(plot).click_and_hold().move_by_offset(
        60, 0
    ).release().perform()
    assert shown.one(f"{PANEL} .line").get_attribute("d") != before
    shown.press(Keys.ESCAPE)
    shown.driver.execute_script("arguments[0].focus()", plot)
    shown.press(Keys.ESCAPE)
    assert shown.one(f"{PANEL} .line").get_attribute("d") == before


def test_the_theme_follows_the_system_until_it_is_chosen(shown):
    for system in ("dark", "light"):
        features = [{"name": "prefers-color-scheme", "value": system}]
        shown.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        shown.until(lambda system=system: shown.theme() == system)
    light = shown.paper()
    shown.click("#theme")
    assert shown.theme() == "dark"
    assert shown.paper() != light
    shown.click("#theme")
    shown.driver.execute_script("localStorage.clear()")


def test_rollouts_are_browsed_by_keys(shown):
    shown.click("#tab-rollouts")
    assert shown.status() == "104 responses in 26 groups"
    shown.click('.row[id="group-0"]')
    shown.press(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    shown.until(lambda: shown.one(".heading h2").text == "Step 2")
    assert shown.one('.row[aria-selected="true"]').get_attribute("id") == "group-2"
    shown.press(Keys.END)
    shown.until(lambda: shown.one(".heading h2").text == "Step 14")
    assert len(shown.all(".response")) == 4
    assert shown.texts(".verdict") == ["✓ correct"] * 3 + ["✗ wrong"]


def test_filters_leave_the_responses_that_meet_them(shown):
    shown.click("#tab-rollouts")
    shown.click('[data-value="wrong"]')
    assert shown.status() == "53 responses in 26 groups of 104 responses"
    shown.until(lambda: set(shown.texts(".verdict")) == {"✗ wrong"})
    shown.click('[data-value="any"]')
    shown.click('[name="flipped"]')
    assert shown.status() == "3 responses in 1 group of 104 responses"
    shown.until(lambda: shown.texts(".badge") == ["flipped to right"] * 3)
    shown.click(".link")  # asked before at step 13: 0 of 4 correct
    shown.until(lambda: shown.one(".heading h2").text == "Step 13")
    shown.choose("Order", "advantage")
    assert shown.one('.row[aria-selected="true"]').get_attribute("id") == "group-0"
    shown.until(
        lambda: (
            [re.search(r"advantage (\S+)", text)[1] for text in shown.texts(".response header")]
            == ["+12.00", "+11.00", "+10.00", "+9.00"]
        )
    )
    shown.choose("Step", "7")
    assert shown.status() == "8 responses in 2 groups of 104 responses"


def test_words_are_found_and_nothing_that_a_model_said_is_markup(shown):
    shown.click("#tab-rollouts")
    shown.one("#search").send_keys("WALRUS said </script><img")
    shown.until(lambda: shown.status().startswith("2 responses in 2 groups with"))
    shown.until(lambda: shown.one(".heading h2").text == "Step 7")
    [response] = shown.texts(".response .tokens")
    assert "<img src=x onerror=alert(1)> <!-- &" in response
    assert shown.all(".token.hit")
    assert not shown.all("main img, main script")
    shown.one("#search").clear()
    shown.one("#search").send_keys("why? </script>")  # in the prompt
    shown.until(lambda: shown.status().startswith("8 responses in 2 groups with"))
    assert HOSTILE.replace("\u2028", "") in shown.one(".question pre").text.replace("\u2028", "").replace(
        "\n", ""
    )
    shown.one("#search").clear()
    shown.one("#search").send_keys("nowhere at all")
    shown.until(lambda: shown.status().startswith("0 responses in 0 groups"))
    assert shown.one(".group .empty").text == "No response meets these filters."


def test_tokens_are_shaded_by_probability_and_by_what_the_clip_did(shown, page):
    rows = [
        json.loads(text)
        for text in (page.parent / "first" / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    ]
    shown.click("#tab-rollouts")
    low = [bin for bin, value in zip(shown.kinds(), rows[0]["logprobs"], strict=True) if value < -4.7]
    assert set(low) <= {"p0"}
    shown.click('[data-value="clip"]')
    up = [rows[0]["advantage"] > 0 and ratio > 1.28 for ratio in rows[0]["ratios"]]
    assert [kind == "up" for kind in shown.kinds()] == up
    assert any(up)
    shown.driver.execute_script("arguments[0].focus()", shown.one(".response .tokens"))
    shown.press(Keys.ARROW_RIGHT)
    assert shown.texts(".tip div")[0] == "token 1"
    assert shown.texts(".tip div")[2].startswith(f"ratio {rows[0]['ratios'][0]:.3f}")


def test_the_other_run_is_chosen_and_what_it_did_not_record_is_said(shown):
    shown.click("#tab-rollouts")
    shown.choose("Run", "1")
    shown.until(lambda: shown.status() == "64 responses in 16 groups")
    assert "Advantages were not recorded" in shown.one(".key").text
    shown.click('[data-value="clip"]')
    assert "Ratios were not recorded" in shown.one(".key").text
    assert not shown.one('[name="clipped"]').is_enabled()


def test_configurations_differ_from_each_other_and_from_the_defaults(shown):
    shown.click("#tab-configuration")
    assert {"run_dir", "seed", "steps", "loss.clip_ratio_high"} == set(shown.settings())
    shown.click('[data-value="departs"]')
    assert "run_dir" not in shown.settings()
    [row] = [each for each in shown.all(".keys tbody tr") if "clip_ratio_high" in each.text]
    assert row.text.split()[-3:] == ["0.28", "0.2", "0.28"]
    shown.click('[data-value="all"]')
    shown.one("#configuration input").send_keys("learning_rate")
    assert shown.settings() == ["optimizer.learning_rate"]


@pytest.mark.parametrize("width", [800, 1366])
def test_nothing_is_wider_than_the_window(width, shown, page):
    size = {"width": width, "height": 768, "deviceScaleFactor": 1, "mobile": False}
    shown.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    shown.driver.execute_script("arguments[0].focus()", shown.one(f"{PANEL} svg[role=img]"))
    shown.press(Keys.ARROW_RIGHT)  # the cursor's place stands in every title
    for tab in ("curves", "rollouts", "configuration"):
        shown.click(f"#tab-{tab}")
        assert shown.driver.execute_script("return document.documentElement.scrollWidth") <= width, tab


def test_in_a_notebooks_frame_it_works_without_a_memory(driver, page, tmp_path):
    made = report(page.parent / "first")
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!doctype html><meta charset=utf-8><body>{made._repr_html_()}", encoding="utf-8")
    complaints(driver)
    driver.get(notebook.as_uri())
    shown = Shown(driver)
    driver.switch_to.frame(shown.one("iframe"))
    shown.until(lambda: shown.one("html").get_attribute("data-ready") == "true")
    shown.click("#theme")
    shown.click("#tab-rollouts")
    assert shown.status() == "104 responses in 26 groups"
    driver.switch_to.default_content()
    assert complaints(driver) == []


@pytest.mark.parametrize(
    ("every", "how", "said"),
    [(9, {}, "No rollouts were logged yet"), (1, {"rollout_steps": 0}, "made without the rollouts")],
)
def test_a_page_without_rollouts_says_why(every, how, said, shown, tmp_path):
    opened(
        shown.driver,
        report(write_run(tmp_path / "run", steps=2, every=every), **how).save(tmp_path / "page.html"),
    )
    shown.click("#tab-rollouts")
    assert said in shown.one("#rollouts .empty").text


@pytest.mark.parametrize(
    "lines",
    [
        [{"step": 0, "eval/x/avg@8": 0.5, "time/eval_s": 3.0}],
        [{"step": 5, "policy/entropy": None, "update/loss": -2.0}, {"step": 6, "policy/entropy": 0.0}],
        [
            {
                "step": 1,
                "sync/sampler_trainer_kl": 0.0,
                "rollout/mixed_frac": 1.0,
                "rollout/all_wrong_frac": None,
            }
        ],
        [{"step": 1, "mine/own": 1e300, "mine/other": -1e-300}],
    ],
    ids=["an evaluation", "what is missing", "zero on a logarithmic axis", "extremes"],
)
def test_metrics_that_hardly_make_a_curve_are_drawn_all_the_same(lines, shown, tmp_path):
    opened(shown.driver, report(write_metrics(tmp_path / "run", *lines)).save(tmp_path / "page.html"))
    for box in shown.all("details"):
        box.click()
    paths = [each.get_attribute("d") for each in shown.all(".panel path")]
    assert shown.all(".panel")
    assert not [path for path in paths if "NaN" in path or "Infinity" in path]
    texts = shown.texts(".panel text") + shown.texts(".panel .value")
    assert not [text for text in texts if "NaN" in text or "Infinity" in text]


def test_a_browser_that_cannot_read_base64_itself_is_helped(driver, page):
    code = {"source": "delete Uint8Array.fromBase64"}
    added = driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", code)
    try:
        opened(driver, page)
        assert driver.execute_script("return Uint8Array.fromBase64") is None
        assert complaints(driver) == []
    finally:
        driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


@pytest.mark.slow
def test_a_thousand_steps_of_64_rollouts_open_in_less_than_3_seconds():
    """As the benchmark measures it, in a process of its own: without the checks of types that tests switch on."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.report_page", "--repeat", "1"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    *_, opening, median = done.stdout.splitlines()
    assert re.fullmatch(r"opening 1: \d+ ms", opening), f"the console complained: {done.stdout}"
    assert int(re.fullmatch(r"median: (\d+) ms", median)[1]) < 3000
