"""The page in a browser: every control works, and the console stays empty."""

import csv
import json
import random
import re
from functools import partial
from urllib.parse import urlsplit

import pytest

from dapo_jax.config import DynamicSamplingConfig
from dapo_jax.report import report
from dapo_jax.rewards.grading import NOT_GRADED
from dapo_jax.trackers.run_status import write_status
from tests.report.chromium import PANEL, Shown, complaints, missing, opened
from tests.report.made import (
    TOKENIZER,
    problem_line,
    rollout_line,
    write_evaluation,
    write_metrics,
    write_rollouts,
    write_run,
)
from tests.structure_test import ROOT

Keys = pytest.importorskip("selenium.webdriver.common.keys", reason=missing() or None).Keys

# Slow: they drive Chromium for minutes; page_test.py opens one page in the default tier.
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "there is a browser")]


def json_lines(file):
    return [json.loads(text) for text in file.read_text().splitlines()]


def test_curves_of_both_runs_are_drawn_and_switched(shown):
    before = shown.lines()
    assert len(before) == 4  # two metrics of two runs
    assert all(path.count("L") > 5 for path in before)
    shown.click('button.run[data-run="1"]')
    assert len(shown.lines()) == 2
    shown.click('button.run[data-run="1"]')
    shown.click(f'{PANEL} [data-series="rollout/accuracy"]')
    assert len(shown.lines()) == 2
    shown.click(f'{PANEL} [data-series="rollout/accuracy"]')
    assert shown.lines() == before
    shown.click('[data-value="sampled_tokens"]')
    assert shown.lines() != before


def test_the_cursor_shows_values_and_is_moved_by_keys(shown, page):
    accuracy = json_lines(page.parent / "first" / "metrics.jsonl")[3]["rollout/accuracy"]
    shown.focus(f"{PANEL} svg[role=img]")
    shown.press(*[Keys.ARROW_RIGHT] * 4)
    shown.until(lambda: shown.one(f"{PANEL} .where").text == "step 3")
    assert shown.one(f"{PANEL} .entry .value").text == f"{100 * accuracy:.1f}%"
    assert set(shown.texts(".panel .where")) == {"step 3"}  # in all panels at one time
    shown.press(Keys.END)
    shown.until(lambda: shown.one(f"{PANEL} .where").text == "step 12")


