"""GSM8K (https://github.com/openai/grade-school-math, MIT): grade-school word problems with step-by-step solutions.

The answer is the text after `####`. The whole solution is stored as `response`, which a supervised warm start can use.
"""

from collections.abc import Mapping
from typing import Any

from dapo_jax.data.file_builder import FileBuilder, field_of

MARK = "####"


class Builder(FileBuilder):
    """The question is `question`, and the answer is the text after the last `####` in `answer`."""

    name = "gsm8k"

    def example(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the question, the answer and the solution of a row, see `FileBuilder.example`."""
        solution = str(field_of(fields, "answer"))
        _, mark, answer = solution.rpartition(MARK)
        if not mark or not answer.strip():
            raise ValueError(f"'answer' has no text after {MARK!r}; it ends with {solution[-40:]!r}")
        return {"prompt": field_of(fields, "question"), "answer": answer.strip(), "response": solution}
