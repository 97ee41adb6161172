"""If the disk is full while a run writes checkpoints, metrics or rollouts, it ends with the reason, and earlier files are whole.

Each part is on its own small file system: a tmpfs in a mount namespace.
"""

import shutil
import subprocess
import sys

import pytest

from tests.faults.micro import assert_the_same_run, make_run
from tests.several import ROOT

ALONE = ["unshare", "--map-root-user", "--mount"]
"""Gives the rights of root in a mount namespace, which ends with the process."""

SCRIPT = """
set -e
run=$1 room=$2 part=$3 out=$4; shift 4
mkdir -p "$run/$part"
mount -t tmpfs -o "size=$room" none "$run/$part"
if [ "$part" = lines ]; then ln -s lines/metrics.jsonl "$run/metrics.jsonl"; fi
status=0
"$@" || status=$?
cp -aL "$run" "$out"
exit $status
"""

PARTS = {
    # A checkpoint has about 100 kB: there is room for two or three of the four.
    "checkpoints": ("360k", "saving checkpoint step"),
    # A step's rollouts have 4 to 8 kB: there is room for the first step, and not for the fifth too.
    "rollouts": ("12k", "rollouts"),
    # A line is 2 kB.
    "lines": ("8k", "cannot write the metrics of step"),
}


def can_mount():
    if shutil.which(ALONE[0]) is None:
        return False
    return (
        subprocess.run([*ALONE, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode == 0
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("whole"), steps=12)
    run.finish()
    return run


@pytest.mark.slow
@pytest.mark.skipif(
    not can_mount(), reason="needs unshare and user namespaces, for a file system without room"
)
@pytest.mark.parametrize("part", PARTS)
def test_a_run_on_a_full_disk_ends_and_resumes_on_a_larger_one(part, whole, tmp_path):
    room, message = PARTS[part]
    run, out = make_run(tmp_path / "full", steps=12), tmp_path / "out"
    command = [sys.executable, "-m", "dapo_jax.cli", "train", str(run.config)]
    done = subprocess.run(
        [*ALONE, "bash", "-c", SCRIPT, "bash", run.run_dir, room, part, out, *command],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert message in done.stderr
    assert "No space left on device" in done.stderr or "is full" in done.stderr
    shutil.rmtree(run.run_dir)
    shutil.rmtree(out / "lines", ignore_errors=True)
    shutil.copytree(out, run.run_dir)
    assert run.steps(), "a checkpoint was there before"
    run.finish("--resume")
    assert_the_same_run(run.run_dir, whole.run_dir)
