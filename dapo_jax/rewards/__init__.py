"""Rewards: graders, user-defined reward functions and the length penalty. This package is plain Python that runs on the host."""

from dapo_jax.rewards.functions import as_verdict as as_verdict
from dapo_jax.rewards.functions import grade_function as grade_function
from dapo_jax.rewards.functions import load_function as load_function
from dapo_jax.rewards.graders import GRADERS as GRADERS
from dapo_jax.rewards.graders import TEXT_RULES as TEXT_RULES
from dapo_jax.rewards.graders import exact_grader as exact_grader
from dapo_jax.rewards.sample import Sample as Sample
from dapo_jax.rewards.sample import whole_group as whole_group
from dapo_jax.rewards.shaping import grade_group as grade_group
