"""DAPO-Math-17k (https://huggingface.co/datasets/BytedTsinghua-SIA/DAPO-Math-17k, Apache-2.0): competition mathematics
with whole numbers for answers.

The published file repeats its prompts about a hundred times, so it is de-duplicated. Its prompts come with the instructions of
the DAPO recipe or bare; here they are bare, and `data.prompt_template: dapo` puts the instructions back.
"""

from collections.abc import Mapping
from typing import Any

from dapo_jax.data.file_builder import FileBuilder, field_of, text_of
from dapo_jax.text.formatting import unwrapped


class Builder(FileBuilder):
    """The question is the last user message, the answer `reward_model.ground_truth`."""

    name = "dapo_math_17k"

    def example(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `FileBuilder.example`."""
        return {
            "prompt": question_of(field_of(fields, "prompt")),
            "answer": text_of(fields, "reward_model.ground_truth"),
        }


def question_of(prompt: Any) -> Any:
    """The bare question of a prompt that is text or one user message; anything else is left to `checked_row`."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], Mapping):
        message = prompt[0]
        if message.get("role") == "user" and isinstance(message.get("content"), str):
            prompt = message["content"]
    return unwrapped(prompt) if isinstance(prompt, str) else prompt
