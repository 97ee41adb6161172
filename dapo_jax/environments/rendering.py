"""From what an environment appends to ids: only what is new, never what was sampled.

Of messages, the chat template is asked for the text behind an answer of the assistant. Whatever a template does to earlier turns (Qwen3's
strips their thinking) so has no effect: they stay the tokens that they were. What is rendered is tokenized as the template's own text is, but for one thing: only what the template
itself writes becomes a special token, nothing in a message, however deep, does.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import numpy as np
from jaxtyping import Int

from dapo_jax.environments.protocol import Context
from dapo_jax.text.chat import ChatTemplate
from dapo_jax.text.conversations import MOST_CHARACTERS, Guarding
from dapo_jax.text.guards import FIRST_GUARD
from dapo_jax.text.messages import canonical_messages
from dapo_jax.text.tokenizers import Tokenizer

_SAID = f"{FIRST_GUARD}said{FIRST_GUARD}"
"""Stands for what the assistant said: no template writes it, and no message may hold it."""


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
        if len(text) > MOST_CHARACTERS:
            raise RenderingError(
                f"a text of {len(text):,} characters was appended; {MOST_CHARACTERS:,} are the most"
            )
        try:
            text.encode("utf-8")  # half of a surrogate pair is no text
            return self.tokenizer.encode_plain(text)
        except ValueError as error:
            raise RenderingError(f"a text was appended that cannot be tokenized: {error}") from error

    def context_ids(self, context: Context) -> Int[np.ndarray, " context"]:
        """The ids of a whole context: a text as a prompt begins, ids as they are, messages up to where the assistant's answer begins.

        Raises:
            RenderingError: it is nothing that can stand there, or empty.
        """
        contents = context.contents
        if isinstance(contents, str):
            found = np.concatenate([self.tokenizer.encode_prompt(""), self._text(contents)])
        elif isinstance(contents, Sequence) and contents and isinstance(contents[0], Mapping):
            template, guard = self._template(), Guarding(self.tokenizer)
            if context.tools and not re.search(r"\btools\b", template.source):
                raise RenderingError(
                    f"chat template {template.name} tells of no tools: write them into the system message, and give a Context without tools"
                )
            try:
                told = _guarded(guard, contents)
                tools = [guard.value(tool) for tool in context.tools] or None
                kwargs = {**self.template_kwargs, "tools": tools}
                found = guard.ids(template.render(told, kwargs, today=self.today))
            except RenderingError:
                raise
            except (ValueError, TypeError) as error:
                raise RenderingError(f"a context cannot be rendered: {error}") from error
        else:
            found = self.ids(contents, after=None)
        if not len(found):
            raise RenderingError(
                "a context has no token: it stands in place of all before, so a turn would have nothing to follow"
            )
        return found

    def _messages(
        self, messages: Sequence[Any], after: Int[np.ndarray, " turn"] | None
    ) -> Int[np.ndarray, " new"]:
        template, guard = self._template(), Guarding(self.tokenizer)
        told = _guarded(guard, messages)
        said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SAID}]
        rendered = template.render([*said, *told], self.template_kwargs, today=self.today)
        before, _, new = rendered.rpartition(_SAID)
        if not before:
            raise RenderingError(
                f"chat template {template.name} leaves out what the assistant said, so nothing can follow it"
            )
        if after is None:
            # Behind a prompt, whose text ends with the opening of an answer.
            raise RenderingError(
                "messages cannot follow a prompt, which ends with the beginning of an answer: give a Context, append a text or ids, or write them into the row's prompt"
            )
        whole = guard.ids(new)
        # The end token that the turn was ended with is there already.
        ended = len(after) > 0 and len(whole) > 0 and int(after[-1]) in self.tokenizer.stop_ids
        return whole[1:] if ended and int(whole[0]) == int(after[-1]) else whole

    def _template(self) -> ChatTemplate:
        if self.tokenizer.chat_template is None:
            raise RenderingError(
                "messages were given, and the model has no chat template: choose a model or a model.tokenizer that has one, or give a text or ids"
            )
        return self.tokenizer.chat_template


def _guarded(guarding: Guarding, messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns the messages as the template is to see them.

    Raises:
        RenderingError: one of them is not a message, or cannot be guarded.
    """
    try:
        return [guarding.message(message) for message in canonical_messages(messages)]
    except ValueError as error:
        raise RenderingError(f"a message was given that cannot be taken: {error}") from error
