"""Tokenizes untrusted conversations, such as HTTP requests, so that no text in a message becomes a special token."""

import re
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

import numpy as np
from jaxtyping import Int32

from dapo_jax.text.chat import ChatTemplate, Message
from dapo_jax.text.messages import DEEPEST, canonical_messages
from dapo_jax.text.special_tokens import Before
from dapo_jax.text.thoughts import MARKS
from dapo_jax.text.tokenizers import Tokenizer

MOST_CHARACTERS = 1 << 20
"""Maximum number of characters in a conversation. Longer conversations are refused before they are tokenized."""
_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""The format of a role. Roles are checked instead of guarded (see `Guards`), because templates compare and print them."""
_ESCAPED_GUARD = re.compile(r"\\udbf[c-f]\\ud[c-f]", re.IGNORECASE)
"""Matches a guard character that is written as an escape sequence, as in ASCII-only JSON."""


class Guarding:
    """Guards the messages of one conversation (see `Guards`), so that they cannot spell out special tokens, and limits their size."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._characters = tokenizer, 0

    def message(self, message: Message) -> dict[str, Any]:
        """Returns a copy of the message in which every text is guarded, except the role and the marks of thoughts in an answer.

        Raises ValueError if the role is not a valid name.
        """
        if not _ROLE.fullmatch(message["role"]):
            raise ValueError(
                f"a message has the role {message['role']!r:.80}; a role must be 1 to 64 letters, digits, _ or -"
            )
        guarded = {**self.value({**message, "role": ""}), "role": message["role"]}
        # Templates look for these marks to leave out earlier thoughts.
        for mark in MARKS if message["role"] == "assistant" else ():
            guarded["content"] = guarded["content"].replace(self._tokenizer.guarded(mark), mark)
        return guarded

    def value(self, value: Any, depth: int = 0) -> Any:
        """Returns a copy of a JSON value in which every text is guarded, including the keys of mappings.

        Raises ValueError if the value is too long or nested too deeply, is not JSON, or contains a lone surrogate or a guard.
        """
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, str):
            self._characters += len(value)
            if (count := self._characters) > MOST_CHARACTERS:
                raise ValueError(
                    f"the messages have {count:,} characters or more; the limit is {MOST_CHARACTERS:,}"
                )
            return self._tokenizer.guarded(value)
        if not isinstance(value, Mapping | list | tuple):
            raise ValueError(
                f"{value!r:.80} ({type(value).__name__}) is not text, a number, a list or a mapping"
            )
        if depth == DEEPEST:
            raise ValueError(f"a message is nested more than {DEEPEST} levels deep")
        if isinstance(value, Mapping):
            return {self.value(str(name)): self.value(item, depth + 1) for name, item in value.items()}
        return [self.value(item, depth + 1) for item in value]

    def ids(self, rendered: str, after: Before = None) -> Int32[np.ndarray, " tokens"]:
        """Returns the token ids of a text that a template has rendered from guarded messages. For `after`, see `Tokenizer.encode`.

        Raises ValueError if the template has written a guard as a JSON escape sequence.
        """
        if _ESCAPED_GUARD.search(rendered):
            raise ValueError("the chat template writes characters beyond U+10EFFF as \\u escapes")
        return self._tokenizer.encode_guarded(rendered, after)


def template_of(tokenizer: Tokenizer) -> ChatTemplate:
    """Returns the tokenizer's chat template. Raises ValueError if it has none."""
    if tokenizer.chat_template is None:
        raise ValueError(
            "there are messages, but the tokenizer has no chat template: for plain text, set data.chat=false or name another field in "
            "data.source_options={prompt: FIELD}; else set model.source to the instruction-tuned model, or to a folder with a chat_template.jinja"
        )
    return tokenizer.chat_template


def conversation_ids(
    messages: Sequence[object], tokenizer: Tokenizer, *, today: date | None = None, variables: Mapping[str, Any] | None = None
) -> Int32[np.ndarray, " prompt"]:  # fmt: skip
    """Returns the token ids of an untrusted conversation, including the generation prompt that begins the answer.

    If a message spells out a token that controls the conversation, such as `<|im_end|>`, that text is encoded as ordinary characters. In all other
    cases, the token ids are the same as the token ids from `PromptFormat`. Texts in `variables`, such as the schemas in `tools`, are guarded too.

    Raises ValueError if there is no chat template, the template fails, or the messages are not a valid conversation.
    """
    template, guarding = template_of(tokenizer), Guarding(tokenizer)
    guarded = [guarding.message(message) for message in canonical_messages(messages)]
    known = {name: guarding.value(value) for name, value in (variables or {}).items()}
    return guarding.ids(template.whole(guarded, known, today=today))
