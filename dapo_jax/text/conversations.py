"""Tokenizes conversations from outside, such as HTTP requests: no text in a message becomes a special token."""

import re
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

import numpy as np
from jaxtyping import Int32

from dapo_jax.text.chat import Message
from dapo_jax.text.messages import DEEPEST, canonical_messages
from dapo_jax.text.tokenizers import Tokenizer

MOST_CHARACTERS = 1 << 20
"""Longer texts are refused before they are tokenized."""
_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Roles are not guarded, because templates compare and print them."""
_ESCAPED_GUARD = re.compile(r"\\udbf[c-f]\\ud[c-f]", re.IGNORECASE)
"""A guard in JSON that is limited to ASCII."""


class Guarding:
    """Guards messages for a chat template and limits their size."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._characters = tokenizer, 0

    def message(self, message: Message) -> dict[str, Any]:
        """Returns the message with all its texts guarded except its role, which cannot hold a special token.

        Raises:
            ValueError: the message is too long or too deep, or its role is not a name.
        """
        if not _ROLE.fullmatch(message["role"]):
            raise ValueError(
                f"a message has the role {message['role']!r:.80}; a role is at most 64 letters, digits, _ and -"
            )
        return {**self.value({**message, "role": ""}), "role": message["role"]}

    def value(self, value: Any, depth: int = 0) -> Any:
        """Returns a value with each text in it guarded, including the names in mappings.

        Raises:
            ValueError: it is too long or too deep, is not JSON, or has a text with half a surrogate pair or a guard.
        """
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, str):
            self._characters += len(value)
            if self._characters > MOST_CHARACTERS:
                raise ValueError(
                    f"messages of {self._characters:,} characters were given; the limit is {MOST_CHARACTERS:,}"
                )
            return self._tokenizer.guarded(value)
        if not isinstance(value, Mapping | list | tuple):
            raise ValueError(
                f"{value!r:.80} ({type(value).__name__}) is not text, a number, a list or a mapping"
            )
        if depth == DEEPEST:
            raise ValueError(f"a message is nested more than {DEEPEST} deep")
        if isinstance(value, Mapping):
            return {self.value(str(name)): self.value(item, depth + 1) for name, item in value.items()}
        return [self.value(item, depth + 1) for item in value]

    def ids(self, rendered: str) -> Int32[np.ndarray, " tokens"]:
        """Returns the ids of the text that a template made of guarded messages.

        Raises:
            ValueError: the template wrote guards as JSON escapes.
        """
        if _ESCAPED_GUARD.search(rendered):
            raise ValueError("the chat template writes characters beyond U+10EFFF as \\u escapes")
        return self._tokenizer.encode_guarded(rendered)


def conversation_ids(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    today: date | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Int32[np.ndarray, " prompt"]:
    """Returns the prompt of a conversation from outside, up to and including the opening of the answer.

    If no text spells an added token, `PromptFormat` makes the same prompt of the same messages. A spelled one is encoded as
    ordinary characters.

    Args:
        messages: the turns, oldest first, in any form that `canonical_messages` takes.
        tokenizer: a tokenizer with a chat template.
        today: the day that the template prints.
        variables: further variables of the template, such as `tools`; their texts are guarded too.

    Raises:
        ValueError: there is no chat template, it fails, or the messages are not a conversation.
    """
    template, guarding = tokenizer.chat_template, Guarding(tokenizer)
    if template is None:
        raise ValueError(
            "the model has no chat template, so it knows no conversations; send token ids, or serve a model with a chat_template.jinja"
        )
    guarded = [guarding.message(message) for message in canonical_messages(messages)]
    known = {name: guarding.value(value) for name, value in (variables or {}).items()}
    return guarding.ids(template.render(guarded, known, today=today))
