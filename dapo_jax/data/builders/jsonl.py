"""Any parquet or JSON-lines file with a question and an answer in each row. `data.source_options` sets the names of these fields."""

from collections.abc import Mapping
from typing import Any

from dapo_jax.data.file_builder import FileBuilder, field_of


class Builder(FileBuilder):
    """The fields are `prompt` and `answer` unless `source_options` sets others, for example `{prompt: question, answer: reward_model.ground_truth}`."""

    name = "jsonl"
    OPTIONS = ("prompt", "answer")

    def example(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `FileBuilder.example`."""
        try:
            return {name: field_of(fields, self._options.get(name, name)) for name in self.OPTIONS}
        except ValueError as error:
            example = """data.source_options='{"prompt": "FIELD", "answer": "FIELD.INSIDE"}'"""
            raise ValueError(f"{error}; set the names of the prompt and answer fields: {example}") from None
