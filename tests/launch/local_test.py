"""launch/local.sh: it starts the processes of a run on this machine and ends them all."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from tests.several import ROOT

SCRIPT = ROOT / "launch" / "local.sh"
# A stand-in for Python: it answers the script's question for a port, then behaves as its first argument names.
FAKE = """#!/usr/bin/env bash
if [ "$1" = -c ]; then exec {python} "$@"; fi
echo "process $JAX_PROCESS_ID of $JAX_NUM_PROCESSES with $JAX_NUM_CPU_DEVICES: ${{*:3}}"
case "$3:$JAX_PROCESS_ID" in
  fail:1) exit 7 ;;
  fail:*|wait:*) trap 'echo "ending"; exit 1' TERM; sleep 60 & wait ;;
esac
printf 'no newline'
"""


@pytest.fixture
def python(tmp_path):
    fake = tmp_path / "python"
    fake.write_text(FAKE.format(python=sys.executable))
    fake.chmod(0o755)
    return {**os.environ, "PYTHON": str(fake)}


def local(*arguments, **how):
    return subprocess.run(
        [SCRIPT, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False, **how
    )


def test_a_dry_run_prints_a_command_for_each_process():
    done = local("--dry-run", "2", "4", "train", "a b.yaml")
    lines = done.stdout.splitlines()
    assert (done.returncode, len(lines)) == (0, 2)
    for index, line in enumerate(lines):
        assert line.rstrip().endswith(
            f"JAX_PROCESS_ID={index} {os.environ.get('PYTHON', 'python')} -m dapo_jax.cli train a\\ b.yaml"
        )
        assert "JAX_NUM_PROCESSES=2" in line
        assert "JAX_NUM_CPU_DEVICES=4" in line
    assert len({re.search(r"JAX_COORDINATOR_ADDRESS=localhost:(\d+)", line)[1] for line in lines}) == 1


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (8, 4)])
def test_xla_takes_the_flags_however_many_cores_there_are(cores, threads, tmp_path):
    (tmp_path / "getconf").write_text(f"#!/bin/sh\necho {cores}\n")
    (tmp_path / "getconf").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    done = local("--dry-run", "2", "3", "train", "a.yaml", env=environment)
    flags = next(word for word in shlex.split(done.stdout.splitlines()[0]) if word.startswith("XLA_FLAGS="))
    assert flags.endswith(f" intra_op_parallelism_threads={threads}")
    environment |= {"XLA_FLAGS": flags.removeprefix("XLA_FLAGS="), "JAX_PLATFORMS": "cpu"}
    asked = "import jax; assert jax.device_count() == 1"
    subprocess.run([sys.executable, "-c", asked], env=environment, timeout=60, check=True)


@pytest.mark.parametrize("arguments", [[], ["2", "4"], ["0", "4", "train"], ["2", "four", "train"]])
def test_wrong_arguments_print_the_usage(arguments):
    done = local(*arguments)
    assert done.returncode == 2
    assert f"found: {' '.join(arguments)}" in done.stderr


def test_each_line_has_the_index_of_its_process(python):
    done = local("3", "2", "quick", env=python)
    assert done.returncode == 0
    expected = [
        f"[{i}] {text}" for i in range(3) for text in ("no newline", f"process {i} of 3 with 2: quick")
    ]
    assert sorted(done.stdout.splitlines()) == expected


@pytest.mark.slow  # waits for the others
def test_a_failed_process_gives_the_status_and_the_others_are_ended(python):
    began = time.monotonic()
    done = local("3", "1", "fail", env=python)
    assert done.returncode == 7
    assert 9 < time.monotonic() - began < 40  # they had the time to end by themselves
    ended = sorted(line for line in done.stdout.splitlines() if "ending" in line)
    assert ended == ["[0] ending", "[2] ending"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_all(python, number, status):
    started = subprocess.Popen(
        [SCRIPT, "2", "1", "wait"], env=python, cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    seen = [started.stdout.readline() for _ in range(2)]
    assert all("wait" in line for line in seen)
    time.sleep(0.5)
    started.send_signal(number)
    output, _ = started.communicate(timeout=40)
    assert started.returncode == status
    assert sorted(output.splitlines()) == ["[0] ending", "[1] ending"]
