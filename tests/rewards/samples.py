"""Samples for tests of graders and reward functions."""

import numpy as np

from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.rewards import Sample


def sample(response="", *, prompt="6*7", answer="42", row=None, ordinal=7, tokens=(3, 4, 5)):
    """A response to a prompt of two tokens."""
    asked = Prompt(
        ordinal=ordinal, tokens=np.array([1, 2], np.int32), text=prompt, answer=answer, row=row or {}
    )
    return Sample(prompt=asked, response=response, tokens=np.array(tokens, np.int32), finish_reason="stop")


def samples(*responses, **fields):
    """Responses to one prompt."""
    return [sample(response, **fields) for response in responses]
