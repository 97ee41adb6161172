"""Conversations of others as ids: nothing that stands in a message becomes a special token.

A chat template mixes its own text, whose special tokens are meant, with contents, whose are not. So these are guarded (`text.guards`) while the template is
rendered, and what is rendered is tokenized as the template's own text is.
"""

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
"""A role's name, which templates compare and print, so nothing may stand in its place."""
_ESCAPED_GUARD = re.compile(r"\\udbf[c-f]\\ud[c-f]", re.IGNORECASE)
"""How JSON without characters beyond ASCII writes what stands in a special token's place."""


class Guarding:
    """Messages as a template is to see them: nothing in them can become a special token, and there are bounds to their size."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._characters = tokenizer, 0

    def message(self, message: Message) -> dict[str, Any]:
        """The message, with all its texts guarded but its role, which can hold no special token.

        Raises:
            ValueError: it is too long or too deep, or has a role that is no name.
        """
        if not _ROLE.fullmatch(message["role"]):
            raise ValueError(
                f"a message has the role {message['role']!r:.80}; a role is at most 64 letters, digits, _ and -"
            )
        return {**self.value({**message, "role": ""}), "role": message["role"]}

    def value(self, value: Any, depth: int = 0) -> Any:
        """A value with each text in it guarded, the names in mappings among them.

        Raises:
            ValueError: it is too long or too deep, or has a text that is none, or that holds what stands for special tokens.
        """
        if isinstance(value, str):
            self._characters += len(value)
            if self._characters > MOST_CHARACTERS:
                raise ValueError(
                    f"messages of {self._characters:,} characters were given; {MOST_CHARACTERS:,} are the most"
                )
            return self._tokenizer.guarded(value)
        if not isinstance(value, Mapping | list | tuple):
            return value  # a number, or nothing; the template refuses all else
        if depth == DEEPEST:
            raise ValueError(f"a message is nested more than {DEEPEST} deep")
        if isinstance(value, Mapping):
            return {self.value(str(name)): self.value(one, depth + 1) for name, one in value.items()}
        return [self.value(one, depth + 1) for one in value]

    def ids(self, rendered: str) -> Int32[np.ndarray, " tokens"]:
        """The ids of what a template made of guarded messages.

        Raises:
            ValueError: it writes what stands for special tokens in another way.
        """
        if _ESCAPED_GUARD.search(rendered):
            raise ValueError(
                "the chat template, or a message, writes characters beyond Unicode's planes in use as \\u escapes"
            )
        return self._tokenizer.encode_guarded(rendered)


def conversation_ids(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    today: date | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Int32[np.ndarray, " prompt"]:
    """The prompt that a conversation of somebody else is, up to and including the opening of the answer.

    Where no text spells a token that was added to the vocabulary, it is the prompt that `PromptFormat` makes of the same messages. Where one does, it
    is encoded as the characters that it has.

    Args:
        messages: the turns, oldest first, in any form that `canonical_messages` takes.
        tokenizer: with a chat template.
        today: the day that a template prints.
        variables: what else the template reads, such as `tools`; texts in them are taken as those of messages.

    Raises:
        ValueError: there is no chat template, it fails, or the messages are none that it could be given.
    """
    template, guarding = tokenizer.chat_template, Guarding(tokenizer)
    if template is None:
        raise ValueError(
            "the model has no chat template, so it knows no conversations; send token ids, or serve a model with a chat_template.jinja"
        )
    told = [guarding.message(message) for message in canonical_messages(messages)]
    # Names of variables are the template's.
    known = {name: guarding.value(value) for name, value in (variables or {}).items()}
    return guarding.ids(template.render(told, known, today=today))
