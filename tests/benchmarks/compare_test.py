"""The stored baselines."""

import json

import pytest

from benchmarks import long_tail
from benchmarks.compare import BASELINES, read
from dapo_jax.models.folder import save_model
from dapo_jax.testing import tiny_decoder_config, tiny_params


@pytest.mark.parametrize("path", sorted(BASELINES.glob("*.json")), ids=lambda path: path.stem)
def test_every_baseline_is_named_after_its_machine(path):
    content = json.loads(path.read_text())
    assert content["kind"] == path.stem
    assert all(values for values in content["figures"].values())
    assert {name.partition("/")[0] for name in content["figures"]} == set(content["workloads"])


def of_cpus():
    """The baselines with a long tail, which were measured on CPUs."""
    contents = [json.loads(path.read_text()) for path in sorted(BASELINES.glob("*.json"))]
    return [content for content in contents if "long_tail/static/steps" in content["figures"]]


# Slow: decodes 40,000 tokens. tests/sampling/continuous_batching_test.py counts the steps of a few responses.
@pytest.mark.slow
def test_ratios_that_do_not_depend_on_the_machine_are_the_baselines(tmp_path):
    """The lengths of the responses are fixed, so steps and live slots depend neither on the model nor on the machine. Static batches take twice as many
    steps, and in the best of three rounds at least three quarters of this ratio must be saved in time."""
    decoder = tiny_decoder_config(vocab_size=512, max_positions=512)
    save_model(tmp_path / "model", decoder, tiny_params(decoder))
    long_tail.main([str(tmp_path / "model"), "--rounds", "3", "--out", str(tmp_path)])
    found = read(tmp_path)["figures"]
    assert of_cpus()
    for baseline in of_cpus():
        for name in (name for name in found if name.endswith(("steps", "_frac"))):
            assert found[name] == baseline["figures"][name]
    saved = max(found["long_tail/static/seconds_relative_to_continuous"])
    [static], [continuous] = (found[f"long_tail/{way}/steps"] for way in ("static", "continuous"))
    assert saved > 0.75 * static / continuous
