"""Where prompts and supervised pairs come from, and how text becomes tokens.

Importing this package is cheap: Grain and TensorFlow Datasets are loaded when rows are first asked for.
"""

from dapo_jax.data.chat import ChatTemplate
from dapo_jax.data.formatting import PromptFormat
from dapo_jax.data.pairs import PairSource
from dapo_jax.data.prompts import PromptSource, held_out
from dapo_jax.data.rows import checked_rows
from dapo_jax.data.sources import load_rows
from dapo_jax.data.stopping import StopStrings, stop_ids
from dapo_jax.data.tokenizers import (
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
    "PairSource",
    "PromptFormat",
    "PromptSource",
    "StopStrings",
    "Tokenizer",
    "check_vocabulary",
    "checked_rows",
    "held_out",
    "load_rows",
    "load_tokenizer",
    "save_tokenizer",
    "stop_ids",
]
