"""launch/slurm.sbatch with Slurm's commands stubbed."""

import re
import shlex
import signal

import pytest

from tests.launch.clients import ROOT

RUN = ("configs/quickstart.yaml", "run_dir=runs/shared")
JOB = {"SLURM_JOB_ID": "71", "SLURM_GPUS_ON_NODE": "4"}
SCRIPT = ROOT / "launch" / "slurm.sbatch"
OF_SBATCH = {"job-name", "output", "open-mode", "signal", "ntasks-per-node", "exclusive", "requeue"}
"""Options in the manual page of sbatch that the script sets."""


def requeues(laptop):
    return [call["words"] for call in laptop.calls("scontrol")]


def test_one_task_a_node_drives_all_its_gpus(laptop):
    done = laptop.launch("slurm.sbatch", *RUN, **JOB)
    assert done.returncode == 0, done.stderr
    (call,) = laptop.calls("srun")
    assert call["words"][-4:] == ["dapo-jax", "train", *RUN]
    assert "--ntasks-per-node=1" in call["words"]
    assert call["environment"] == {"DAPO_JAX_DISTRIBUTED": "1", "JAX_LOCAL_DEVICE_IDS": "0,1,2,3"}
    assert requeues(laptop) == []
    dry = laptop.launch("slurm.sbatch", "--dry-run", *RUN, **JOB)
    settings = [f"{name}={value}" for name, value in call["environment"].items()]
    assert shlex.split(dry.stdout) == [*settings, "srun", *call["words"]]
    assert set(re.findall(r"^#SBATCH --([\w-]+)", SCRIPT.read_text(), re.MULTILINE)) == OF_SBATCH


@pytest.mark.parametrize(
    ("status", "job", "environment", "requeued"),
    [
        (134, "RUNNING", {}, True),
        (2, "RUNNING", {}, False),  # a configuration error
        (1, "RUNNING", {"SLURM_RESTART_COUNT": "3", "RESTARTS": "3"}, False),
        (143, "COMPLETING", {}, False),  # the user cancelled it
    ],
)
def test_which_failures_requeue_the_job(laptop, status, job, environment, requeued):
    laptop.scenario(srun=[status], squeue=[job])
    assert laptop.launch("slurm.sbatch", *RUN, **JOB, **environment).returncode == status
    assert requeues(laptop) == [["requeue", "71"]] * requeued
    resumed = laptop.calls("srun")[0]["words"][-1] == "--resume"
    assert resumed == ("SLURM_RESTART_COUNT" in environment)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_stop_is_passed_to_the_step_and_the_job_is_requeued(laptop, number):
    laptop.scenario(held=True, srun=[75])
    errors = laptop.signal(number, SCRIPT.name, *RUN, once="srun", **JOB)
    order = [call["words"] for call in laptop.calls("scancel", "scontrol")]
    assert order == [["--signal=TERM", "71"], ["requeue", "71"]]
    assert "signalled to stop; requeued" in errors


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        (RUN, {}, "not in a job"),
        (("run_dir=runs/x",), JOB, "CONFIG is missing"),
        ((*RUN, "--nodes=2"), JOB, "--nodes=2 is not an option"),
        (RUN, {"SLURM_JOB_ID": "71"}, "ask for GPUs"),
    ],
)
def test_misuse_is_reported(laptop, words, environment, message):
    done = laptop.launch("slurm.sbatch", *words, **environment)
    assert done.returncode == 2
    assert message in done.stderr
