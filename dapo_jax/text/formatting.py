"""Builds and tokenizes the prompt for a row's question, either as plain text or as a conversation."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any, TypeGuard

import numpy as np
from jaxtyping import Int32

from dapo_jax.config.data_schema import TEMPLATES, DataConfig
from dapo_jax.text.chat import Message
from dapo_jax.text.conversations import template_of
from dapo_jax.text.messages import canonical_messages
from dapo_jax.text.tokenizers import Tokenizer


@dataclass(frozen=True)
class PromptFormat:
    """Builds prompts from questions, with the template, the examples and the chat settings in the configuration section `data`."""

    data: DataConfig = field(default_factory=DataConfig)
    question: str = ""
    """The template of the question, in place of `data.prompt_template`. It names columns of `row` in braces."""
    row: Mapping[str, Any] = field(default_factory=dict)

    @property
    def today(self) -> date | None:
        """The date that chat templates print. If None, a template that prints a date raises an error."""
        return date.fromisoformat(self.data.template_date) if self.data.template_date else None

    def encode(
        self, prompt: str | Sequence[Message], tokenizer: Tokenizer
    ) -> tuple[str, Int32[np.ndarray, " prompt"]]:
        """Returns the prompt's text and tokens. Raises ValueError if the messages, the chat template or the settings do not fit the prompt."""
        if self.is_plain(prompt):
            if self.data.system_prompt or self.data.chat_template_kwargs:
                raise ValueError(
                    "the prompt is plain text, but data.system_prompt or data.chat_template_kwargs is set, which only "
                    "conversations use; set data.chat=true (--chat) to send the prompt as a user message"
                )
            examples = [self._around(shot["prompt"]) + shot["response"] for shot in self.data.few_shot]
            text = "\n\n".join([*examples, self._asked(prompt)])
            return text, tokenizer.encode_prompt(text)
        text = self._conversation(prompt, tokenizer)
        # The chat template has already written all special tokens, including the beginning-of-text token.
        return text, tokenizer.encode(text)

    def is_plain(self, prompt: str | Sequence[Message]) -> TypeGuard[str]:
        """Returns whether the prompt becomes plain text instead of a conversation."""
        return isinstance(prompt, str) and not self.data.chat

    def _asked(self, prompt: str) -> str:
        columns = {**self.row, "prompt": prompt}

        def column(name: re.Match[str]) -> str:
            if name[1] not in columns:
                raise ValueError(f"{self.question!r} names the column {name[1]!r}, but a row has {sorted(columns)}: name one of them")  # fmt: skip
            return str(columns[name[1]])

        return re.sub(r"\{(\w+)\}", column, self.question) if self.question else self._around(prompt)

    def _around(self, question: str) -> str:
        # str.format would fail if a question contains braces, for example in sets or code.
        template = TEMPLATES.get(self.data.prompt_template, self.data.prompt_template)
        return template.replace("{prompt}", question)

    def _conversation(self, prompt: str | Sequence[Message], tokenizer: Tokenizer) -> str:
        template = template_of(tokenizer)
        messages = [_user(prompt)] if isinstance(prompt, str) else checked_messages(prompt)
        last = max(index for index, message in enumerate(messages) if message["role"] == "user")
        question = {**messages[last], "content": self._asked(messages[last]["content"])}
        examples = []
        for shot in self.data.few_shot:
            asked = _user(self._around(shot["prompt"]))
            examples += [asked, {"role": "assistant", "content": shot["response"]}]
        first = int(messages[0]["role"] in ("system", "developer"))
        messages = [*messages[:first], *examples, *messages[first:last], question, *messages[last + 1 :]]
        if self.data.system_prompt:
            if first:
                raise ValueError(
                    "the row's messages begin with a system message, but data.system_prompt is set too; clear "
                    "data.system_prompt or remove the message from the row"
                )
            messages = [{"role": "system", "content": self.data.system_prompt}, *messages]
        return template.whole(messages, self.data.chat_template_kwargs, today=self.today)


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


AS_IT_STANDS = PromptFormat()
"""The default format, in which the prompt is the question alone."""


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """Returns the messages of a prompt in canonical form (see `text.messages`).

    Raises ValueError if a message is invalid, there is no user message, the question is empty, or the last message is the assistant's.
    """
    if not isinstance(messages, list | tuple | np.ndarray) or not len(messages):  # an array: from parquet
        raise ValueError(
            f"'prompt' must be a string or a list of messages such as "
            f'[{{"role": "user", "content": "1+1"}}]; got {messages!r:.80} ({type(messages).__name__})'
        )
    checked = canonical_messages(messages)
    roles = [message["role"] for message in checked]
    questions = [message["content"] for message in checked if message["role"] == "user"]
    if not questions:
        raise ValueError(f"no message has the role 'user'; the roles are {roles!r:.200}")
    if not questions[-1].strip():
        raise ValueError("the last user message is empty; remove the row or fill in the message")
    if roles[-1] == "assistant":
        raise ValueError(
            "the last message is the assistant's, so the response would be a second answer in a row; end with the question"
        )
    return checked
