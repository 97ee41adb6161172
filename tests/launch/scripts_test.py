"""The launch scripts pass shellcheck. tests/docs/shell_test.py runs the commands of docs/launch.md with --dry-run."""

import pytest

from tests.launch.clients import ROOT, shellcheck

SCRIPTS = sorted([*ROOT.glob("launch/*.sh"), *ROOT.glob("launch/*.sbatch"), ROOT / ".ci" / "run"])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
@pytest.mark.skipif(shellcheck() is None, reason="shellcheck is not installed; it comes with the extra `dev`")
def test_shellcheck_finds_nothing(laptop, script):
    done = laptop.run(shellcheck(), "--external-sources", str(script))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["tpu_vm.sh", "gke_xpk.sh", "slurm.sbatch", "slurm_ray.sbatch"])
def test_help_needs_nothing(laptop, name):
    done = laptop.launch(name, "--help", PATH="/usr/bin:/bin")
    assert done.returncode == 0
    assert "CONFIG [key=value ...]" in done.stdout
