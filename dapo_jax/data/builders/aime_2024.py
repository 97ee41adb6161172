"""AIME 2024 as published with DAPO (https://huggingface.co/datasets/BytedTsinghua-SIA/AIME-2024): 30 problems, repeated 32 times.

This builder keeps each problem once. To sample 32 responses to each, set `eval.samples_per_prompt: 32`. The questions have no
instructions. Set `data.prompt_template: dapo` to add the instructions of the DAPO recipe.
"""

from collections.abc import Mapping
from typing import Any

from dapo_jax.data.builders.dapo_math_17k import question_of
from dapo_jax.data.file_builder import FileBuilder, field_of


class Builder(FileBuilder):
    """The question is `extra_info.raw_problem`, or else the last user message. The answer is `reward_model.ground_truth`."""

    name = "aime_2024"
    SPLIT = "test"

    def example(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the question and the answer of a row, see `FileBuilder.example`."""
        extra = fields.get("extra_info")
        bare = isinstance(extra, Mapping) and "raw_problem" in extra
        text = field_of(fields, "extra_info.raw_problem") if bare else question_of(field_of(fields, "prompt"))
        return {"prompt": text, "answer": field_of(fields, "reward_model.ground_truth")}
