"""Runs of one process share their programs where shapes and options are the same, and only there."""

from contextlib import contextmanager
from dataclasses import replace

import jax
import numpy as np
from jax import monitoring

LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"


@contextmanager
def counted():
    """The programs that are lowered within, one entry each."""
    found = []

    def heard(event, _seconds, **_):
        if event == LOWERED:
            found.append(event)

    monitoring.register_event_duration_secs_listener(heard)
    try:
        yield found
    finally:
        monitoring.unregister_event_duration_listener(heard)


def weights(result):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(result.policy.params)]


def test_a_second_run_makes_no_program_whatever_its_seed_rate_and_rewards(micro, run_micro):
    run_micro(micro(steps=2))
    with counted() as found:
        other = run_micro(micro(steps=2, seed=1, optimizer__learning_rate=0.01, reward__correct=2.0))
    assert not found
    with counted() as found:
        again = run_micro(micro(steps=2, seed=1, optimizer__learning_rate=0.01, reward__correct=2.0))
    assert not found
    assert all(np.array_equal(a, b) for a, b in zip(weights(other), weights(again), strict=True))


def test_what_a_program_depends_on_makes_another(micro, run_micro):
    run_micro(micro(steps=1))
    with counted() as found:
        run_micro(micro(steps=1, loss__clip_ratio_high=0.3))
    assert found


def test_an_own_objective_is_asked_by_every_run(micro, run_micro):
    """It may be an object that has changed meanwhile."""
    asked = []

    def objective(*arrays, **options):
        from dapo_jax.dapo.losses import dapo_loss

        asked.append(1)
        return dapo_loss(*arrays, **options)

    config = micro(steps=1)
    run_micro(config, objective=objective)
    first = len(asked)
    run_micro(replace(config, run_dir=config.run_dir + "_again"), objective=objective)
    assert len(asked) == 2 * first > 0
