"""Sources of prompts, and of supervised pairs of a prompt and a response.

Importing this package is fast, because Grain and TensorFlow Datasets are imported only when rows are first read.
"""

from dapo_jax.data.prompts import PairSource, PromptSource, held_out
from dapo_jax.data.rows import checked_rows
from dapo_jax.data.sources import load_rows

__all__ = ["PairSource", "PromptSource", "checked_rows", "held_out", "load_rows"]
