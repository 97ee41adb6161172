"""The commands in README and the pages: each is run, or parsed by its program, or listed here with the reason why not."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib

import pytest

from dapo_jax import cli
from dapo_jax.config import EvaluateConfig, SftConfig, TrainConfig, load_config, load_evaluation
from tests.docs.blocks import PAGES, ROOT, blocks, shell_lines

STANDS_FOR = {
    "CONFIG": "configs/quickstart.yaml",
    "my.yaml": "configs/quickstart.yaml",
    "runs/quickstart/config.yaml": "configs/quickstart.yaml",
    "MODEL": "shipped:quickstart",
    "ROLLOUTS": "kept",
}
"""Placeholders on the pages -> a value for the tests."""

READERS_OWN = ("dapo-math-17k.parquet", "aime-2024.parquet")
"""Published files that readers download; here they are empty, because no test reads them."""

NOT_HERE = {
    "git": "it clones this repository from the reader's address",
    "cd": "a command of the shell, to enter the clone",
    "export": "a command of the shell, to set a variable for the commands that follow",
    "gcloud": "Google's client, which asks a service",
    "vf-eval": "verifiers' command, which is not a dependency",
    "lm_eval": "lm-eval's command; tests/serving/http_server_test.py reads an answer as lm-eval does",
    "sky": "SkyPilot's client, which rents machines; tests/launch/skypilot_test.py runs the commands of its file",
    "hf": "the hub's client, which would fetch 65 GB",
    "curl": "it asks a server; tests/serving/shipped_chat_test.py makes the prompts of the bodies that docs/serve.md sends",
}
"""Programs that no test can run -> why."""

CHECKS = ("ruff", "pyrefly", "lint-imports", "sphinx-build")
"""Programs that `.ci/run` runs."""

ENVIRONMENT = (
    "JAX_PLATFORMS",
    "XLA_FLAGS",
    "DAPO_JAX_SMOLLM2",
    "DAPO_JAX_DATA",
    "DAPO_JAX_API_KEY",
    "PYTHON",
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINES = sorted({(page.relative_to(ROOT).as_posix(), line) for page in PAGES for line in shell_lines(page)})


def without_environment(words):
    """Returns the words after `NAME=value ...`; JAX, pytest or this library must read each NAME."""
    while re.fullmatch(r"[A-Z][A-Z_]*=.*", words[0]):
        assert words[0].partition("=")[0] in ENVIRONMENT, words[0]
        words = words[1:]
    return words


@pytest.fixture(autouse=True)
def checkout(tmp_path, monkeypatch):
    """Makes a folder in which the paths on the pages lead to this checkout."""
    for name in ("configs", "launch", "constraints", "tests", "benchmarks", "docs", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in READERS_OWN:
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_has_a_known_language(page):
    languages = {block.language for block in blocks(page)}
    plain = {language for language in languages if not language.startswith("{")}
    assert plain <= {"python", "sh", "yaml", "text"}, f"{page.name}: {plain}"


@pytest.mark.parametrize(("page", "line"), LINES)
def test_a_command_is_understood_by_its_program(page, line):
    words = without_environment(shlex.split(line))
    program, rest = words[0], words[1:]
    if program in NOT_HERE or program in CHECKS:
        return
    known = {
        "dapo-jax": is_a_command,
        "pip": installs_what_there_is,
        "pytest": runs_tests_that_exist,
        "python": runs_a_file_or_a_module,
        "ray": is_a_command_of_ray,
        "bash": tried_dry,
        "sbatch": tried_dry,
    }
    check = tried_dry if program.startswith("launch/") else known.get(program)
    assert check is not None, f"{page}: nothing here reads {program!r}; add it, or a reason to NOT_HERE"
    check(program, rest)


SMALL = [
    "steps=2",
    "sampling.slots=16",
    "dynamic_sampling.prompts_per_wave=4",
    "dynamic_sampling.on_shortfall=train_fewer",
    "batch.prompts_per_step=4",
    "batch.group_size=4",
    "batch.groups_per_update=2",
    "batch.rows_per_microbatch=8",
    "eval.prompts=4",
    "eval.samples_per_prompt=2",
    "log.rollouts_every_steps=1",
]
FEW = "eval.prompts=4 eval.samples_per_prompt=2 data.max_prompt_tokens=8 sampling.max_response_tokens=48"
AT_A_SMALLER_SIZE = {"train": SMALL, "eval": FEW.split()}
READERS_FILES = ("gguf", "aime-2024.parquet")
OF_THEIR_OWN = {"doctor": "tests/cli/doctor_test.py", "serve": "tests/serving/serve_test.py"}


@pytest.mark.slow
def test_the_commands_for_a_first_day_run_one_after_the_other(tmp_path, capsys):
    """The commands of two pages, in their order, at smaller sizes; each uses the files of the previous ones."""
    question = {"prompt": "1+2", "answer": "3", "question": "1+2", "solution": "3"}
    (tmp_path / "problems.jsonl").write_text(json.dumps(question) + "\n")
    (tmp_path / "kept").symlink_to(tmp_path / "runs" / "quickstart" / "rollouts")
    ran = []
    for page in ("start", "use_a_model"):
        for line in shell_lines(ROOT / "docs" / f"{page}.md"):
            program, *words = (STANDS_FOR.get(word, word) for word in shlex.split(line))
            skipped = program != "dapo-jax" or words[0] in OF_THEIR_OWN
            if skipped or any(name in line for name in READERS_FILES):
                continue
            status = cli.main([*words, *AT_A_SMALLER_SIZE.get(words[0], [])])
            assert status == 0, f"{line}: {capsys.readouterr().err}"
            ran.append(words[0])
    assert {"train", "report", "sample", "eval", "convert", "score"} == set(ran)


def is_a_command_of_ray(program, words):
    """Reads the words with Ray's own options."""
    scripts = pytest.importorskip("ray.scripts.scripts", reason="needs the extra `cluster`")
    scripts.cli.commands[words[0]].make_context(words[0], words[1:])


