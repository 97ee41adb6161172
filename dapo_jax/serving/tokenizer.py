"""The model's tokenizer in JetStream's shape."""

from typing import Any

import numpy as np
from jetstream.engine import tokenizer_api

from dapo_jax.serving.text import decoded
from dapo_jax.text.formatting import AS_IT_STANDS, PromptFormat
from dapo_jax.text.tokenizers import Tokenizer

PREFILL_LENGTHS = tuple(1 << power for power in range(4, 16))
"""Lengths that JetStream pads prompts to; an engine's `max_prefill_length` must be one of them."""


class JetStreamTokenizer(tokenizer_api.Tokenizer):
    """One of `dapo_jax.text.tokenizers` as JetStream asks for it."""

    def __init__(
        self, tokenizer: Tokenizer, max_prefill_length: int, prompt_format: PromptFormat = AS_IT_STANDS
    ) -> None:
        """`max_prefill_length` is one of `PREFILL_LENGTHS`; `prompt_format` is put around texts, not around ids."""
        self.tokenizer, self._longest, self._format = tokenizer, max_prefill_length, prompt_format

    def encode(self, s: str, **kwargs: Any) -> tuple[np.ndarray, int]:
        """Padded ids, and how many of them are the prompt's; see `pad`. JetStream's options change nothing."""
        return self.pad(self.prompt(s))

    def prompt(self, content: str | list[int]) -> np.ndarray:
        """The ids of a prompt: a text's are the prompt format's, ids are taken as they are.

        Raises:
            ValueError: the tokenizer cannot take the text, or does not have one of the ids.
        """
        if isinstance(content, str):
            return self._format.encode(content, self.tokenizer)[1]
        size = self.tokenizer.vocab_size
        if outside := [token for token in content if not 0 <= token < size]:
            raise ValueError(f"token id {outside[0]} is not in the vocabulary of {size} ids, 0 to {size - 1}")
        return np.array(content, np.int32)

    def pad(self, ids: np.ndarray) -> tuple[np.ndarray, int]:
        """Fills `ids` up to a length that JetStream prefills; and how many they were.

        Raises:
            ValueError: they are more than the longest.
        """
        lengths = [length for length in PREFILL_LENGTHS if len(ids) <= length <= self._longest]
        if not lengths:
            raise ValueError(f"the prompt has {len(ids)} tokens, the longest may have {self._longest}")
        return np.pad(ids, (0, lengths[0] - len(ids)), constant_values=self.pad_id), len(ids)

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        """The text of the ids."""
        return decoded(self.tokenizer, token_ids)

    @property
    def pad_id(self) -> int:
        """Fills a prompt up."""
        return self.tokenizer.pad_id

    @property
    def eos_id(self) -> int:
        """Ends a response."""
        return self.tokenizer.eos_id

    @property
    def bos_id(self) -> int:
        """JetStream asks for one; what begins a text is `encode`'s business, and nothing here uses this."""
        return self.tokenizer.eos_id

    @property
    def stop_tokens(self) -> set[int]:
        """Every id that ends a response; padding is not among them, since no engine of ours draws it."""
        return set(self.tokenizer.stop_ids)
