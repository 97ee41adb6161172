"""DAPO-Math-17k (https://huggingface.co/datasets/BytedTsinghua-SIA/DAPO-Math-17k, Apache-2.0): competition mathematics
with integer answers.

The published file contains each prompt about a hundred times, so the rows are deduplicated. The instructions of the DAPO recipe are
removed from prompts that have them. To add the instructions to all prompts, set `data.prompt_template: dapo`.
"""

from collections.abc import Mapping
from typing import Any

from dapo_jax.config.data_schema import TEMPLATES
from dapo_jax.data.file_builder import FileBuilder, field_of


class Builder(FileBuilder):
    """The question is the last user message, and the answer is `reward_model.ground_truth`."""

    name = "dapo_math_17k"

    def example(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the question and the answer of a row, see `FileBuilder.example`."""
        return {
            "prompt": question_of(field_of(fields, "prompt")),
            "answer": field_of(fields, "reward_model.ground_truth"),
        }


def question_of(prompt: Any) -> Any:
    """Returns the question, without the instructions, from a text or a single user message. Returns other prompts unchanged for `checked_row` to check."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], Mapping):
        message = prompt[0]
        if message.get("role") == "user" and isinstance(message.get("content"), str):
            prompt = message["content"]
    before, _, after = TEMPLATES["dapo"].partition("{prompt}")
    if isinstance(prompt, str) and prompt.startswith(before) and prompt.endswith(after):
        return prompt[len(before) : len(prompt) - len(after)]
    return prompt