def is_a_command(program, words):
    words = [STANDS_FOR.get(word, word) for word in words]
    parsed = cli._parsed(words)
    overrides = getattr(parsed, "overrides", [])
    if parsed.name == "eval":
        load_evaluation(parsed.config, overrides)
    elif parsed.name == "config":
        schema = SftConfig if parsed.sft else EvaluateConfig if parsed.eval else TrainConfig
        load_config(parsed.config, overrides, schema=schema)
    elif getattr(parsed, "config", None):
        load_config(parsed.config, overrides, schema=SftConfig if parsed.name == "sft" else TrainConfig)


def installs_what_there_is(program, words):
    assert words[0] == "install", words
    extras = PROJECT["project"]["optional-dependencies"]
    for word in words[1:]:
        named = re.fullmatch(r"(?:\.|dapo_jax)\[([\w,-]+)\]", word)
        if named:
            assert set(named[1].split(",")) <= extras.keys(), word
        else:
            assert word in ("-e", "-c", ".", "dapo_jax", "xpk", "skypilot") or (ROOT / word).exists(), word


def runs_tests_that_exist(program, words):
    markers = {text.partition(":")[0] for text in PROJECT["tool"]["pytest"]["ini_options"]["markers"]}
    for at, word in enumerate(words):
        if word == "-m":
            assert set(re.findall(r"\w+", words[at + 1])) - {"or", "not", "and"} <= markers
        elif "/" in word:
            assert (ROOT / word).exists(), word


def runs_a_file_or_a_module(program, words):
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]) is not None, words[1]
    else:
        assert (ROOT / words[0]).exists(), words[0]


def tried_dry(program, words):
    """Runs a launch script with --dry-run: it reads the configuration and prints its commands."""
    if program in ("bash", "sbatch"):
        script = next(word for word in words if word.startswith("launch/"))
        after = words[words.index(script) + 1 :]
        words = [script, "--dry-run", *(word for word in after if word != "--dry-run")]
    elif program == "launch/local.sh":
        words = [program, "--dry-run", *words]
    else:
        words = [program, *words, "--dry-run"]
    tools = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", *words], env=os.environ | {"PATH": tools}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
