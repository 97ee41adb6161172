"""Whoever imports a module by its old name is told the new one."""

import importlib

import pytest

from dapo_jax.moved import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_answered_with_the_new_one_which_exists(old):
    with pytest.raises(ModuleNotFoundError, match=rf"dapo_jax\.{old} is dapo_jax\.{MOVED[old]} now"):
        importlib.import_module(f"dapo_jax.{old}")
    importlib.import_module(f"dapo_jax.{MOVED[old]}")


def test_another_name_is_missing_as_ever():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'dapo_jax\.lossess'"):
        importlib.import_module("dapo_jax.lossess")


@pytest.mark.parametrize(
    ("old", "new"), [("Row", "Example"), ("rows_of", "training_examples"), ("row_weights", "example_weights")]
)
def test_a_name_that_changed_is_answered_with_the_new_one_which_exists(old, new):
    batching = importlib.import_module("dapo_jax.dapo.batching")
    with pytest.raises(ImportError, match=rf"dapo_jax\.dapo\.batching\.{old} is {new} now"):
        getattr(batching, old)
    assert getattr(batching, new).__module__ == batching.__name__
    assert not hasattr(batching, "nothing_of_this_name")
