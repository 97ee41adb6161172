"""The launch scripts pass shellcheck, and the commands of docs/launch.md work as written."""

import re
import shutil
import subprocess
import time

import pytest

from tests.launch.clients import ROOT, shellcheck

SCRIPTS = sorted([*ROOT.glob("launch/*.sh"), *ROOT.glob("launch/*.sbatch"), ROOT / ".ci" / "run"])
HEAD, *SECTIONS = (ROOT / "docs" / "launch.md").read_text().split("\n## ")
PAGE = {text.partition("\n")[0]: text for text in SECTIONS}
STARTS = [PAGE["Cloud TPU VMs"], PAGE["GKE"], PAGE["Slurm"]]
"""The sections that start runs with the scripts."""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
@pytest.mark.skipif(shellcheck() is None, reason="shellcheck is not installed; it comes with the extra `dev`")
def test_shellcheck_finds_nothing(laptop, script):
    done = laptop.run(shellcheck(), "--external-sources", str(script))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["tpu_vm.sh", "gke_xpk.sh", "slurm.sbatch"])
def test_help_needs_nothing(laptop, name):
    done = laptop.launch(name, "--help", PATH="/usr/bin:/bin")
    assert done.returncode == 0
    assert "CONFIG [key=value ...]" in done.stdout


def readers_checkout(laptop):
    """Makes the working folder a checkout, with the configurations and data files that the page names."""
    for name in ("launch", "constraints", "dapo_jax"):
        shutil.copytree(ROOT / name, laptop.work / name)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, laptop.work)
    for name in re.findall(r"configs/([\w.]+\.yaml)", "".join(STARTS)):
        shutil.copy(ROOT / "configs" / name, laptop.work / "configs" / name)
    for name in ("dapo-math-17k.parquet", "aime-2024.parquet"):
        (laptop.work / name).touch()


def commands(section):
    return [f"set -euo pipefail\n{text}" for text in re.findall(r"```sh\n(.*?)```", section, re.DOTALL)]


def started(laptop, block):
    """Starts a block as a process and waits until it follows the second run, which has logged its first step."""
    before, log = laptop.verbs().count("follow"), laptop.folder / "workers" / "0" / "dapo_jax_run" / "log"

    def follows():
        return laptop.verbs().count("follow") > before and "step 1 of start 1" in log.read_text()

    run = subprocess.Popen(
        ["bash", "-c", block], cwd=laptop.work, env=laptop.environment, stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 60
    while not follows() and time.monotonic() < until:
        time.sleep(0.05)
    return run


def test_the_page_of_pods_works_word_by_word(laptop):
    """Runs the first block to the end of a run; then again, with the later blocks next to it."""
    readers_checkout(laptop)
    first, watch, look, end = commands(STARTS[0])
    done = laptop.run("bash", "-c", first)
    assert done.returncode == 0, done.stdout + done.stderr
    assert laptop.verbs()[-2:] == ["follow", "delete"]

    laptop.scenario(held=True)
    runs = [started(laptop, block) for block in (first, watch)]
    for block in (look, end):
        done = laptop.run("bash", "-c", block)
        assert done.returncode == 0, done.stdout + done.stderr
        if block is look:
            assert "step 1 of start 1" in done.stdout
    for run in runs:
        assert "dapo-32b was deleted" in run.communicate(timeout=60)[1]

    laptop.scenario()
    for block in (*commands(STARTS[1]), *commands(STARTS[2])):
        done = laptop.run("bash", "-c", block)
        assert done.returncode == 0, done.stdout + done.stderr
    assert not any(call.get("refused") for call in laptop.calls())
    seen = [" ".join([call["client"], *call["words"][:2]]) for call in laptop.calls()]
    for part in ("dapo-jax plan", "gcloud storage", "xpk workload", "kubectl logs", "sbatch", "srun"):
        assert any(line.startswith(part) for line in seen), part


def test_the_options_that_the_page_names_exist(laptop):
    text = "".join([HEAD, *STARTS])
    helped = "".join(laptop.launch(name, "--help").stdout for name in ("tpu_vm.sh", "gke_xpk.sh"))
    options = set(re.findall(r"`(--[a-z-]+)", text)) - {"--help"}
    assert options
    assert {option for option in options if option not in helped} == set()
