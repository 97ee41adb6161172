"""MATH-500 (https://huggingface.co/datasets/HuggingFaceH4/MATH-500, MIT): 500 problems from MATH, with LaTeX answers.

Use the `math` grader, because the same answer can be written in many ways.
"""

from dapo_jax.data.file_builder import FileBuilder


class Builder(FileBuilder):
    """The question is `problem`, and the answer is `answer`. Rows also have the step-by-step `solution`."""

    name = "math_500"
    SPLIT = "test"
    QUESTION = "problem"
