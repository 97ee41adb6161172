"""The dataset `jsonl`: any parquet or JSON Lines file whose rows have a question and an answer. `data.source_options` sets the names of both fields."""

from collections.abc import Mapping
from typing import Any

from dapo_jax.data.file_builder import FileBuilder, field_of


class Builder(FileBuilder):
    """The fields are `prompt` and `answer` unless `source_options` sets others, for example `{prompt: question, answer: reward_model.ground_truth}`."""

    name = "jsonl"
    OPTIONS = ("prompt", "answer")

    def example(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the question and the answer of a row, see `FileBuilder.example`."""
        try:
            return {name: field_of(fields, self._options.get(name, name)) for name in self.OPTIONS}
        except ValueError as error:
            example = """data.source_options='{"prompt": "FIELD", "answer": "FIELD.INSIDE"}'"""
            raise ValueError(f"{error}; set the names of the prompt and answer fields: {example}") from None
