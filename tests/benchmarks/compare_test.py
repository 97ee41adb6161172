"""The stored baselines."""

import json

import pytest

from benchmarks.compare import BASELINES


@pytest.mark.parametrize("path", sorted(BASELINES.glob("*.json")), ids=lambda path: path.stem)
def test_every_baseline_is_named_after_its_machine(path):
    content = json.loads(path.read_text())
    assert content["kind"] == path.stem
    assert all(values for values in content["figures"].values())
    assert {name.partition("/")[0] for name in content["figures"]} == set(content["workloads"])
