"""What an unknown key is answered with."""

import pytest

from dapo_jax.config import SftConfig, TrainConfig
from dapo_jax.config.section import leaf_types
from dapo_jax.config.suggestions import ALIASES, NOTES, alias_of, nearest_keys, unknown_key

KEYS = leaf_types(TrainConfig)


def test_every_alias_stands_for_a_key_that_exists_and_is_none_itself():
    sections = {key.rpartition(".")[0] for key in KEYS}
    assert {ours for ours in ALIASES.values() if ours not in KEYS and ours not in sections} == set()
    assert ALIASES.keys() & KEYS.keys() == set()
    assert NOTES.keys() <= ALIASES.keys()


@pytest.mark.parametrize(("theirs", "ours"), sorted(ALIASES.items()))
def test_every_alias_is_answered_with_our_name(theirs, ours):
    assert f"`{ours}`" in unknown_key(theirs, KEYS)


def test_the_longest_ending_of_a_dotted_alias_wins():
    assert alias_of("actor_rollout_ref.rollout.val_kwargs.n", KEYS) == "val_kwargs.n"
    assert alias_of("actor_rollout_ref.rollout.n", KEYS) == "rollout.n"
    assert alias_of("whatever.N", KEYS) == "n"
    assert alias_of("nn", KEYS) is None


def test_an_alias_for_a_key_of_the_other_schema_is_not_offered():
    assert alias_of("num_generations", leaf_types(SftConfig)) is None
    assert "group_size" not in unknown_key("num_generations", leaf_types(SftConfig))


def test_a_right_name_in_the_wrong_section_is_found():
    assert nearest_keys("loss.group_size", KEYS)[0] == "batch.group_size"
    assert "data.max_prompt_tokens" in nearest_keys("sampling.max_prompt_tokens", KEYS)


def test_a_name_like_nothing_gets_the_top_level_instead():
    assert nearest_keys("qqq", KEYS) == []
    assert "the top level has batch, " in unknown_key("qqq", KEYS)
