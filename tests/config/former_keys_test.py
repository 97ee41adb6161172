"""Keys of earlier versions: refused with today's key in files and overrides, and converted in the config.yaml of a run."""

from pathlib import Path

import pytest

from dapo_jax.config import ConfigError, TrainConfig, load_config
from dapo_jax.config.former_keys import FORMER, converted_leaves
from dapo_jax.config.loading import changed_keys, leaf_values
from dapo_jax.config.reading import read_yaml, write_yaml
from dapo_jax.config.section import leaf_types

ROOT = Path(__file__).parents[2]

CASES = """
rollout: {max_age_steps: 3} -> rollout.max_staleness=3
guard: {max_mismatch_kl: 0.1, on_mismatch: stop} ->
guard: {max_mismatch_kl: 0.1, on_mismatch: warn} -> guard.max_mismatch_kl=null
checkpoint: {grace_s: 3.0} ->
reward: {on_nonfinite: lost} ->
batch: {packing: false} ->
optimizer: {from_source: true} ->
sampling: {merge_lora: true} ->
"""
"""A file with a former key -> the overrides with the same meaning today. An empty right side: the key is left out."""

TABLE = [tuple(part.strip() for part in line.split("->")) for line in CASES.strip().splitlines()]


def key_in(text):
    """Returns the former key in the file, and its value."""
    [key] = [key for key in FORMER if key in (leaves := dict(leaves_of(read_yaml(text))))]
    return key, leaves[key]


def leaves_of(values, prefix=""):
    for name, value in values.items():
        yield f"{prefix}{name}", value
        if isinstance(value, dict):
            yield from leaves_of(value, f"{prefix}{name}.")


def file_of(folder, text, name="mine.yaml"):
    path = folder / name
    path.write_text(f"run_dir: out\n{text}\n")
    return path


def test_every_former_key_has_a_case_and_is_not_a_key():
    assert {key_in(text)[0] for text, _ in TABLE} == FORMER.keys()
    assert not FORMER.keys() & leaf_types(TrainConfig).keys()


@pytest.mark.parametrize(("text", "today"), TABLE)
def test_a_former_key_in_a_file_is_refused_with_what_to_write(text, today, tmp_path):
    key, _ = key_in(text)
    with pytest.raises(ConfigError, match=rf"mine\.yaml: {key} = ") as caught:
        load_config(file_of(tmp_path, text))
    assert (f"write {today} " if today else "leave it out ") in f"{caught.value} "


@pytest.mark.parametrize(("text", "today"), TABLE)
def test_a_run_with_a_former_key_still_loads(text, today, tmp_path):
    path = file_of(tmp_path, text, "config.yaml")
    kept = {name: value for name, value in leaves_of(read_yaml(text)) if name in leaf_types(TrainConfig)}
    same = [f"{name}={write_yaml({'v': value})[3:].strip()}" for name, value in kept.items()]
    expected = load_config(file_of(tmp_path, ""), [*same, *today.split()])
    assert changed_keys(load_config(path), expected) == {}


@pytest.mark.parametrize(("text", "today"), TABLE)
def test_a_checkpoint_with_a_former_key_has_the_same_leaves(text, today):
    leaves = {name: value for name, value in leaves_of(read_yaml(text)) if not isinstance(value, dict)}
    found = converted_leaves(leaves, leaf_values(TrainConfig(run_dir=".")))
    assert key_in(text)[0] not in found
    assert {override.partition("=")[0] for override in today.split()} <= found.keys()


def test_a_former_key_in_an_override_is_refused_with_what_to_write():
    with pytest.raises(
        ConfigError, match=r"override .*: rollout.max_age_steps = 3: .*rollout\.max_staleness=3"
    ):
        load_config("quickstart", ["rollout.max_age_steps=3"])


def test_a_run_of_an_earlier_version_loads():
    assert load_config(ROOT / "docs/results/study_picked_sums/config.yaml").rollout.max_staleness == 0
