"""Keys of earlier versions: refused with today's key in files and overrides, and converted in the config.yaml of a run."""

from pathlib import Path

import pytest

from dapo_jax.config import ConfigError, TrainConfig, load_config
from dapo_jax.config.former_keys import FORMER, converted_leaves, has, value_of
from dapo_jax.config.keys import shown
from dapo_jax.config.loading import changed_keys
from dapo_jax.config.reading import read_yaml, write_yaml
from dapo_jax.config.section import leaf_types

ROOT = Path(__file__).parents[2]

CASES = """
loss: {objective: cispo, options: {cap: 5}} -> loss: {objective: {cispo: {cap: 5}}}
loss: {select: high_entropy, select_options: {frac: 0.5}} -> loss: {select: {high_entropy: {frac: 0.5}}}
loss: {dual_clip: 10.0} -> loss: {objective: {clip: {dual_clip: 10.0}}}
loss: {dual_clip: null} -> {}
loss: {importance_cap: 3.0} -> loss: {importance_range: [0, 3.0]}
rollout: {in_flight: 16, max_age_steps: 3} -> rollout: {in_flight: 16, max_staleness: 3}
guard: {max_mismatch_kl: 0.1, on_mismatch: stop} -> guard: {max_mismatch_kl: 0.1}
guard: {max_mismatch_kl: 0.1, on_mismatch: warn} -> guard: {max_mismatch_kl: null}
checkpoint: {grace_s: 3.0} -> {}
reward: {on_nonfinite: lost} -> {}
model: {source: hf:org/name, revision: abc} -> model: {source: hf:org/name@abc}
model: {source: hf:org/name, revision: ""} -> model: {source: hf:org/name}
model: {source: runs/x, checkpoint: best} -> model: {source: runs/x@best}
{teacher: {source: hf:org/name, revision: abc}, dynamic_sampling: {enabled: false}} -> {teacher: {source: hf:org/name@abc}, dynamic_sampling: {enabled: false}}
reward: {graders: [{grader: math}]} -> reward: {grader: [{grader: math}]}
batch: {keep: 8, keep_by: reward_per_token} -> batch: {keep: {reward_per_token: 8}}
batch: {keep: 8, keep_by: shortest} -> batch: {keep: 8}
log: {tensorboard: true} -> log: {trackers: [tensorboard]}
log: {tensorboard: false} -> {}
log: {wandb: true} -> log: {trackers: [wandb]}
reward: {workers: 3} -> workers: {count: 3}
reward: {timeout_s: 3.0} -> workers: {timeout_s: 3.0}
environment: {source: guess, workers: 3} -> {environment: {source: guess}, workers: {count: 3}}
environment: {source: guess, timeout_s: 3.0} -> {environment: {source: guess}, workers: {timeout_s: 3.0}}
compilation_cache: gs://b/xla -> {}
data: {data_dir: prepared} -> {}
batch: {packing: false} -> {}
optimizer: {from_source: true} -> {}
sampling: {page_tokens: 128} -> {}
sampling: {steps_per_call: 4} -> {}
sampling: {merge_lora: true} -> {}
"""
"""A file with a former key -> the file with the same meaning today."""

TABLE = [tuple(read_yaml(text) for text in line.split("->")) for line in CASES.strip().splitlines()]


def former_key_in(values):
    [key] = [key for key in FORMER if has(values, key)]
    return key


def leaves_of(values):
    known = (*leaf_types(TrainConfig), *FORMER)
    return {key: value_of(values, key) for key in known if has(values, key)}


def file_of(folder, values, name):
    path = folder / name
    path.write_text(write_yaml({"run_dir": "out", **values}))
    return path


def test_every_former_key_has_a_case_and_is_not_a_key():
    assert {former_key_in(before) for before, _ in TABLE} == FORMER.keys()
    assert not FORMER.keys() & leaf_types(TrainConfig).keys()


@pytest.mark.parametrize(("before", "now"), TABLE)
def test_a_former_key_in_a_file_is_refused_with_what_to_write(before, now, tmp_path):
    with pytest.raises(ConfigError, match=rf"mine\.yaml: {former_key_in(before)} = ") as caught:
        load_config(file_of(tmp_path, before, "mine.yaml"))
    new = [
        f"{key}={shown(value)}"
        for key, value in leaves_of(now).items()
        if leaves_of(before).get(key) != value
    ]
    remedy = f"write {' '.join(new)}" if new else "leave it out"
    assert remedy in str(caught.value)


@pytest.mark.parametrize(("before", "now"), TABLE)
def test_a_run_with_a_former_key_still_loads(before, now, tmp_path):
    found = load_config(file_of(tmp_path, before, "config.yaml"))
    assert changed_keys(found, load_config(file_of(tmp_path, now, "mine.yaml"))) == {}


@pytest.mark.parametrize(("before", "now"), TABLE)
def test_a_checkpoint_with_a_former_key_has_the_keys_of_today(before, now):
    assert converted_leaves(leaves_of(before), leaf_types(TrainConfig)) == leaves_of(now)


def test_a_former_key_in_an_override_is_refused_with_what_to_write():
    with pytest.raises(
        ConfigError, match=r"override .*: rollout.max_age_steps = 3: .*rollout\.max_staleness=3"
    ):
        load_config("quickstart", ["rollout.max_age_steps=3"])


def test_a_run_of_an_earlier_version_loads():
    assert load_config(ROOT / "docs/results/study_picked_sums/config.yaml").rollout.max_staleness == 0
