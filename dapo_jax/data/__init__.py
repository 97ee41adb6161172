"""Sources of prompts for training and evaluation, and of prompt / response pairs for a supervised warm start.

Importing this package is fast, because Grain and TensorFlow Datasets are only imported when rows are first loaded.
"""

from dapo_jax.data.prompts import PairSource, PromptSource, held_out
from dapo_jax.data.rows import checked_rows
from dapo_jax.data.sources import load_rows

__all__ = ["PairSource", "PromptSource", "checked_rows", "held_out", "load_rows"]
