"""The page as a file: it loads nothing, and texts of models are never markup."""

import base64
import hashlib
import json
import re
from functools import partial
from html.parser import HTMLParser

import pytest

from dapo_jax.config import ConfigError
from dapo_jax.report import report
from dapo_jax.report.page import SCRIPTS, WATCHING, inert
from dapo_jax.trackers.run_status import write_status
from tests.report.chromium import missing
from tests.report.made import problem_line, rollout_line, write_evaluation, write_run
from tests.structure_test import ROOT

HOSTILE = "</script><script>alert(1)</script><!--<script> \u2028 <img src=x onerror=alert(2)> & ]]> \0 \ud83d"


class Elements(HTMLParser):
    """All elements with their attributes, and the content of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.found, self.contents, self.inside = [], [], False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self.contents.append("")
        self.inside = True

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.contents[-1] += data

    def of(self, tag):
        pairs = zip(self.found, self.contents, strict=True)
        return [(attributes, content) for (name, attributes), content in pairs if name == tag]


@pytest.fixture
def hostile(tmp_path):
    """A run whose texts and name try to break out of the page."""

    texts = {"prompt": HOSTILE, "extracted": HOSTILE, "reason": HOSTILE}
    run = write_run(
        tmp_path / "<b>run<!--", steps=2, line=partial(rollout_line, response="</script>", **texts)
    )
    for step in (0, 1):
        strange = dict.fromkeys(("prompt", "answer", "place"), HOSTILE) | {
            "responses": [{"response": HOSTILE, "reason": HOSTILE}],
            "extracted": [{"answer": HOSTILE, "count": 8, "correct": 0}],
        }
        write_evaluation(run, step, [problem_line(0, 0) | strange], name="</script><b>x")
    write_status(run, "failed", HOSTILE)
    return run


def test_texts_of_models_are_never_markup(hostile, tmp_path):
    same = write_run(tmp_path / "plain", steps=2)
    for step in (0, 1):
        write_evaluation(same, step, [problem_line(0, 0)])
    plain = Elements(report(same).html)
    found = Elements(report(hostile).html)
    assert [tag for tag, _ in found.found] == [tag for tag, _ in plain.found]
    assert "<script>alert" not in report(hostile).html
    assert "<img" not in report(hostile).html
    assert found.of("title")[0][1].startswith("<b>run<!-- ")


def test_the_page_loads_nothing_and_may_load_nothing(hostile):
    text = report(hostile).html
    found = Elements(text)
    for tag, attributes in found.found:
        assert not {"src", "data", "action", "srcset", "ping"} & attributes.keys(), tag
        assert attributes.get("href", "#").startswith("#")
    assert not re.search(
        r"url\((?!#)|@import|https?://(?!www\.w3\.org/2000/svg)", "".join(c for _, c in found.of("style"))
    )
    [policy] = [
        each["content"] for each, _ in found.of("meta") if each.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "http" not in policy
    running = [content for attributes, content in found.of("script") if "type" not in attributes]
    own = [*running, *(content for _, content in found.of("style"))]
    hashes = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in own]
    assert re.findall(r"'sha256-([^']+)'", policy) == hashes, "only the page's own script and style"


def test_json_in_a_script_element_is_the_same_json():
    value = {"text": HOSTILE, "others": ["\u2029", "é🙂", 1.5, None]}
    text = inert(value)
    assert json.loads(text) == value
    assert not re.search(r"[<>&\u2028\u2029]", text)
    with pytest.raises(ValueError, match="JSON"):
        inert(float("nan"))


def test_scripts_never_read_markup():
    """Data goes into text nodes and attributes; these functions would read markup."""
    folder = ROOT / "dapo_jax" / "report" / "assets"
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|XMLHttp|import\("
    assert {path.name for path in folder.glob("*.js")} == {*SCRIPTS, WATCHING}
    for name in (*SCRIPTS, WATCHING):
        # Only a served page sends requests; its policy allows only its own server.
        forbidden = markup if name == WATCHING else rf"{markup}|fetch\("
        found = re.search(forbidden, (folder / name).read_text())
        assert not found, f"{name}: {found}"


def test_a_report_is_saved_whole_and_is_the_same_except_its_time(tmp_path):
    run = write_run(tmp_path / "run", steps=1)
    made = report(run)
    path = made.save(tmp_path / "deep" / "page.html")
    assert path.read_text(encoding="utf-8") == made.html
    assert [each.name for each in path.parent.iterdir()] == ["page.html"]
    one, other = (re.sub(r'"made":"[^"]*"', "", each) for each in (made.html, report(run).html))
    assert one == other
    [(attributes, _)] = Elements(made._repr_html_()).of("iframe")
    assert (attributes["sandbox"], attributes["srcdoc"]) == ("allow-scripts", made.html)


def test_too_many_runs_are_refused(tmp_path):
    runs = [write_run(tmp_path / str(number), steps=1) for number in range(9)]
    with pytest.raises(ConfigError, match="found 9 runs; a report shows at most 8"):
        report(*runs)
    with pytest.raises(ConfigError, match="rollout_steps: found -1"):
        report(runs[0], rollout_steps=-1)


@pytest.mark.skipif(bool(missing()), reason=missing() or "there is a browser")
def test_the_page_opens_in_a_browser_and_texts_of_models_are_not_markup(shown):
    """The one test of the default tier that needs Chromium; browser_test.py has the others."""
    assert len(shown.lines()) == 4  # two metrics of two runs
    shown.click("#tab-rollouts")
    shown.one("#search").send_keys("WALRUS said </script><img")
    shown.until(lambda: shown.status().startswith("2 responses in 2 groups with"))
    shown.until(lambda: shown.one(".heading h2").text == "Step 7")
    [response] = shown.texts("#rollouts .response .tokens")
    assert "<img src=x onerror=alert(1)> <!-- &" in response
    assert shown.all(".token.hit")
    assert not shown.all("main img, main script")
    shown.one("#search").clear()
    shown.one("#search").send_keys("nowhere at all")
    shown.until(lambda: shown.status().startswith("0 responses in 0 groups"))
    assert shown.one(".group .empty").text == "No response meets these filters."
