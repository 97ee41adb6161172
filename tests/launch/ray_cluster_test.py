"""launch/ray_cluster.yaml: its fields, and the arguments that KubeRay makes of it for `ray start`."""

import json
import math
import re
import shlex

import pytest
import yaml

from dapo_jax.config import load_config
from tests.launch.clients import ROOT

TEXT = (ROOT / "launch" / "ray_cluster.yaml").read_text()
CLUSTER = yaml.safe_load(TEXT)
GROUPS = [CLUSTER["spec"]["headGroupSpec"], *CLUSTER["spec"]["workerGroupSpecs"]]


def test_the_fields_are_those_of_kuberay():
    """The types RayClusterSpec, HeadGroupSpec and WorkerGroupSpec in ray-operator/apis/ray/v1/raycluster_types.go of KubeRay 1.5."""
    assert (CLUSTER["apiVersion"], CLUSTER["kind"]) == ("ray.io/v1", "RayCluster")
    assert CLUSTER["spec"].keys() == {"authOptions", "headGroupSpec", "workerGroupSpecs"}
    assert CLUSTER["spec"]["authOptions"] == {"mode": "token"}
    head, *workers = GROUPS
    assert head.keys() <= {"rayStartParams", "template", "serviceType", "headService", "resources"}
    for group in workers:
        assert group.keys() <= {
            "groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "rayStartParams", "template"
        }  # fmt: skip
        assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]
    for group in GROUPS:
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"] == container["resources"]["requests"]
        assert container["image"] == "IMAGE"
        assert {"name": "RAY_memory_monitor_refresh_ms", "value": "0"} in container["env"]


def test_the_head_offers_nothing_and_the_graders_offer_their_cpus():
    """KubeRay writes --NAME=VALUE for each parameter into a command of the shell."""
    scripts = pytest.importorskip("ray.scripts.scripts", reason="needs the extra `cluster`")
    read = []
    for group in GROUPS:
        line = " ".join(f"--{name}={value}" for name, value in group["rayStartParams"].items())
        read.append(scripts.cli.commands["start"].make_context("start", shlex.split(line)).params)
    head, graders, samplers = read
    assert (samplers["num_cpus"], samplers["num_gpus"]) == (0, None)
    assert (head["num_cpus"], head["num_gpus"], json.loads(head["resources"])) == (0, 0, {"TPU": 0})
    assert (graders["num_cpus"], graders["num_gpus"]) == (None, 0)  # KubeRay takes the limit of the CPU


def test_a_host_of_the_samplers_has_as_many_chips_as_its_topology():
    for group in GROUPS:
        spec = group["template"]["spec"]
        chips = spec["containers"][0]["resources"]["limits"].get("google.com/tpu", "1")
        topology = spec.get("nodeSelector", {}).get("cloud.google.com/gke-tpu-topology", "1")
        assert math.prod(map(int, topology.split("x"))) == int(chips)
    config = load_config(
        ROOT / "configs" / "quickstart.yaml",
        [
            "cluster.address=auto",
            "cluster.samplers=2",
            "cluster.resources={TPU: 4}",
            "rollout.in_flight=64",
            "rollout.round_tokens=24",
        ],
    )
    assert config.cluster.resources == {"TPU": int(chips)}  # the last group


def test_the_command_in_its_header_trains_on_the_cluster():
    command = re.search(r"dapo-jax train CONFIG (.*)", TEXT).group(1)
    config = load_config(ROOT / "configs" / "quickstart.yaml", command.split())
    assert (config.cluster.address, config.cluster.workers, config.workers.count) == ("auto", True, 128)
