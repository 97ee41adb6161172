"""Runs with score centering, and the configurations in which it is not defined."""

from types import SimpleNamespace

import pytest

from dapo_jax.config import ConfigError, load_config
from dapo_jax.dapo.centering import HEAD_MAX
from dapo_jax.dapo.losses import dapo_loss
from dapo_jax.dapo.objectives import OBJECTIVES
from dapo_jax.dapo.tokens import head_shapes
from dapo_jax.run.guard import Guard
from dapo_jax.run.updater_setup import has_reference, record_notes, recorded_values
from dapo_jax.testing import tiny_decoder_config

FLYING = {
    "rollout__round_tokens": 2,
    "rollout__in_flight": 16,
    "sampling__slots": 16,
    "optimizer__epsilon": 0.1,
    "loss__center": 3,
}
"""Responses of up to 6 tokens take three rounds, so that most continue under other weights."""


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("loss.correction=keep_responses", "loss.correction"),
        ("loss.correction=truncate_responses", "loss.correction"),
        ("loss.drop_off_policy=0.5", "loss.drop_off_policy"),
        ("loss.select=low_second_moment", "loss.select"),
        ("loss.select=low_covariance", "loss.select"),
        ("teacher.source=shipped:quickstart", "loss.center"),
    ],
)
def test_keys_that_look_at_the_sampled_token_or_at_the_response_are_refused(change, key):
    load_config("quickstart", ["loss.center=8", "loss.select=high_entropy", "loss.correction=mask"])
    taught = ["dynamic_sampling.enabled=false"] if "teacher" in change else []
    load_config("quickstart", [change, *taught])
    with pytest.raises(ConfigError, match=rf": {key}: found .*loss\.center=0"):
        load_config("quickstart", ["loss.center=8", change, *taught])


def test_a_divergence_from_a_teacher_is_not_centered_but_rewards_are():
    full = [
        "loss.center=8",
        "teacher.source=shipped:quickstart",
        "teacher.kl=full",
        "dynamic_sampling.enabled=false",
    ]
    load_config("quickstart", [*full, "teacher.rewards=true"])
    with pytest.raises(ConfigError, match=r"loss\.center: .*teacher\.rewards=true"):
        load_config("quickstart", full)


def of_reference(logprobs, old_logprobs, advantages, mask, *, weights, ref_logprobs):
    return dapo_loss(logprobs, ref_logprobs, advantages, mask, weights=weights)


@pytest.mark.parametrize("name", [*OBJECTIVES, "of_reference"])
def test_objectives_of_whole_responses_are_refused(name):
    objective = OBJECTIVES.get(name, of_reference)
    selects = "loss.select=high_entropy" if name == "kl_cov" else "loss.select=all"
    config = load_config("quickstart", ["loss.center=8", selects])
    if name not in ("gspo", "gspo_token", "gmpo", "vespo", "of_reference"):
        assert not has_reference(config, objective)
        return
    with pytest.raises(
        ConfigError, match=r"loss\.center=8 needs an objective of single tokens.*set loss\.center=0"
    ):
        has_reference(config, objective)


def test_the_record_of_a_run_and_the_note_about_its_size():
    """8 bytes for each of 8 heads."""
    config = load_config("quickstart", ["loss.center=8"])
    recorded = recorded_values(config, tiny_decoder_config())
    assert recorded == head_shapes(8)
    [note] = record_notes(config, recorded)
    assert "score centering records 64 bytes per token" in note
    assert not [*record_notes(config, ())]


def test_a_record_that_is_not_normalized_stops_the_run():
    guard = SimpleNamespace(_config=load_config("quickstart", ["loss.center=8"]))
    assert Guard._unnormalized(guard, 3, {HEAD_MAX: 1.00009}) == Guard._unnormalized(guard, 3, {}) == ""
    assert "step 3: the sampler's 8 most probable tokens have a probability of 1.002" in Guard._unnormalized(
        guard, 3, {HEAD_MAX: 1.002}
    )


@pytest.fixture(scope="module")
def flying(micro):
    return lambda run_dir=None, **changes: micro(run_dir, **FLYING | changes)


# Slow: three runs. tests/sampling/heads_test.py has records in flight and from checkpoints, and tests/run/metrics_page_test.py runs a step.
@pytest.mark.slow
@pytest.mark.parametrize("weight_dtype", ["", "int8"])
def test_a_run_resumed_in_flight_is_the_uninterrupted_run(flying, weight_dtype, run_micro, same_run):
    how = {"checkpoint__every_steps": 1, "sampling__weight_dtype": weight_dtype}
    whole = run_micro(flying(steps=3, checkpoint__keep=9, **how))
    config = flying(steps=1, **how)
    run_micro(config)
    same_run(run_micro(flying(config.run_dir, steps=3, **how), resume=True), whole)
    assert all(line["center/sampler_head_max"] <= 1.0001 for line in whole.metrics)
    pushes = [line["center/push"] for line in whole.metrics[1:]]
    assert max(pushes) > 1e-3, "later tokens are of older weights"


# Slow: two runs. `test_a_run_resumed_in_flight_is_the_uninterrupted_run` has another key.
@pytest.mark.slow
def test_rows_and_microbatches_change_nothing_but_rounding(micro, run_micro):
    how = {"steps": 1, "loss__center": 3, "loss__correction": "truncate", "sampling__weight_dtype": "int8"}
    one, other = (
        run_micro(micro(**how, batch__row_tokens=tokens, batch__rows_per_microbatch=rows)).metrics[0]
        for tokens, rows in ((0, 8), (40, 8))
    )
    for name in ("center/push", "center/sampler_head", "center/trainer_head", "update/grad_norm"):
        assert one[name] == pytest.approx(other[name], rel=1e-4), name
