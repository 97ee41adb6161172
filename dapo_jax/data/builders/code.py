"""The dataset `code`: coding problems in any format that the grader `code` reads. `data.source_options` may name the field with the question."""

from collections.abc import Mapping
from typing import Any

from dapo_jax.data.file_builder import FileBuilder, field_of
from dapo_jax.text.code_tests import tests_of

QUESTIONS = ("query", "prompt", "problem", "question", "question_content", "description", "text", "messages")
"""The fields that may have the question. The first of them is used."""


class Builder(FileBuilder):
    """The tests stay in the fields of the row. A row whose tests the grader `code` cannot read is a bad row."""

    name = "code"
    OPTIONS = ("prompt",)

    def example(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the question and, as the answer, the number of tests, see `FileBuilder.example`. The question replaces the field `prompt`, whose code the tests may need."""
        question = self._options.get("prompt") or next(
            (name for name in QUESTIONS if name in fields), QUESTIONS[0]
        )
        code = {"code_prompt": fields["prompt"]} if question != "prompt" and "prompt" in fields else {}
        return {"prompt": field_of(fields, question), "answer": f"{tests_of('', fields).count} tests", **code}
