"""Where prompts and supervised pairs come from, and how text becomes tokens.

Importing this package is cheap: Grain and TensorFlow Datasets are loaded when rows are first asked for.
"""

from dapo_jax.data.pairs import PairSource
from dapo_jax.data.prompts import PromptSource, checked_rows, held_out, load_rows
from dapo_jax.data.tokenizers import ByteTokenizer, CharTokenizer, Tokenizer, load_tokenizer, save_tokenizer

__all__ = [
    "ByteTokenizer",
    "CharTokenizer",
    "PairSource",
    "PromptSource",
    "Tokenizer",
    "checked_rows",
    "held_out",
    "load_rows",
    "load_tokenizer",
    "save_tokenizer",
]
