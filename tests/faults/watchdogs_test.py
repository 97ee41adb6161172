"""Runs with the cause of one warning: within 20 steps it raises this warning and no other."""

import jax.numpy as jnp
import pytest

from dapo_jax.dapo.metrics import Mean
from dapo_jax.health.watchdogs import NAMES
from dapo_jax.run import updater_setup
from dapo_jax.sampling import engine
from dapo_jax.sampling.decoding import response_keys
from dapo_jax.training.update import UpdateOptions

pytestmark = pytest.mark.slow


def sure_of_itself(logprobs, old_logprobs, advantages, mask, *, weights):
    """Raises the probability of likely tokens, whatever the reward."""
    probability = jnp.exp(jnp.where(mask, logprobs, 0.0))
    return -(weights * probability).sum(), {"policy/sure": Mean(probability.sum(), weights.sum())}


def brief(sample):
    return len(sample.tokens) <= 3


def long(sample):
    return len(sample.tokens) >= 20


def begins_even(sample):
    return int(sample.tokens[0]) % 2 == 0


def asked_for(sample):
    """Wants an even or an odd token, by the prompt: a constant response is right half of the time."""
    return (int(sample.tokens[0]) + sample.prompt.ordinal) % 2 == 0


CAUSES = {
    # Responses i and i + 4 have the same key, as in two engines with equal seeds.
    "copies": {"index": lambda indices: indices % 4, "batch__prompts_per_step": 16},
    "length_collapse": {"reward": brief},
    # At so few tokens most responses are cut off from the beginning.
    "entropy_collapse": {
        "objective": sure_of_itself,
        "reward": asked_for,
        "optimizer__learning_rate": 0.1,
        "sampling__max_response_tokens": 4,
    },
    "truncation": {"reward": long},
    "flat_groups": {"reward": lambda sample: False},
    "reward_stuck": {"optimizer__learning_rate": 1e-9},
}


@pytest.fixture
def run(micro, run_micro, shown, monkeypatch):
    """Runs twenty steps of 8 prompts x 8 responses of up to 30 tokens, and returns the metrics and the output."""

    def go(**how):
        if index := how.pop("index", None):
            monkeypatch.setattr(
                engine,
                "response_keys",
                lambda key, ordinals, indices, turns: response_keys(key, ordinals, index(indices), turns),
            )
        if temperature := how.pop("trainer_temperature", None):
            monkeypatch.setattr(
                updater_setup,
                "UpdateOptions",
                lambda **options: UpdateOptions(**{**options, "temperature": temperature}),
            )
        changes = {name: how.pop(name) for name in list(how) if "__" in name}
        config = micro(**{
            "steps": 20, "dynamic_sampling__enabled": False, "batch__prompts_per_step": 8, "batch__group_size": 8,
            "batch__groups_per_update": 4, "batch__row_tokens": 34, "sampling__max_response_tokens": 30,
            "sampling__slots": 64, "reward__overlong__enabled": False, "optimizer__learning_rate": 0.01,
            "checkpoint__every_steps": 0, **changes,
        })  # fmt: skip
        result = run_micro(config, **{"reward": begins_even, "progress": shown.progress(config), **how})
        return result.metrics, shown.text()

    return go


@pytest.mark.parametrize("name", CAUSES)
def test_each_cause_raises_its_own_warning_and_no_other(name, run):
    metrics, printed = run(**CAUSES[name])
    raised = {other: sum(line[f"watchdog/{other}"] for line in metrics) for other in NAMES}
    assert raised.pop(name) > 0
    assert not any(raised.values())
    lines = [line for line in printed.splitlines() if "Usual causes" in line]
    assert len(lines) == 1
    assert f": {name.replace('_', ' ')}" in lines[0]


def test_another_temperature_in_the_trainer_is_seen_once_the_policy_is_sure(run):
    """The sampler has the temperature 1, the trainer 1.5. While all tokens are about equally likely, differences have both signs."""
    metrics, _ = run(trainer_temperature=1.5)
    assert any(line.get("watchdog/sampler_scale") for line in metrics)


def test_every_warning_is_raised_by_a_run():
    assert {*CAUSES, "sampler_scale"} == set(NAMES)
