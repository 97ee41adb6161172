"""MATH-500 (https://huggingface.co/datasets/HuggingFaceH4/MATH-500, MIT): 500 problems from MATH, with LaTeX answers.

Use the `math` grader, because the same answer can be written in many ways.
"""

from collections.abc import Mapping
from typing import Any

from dapo_jax.data.file_builder import FileBuilder, field_of


class Builder(FileBuilder):
    """The question is `problem`, and the answer is `answer`. Rows also have the step-by-step `solution`."""

    name = "math_500"
    SPLIT = "test"

    def example(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the question and the answer of a row, see `FileBuilder.example`."""
        return {"prompt": field_of(fields, "problem"), "answer": field_of(fields, "answer")}
