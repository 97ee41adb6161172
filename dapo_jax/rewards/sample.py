"""What every reward function is handed."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from dapo_jax.rollouts import FinishReason, Prompt


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What a reward function is handed: one response, its prompt, and the row that the prompt was made from."""

    prompt: Prompt
    response: str
    """The response decoded without special tokens."""
    tokens: Int[np.ndarray, " response"]
    """The sampled tokens, the end token included when there is one."""
    finish_reason: FinishReason

    @property
    def answer(self) -> str:
        """The reference answer."""
        return self.prompt.answer

    @property
    def response_tokens(self) -> int:
        """Length of the response in tokens, the end token included."""
        return len(self.tokens)
