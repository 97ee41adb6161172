"""From what an environment appends to ids: only what is new, never what was sampled.

Of messages, the chat template is asked for the text behind an answer of the assistant. Whatever a template does to earlier turns (Qwen3's
strips their thinking) so has no effect: they stay the tokens that they were. Contents are tokenized apart from the template's own text, and nothing in them becomes a special token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import numpy as np
from jaxtyping import Int

from dapo_jax.text.conversations import Marks
from dapo_jax.text.tokenizers import Tokenizer

_SAID = "\u2402said\u2402"
"""Stands for what the assistant said: a text that no template writes."""

_MOST_CHARACTERS = 1 << 20
"""A longer text is refused before it is tokenized."""


class RenderingError(ValueError):
    """No tokens can be made of what was appended."""


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """Turns what is appended to episodes into ids."""

    tokenizer: Tokenizer
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, those of `data.chat_template_kwargs`."""
    today: date | None = None
    """The day that a template prints."""

    def ids(self, appended: object, *, after: Int[np.ndarray, " turn"] | None) -> Int[np.ndarray, " new"]:
        """The ids of what an environment appended (`protocol.Appended`) behind a turn, or behind the prompt (None).

        Raises:
            RenderingError: it is nothing that can be appended, has ids outside the vocabulary, or the model has no chat template.
        """
        if isinstance(appended, str):
            return self._text(appended)
        if not isinstance(appended, Sequence | np.ndarray):
            raise RenderingError(
                f"{appended!r:.200} ({type(appended).__name__}) cannot be appended; a text, a list of messages or ids can"
            )
        try:
            if isinstance(appended, Sequence) and appended and isinstance(appended[0], Mapping):
                return self._messages(appended, after)
            return self._ids(appended)
        except RenderingError:
            raise
        except (ValueError, TypeError, OverflowError) as error:  # of numpy, or of the chat template
            raise RenderingError(f"{appended!r:.200} cannot be appended: {error}") from error

    def _ids(self, appended: Any) -> Int[np.ndarray, " new"]:
        found = np.asarray(appended)
        if found.size == 0:
            return np.zeros(0, np.int32)
        if found.ndim != 1 or found.dtype.kind not in "iu":
            raise RenderingError(
                f"{appended!r:.200} cannot be appended: it is neither messages nor a list of ids"
            )
        if not 0 <= int(found.min()) <= int(found.max()) < self.tokenizer.vocab_size:
            raise RenderingError(
                f"ids from {found.min()} to {found.max()} were appended; those of the tokenizer are from 0 to {self.tokenizer.vocab_size - 1}"
            )
        return found.astype(np.int32)

    def _text(self, text: str) -> Int[np.ndarray, " new"]:
        if len(text) > _MOST_CHARACTERS:
            raise RenderingError(
                f"a text of {len(text):,} characters was appended; {_MOST_CHARACTERS:,} are the most"
            )
        try:
            text.encode("utf-8")  # half of a surrogate pair is no text
            return self.tokenizer.encode_plain(text)
        except ValueError as error:
            raise RenderingError(f"a text was appended that cannot be tokenized: {error}") from error

    def _messages(
        self, messages: Sequence[Any], after: Int[np.ndarray, " turn"] | None
    ) -> Int[np.ndarray, " new"]:
        template = self.tokenizer.chat_template
        if template is None:
            raise RenderingError(
                "messages were appended, and the model has no chat template: append a text or ids"
            )
        marks, told = Marks(), []
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise RenderingError(f"{message!r:.200} is no message: it needs a role and a content")
            content = message.get("content")
            if not isinstance(content, str):
                raise RenderingError(
                    f"{message!r:.200} is no message with a text: its content has to be a str"
                )
            if len(content) > _MOST_CHARACTERS:
                raise RenderingError(
                    f"a message of {len(content):,} characters was appended; {_MOST_CHARACTERS:,} are the most"
                )
            told.append(
                {
                    key: marks.mark(value) if isinstance(value, str) and key != "role" else value
                    for key, value in message.items()
                }
            )
        asked = {"role": "user", "content": "?"}
        said = [asked, {"role": "assistant", "content": _SAID}]
        rendered = template.render([*said, *told], today=self.today, **self.template_kwargs)
        before, _, new = rendered.rpartition(_SAID)
        if not before:
            raise RenderingError(
                f"chat template {template.name} leaves out what the assistant said, so nothing can follow it"
            )
        if after is None:
            # Behind a prompt, whose text ends with the opening of an answer.
            raise RenderingError(
                "messages cannot follow a prompt, which ends with the beginning of an answer: append a text or ids, or write them into the row's prompt"
            )
        whole = marks.ids(new, encode=self.tokenizer.encode, encode_plain=self._text)
        # The end token that the turn was ended with is there already.
        ended = len(after) > 0 and len(whole) > 0 and int(after[-1]) in self.tokenizer.stop_ids
        return whole[1:] if ended and int(whole[0]) == int(after[-1]) else whole
