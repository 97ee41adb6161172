"""launch/skypilot.yaml: its commands run on stubs of two machines."""

import shutil

import pytest
import yaml

from tests.launch.clients import ROOT, TOKENS, shellcheck

TASK = yaml.safe_load((ROOT / "launch" / "skypilot.yaml").read_text())
RUN = {"CONFIG": "configs/quickstart.yaml", "RUN_DIR": "gs://bucket/run", "OVERRIDES": "steps=3 seed=1"}
WORDS = ["train", RUN["CONFIG"], f"run_dir={RUN['RUN_DIR']}"]


@pytest.fixture
def machine(laptop):
    """A machine to which SkyPilot has copied a checkout, with uv where SkyPilot installs it."""
    for name in ("pyproject.toml", "constraints/py312.txt", "dapo_jax/cli/__init__.py"):
        (laptop.work / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, laptop.work / name)
    (laptop.folder / "home" / ".local" / "bin").mkdir(parents=True)
    shutil.copy(laptop.folder / "parts" / "uv", laptop.folder / "home" / ".local" / "bin" / "uv")
    return laptop


def step(machine, name, **environment):
    return machine.run("bash", "-c", TASK[name], **environment)


def test_the_fields_are_those_of_skypilot():
    """The schema is in sky/utils/schemas.py of SkyPilot 0.14.1. It refuses other fields."""
    assert TASK.keys() <= {"name", "workdir", "num_nodes", "resources", "setup", "run", "envs", "secrets"}
    assert TASK["resources"].keys() == {"accelerators", "job_recovery"}
    assert TASK["resources"]["job_recovery"] == {"recover_on_exit_codes": [1, 75]}
    assert all(value is None or isinstance(value, str) for value in TASK["envs"].values())
    assert TASK["envs"].keys() == RUN.keys()


@pytest.mark.skipif(shellcheck() is None, reason="shellcheck is not installed; it comes with the extra `dev`")
@pytest.mark.parametrize("name", ["setup", "run"])
def test_shellcheck_finds_nothing(machine, name):
    (machine.work / "step.sh").write_text(f"#!/usr/bin/env bash\n{TASK[name]}")
    done = machine.run(shellcheck(), "step.sh")
    assert done.returncode == 0, done.stdout


def test_each_machine_starts_one_process_of_the_run_which_alone_is_not_distributed(machine):
    for _ in range(2):  # the second time, the environment is there
        done = step(machine, "setup")
        assert done.returncode == 0, done.stderr
    machine.scenario(**{"dapo-jax": [0, 0, 75]})
    several = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8\n"}
    for rank in ("0", "1"):
        done = step(machine, "run", **RUN, **several, **TOKENS, SKYPILOT_NODE_RANK=rank)
        assert done.returncode == 0, done.stderr
    alone = {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_IPS": "10.0.0.7", "SKYPILOT_NODE_RANK": "0"}
    assert step(machine, "run", **RUN | {"OVERRIDES": ""}, **alone).returncode == 75
    *calls, single = machine.calls("dapo-jax")
    for rank, call in enumerate(calls):
        assert call["words"] == [*WORDS, "steps=3", "seed=1", "--resume"]
        assert call["environment"] == TOKENS | {
            "JAX_COORDINATOR_ADDRESS": "10.0.0.7:8476", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(rank)
        }  # fmt: skip
    assert len(calls) == 2
    assert (single["words"], single["environment"]) == ([*WORDS, "--resume"], {})
    done = step(machine, "run", **RUN | {"RUN_DIR": "runs/1"}, **alone)
    assert done.returncode == 2
    assert "RUN_DIR=runs/1" in done.stderr
