"""GSM8K (https://github.com/openai/grade-school-math, MIT): word problems of primary school, with worked answers.

The text after `####` is the answer; the worked answer is kept as `response` for a warm start.
"""

from collections.abc import Mapping
from typing import Any

from dapo_jax.data.file_builder import FileBuilder, text_of

MARK = "####"


class Builder(FileBuilder):
    """`question`, and the `answer` after its mark."""

    name = "gsm8k"

    def example(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `FileBuilder.example`."""
        worked = text_of(fields, "answer")
        _, found, answer = worked.rpartition(MARK)
        if not found or not answer.strip():
            raise ValueError(f"'answer' has nothing after {MARK!r}; it ends {worked[-40:]!r}")
        return {"prompt": text_of(fields, "question"), "answer": answer.strip(), "response": worked}
