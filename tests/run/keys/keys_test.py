"""Every key of the configuration has an effect: another value changes what is seen at the place of its use."""

from zlib import crc32

import jax
import pytest

from dapo_jax.config import SourceConfig, TrainConfig
from dapo_jax.config.section import field_types, leaf_types
from tests.prose import ROOT
from tests.run.keys import (
    watch_data,
    watch_entries,
    watch_environment,
    watch_learning,
    watch_rewards,
    watch_runs,
    watch_sampling,
)
from tests.run.keys.watching import SEEN, default_of

SECTIONS = (watch_runs, watch_data, watch_sampling, watch_rewards, watch_environment, watch_learning)
WATCHERS = [watcher for section in SECTIONS for watcher in section.WATCHERS]
ADD_ONE = (
    "add a watcher to the file of its section in tests/run/keys, with two values and what is seen of each"
)

SEEN_IN_RUNS = {
    "run_dir": "run/train_test",
    "steps": "run/train_test",
    "stall_timeout_s": "run/stalls_test",
    "checkpoint.every_steps": "run/ends_test",
    "log.rollouts_every_steps": "rollout/flight_test",
    "log.trackers": "run/records_test",
    "guard.max_mismatch_kl": "faults/nan_test",
    "dynamic_sampling.enabled": "run/build_test",
    "dynamic_sampling.max_waves": "run/build_test",
    "dynamic_sampling.metric": "cli_test",
    "rollout.saved": "run/teacher_setup_test",
    "rollout.weight_rounds": "rollout/sample_workers_test",
    "cluster.samplers": "rollout/sample_workers_test",
    "cluster.resources": "rollout/sample_workers_test",
    "cluster.round_s": "cluster/remote_rounds_test",
    "teacher.prompt": "run/teacher_setup_test",
    "dynamic_sampling.skip_solved": "rollout/skip_solved_test",
    "lora.rank": "run/lora_test",
    "environment.source": "run/turns_test",
    "environment.max_turns": "run/turns_test",
    "environment.turn_tokens": "run/turns_test",
    "reward.overlong.enabled": "run/build_test",
    "eval.samples_per_prompt": "cli_test",
    "cluster.address": "cluster/run_test",
    "cluster.workers": "cluster/run_test",
}
"""Keys without a watcher: another test sees the effect in a run."""


@pytest.fixture
def seen(look):
    """What a watcher sees of a value."""

    def see(watcher, value):
        return watcher.see(look({**watcher.also, watcher.key: value}))

    return see


def test_every_key_is_watched():
    keys, watched = leaf_types(TrainConfig).keys(), {watcher.key for watcher in WATCHERS}
    missing = keys - watched - SEEN_IN_RUNS.keys()
    assert not missing, f"no watcher of {', '.join(sorted(missing))}: {ADD_ONE}"
    assert watched | SEEN_IN_RUNS.keys() == keys
    assert not watched & SEEN_IN_RUNS.keys()
    assert all((ROOT / "tests" / f"{name}.py").exists() for name in SEEN_IN_RUNS.values())


def test_every_name_of_a_dataset_is_watched():
    watched = {watcher.what for watcher in watch_entries.WATCHERS if watcher.key == "data.mixture"}
    assert watched == field_types(SourceConfig).keys(), ADD_ONE


@pytest.mark.parametrize("key", sorted({watcher.key for watcher in WATCHERS}))
def test_a_key_is_watched_off_its_default(key):
    values = [value for watcher in WATCHERS if watcher.key == key for value, _ in watcher.values]
    assert any(value != default_of(TrainConfig, key) for value in values)


@pytest.mark.parametrize("watcher", [*WATCHERS, *watch_entries.WATCHERS], ids=str)
def test_each_value_of_a_key_is_seen_where_the_key_is_used(watcher, seen):
    found = [seen(watcher, value) for value, _ in watcher.values]
    for (value, expected), one in zip(watcher.values, found, strict=True):
        assert expected is SEEN or one == expected, f"{watcher.key}={value!r}"
    assert all(one != other for place, one in enumerate(found) for other in found[:place])


def test_training_and_evaluation_sample_by_keys_of_their_own(look):
    """Folded from the run's key: 0 for training; for evaluation 1, the step and the dataset."""
    run = jax.random.key(0)
    assert watch_sampling.keys(look({})) == jax.random.key_data(jax.random.fold_in(run, 0)).tolist()
    for number in (1, 7, crc32(b"arithmetic")):
        run = jax.random.fold_in(run, number)
    assert watch_sampling.keys_of_evaluation(look({})) == jax.random.key_data(run).tolist()
