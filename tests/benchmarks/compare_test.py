"""The comparison of measurements with a baseline."""

import json

import pytest

from benchmarks import long_tail
from benchmarks.compare import BASELINES, compared, read
from benchmarks.workload import Workload
from dapo_jax.models.folder import save_model
from dapo_jax.testing import tiny_decoder_config, tiny_params

MACHINE = {"processor": "AMD EPYC 7B13", "cpus": 2, "memory_gb": 24.0, "load": 0.1}


def written(folder, *, ours=(2.0, 2.0), peak=1.5, layers=30):
    """Two rounds of 4,096 tokens. The limit is 4,096 tokens/s; TRL's sampler takes 4 s."""
    systems = {
        "ours:float32": {"seconds": list(ours), "peak_gb": peak, "version": "dapo_jax 0.1"},
        "hf:float32": {"seconds": [4.0, 4.0], "peak_gb": 3.0, "version": "transformers 5"},
    }
    limits = [{"float32": {"tokens_per_s": 4096.0}}] * 2
    sizes = {"hidden_size": 576, "num_hidden_layers": layers, "vocab_size": 49152}
    (folder / "config.json").write_text(json.dumps(sizes))
    workload = Workload(model=str(folder)).to_json()
    content = {"time": "2026-11-27T00:00:00", "machine": MACHINE, "workload": workload}
    (folder / "rollout.json").write_text(json.dumps(content | {"systems": systems, "limits": limits}))
    return read(folder)


def test_figures_follow_from_seconds(tmp_path):
    found = written(tmp_path)
    assert found["kind"] == "amd_epyc_7b13-2"
    assert found["versions"] == {"ours": "dapo_jax 0.1", "hf": "transformers 5"}
    figures = found["figures"]
    assert figures["rollout/ours:float32/tokens_per_s"] == [2048.0, 2048.0]
    assert figures["rollout/ours:float32/share_of_limit"] == [0.5, 0.5]
    assert figures["rollout/hf:float32/seconds_relative_to_ours"] == [2.0, 2.0]
    assert figures["rollout/ours:float32/peak_gb"] == [1.5]


def test_a_gpu_has_its_own_baseline(tmp_path):
    """Two rounds, in which TRL takes 1.5 and 1.25 times our seconds."""
    results = {
        "update:ours": {"version": "dapo_jax 0.1", "seconds": [2.0, 4.0], "share": [0.2, 0.1]},
        "update:trl": {"version": "trl 1", "seconds": [3.0, 5.0], "share": [0.1, 0.1]},
    }
    sizes = {"size": "qwen3-0.6b", "rollout": "(1,)", "update": "(1,)", "rows_per_microbatch": "8"}
    content = {"time": "2026-11-27T00:00:00", "machine": MACHINE, "card": "h200", "results": results}

    def again(**changed):
        (tmp_path / "gpu.json").write_text(json.dumps(content | {"options": sizes | changed}))
        return read(tmp_path)

    found = again(out="elsewhere")
    assert found["kind"] == "h200"
    assert found["versions"] == {"ours": "dapo_jax 0.1", "trl": "trl 1"}
    assert found["figures"]["gpu/update:trl/seconds_relative_to_ours"] == [1.5, 1.25]
    with pytest.raises(SystemExit, match=r"'size': 'tiny'.*'size': 'qwen3-0\.6b'"):
        compared(found, again(size="tiny"))


@pytest.mark.parametrize(
    ("ours", "moved"),
    [
        pytest.param((2.0, 2.0), False, id="equal"),
        pytest.param((2.04, 2.05), False, id="under three percent"),
        pytest.param((1.9, 2.6), False, id="the ranges overlap"),
        pytest.param((2.2, 2.2), True, id="ten percent slower"),
    ],
)
def test_a_figure_moved_if_the_ranges_are_apart_and_the_medians_differ(tmp_path, ours, moved):
    text = compared(written(tmp_path), written(tmp_path, ours=ours))
    assert ("rollout/ours:float32/seconds: " in text) == moved
    assert ("Nothing moved." in text) != moved


def test_another_model_is_not_compared_with_the_baseline(tmp_path):
    with pytest.raises(SystemExit, match=r"'num_hidden_layers': 4.*'num_hidden_layers': 30"):
        compared(written(tmp_path), written(tmp_path, layers=4))


def test_a_folder_without_measurements_is_an_error(tmp_path):
    with pytest.raises(SystemExit, match=r"rollout\.json"):
        read(tmp_path)


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
