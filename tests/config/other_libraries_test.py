"""The remedies for unknown keys."""

import re

import pytest

from dapo_jax.config import EvaluateConfig, SftConfig, TrainConfig
from dapo_jax.config.other_libraries import (
    ALIASES,
    NO_KEY,
    NOTES,
    nearest_keys,
    of_another_library,
    unknown_key,
)
from dapo_jax.config.section import leaf_types

KEYS = leaf_types(TrainConfig)


def test_every_alias_stands_for_an_existing_key_and_is_not_a_key():
    sections = {key.rpartition(".")[0] for key in KEYS}
    assert {ours for ours in ALIASES.values() if ours not in KEYS and ours not in sections} == set()
    assert ALIASES.keys() & KEYS.keys() == set()
    assert NOTES.keys() <= ALIASES.keys()


def test_every_alias_is_answered_with_our_name():
    assert [theirs for theirs, ours in ALIASES.items() if f"`{ours}`" not in unknown_key(theirs, KEYS)] == []


def test_the_longest_ending_of_a_dotted_alias_wins():
    assert "`val_kwargs.n` of verl" in of_another_library("actor_rollout_ref.rollout.val_kwargs.n", KEYS)
    assert "`rollout.n` of verl" in of_another_library("actor_rollout_ref.rollout.n", KEYS)
    assert "`n` of verl" in of_another_library("whatever.N", KEYS)
    assert of_another_library("nn", KEYS) is None


def test_an_alias_for_a_key_of_the_other_schema_is_not_offered():
    assert of_another_library("num_generations", leaf_types(SftConfig)) is None


@pytest.mark.parametrize("theirs", ["adv_estimator", "loss_type", "loss_mode"])
def test_the_name_of_an_algorithm_elsewhere_is_answered_with_algorithm(theirs):
    assert "`algorithm: NAME`" in unknown_key(theirs, KEYS)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("eval.n", "`eval.samples_per_prompt`"),
        ("eval.k", "`eval.samples_per_prompt`"),
        ("rollout.n", "`batch.group_size`"),
        ("loss.entropy_coef", "no entropy bonus"),
    ],
)
def test_a_remedy_does_not_change_another_quantity(theirs, ours):
    assert ours in unknown_key(theirs, KEYS)


def test_remedies_name_existing_keys_and_sections():
    places = {place for key in KEYS for place in (key, key.rpartition(".")[0])}
    named = {name for answer in NO_KEY.values() for name in re.findall("`([^`]+)`", answer)}
    assert named - places == set()
    assert NO_KEY.keys() & {*ALIASES, *KEYS} == set()


def test_keys_that_another_schema_lacks_are_not_named_for_it():
    assert "batch.groups_per_update" not in unknown_key("num_iterations", leaf_types(EvaluateConfig))


def test_a_right_name_in_the_wrong_section_is_found():
    assert nearest_keys("loss.group_size", KEYS)[0] == "batch.group_size"
    assert "data.max_prompt_tokens" in nearest_keys("sampling.max_prompt_tokens", KEYS)


def test_a_name_like_nothing_gets_the_top_level_instead():
    assert nearest_keys("qqq", KEYS) == []
    assert "the top level has advantage, " in unknown_key("qqq", KEYS)
