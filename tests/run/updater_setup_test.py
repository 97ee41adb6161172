"""Runs of one process share their compiled programs where shapes and options are equal."""

from contextlib import contextmanager
from dataclasses import replace

from jax import monitoring

from dapo_jax.dapo.losses import dapo_loss
from tests.run.conftest import assert_equal_weights

LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"


@contextmanager
def counted():
    """Within, notes the lowered programs."""
    found = []

    def heard(event, _seconds, **_):
        if event == LOWERED:
            found.append(event)

    monitoring.register_event_duration_secs_listener(heard)
    try:
        yield found
    finally:
        monitoring.unregister_event_duration_listener(heard)


def test_a_second_run_compiles_nothing_for_another_seed_rate_or_reward_but_for_another_loss(micro, run_micro):
    run_micro(micro(steps=2))
    other = {"steps": 2, "seed": 1, "optimizer__learning_rate": 0.01, "reward__correct": 2.0}
    with counted() as found:
        first, second = (run_micro(micro(**other)) for _ in range(2))
    assert not found
    assert_equal_weights(first, second)
    with counted() as found:
        run_micro(micro(steps=1, loss__clip_ratio_high=0.3))
    assert found


def test_an_own_objective_is_called_by_every_run(micro, run_micro):
    """It may be an object with a state."""
    asked = []

    def objective(*arrays, **options):
        asked.append(1)
        return dapo_loss(*arrays, **options)

    config = micro(steps=1)
    run_micro(config, objective=objective)
    first = len(asked)
    run_micro(replace(config, run_dir=config.run_dir + "_again"), objective=objective)
    assert len(asked) == 2 * first > 0
