"""Tokenizes the texts and messages that episodes append to the context.

When messages are appended, only the text that the chat template renders after the assistant's answer is used. Some
templates also rewrite earlier turns. For example, Qwen3's template removes the thinking from them. Such changes are ignored, so the tokens
of earlier turns stay the same. Only text that the template itself writes can become special tokens. Text inside messages never does, even in nested fields.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property, partial
from typing import Any, TypeGuard

import numpy as np
from jaxtyping import Int

from dapo_jax.environments.calls import LostError
from dapo_jax.environments.protocol import Context
from dapo_jax.environments.tool_calls import ToolCall, tool_calls
from dapo_jax.text.chat import ToolsError
from dapo_jax.text.conversations import MOST_CHARACTERS, Guarding, conversation_ids, template_of
from dapo_jax.text.messages import canonical_messages
from dapo_jax.text.special_tokens import FIRST_GUARD, Before
from dapo_jax.text.stop_strings import StopStrings
from dapo_jax.text.thoughts import opening
from dapo_jax.text.tokenizers import Tokenizer

_ANSWER = f"{FIRST_GUARD}said{FIRST_GUARD}"
"""Placeholder for the assistant's answer. Templates do not contain this text, and messages that contain it are rejected."""


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """Renders appended values and new contexts as token ids, with the tokenizer and its chat template."""

    tokenizer: Tokenizer
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the chat template, from `data.chat_template_kwargs`."""
    today: date | None = None
    """The date for chat templates that print the current date."""

    @cached_property
    def opening(self) -> str:
        """The mark, such as `<think>`, with which the chat template begins the thoughts of an answer, or an empty string."""
        with suppress(ValueError):  # no template, or one that refuses this message
            asked = [{"role": "user", "content": "?"}]
            return opening(template_of(self.tokenizer).render(asked, self.template_kwargs, today=self.today))
        return ""

    @cached_property
    def _known(self) -> set[str]:
        """The names of functions for which `_warn_of_unread_calls` has run."""
        return set()

    def ids(self, appended: object, *, after: Int[np.ndarray, " turn"] | None) -> Int[np.ndarray, " new"]:
        """Returns the token ids of an appended value (`protocol.Appended`). `after` is the preceding turn, or None if the value follows the prompt.

        Raises LostError if the value cannot be appended, has ids outside the vocabulary, or needs a chat template that the model lacks.
        """
        if isinstance(appended, str):
            return self._text(appended, np.zeros(0, np.int32) if after is None else after)
        if not isinstance(appended, Sequence | np.ndarray):
            raise LostError(
                f"{appended!r:.200} ({type(appended).__name__}) cannot be appended; append a text, a list of messages or a list of token ids"
            )
        try:
            return self._messages(appended, after) if _is_messages(appended) else self._ids(appended)
        except (ValueError, TypeError, OverflowError) as error:  # raised by NumPy or the chat template
            raise LostError(f"{appended!r:.200} cannot be appended: {error}") from error

    def _ids(self, appended: Any) -> Int[np.ndarray, " new"]:
        ids, last = np.asarray(appended), self.tokenizer.vocab_size - 1
        if ids.size == 0:
            return np.zeros(0, np.int32)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise LostError(f"{appended!r:.200} cannot be appended: it is not a list of messages or ids")
        low, high = int(ids.min()), int(ids.max())
        if not 0 <= low <= high <= last:
            raise LostError(
                f"token ids from {low} to {high} were appended; the tokenizer has ids from 0 to {last}"
            )
        return ids.astype(np.int32)

    def _text(self, text: str, after: Before = None) -> Int[np.ndarray, " new"]:
        if len(text) > MOST_CHARACTERS:
            raise LostError(f"a text has {len(text):,} characters; the limit is {MOST_CHARACTERS:,}")
        try:
            return self.tokenizer.encode_plain(text, after)
        except ValueError as error:
            raise LostError(f"the appended text cannot be tokenized: {error}") from error

    def context_ids(self, context: Context) -> Int[np.ndarray, " context"]:
        """Returns the token ids of a new context. A text is encoded like a prompt. Messages end with the generation prompt.

        Raises LostError if the value cannot be used as a context, or is empty.
        """
        contents = context.contents
        if isinstance(contents, str):
            ids = np.concatenate([self.tokenizer.encode_prompt(""), self._text(contents)])
        elif _is_messages(contents):
            variables = {**self.template_kwargs, "tools": [*context.tools] or None}
            try:
                ids = conversation_ids(contents, self.tokenizer, today=self.today, variables=variables)
                self._warn_of_unread_calls(variables)
            except (ValueError, TypeError) as error:
                every = self.tokenizer.chat_template is None or isinstance(error, ToolsError)
                raise LostError(f"a context cannot be rendered: {error}", every=every) from error
        else:
            ids = self.ids(contents, after=None)
        if not len(ids):
            raise LostError("the new context is empty; it needs at least one token")
        return ids

    def _warn_of_unread_calls(self, variables: Mapping[str, Any]) -> None:
        """Warns if `tool_calls` cannot read a call as the template writes it, because then each turn counts as a final answer."""
        template, functions = template_of(self.tokenizer).with_tools, variables["tools"] or []
        name = next((tool["function"]["name"] for tool in functions if "function" in tool), "")
        if not name or name in self._known:
            return
        self._known.add(name)
        call = {"type": "function", "id": "0" * 9, "function": {"name": name, "arguments": {}}}
        asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        render = partial(template.render, variables=variables, today=self.today)
        try:
            before, whole = render(asked[:1]), render(asked)
        except ValueError:  # the template refuses these messages
            return
        same = next((at for at, pair in enumerate(zip(before, whole, strict=False)) if len({*pair}) > 1), len(before))  # fmt: skip
        written = whole[len(re.sub(r"(?:<[^<>]*|\[[^\[\]]*)\Z", "", whole[:same])) :]
        if name in written and ToolCall(name, {}) not in tool_calls(written, functions):
            warnings.warn(
                f"chat template {template.name} writes a tool call in a format that is not read: {written!r:.200}. A turn with such a call counts as a final answer. "
                "Use a model with a format that docs/write_an_environment.md lists, or parse turn.marked_text in an environment of your own",
                stacklevel=2,
            )

    def _messages(self, messages: Sequence[Any], after: Before) -> Int[np.ndarray, " new"]:
        template, guard = template_of(self.tokenizer), Guarding(self.tokenizer)
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        mistral = {"tool_call_id": "0" * 9}  # its templates require an id of nine characters
        appended = [{**mistral, **guard.message(message)} for message in canonical_messages(messages)]
        whole = [*before, *appended]
        if any(message["role"] == "tool" for message in whole):
            template = template.with_tools
        render = partial(template.render, variables=self.template_kwargs, today=self.today)
        checked = partial(template.whole, variables=self.template_kwargs, today=self.today, given=2)
        try:
            rendered = checked(whole)
        except ValueError:
            if whole[2]["role"] != "tool":
                raise
            # The templates of gpt-oss and Gemma 4 write a result only after its call.
            call = {"name": whole[2].get("name", "tool"), "arguments": {"said": _ANSWER}}
            whole[1] = {**whole[1], "content": "", "tool_calls": [{"type": "function", "function": call}]}
            rendered = checked(whole)
        if _ANSWER not in rendered:
            reason = "leaves out the assistant's answer, so nothing can be appended to it"
            raise LostError(f"chat template {template.name} {reason}")
        if after is None:
            # The prompt already ends with the generation prompt, so the policy's answer must come next.
            raise LostError(
                "messages cannot follow a prompt, because it ends with the beginning of an answer: return a Context, append a text or token ids, or "
                "add the messages to the row's prompt"
            )
        new = _after_answer(rendered)
        # The template ends any answer with this text. The turn may end with a part of it already, for example with a stop string.
        other = render([*whole[:2], {"role": "user", "content": FIRST_GUARD}])
        ending = _after_answer(other).partition(FIRST_GUARD)[0]
        marks = StopStrings(self.tokenizer, [f"{ending}\n"])
        marked, done = marks.marked(ending), 0
        turn = marks.text(after) if marks.text(after[-1:]) else ""  # another end token has no text
        for size in range(1, len(ending) + 1):
            begin = marks.marked(ending[:size])
            # Some templates write a space before the end token. A prefix that cuts a special token does not begin the marked text.
            last = begin.lstrip() if begin.lstrip() >= FIRST_GUARD else begin
            if turn.endswith(last) and marked.startswith(begin) and new.startswith(ending[:size]):
                done = size
        return guard.ids(new[done:], after)


def _after_answer(rendered: str) -> str:
    """Returns the text after `_ANSWER`. If `_ANSWER` is an argument of a call, returns the text after the arguments."""
    return re.sub(r'\A(?:"|<\|"\|>)\}', "", rendered.rpartition(_ANSWER)[2])


def _is_messages(value: object) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    return isinstance(value, Sequence) and len(value) > 0 and isinstance(value[0], Mapping)
