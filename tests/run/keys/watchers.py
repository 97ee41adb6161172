"""All watchers of the keys of `TrainConfig`."""

from tests.run.keys import (
    watch_data,
    watch_environment,
    watch_learning,
    watch_rewards,
    watch_runs,
    watch_sampling,
)

WATCHERS = [
    *watch_runs.WATCHERS,
    *watch_data.WATCHERS,
    *watch_sampling.WATCHERS,
    *watch_rewards.WATCHERS,
    *watch_environment.WATCHERS,
    *watch_learning.WATCHERS,
]
