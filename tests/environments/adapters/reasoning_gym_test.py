"""reasoning-gym's tasks have one turn."""

import inspect

import pytest

from dapo_jax.environments import load_environment


def test_its_tasks_are_questions_with_a_grader():
    with pytest.raises(
        ValueError, match=r"data\.source=reasoning_gym:leg_counting with reward\.grader=reasoning_gym"
    ):
        load_environment("reasoning_gym:leg_counting")


def test_the_package_has_nothing_that_answers_a_turn():
    """If it gets environments one day, this fails, and an adapter is due."""
    package = pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    methods = {name for name, _ in inspect.getmembers(package.dataset.ProceduralDataset)}
    assert "score_answer" in methods
    assert not methods & {"step", "reset", "turn", "interact"}
