"""The argument of every reward function."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Int

from dapo_jax.dapo.rollouts import FinishReason, Prompt


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A reward function's argument: one response, its prompt, and the row that the prompt was made from."""

    prompt: Prompt
    response: str
    """The response decoded without special tokens."""
    tokens: Int[np.ndarray, " response"]
    """The sampled tokens, the end token included when there is one. A function gets them read-only: they are what is trained on."""
    finish_reason: FinishReason

    @property
    def answer(self) -> str:
        """The reference answer."""
        return self.prompt.answer

    @property
    def response_tokens(self) -> int:
        """Length of the response in tokens, the end token included."""
        return len(self.tokens)


def handed_over(call: Sequence[Sample]) -> list[Sample]:
    """The samples of one call as a function gets them: it can change nothing that the run or another call goes on with.

    Tokens are read-only views, so that nothing is copied of long responses; rows are copies.
    """
    prompts = {id(sample.prompt): sample.prompt for sample in call}
    own = {
        key: replace(
            prompt,
            tokens=read_only(prompt.tokens),
            row={name: copied(value) for name, value in prompt.row.items()},
        )
        for key, prompt in prompts.items()
    }
    return [
        replace(sample, prompt=own[id(sample.prompt)], tokens=read_only(sample.tokens)) for sample in call
    ]


def read_only(tokens: np.ndarray) -> np.ndarray:
    """A view that cannot be written to."""
    view = np.asarray(tokens).view()
    view.flags.writeable = False
    return view


def copied(value: Any) -> Any:
    """Plain data, copied at any depth; other objects as they are."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) is dict:
        return {name: copied(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(item) for item in value)
    return value
