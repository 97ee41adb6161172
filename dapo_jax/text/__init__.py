"""Text and tokens: tokenizers, chat templates, prompt templates and stop strings."""

from dapo_jax.text.chat import ChatTemplate
from dapo_jax.text.formatting import PromptFormat
from dapo_jax.text.stop_strings import StopStrings, stop_ids
from dapo_jax.text.tokenizers import (
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    check_vocabulary,
    load_tokenizer,
    save_tokenizer,
)

__all__ = [
    "ByteTokenizer",
    "CharTokenizer",
    "ChatTemplate",
    "PromptFormat",
    "StopStrings",
    "Tokenizer",
    "check_vocabulary",
    "load_tokenizer",
    "save_tokenizer",
    "stop_ids",
]
