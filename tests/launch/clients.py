"""A laptop whose cloud clients are stubs."""

import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STUB = Path(__file__).with_name("stub.py")
CLIENTS = ("gcloud", "xpk", "kubectl", "srun", "scontrol", "scancel", "squeue", "dapo-jax", "ray")
ASYNC_GATHERS = "--xla_enable_async_all_gather=true --xla_tpu_overlap_compute_collective_tc=true"
"""The flags of the TPU compiler that the scripts set for any slice."""
TOKENS = {"HF_TOKEN": "hf_SECRET it's $HOME", "WANDB_API_KEY": "wandb_SECRET"}


@dataclass(frozen=True)
class Laptop:
    """A folder with a home, a working folder, and the stubs of the clients first in PATH."""

    folder: Path
    environment: dict[str, str]

    @property
    def work(self) -> Path:
        return self.folder / "work"

    def scenario(self, **replies: Any) -> None:
        """Sets the replies of the stubs (see stub.py), from the first on."""
        (self.folder / "scenario.json").write_text(json.dumps(replies))
        shutil.rmtree(self.folder / "counts", ignore_errors=True)
        (self.folder / "counts").mkdir()

    def run(self, *words: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
        environment = self.environment | more
        return subprocess.run(
            words, cwd=self.work, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300, check=False,
        )  # fmt: skip

    def launch(self, script: str, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return self.run("bash", ROOT / "launch" / script, *words, **more)

    def signal(self, number: int, script: str, *words: str, once: str, **more: str) -> str:
        """Launches a script, and signals it once it has called the client `once`. Returns its error output. It must end with status 0 within 15 s."""
        # A stop in this process leaves SIGUSR1 ignored. Bash would inherit that, and cannot trap such a signal.
        former = signal.signal(number, signal.SIG_DFL)
        job = subprocess.Popen(
            ["bash", ROOT / "launch" / script, *words], cwd=self.work, env=self.environment | more, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        signal.signal(number, former)
        try:
            until = time.monotonic() + 30
            while not self.calls(once) and time.monotonic() < until:
                time.sleep(0.05)
            job.send_signal(number)
            assert job.wait(timeout=15) == 0
        finally:
            subprocess.run(["kill", "--", f"-{job.pid}"], check=False)
            errors = job.communicate()[1]
        return errors

    def calls(self, *names: str) -> list[dict[str, Any]]:
        """The recorded calls in order: all, or only of these clients."""
        path = self.folder / "calls.jsonl"
        lines = map(json.loads, path.read_text().splitlines()) if path.exists() else []
        return [line for line in lines if not names or line["client"] in names]

    def commands(self) -> list[list[str]]:
        """The commands of a cloud that the script ran."""
        return [[line["client"], *line["words"]] for line in self.calls("gcloud", "xpk", "kubectl")]


def shellcheck() -> str | None:
    found = Path(sys.executable).with_name("shellcheck")
    return str(found) if found.exists() else shutil.which("shellcheck")


def printed(text: str) -> list[list[str]]:
    """The commands that a dry run prints, without `tar`."""
    lines = (shlex.split(line) for line in text.splitlines() if not line.startswith("#"))
    return [line for line in lines if line[0] != "tar"]


def make_laptop(folder: Path, answers: Path) -> Laptop:
    """A laptop with a configuration and a reward. `answers` is a folder for the output of `dapo-jax config`."""
    programs = {"near": CLIENTS, "parts": ("uv",)}
    for name in ("work/configs", "home", "copied", *programs):
        (folder / name).mkdir(parents=True)
    for place, names in programs.items():
        for name in names:
            path = folder / place / name
            path.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {STUB} {name} "$@"\n')
            path.chmod(0o755)
    shutil.copy(ROOT / "configs" / "quickstart.yaml", folder / "work" / "configs")
    (folder / "work" / "rewards.py").write_text("def brief(sample):\n    return True\n")
    environment = {
        "PATH": f"{folder / 'near'}:/usr/bin:/bin",
        "HOME": str(folder / "home"),
        "PYTHONPATH": str(ROOT),
        "STUB_FOLDER": str(folder),
        "STUB_PYTHON": sys.executable,
        "STUB_ANSWERS": str(answers),
        "LC_ALL": "C.UTF-8",
    }
    laptop = Laptop(folder, environment)
    laptop.scenario()
    return laptop
