"""Supervised pairs for a warm start: a prompt, and one of its row's demonstrations with the end token."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from dapo_jax.data.prompts import PromptSource
from dapo_jax.data.rows import place_of
from dapo_jax.text.formatting import AS_IT_STANDS, PromptFormat
from dapo_jax.text.tokenizers import Tokenizer


class PairSource:
    """Random access to an endless sequence of pairs: `source[i]` for any i >= 0.

    Rows come in the order of `PromptSource` with the same seed. A row's demonstrations are its `responses`, or
    its single `response`; the choice for pair i depends on (seed, i) alone.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        *,
        seed: int,
        max_prompt_tokens: int,
        max_response_tokens: int,
        prompt_format: PromptFormat = AS_IT_STANDS,
        shuffle: bool = True,
        parts: Sequence[Sequence[int]] = (),
        weights: Sequence[float] = (),
    ) -> None:
        """Takes the arguments of `PromptSource`; `max_response_tokens` includes the end token.

        Raises:
            ValueError: there are no rows, or the seed is negative.
        """
        self._prompts = PromptSource(
            rows,
            tokenizer,
            seed=seed,
            max_prompt_tokens=max_prompt_tokens,
            prompt_format=prompt_format,
            shuffle=shuffle,
            parts=parts,
            weights=weights,
        )
        self._tokenizer = tokenizer
        self._seed = seed
        self._max_response_tokens = max_response_tokens

    def __getitem__(self, i: int) -> tuple[Int32[np.ndarray, " prompt"], Int32[np.ndarray, " response"]]:
        """Returns the tokens of pair `i`: of the prompt, and of the response with the end token.

        Raises:
            IndexError: `i` is negative.
            ValueError: the row has no demonstration, or a text is too long or cannot be tokenized.
        """
        prompt = self._prompts[i]
        index = self._prompts.row_index(i)
        place = place_of(prompt.row, index)
        choices = _demonstrations(prompt.row, place)
        text = choices[int(np.random.default_rng([self._seed, i]).integers(len(choices)))]
        try:
            response = np.append(self._tokenizer.encode(text), np.int32(self._tokenizer.eos_id))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        if len(response) > self._max_response_tokens:
            raise ValueError(
                f"{place}: the response has {len(response) - 1} + 1 end token = {len(response)} tokens, "
                f"over max_response_tokens={self._max_response_tokens}; raise it or drop the row"
            )
        return prompt.tokens, response


def _demonstrations(row: Mapping[str, Any], place: str) -> Sequence[str]:
    choices = row["responses"] if "responses" in row else [row["response"]] if "response" in row else []
    if isinstance(choices, str) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError(
            f"{place} needs a demonstration: 'responses', a list of strings, or 'response', a string; "
            f"its fields are {sorted(map(str, row))}"
        )
    return choices
