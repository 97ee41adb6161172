"""README.md and the pages of docs/ are true: their programs run, and their files, functions, tests and commands exist."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from dapo_jax.cli import main
from dapo_jax.config import TrainConfig, load_config
from dapo_jax.config.other_libraries import unknown_key
from dapo_jax.config.section import entry, leaf_types
from dapo_jax.dapo.rollouts import Group, Prompt, Response, Rollout, Verdict
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.rewards.judge import JudgeConfig
from dapo_jax.trackers import read_metrics
from dapo_jax.trackers.rollout_log import write_rollouts
from tests.docs.blocks import PAGES as ALL_PAGES
from tests.docs.blocks import blocks

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
OWN_TEST = ROOT / "docs" / "your_own_training_loop.md"
"""own_stack_test.py runs this page."""
PAGES = [
    README,
    *sorted(page for page in set(ROOT.glob("docs/**/*.md")) - {OWN_TEST} if "```python" in page.read_text()),
]
TRAINS = (
    "bring_your_data",
    "bring_your_model",
    "start",
    "write_a_reward",
    "write_an_environment",
    "write_an_objective",
)
"""Pages whose programs train a model, which takes minutes together."""
TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
RUN_ELSEWHERE = {
    ("serve.md", "import json"): "tests/serving/http_test.py::test_the_client_in_the_docs_works",
    ("use_a_model.md", "import grpc"): "tests/serving/serve_test.py::test_the_client_in_the_docs_works",
    ("adapters.md", "from transformers import AutoModelForCausalLM"): (
        "tests/models/adapter_folder_test.py::test_the_code_of_the_documentation_opens_an_adapter"
    ),
    ("guards.md", "import numpy as np"): "tests/faults/nan_test.py::test_the_page_opens_a_post_mortem",
}
"""Programs that are indented instead of fenced, because they need a server or a failed run: page and first line -> the test that runs them."""


def program(page):
    """Returns the page with everything except its Python blocks blanked, so a traceback has the page's line numbers."""
    lines, inside = [], False
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            inside, line = line == "```python", ""
        lines.append(line if inside else "")
    return "\n".join(lines)


def table(page, heading):
    """The cells of the table below a heading of a page, without its two header rows."""
    section = page.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows[2:]]


def leave_a_run(folder):
    """Writes the files of a finished quickstart that pages read: the metrics of a real run, and one rollout."""
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "results" / "smollm2_135m_arithmetic" / "metrics.jsonl", folder)
    prompt = Prompt(ordinal=0, tokens=np.array([1], np.int32), text="1+2", answer="3")
    response = Response(record=Tokens(np.array([2], np.int32)), finish_reason="stop")
    rollout = Rollout(response=response, text="=3", verdict=Verdict(correct=True), reward=1.0)
    write_rollouts(folder / "rollouts", 10, [Group(prompt=prompt, rollouts=(rollout,))])


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow) if page.stem in TRAINS else page for page in PAGES],
    ids=lambda page: page.name,
)
def test_the_programs_of_a_page_run_unchanged(page, tmp_path):
    """The program runs in a separate process from the checkout, without the strict settings of the tests."""
    leave_a_run(tmp_path / "runs" / "quickstart")
    script = tmp_path / f"{page.stem}.py"
    script.write_text(program(page))
    environment = os.environ | {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    promised = re.findall(r"^print\(.*\)  # (-?[\d.]+)$", program(page), re.MULTILINE)
    assert set(promised) <= set(done.stdout.splitlines())


@pytest.mark.parametrize(
    "page", [page for page in ALL_PAGES if "```yaml" in page.read_text()], ids=lambda page: page.name
)
def test_the_yaml_of_a_page_is_a_configuration(page, tmp_path):
    """Except a task of lm-eval (`task:`), and the settings of a judge (`url:`)."""
    for number, block in enumerate(block for block in blocks(page) if block.language == "yaml"):
        path = tmp_path / f"{number}.yaml"
        if block.text.startswith("task:"):
            continue
        if block.text.startswith("url:"):
            entry("judge", yaml.safe_load(block.text), JudgeConfig)
            continue
        path.write_text(block.text if "run_dir:" in block.text else f"run_dir: out\n{block.text}")
        load_config(path)


def own_files(folder, rows):
    """Writes `my.yaml` as the page has it, and a file of that many rows in the page's form; returns the configuration."""
    text = (ROOT / "docs" / "start.md").read_text().split("## Your model, your data, your reward")[1]
    row = json.loads(re.search(r"`(\{.*?\})`", text)[1])
    sums = [row | {"question": f"{at}+{at + 1}", "answer": str(2 * at + 1)} for at in range(10, 10 + rows)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(each) + "\n" for each in sums))
    (folder / "my.yaml").write_text(re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1])
    return load_config(folder / "my.yaml", ["run_dir=runs/mine"])