def test_rollouts_are_browsed_by_keys(shown):
    shown.click("#tab-rollouts")
    assert shown.status() == "104 responses in 26 groups"
    shown.click('.row[id="group-0"]')
    shown.press(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    shown.until(lambda: shown.one(".heading h2").text == "Step 2")
    assert shown.one('.row[aria-selected="true"]').get_attribute("id") == "group-2"
    shown.press(Keys.END)
    shown.until(lambda: shown.one(".heading h2").text == "Step 14")
    assert len(shown.all("#rollouts .response")) == 4
    assert shown.texts("#rollouts .verdict") == ["✓ correct"] * 3 + ["✗ wrong"]


def test_a_link_shows_the_same_tab_step_and_group_or_problem(shown, page):
    """The address follows the reader, and another page with the same address shows the same. The fourth group has the prompt with ordinal 5."""
    address = page.resolve().as_uri()

    def fragment():
        return urlsplit(shown.driver.current_url).fragment

    shown.click("#tab-rollouts")
    shown.click('.row[id="group-3"]')
    shown.until(lambda: shown.one("#rollouts .heading h2").text == "Step 2")
    at, heading = fragment(), shown.one("#rollouts .heading").text
    assert at == "tab=rollouts&run=0&step=2&group=5"
    shown.click("#tab-evaluations")
    shown.choose("Run", "1", "#evaluations")
    shown.click('#evaluations .row[id="problem-1"]')
    problem = "tab=evaluations&run=1&dataset=aime_2024&step=4&problem=2"
    shown.until(lambda: fragment() == problem)
    for link, tab, wanted in ((at, "rollouts", heading), (problem, "evaluations", "Problem 2")):
        shown.driver.get("about:blank")
        shown.driver.get(f"{address}#{link}")
        shown.until(lambda tab=tab, wanted=wanted: wanted in shown.one(f"#{tab} .heading").text)
    for strange in (
        "main",
        "tab=nothing",
        "tab=rollouts&run=9",
        "tab=evaluations&run=0&dataset=no&problem=x",
    ):
        shown.driver.get("about:blank")
        shown.driver.get(f"{address}#{strange}")
        shown.until(lambda: shown.one("html").get_attribute("data-ready") == "true")


def test_metrics_are_saved_as_csv(shown, page, tmp_path):
    """A line per run and step; the second run has the metrics of the first."""
    how = {"behavior": "allow", "downloadPath": str(tmp_path)}
    shown.driver.execute_cdp_cmd("Browser.setDownloadBehavior", how)
    shown.driver.find_element("xpath", "//button[text()='Metrics as CSV']").click()
    shown.until((tmp_path / "metrics.csv").exists)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for name in ("first", "second"):
        metrics = json_lines(page.parent / name / "metrics.jsonl")
        found = [(int(row["step"]), row["rollout/accuracy"]) for row in rows if row["run"] == name]
        values = [(line["step"], line.get("rollout/accuracy")) for line in metrics]
        assert found == [(at, "" if one is None else f"{float(f'{one:.6g}'):g}") for at, one in values]


def test_filters_leave_the_responses_that_meet_them(shown):
    shown.click("#tab-rollouts")
    shown.click('[data-value="wrong"]')
    assert shown.status() == "53 responses in 26 groups of 104 responses"
    shown.until(lambda: set(shown.texts("#rollouts .verdict")) == {"✗ wrong"})
    shown.click('[data-value="any"]')
    shown.click('[name="flipped"]')
    assert shown.status() == "3 responses in 1 group of 104 responses"
    shown.until(lambda: shown.texts(".badge") == ["flipped to right"] * 3)
    shown.click(".link")  # asked before at step 13: 0 of 4 correct
    shown.until(lambda: shown.one(".heading h2").text == "Step 13")
    shown.choose("Order", "advantage")
    shown.until(lambda: "advantage +12.00" in shown.texts("#rollouts .response header")[0])
    shown.choose("Step", "7")
    assert shown.status() == "8 responses in 2 groups of 104 responses"


def test_tokens_are_shaded_by_probability_and_clip(shown, page):
    first = json_lines(page.parent / "first" / "rollouts" / "step_000001.jsonl")[0]
    shown.click("#tab-rollouts")
    low = [bin for bin, value in zip(shown.kinds(), first["logprobs"], strict=True) if value < -4.7]
    assert set(low) <= {"p0"}
    shown.click('[data-value="clip"]')
    up = [first["advantage"] > 0 and ratio > 1.28 for ratio in first["ratios"]]
    assert [kind == "up" for kind in shown.kinds()] == up
    assert any(up)
    shown.focus(".response .tokens")
    shown.press(Keys.ARROW_RIGHT)
    assert shown.texts(".tip div")[0] == "token 1"
    assert shown.texts(".tip div")[2].startswith(f"ratio {first['ratios'][0]:.3f}")


def episode(*parts):
    """The log line of an episode. Parts are (`turn`, text, reward), (`environment`, text) or (`context`, text); turns end with an end token."""
    ids, found = [], {"turns": [], "turn_rewards": [], "contexts": []}
    for kind, text, *reward in parts:
        new = TOKENIZER.encode(text).tolist() + [TOKENIZER.eos_id] * (kind == "turn")
        if kind != "environment":
            found[f"{kind}s"].append([len(ids), len(ids) + len(new)])
        found["turn_rewards"] += reward
        ids += new
    logprobs, ratios = [-0.125] * len(ids), [1.0] * len(ids)
    text = "".join(text for _, text, *_ in parts)
    return found | {"response": text, "response_token_ids": ids, "logprobs": logprobs, "ratios": ratios}


def test_a_turn_outside_the_loss_is_named_and_shaded_as_the_environment(shown, tmp_path):
    opened_episode(shown, tmp_path, ("turn", "31", 0.0), ("context", "go"), ("turn", "4", 1.5), forgotten=[0])
    assert shown.texts(".response .since") == [
        "turn 1, outside the loss, reward +0.00", "new context, in place of all before", "turn 2, reward +1.50"
    ]  # fmt: skip
    assert [kind == "environment" for kind in shown.kinds()] == [True] * 5 + [False] * 2
    assert "turns outside the loss: 1" in shown.texts(".response .fact")


def opened_episode(shown, folder, *parts, forgotten=(), **how):
    run, found = write_run(folder / "run", steps=1, **how), {**episode(*parts), "forgotten": forgotten}
    write_rollouts(run, 1, [rollout_line(1, 0, 0, rng=random.Random(0), correct=True, **found)])
    opened(shown.driver, report(run).save(folder / "page.html"))
    shown.click("#tab-rollouts")


def test_parts_of_an_episode_are_separate(shown, tmp_path):
    """Contexts of 2 and 4 tokens, 3 tokens of the environment, and turns of 2, 1 and 3 tokens, each with an end token."""
    opened_episode(
        shown, tmp_path,
        ("context", "go"), ("turn", "31", 0.0), ("environment", ">>>"), ("turn", "4", -0.25), ("context", "then"), ("turn", "so7", 1.5),
    )  # fmt: skip
    assert shown.texts(".response .since") == [
        "new context, in place of the prompt", "turn 1, reward +0.00", "environment", "turn 2, reward \u22120.25",
        "new context, in place of all before", "turn 3, reward +1.50",
    ]  # fmt: skip
    assert shown.texts(".part .said") == ["go", "31end", ">>>", "4end", "then", "so7end"]
    counts = [2, 3, 3, 2, 4, 4]
    environment = [part % 2 == 0 for part, count in enumerate(counts) for _ in range(count)]
    assert [kind == "environment" for kind in shown.kinds()] == environment
    assert {"tokens 9", "in 3 turns", "the environment's 9 tokens"} <= set(shown.texts(".response .fact"))
    shown.focus(".response .tokens")
    for token, kind in ((2, "of a new context of the environment"), (3, "turn 1 of 3")):
        shown.press(*[Keys.ARROW_RIGHT] * (2 if token == 2 else 1))
        assert shown.texts(".tip div")[:2] == [f"token {token}", kind]


def test_tokens_are_shaded_by_the_age_of_their_weights(shown, tmp_path):
    """At step 9, whose weights have done 8 steps; the responses have seven characters and an end token."""
    run = write_run(tmp_path / "run", steps=1, every=2)
    spans = [[[0, 5], [3, 6], [5, 8]], [[0, 8]], [[0, 6]]]
    same = {"response": "abc\nefg", "correct": True}
    rows = [rollout_line(9, 0, i, rng=random.Random(i), spans=each, **same) for i, each in enumerate(spans)]
    write_rollouts(run, 9, rows)
    opened(shown.driver, report(run).save(tmp_path / "page.html"))
    shown.click("#tab-rollouts")
    found = [re.search(r"sampled by (.+)", text) for text in shown.texts("#rollouts .response header")]
    assert [match and match[1] for match in found] == [
        "3 versions of the weights, steps 6 to 9",
        None,
        "the weights of step 7, 2 steps before",
    ]
    shown.click('#rollouts [data-value="age"]')
    assert shown.kinds() == ["a3"] * 3 + ["a2"] * 2 + ["a0"] * 3
    # Where the weights change, a label names their step, so that shades do not depend on colours alone.
    assert shown.texts("#rollouts .since") == ["step 6", "step 7", "step 9", "step 7"]
    shown.focus("#rollouts .tokens")
    shown.press(Keys.ARROW_RIGHT)
    assert shown.texts(".tip div")[-1] == "sampled by the weights of step 6, 3 steps before"


@pytest.fixture
def wide(shown):
    """Sets the width of the window, and restores it after the test."""

    def set_width(width):
        size = {"width": width, "height": 768, "deviceScaleFactor": 1, "mobile": False}
        shown.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    yield set_width
    set_width(1366)


@pytest.mark.parametrize("width", [390, 1366])
def test_nothing_is_wider_than_the_window(width, shown, wide, tmp_path):
    long = "a" * 300
    line = partial(rollout_line, prompt=long, response=long)
    runs = [write_run(tmp_path / f"{name}_{long[:100]}", steps=3, line=line) for name in "ab"]
    for run in runs:
        for step in range(40):
            problem = problem_line(0, step % 8, prompt=long, answer=long, response=long)
            write_evaluation(run, step, [problem], name=long[:90])
    write_status(runs[0], "failed", long)
    opened(shown.driver, report(*runs).save(tmp_path / "page.html"))
    wide(width)
    shown.focus(f"{PANEL} svg[role=img]")
    shown.press(Keys.ARROW_RIGHT)  # every title has the cursor's place
    for tab in ("curves", "rollouts", "evaluations", "configuration"):
        shown.click(f"#tab-{tab}")
        if tab in ("rollouts", "evaluations"):
            shown.choose("Beside", "1", within=f"#{tab}")
        assert shown.driver.execute_script("return document.documentElement.scrollWidth") <= width, tab


def scored(step, ordinal, index, *, rng):
    """Scores alternate between two values and rise by 0.1 per step; no response is correct."""
    reward = -2.0 + 0.5 * (index % 2) + 0.1 * step
    return rollout_line(
        step, ordinal, index, rng=rng, correct=False, extracted=None, score=reward, reward=reward, advantage=1.0 if index % 2 else -1.0
    )  # fmt: skip


@pytest.fixture
def judged(tmp_path):
    run = write_run(
        tmp_path / "judged", steps=4, line=scored, dynamic_sampling=DynamicSamplingConfig(metric="score")
    )
    lines = [
        {name: one for name, one in line.items() if name[:5] != "eval/"}
        for line in json_lines(run / "metrics.jsonl")
    ]
    for line, reward in zip(lines, (-1.448, None, -1.2, None, -0.81), strict=True):
        line |= {} if reward is None else {"eval/aime_2024/reward": reward, "eval/aime_2024/avg@8": 0.0}
        line |= {"rollout/accuracy": 0.0, "reward/mean": -0.6, "rollout/scores_differ_frac": 0.75}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step, rewards in ((0, (-1.5, -1.0)), (4, (-0.5, -1.25))):
        problems = [problem_line(place, 0, reward=reward) for place, reward in enumerate(rewards)]
        for problem, reward in zip(problems, rewards, strict=True):
            problem["responses"][0]["score"] = reward - 0.1
        write_evaluation(run, step, problems)
    return run


@pytest.mark.parametrize("metric", ["correct", "score"])
def test_responses_that_were_not_graded_have_no_verdict(shown, tmp_path, metric):
    """A run that does not learn rewards grades only in evaluations."""
    run = write_run(tmp_path / "run", steps=1, dynamic_sampling=DynamicSamplingConfig(metric=metric))
    ungraded = {"correct": False, "score": 0.0, "reward": 0.0, "reason": NOT_GRADED.reason}
    write_rollouts(run, 1, [rollout_line(1, 0, 0, rng=random.Random(0), **ungraded)])
    opened(shown.driver, report(run).save(tmp_path / "page.html"))
    shown.click("#tab-rollouts")
    assert shown.texts("#rollouts .verdict") == ["not graded"]
    assert shown.texts("#rollouts .why") == [""]


def summary(shown):
    """The lines of the table of runs, each with the text of a cell by the title of its column."""
    titles = [text.replace("\n", " ") for text in shown.texts(".summary th")]
    texts = iter(shown.texts(".summary td"))
    return [dict(zip(titles, cells, strict=True)) for cells in zip(*[texts] * len(titles), strict=True)]


def held_out(shown, folder, *runs):
    """The held-out columns of runs, each a list of evaluations [step, {dataset: avg@8}]."""
    written = [
        write_metrics(folder / str(number), *[{"step": step} | {f"eval/{name}/avg@8": value for name, value in found.items()} for step, found in run])
        for number, run in enumerate(runs)
    ]  # fmt: skip
    opened(shown.driver, report(*written).save(folder / "page.html"))
    return [{title: text for title, text in line.items() if "@" in title} for line in summary(shown)]


def cells(dataset, values="\u2013", best="\u2013"):
    return {f"Held-out avg@8 {dataset}": values, f"Best avg@8 {dataset}": best}


def test_a_held_out_column_is_for_one_dataset(shown, tmp_path):
    """Two runs have the same datasets in different orders, and one run has another dataset."""
    first = [(0, {"x": 0.1, "y": 0.8}), (1, {"x": 0.2, "y": 0.7})]
    second = [(0, {"y": 0.6, "x": 0.3}), (1, {"y": 0.9, "x": 0.4})]
    assert held_out(shown, tmp_path, first, second, [(0, {"z": 0.5})]) == [
        cells("x", "10.0% → 20.0%", "20.0% at step 1") | cells("y", "80.0% → 70.0%", "80.0% at step 0") | cells("z"),
        cells("x", "30.0% → 40.0%", "40.0% at step 1") | cells("y", "60.0% → 90.0%", "90.0% at step 1") | cells("z"),
        cells("x") | cells("y") | cells("z", "50.0%", "50.0% at step 0"),
    ]  # fmt: skip


def test_the_summary_shows_the_datasets_of_the_last_evaluation(shown, tmp_path):
    """The first run replaced dataset x by y. The last steps have no evaluation."""
    replaced = [(0, {"x": 0.25}), (5, {"y": 0.5}), (6, {})]
    kept = [(0, {"x": 0.25}), (5, {"x": 0.5}), (6, {})]
    assert held_out(shown, tmp_path, replaced, kept) == [
        cells("y", "50.0%", "50.0% at step 5") | cells("x"),
        cells("y") | cells("x", "25.0% → 50.0%", "50.0% at step 5"),
    ]


def test_runs_with_verdicts_and_runs_with_scores_have_separate_held_out_columns(shown, judged, tmp_path):
    counted = write_run(tmp_path / "counted", steps=1)
    opened(shown.driver, report(counted, judged).save(tmp_path / "page.html"))
    columns = ("Held-out avg@8 aime_2024", "Held-out reward aime_2024")
    assert [[line[title] for title in columns] for line in summary(shown)] == [
        ["40.0%", "\u2013"],
        ["\u2013", "\u22121.45 → \u22120.810"],
    ]


@pytest.mark.parametrize(
    ("function", "texts"),
    [
        ("duration", {"0.0344": "0.0344 s", "59.96": "60.0 s", "119.4": "119 s", "119.6": "2 min 0 s", "179.7": "3 min 0 s",
                      "3599.7": "60 min 0 s", "7199.7": "2 h 0 min", "10799": "3 h 0 min", "13000": "3 h 37 min"}),
        ("figure", {"999.4": "999", "999.96": "1,000", "-1234.5": "-1,235", "99999": "99,999", "99999.7": "100k", "999499": "999k",
                    "999600": "1.00M", "999.4e6": "999M", "999.6e6": "1.00G", "999.6e9": "1.0e12", "1e300": "1.0e300", "0.00012": "1.2e-4"}),
        ("percent", {"0.0012": "0.12%", "0.00994": "0.99%", "0.00996": "1.0%", "0.5": "50.0%", "0": "0.0%"}),
        ("mark", {"0.00000125": "1.25e-6", "-0.000005": "-5e-6", "0.25": "0.25", "25000": "25,000", "1e5": "100k", "123420000": "123.42M",
                  "1025e6": "1.025G", "1e15": "1e15", "0.00017782794": "1.778e-4"}),
    ],
)  # fmt: skip
def test_numbers_are_rounded_before_they_get_a_unit(driver, function, texts):
    functions = "".join(
        (ROOT / "dapo_jax/report/assets" / name).read_text() for name in ("base.js", "scales.js")
    )
    script = f"{functions}; return arguments[0].map((value) => {function}(Number(value)))"
    found = [text.replace("\u2212", "-") for text in driver.execute_script(script, list(texts))]
    assert found == list(texts.values())


def test_a_run_judged_by_scores_has_rewards_and_no_verdicts(shown, judged, tmp_path):
    opened(shown.driver, report(judged).save(tmp_path / "page.html"))
    [heads] = summary(shown)
    assert heads["Held-out reward aime_2024"] == "\u22121.45 \u2192 \u22120.810"
    assert heads["Best reward aime_2024"] == "\u22120.810 at step 4"
    assert heads["Train reward"] == "\u22120.600"
    groups = shown.texts('[data-title="Groups sampled"] .entry')
    assert groups == ["scores differ\n75.0%", "all scores equal\n25.0%"]
    assert shown.all(".distribution .bars rect.even")
    assert not shown.all(".distribution .bars rect.bad, .distribution .bars rect.good")
    shown.click("#tab-rollouts")
    assert shown.texts("#rollouts .verdict") == ["score \u22121.90", "score \u22121.40"] * 2
    assert shown.texts("#rollouts .row .score")[0] == "mean \u22121.65"
    shown.click('#rollouts [data-value="above"]')
    assert shown.status() == "16 responses in 8 groups of 32 responses"
    shown.until(lambda: shown.texts("#rollouts .verdict") == ["score \u22121.40"] * 2)
    assert "correct" not in shown.one("#rollouts").text.lower()
    shown.click("#tab-evaluations")
    view = "#evaluations"
    assert shown.one(f"{view} .status").text == "2 problems, mean reward \u22120.875 at step 4"
    assert shown.texts(f"{view} .row .score") == ["mean \u22120.500", "mean \u22121.25"]
    assert shown.texts(f"{view} .verdict") == ["score \u22120.600"]
    shown.click(f'{view} [data-value="lower"]')
    shown.until(lambda: shown.texts(f"{view} .row .step") == ["problem 2"])
    assert "correct" not in shown.one(view).text.lower()


def test_a_prompt_is_seen_at_every_step_at_which_it_was_asked(shown):
    shown.click("#tab-rollouts")
    shown.one("#search").send_keys("why? </script>")
    shown.until(lambda: shown.status().startswith("8 responses in 2 groups with"))
    assert shown.one(".heading h2").text == "Step 13"
    bars = shown.all("#rollouts .strip .bar")
    assert [bar.get_attribute("aria-label") for bar in bars] == [
        "step 13: 0 of 4 correct",
        "step 14: 3 of 4 correct",
    ]
    assert [bar.get_attribute("aria-pressed") for bar in bars] == ["true", "false"]
    bars[1].click()
    shown.until(lambda: shown.one(".heading h2").text == "Step 14")


def test_the_same_prompt_is_seen_in_two_runs_side_by_side(shown):
    shown.click("#tab-rollouts")
    shown.choose("Beside", "1", within="#rollouts")
    # The first run's prompts up to step 8, two groups a step, were asked in the second too; the last ones were not.
    shown.until(lambda: shown.status() == "64 responses in 16 groups of 104 responses")
    shown.until(lambda: len(shown.all("#rollouts .pair .question")) == 2)
    mine, theirs = (each.text for each in shown.all("#rollouts .pair .question pre:first-of-type"))
    assert mine == theirs
    shown.click('[name="shared"]')
    shown.until(lambda: shown.status() == "104 responses in 26 groups")
    shown.focus("#rollouts .groups")
    shown.press(Keys.END)
    shown.until(lambda: "second did not log this prompt." in shown.texts("#rollouts .pair .empty"))


def test_problems_of_evaluations_are_read_one_by_one_over_time_and_in_two_runs(shown):
    shown.click("#tab-evaluations")
    view = "#evaluations"
    # At step 10 7 + 2 + 8 of 24 are right.
    assert shown.one(f"{view} .status").text == "3 problems, 70.8% correct at step 10"
    assert shown.texts(f"{view} .row .score") == ["7/8", "2/8", "8/8"]
    assert [bar.get_attribute("aria-label") for bar in shown.all(f"{view} .bar")] == [
        "step 0: 0 of 8 correct", "step 5: 4 of 8 correct", "step 10: 7 of 8 correct",
    ]  # fmt: skip
    assert shown.texts(f"{view} .given li") == ["2 \u00d7 7", "no answer \u00d7 1"]
    shown.all(f"{view} .bar")[0].click()
    shown.until(lambda: shown.texts(f"{view} .row .score") == ["0/8", "5/8", "8/8"])
    shown.until(lambda: shown.texts(f"{view} .verdict") == ["✗ wrong"])
    shown.choose("Order", "gained", within=view)
    shown.until(lambda: shown.texts(f"{view} .row .step") == ["problem 1", "problem 3", "problem 2"])
    shown.click(f'{view} [data-value="none"]')
    shown.until(lambda: shown.texts(f"{view} .row .step") == ["problem 1"])
    shown.click(f'{view} [data-value="any"]')
    shown.choose("Beside", "1", within=view)
    shown.until(lambda: len(shown.all(f"{view} .sides section")) == 2)
    assert "3 of 4 correct" in shown.all(f"{view} .sides section")[1].text


def test_responses_of_evaluations_are_found_and_are_not_markup(shown):
    shown.click("#tab-evaluations")
    shown.one("#evaluations input").send_keys("A HERON")
    shown.until(lambda: shown.one("#evaluations .status").text.startswith("1 problem of 3"))
    shown.until(lambda: shown.one("#evaluations .heading h2").text == "Problem 3")
    assert shown.texts("#evaluations .evaluation mark") == ["a heron"] * 2
    assert "<img src=x onerror=alert(1)>" in shown.one("#evaluations .question pre").text
    assert not shown.all("main img, main script")
    shown.one("#evaluations input").send_keys(" nowhere")
    shown.until(lambda: shown.texts("#evaluations .group .empty") == ["No problem meets these filters."])


def test_the_page_works_in_the_frame_of_a_notebook(driver, page, tmp_path):
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


def test_unusual_metrics_are_drawn(shown, tmp_path):
    """Only an evaluation, a zero on a logarithmic axis, and extremes."""
    lines = [
        {"step": 0, "eval/x/avg@8": 0.5, "time/eval_s": 3.0},
        {
            "step": 1,
            "sync/sampler_trainer_kl": 0.0,
            "rollout/mixed_frac": 1.0,
            "rollout/all_wrong_frac": None,
        },
        {"step": 1, "mine/own": 1e300, "mine/other": -1e-300},
    ]
    runs = [write_metrics(tmp_path / str(number), line) for number, line in enumerate(lines)]
    opened(shown.driver, report(*runs).save(tmp_path / "page.html"))
    for box in shown.all("details"):
        box.click()
    assert shown.all(".panel")
    texts = [each.get_attribute("d") for each in shown.all(".panel path")]
    texts += shown.texts(".panel text") + shown.texts(".panel .value")
    assert not [text for text in texts if "NaN" in text or "Infinity" in text]
