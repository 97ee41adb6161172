"""Every key of the configuration does something: set to another value, something else is seen where it is used.

Each watcher is also shown a library that ignores its key, which it must notice; those of whole runs in the slow tier.
"""

from zlib import crc32

import jax
import pytest

from dapo_jax.config import TrainConfig
from dapo_jax.config.section import field_types, leaf_types
from tests.run.keys import watch_entries, watch_runs
from tests.run.keys.watch_sampling import keys, keys_of_evaluation
from tests.run.keys.watchers import WATCHERS
from tests.run.keys.watching import SEEN, default_of, ignored, reading

ADD_ONE = "add a watcher to the file of its section in tests/run/keys, with two values and what is seen of each where the key is used"


@pytest.fixture
def seen(look):
    """What a watcher sees of a value."""
    return lambda watcher, value: watcher.see(look({**watcher.also, watcher.key: value}))


@pytest.fixture
def seen_in_entry(look):
    """The same of a value in the first entry of a list."""

    def see(watcher, value):
        entries = [{**watcher.entry, watcher.name: value}, *watcher.others]
        return watcher.see(look({**watcher.also, watcher.list_key: entries}))

    return see


def check(watcher, seen):
    """Each value is seen as it should be, and as something else than the others; what was seen of the first."""
    found = [seen(watcher, value) for value, _ in watcher.values]
    for (value, expected), one in zip(watcher.values, found, strict=True):
        assert expected is SEEN or one == expected, f"{watcher.key}={value!r}"
    assert all(one != other for place, one in enumerate(found) for other in found[:place])
    return found[0]


def test_every_key_is_watched():
    keys = leaf_types(TrainConfig).keys()
    watched = {watcher.key for watcher in WATCHERS}
    assert not keys - watched, f"nobody watches {', '.join(sorted(keys - watched))}: {ADD_ONE}"
    assert watched <= keys


def test_every_name_in_an_entry_is_watched():
    names = {
        f"{key}[].{name}" for key, schema in watch_entries.SCHEMAS.items() for name in field_types(schema)
    }
    watched = {watcher.key for watcher in watch_entries.WATCHERS}
    assert not names - watched, f"nobody watches {', '.join(sorted(names - watched))}: {ADD_ONE}"
    lists = {key for key, kind in leaf_types(TrainConfig).items() if str(kind).startswith("list[dict")}
    assert lists == watch_entries.SCHEMAS.keys()


@pytest.mark.parametrize("key", sorted({watcher.key for watcher in WATCHERS}))
def test_a_key_is_watched_off_its_default(key):
    default = default_of(TrainConfig, key)
    values = [value for watcher in WATCHERS if watcher.key == key for value, _ in watcher.values]
    assert any(value != default for value in values)


@pytest.mark.parametrize("watcher", WATCHERS, ids=str)
def test_each_value_of_a_key_is_seen_where_the_key_is_used(watcher, seen):
    check(watcher, seen)


def whole_runs_slow(watchers):
    return [
        pytest.param(watcher, id=str(watcher), marks=[pytest.mark.slow] * (watcher in watch_runs.WATCHERS))
        for watcher in watchers
    ]


@pytest.mark.parametrize("watcher", whole_runs_slow(WATCHERS))
def test_a_value_is_missed_where_the_library_ignores_the_key(watcher, seen):
    """It reads the first value whatever is set: the last is seen as the first is."""
    first, last = watcher.values[0][0], watcher.values[-1][0]
    of_first = seen(watcher, first) if watcher.values[0][1] is SEEN else watcher.values[0][1]
    with ignored(TrainConfig, watcher.key, first):
        assert seen(watcher, last) == of_first


@pytest.mark.parametrize("watcher", watch_entries.WATCHERS, ids=str)
def test_a_value_in_an_entry_is_seen_where_it_is_used_and_is_missed_where_the_library_ignores_it(
    watcher, seen_in_entry
):
    of_first = check(watcher, seen_in_entry)
    schema, first, last = watch_entries.SCHEMAS[watcher.list_key], watcher.values[0][0], watcher.values[-1][0]
    if watcher.list_key == "data.few_shot":
        return  # read as mappings, which no class stands before
    with reading(schema, watcher.name, lambda given: first if given == last else given):
        assert seen_in_entry(watcher, last) == of_first


def test_training_and_evaluation_draw_by_keys_of_their_own(look):
    """Folded from the run's: 0 for training; for evaluation 1, the step and the dataset."""
    run = jax.random.key(0)
    assert keys(look({})) == jax.random.key_data(jax.random.fold_in(run, 0)).tolist()
    for number in (1, 7, crc32(b"arithmetic")):
        run = jax.random.fold_in(run, number)
    assert keys_of_evaluation(look({})) == jax.random.key_data(run).tolist()