@pytest.mark.slow  # a minute: it compiles and trains
def test_the_example_with_ones_own_files_trains(tmp_path, monkeypatch):
    """It uses the model of the package instead of the model on the hub; this one writes its answers after `=`, which `exact` reads."""
    monkeypatch.chdir(tmp_path)
    own_files(tmp_path, 36)
    shipped = ["model.source=shipped:quickstart", "data.chat=false", "reward.grader=exact"]
    settings = ["run_dir=runs/mine", "steps=2", *shipped]
    assert main(["train", "my.yaml", *settings]) == 0
    assert [line["step"] for line in read_metrics("runs/mine/metrics.jsonl")] == [0, 1, 2]


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_on_a_page_exists(page):
    text = page.read_text()
    folders = r"(?:dapo_jax|configs|constraints|docs|tests|launch|notebooks|benchmarks|\.ci|\.github)"
    named = re.findall(rf"(?<![\w/.]){folders}/[\w./-]*\w", text)
    linked = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    missing = [name for name in set(named) if not (ROOT / name).exists()]
    missing += [name for name in set(linked) if not (page.parent / name).exists()]
    assert not missing, f"{page.name} names {sorted(missing)}, which do not exist"


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_linked_section_exists(page):
    """An anchor is the heading in lower case, joined by hyphens, as on code hosts and the site."""
    linked = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text())
    missing = [f"{target}#{name}" for target, name in linked if name not in sections(page, target)]
    assert not missing, f"{page.name} leads to {missing}, which do not exist"


def test_every_test_on_a_page_exists():
    named = [(page, *test) for page in ALL_PAGES for test in re.findall(TEST, page.read_text())]
    named += [
        ("above", *test) for elsewhere in RUN_ELSEWHERE.values() for test in re.findall(TEST, elsewhere)
    ]
    assert len(named) > 40
    missing = [
        test
        for test in named
        if not re.search(rf"^def {test[2]}\(", (ROOT / test[1]).read_text(), re.MULTILINE)
    ]
    assert not missing


def sections(page, target):
    text = (page.parent / target if target else page).read_text()
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_diagram_and_table_of_stages_agree_with_the_loop():
    """The diagram equals the loop's docstring, and the table of files has its stages in order."""
    diagram = re.search(r"^ +prompts -> .*(?:\n .*)*", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert diagram is not None
    assert diagram[0] in importlib.import_module("dapo_jax.run.loop").__doc__
    stages = [stage.strip() for stage in diagram[0].splitlines()[0].split("->")]
    rows = re.findall(
        r"^\| ([\w ]+) \| `dapo_jax/", (ROOT / "docs" / "concepts.md").read_text(), re.MULTILINE
    )
    assert rows == [*stages, "weights"]


@pytest.mark.parametrize("row", table(ROOT / "docs" / "from_trl_or_verl.md", "Keys"), ids=lambda row: row[0])
def test_a_key_of_another_library_is_answered_with_ours_in_the_same_row(row):
    """The table has `key=value` if the value has another name, too."""
    ours, *theirs = [[key.partition("=")[0] for key in re.findall(r"`([^`]+)`", cell)] for cell in row]
    known = leaf_types(TrainConfig)
    assert set(ours) <= known.keys()
    for keys in filter(None, theirs):
        for key, expected in zip(keys, ours, strict=True):
            assert f"`{expected}`" in unknown_key(key, known), key


def test_the_overrides_on_the_page_about_other_libraries_are_accepted():
    page = (ROOT / "docs" / "from_trl_or_verl.md").read_text()
    given = re.findall(
        r"`((?:algorithm|loss\.\w+)=[^`]+)`", page.split("\n### Values of")[1].split("\n## ")[0]
    )
    assert len(given) > 8
    graders = "reward.grader=[{grader: exact}, {grader: kimi_length}]"
    for overrides in set(given) - {"algorithm=NAME"}:
        load_config("quickstart", [*re.split(r" (?=[\w.]+=)", overrides), graders])


def test_indented_programs_are_run_elsewhere():
    found = [
        (page.name, block.text.splitlines()[0])
        for page in ALL_PAGES
        for block in blocks(page)
        if block.language == "python" and not block.fenced
    ]
    assert sorted(found) == sorted(RUN_ELSEWHERE)
