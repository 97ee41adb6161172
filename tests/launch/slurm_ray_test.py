"""launch/slurm_ray.sbatch with the commands of Slurm and Ray stubbed."""

import re
import shlex
import signal

import pytest

CONFIG = "configs/quickstart.yaml"
RUN = (CONFIG, "cluster.workers=true", "run_dir=runs/shared")
WORDS = ["train", CONFIG, "cluster.address=10.0.0.7:7000", *RUN[1:]]
JOB = {
    "SLURM_JOB_ID": "71", "SLURM_HET_SIZE": "2", "SLURM_JOB_NUM_NODES_HET_GROUP_0": "1", "SLURM_JOB_NUM_NODES_HET_GROUP_1": "2",
    "HEAD": "10.0.0.7", "PORT": "7000",
}  # fmt: skip
THREE, TWO = ("Active:\n" + " 1 node_5c5c\n" * count for count in (3, 2))


def test_the_head_begins_then_the_nodes_then_the_run_each_with_the_token(laptop):
    laptop.scenario(status=[TWO, THREE])
    done = laptop.launch("slurm_ray.sbatch", *RUN, **JOB)
    assert done.returncode == 0, done.stderr
    head, *status, train = laptop.calls("ray", "dapo-jax")
    assert [call["words"][0] for call in status] == ["status", "status"]  # until the third node has joined
    (nodes,) = laptop.calls("srun")
    assert train["words"] == WORDS
    assert head["words"][:4] == ["start", "--head", "--node-ip-address=10.0.0.7", "--port=7000"]
    assert {"--num-cpus=0", "--num-gpus=0"} <= set(head["words"])
    assert "--het-group=1" in nodes["words"]
    assert nodes["words"][5:8] == ["ray", "start", "--address=10.0.0.7:7000"]
    for call in (head, nodes, train):
        assert call["environment"]["RAY_AUTH_MODE"] == "token"
        assert re.fullmatch("[0-9a-f]{64}", call["environment"]["RAY_AUTH_TOKEN"])
        assert call["environment"] == head["environment"]
    dry = laptop.launch("slurm_ray.sbatch", "--dry-run", *RUN, **JOB)
    assert [shlex.split(line) for line in dry.stdout.splitlines()] == [
        ["ray", *head["words"]], ["srun", *nodes["words"]], ["dapo-jax", *WORDS]
    ]  # fmt: skip
    assert "TOKEN" not in dry.stdout


def test_ray_reads_its_arguments(laptop):
    scripts = pytest.importorskip("ray.scripts.scripts", reason="needs the extra `cluster`")
    dry = laptop.launch("slurm_ray.sbatch", "--dry-run", *RUN, **JOB)
    commands = [shlex.split(line) for line in dry.stdout.splitlines()[:2]]
    read = []
    for words in commands:
        after = words[words.index("ray") + 1 :]
        read.append(scripts.cli.commands[after[0]].make_context(after[0], after[1:]).params)
    head, node = read
    assert (head["head"], head["port"], head["num_cpus"], head["num_gpus"]) == (True, 7000, 0, 0)
    assert (node["address"], node["block"], node["num_cpus"]) == ("10.0.0.7:7000", True, None)


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
    laptop.scenario(**{"dapo-jax": [status], "squeue": [job], "status": [THREE]})
    assert laptop.launch("slurm_ray.sbatch", *RUN, **JOB, **environment).returncode == status
    assert [call["words"] for call in laptop.calls("scontrol")] == [["requeue", "71"]] * requeued
    resumed = laptop.calls("dapo-jax")[0]["words"][-1] == "--resume"
    assert resumed == ("SLURM_RESTART_COUNT" in environment)


def test_a_stop_is_passed_to_the_trainer_alone_and_the_job_is_requeued(laptop):
    """The stub of the trainer ends at SIGTERM. The steps of Ray's nodes get no signal."""
    laptop.scenario(held=True, status=[THREE])
    errors = laptop.signal(signal.SIGUSR1, "slurm_ray.sbatch", *RUN, once="dapo-jax", **JOB)
    assert [call["words"] for call in laptop.calls("scancel", "scontrol")] == [["requeue", "71"]]
    assert "signalled to stop; requeued" in errors


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        (RUN, {}, "not in a job"),
        (("run_dir=runs/x",), JOB, "CONFIG is missing"),
        ((*RUN, "--nodes=2"), JOB, "--nodes=2 is not an option"),
        (RUN, JOB | {"SLURM_HET_SIZE": "1"}, "SLURM_HET_SIZE=1; the job needs two components"),
        (RUN, JOB | {"SLURM_JOB_NUM_NODES_HET_GROUP_0": "2"}, "the first component has 2 nodes"),
    ],
)
def test_misuse_is_reported(laptop, words, environment, message):
    done = laptop.launch("slurm_ray.sbatch", *words, **environment)
    assert done.returncode == 2
    assert message in done.stderr
