"""The configuration of the tiny step."""

import numpy as np
import pytest

from dapo_jax.config import load_config
from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.doctor.tiny_step import GROUP, reduced

SAVED = "algorithm=opd teacher.source=preset:tiny teacher.kl=full rollout.saved=true batch.group_size=1 data.deduplicate=false"


@pytest.mark.parametrize("overrides", ["algorithm=gfpo", "advantage.best_of=5 reward.incorrect=0", SAVED])
def test_a_key_that_needs_another_group_size_does_not_refuse_the_tiny_step(overrides):
    """GFPO keeps 8 responses, the best of 5 needs 5, and saved rollouts have one; the tiny step samples `GROUP`."""
    prompts = [Prompt(ordinal=0, tokens=np.arange(3, dtype=np.int32), text="1+1", answer="2")]
    assert reduced(load_config("quickstart", overrides.split()), prompts).batch.group_size == GROUP
