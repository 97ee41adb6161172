"""Rewards: graders, user-defined reward functions and the length penalty. This package is plain Python that runs on the host."""

from dapo_jax.rewards.functions import as_verdict, grade_function, load_function
from dapo_jax.rewards.graders import GRADERS, TEXT_RULES, exact_grader
from dapo_jax.rewards.sample import Sample, whole_group
from dapo_jax.rewards.shaping import grade_group

__all__ = [
    "GRADERS",
    "TEXT_RULES",
    "Sample",
    "as_verdict",
    "exact_grader",
    "grade_function",
    "grade_group",
    "load_function",
    "whole_group",
]
