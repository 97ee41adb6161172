"""Conversations of others as ids: nothing that stands in a message becomes a special token.

A chat template mixes its own text, whose special tokens are meant, with contents, whose are not. So marks stand for texts while the template is
rendered, and each is tokenized by itself where its mark has come to stand.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from typing import Any

import numpy as np
from jaxtyping import Int32

from dapo_jax.text.chat import Message
from dapo_jax.text.tokenizers import Tokenizer, added_tokens

Encode = Callable[[str], Int32[np.ndarray, " tokens"]]

_SIGN = "\u2402"
"""Encloses the number of a mark."""


class Marks:
    """Texts with the marks that stand for them in what a template renders.

    >>> marks = Marks()
    >>> rendered = "<" + marks.mark("a") + ">"
    >>> marks.parts(rendered)
    [('<', False), ('a', True), ('>', False)]
    """

    def __init__(self, beside: str = "") -> None:
        """`beside` is what will be rendered without marks: none of these is spelled in it."""
        longest = max((len(run) for run in re.findall(f"{_SIGN}+", beside)), default=0)
        self._sign = _SIGN * (longest + 1)
        self._texts: dict[str, str] = {}

    def mark(self, text: str) -> str:
        """Takes a text, and gives what is to be rendered in its place."""
        mark = f"{self._sign}{len(self._texts)}{self._sign}"
        self._texts[mark] = text
        return mark

    def parts(self, rendered: str) -> list[tuple[str, bool]]:
        """The rendered text in parts that are not empty, each with whether a mark stood for it."""
        if not self._texts:
            return [(rendered, False)] if rendered else []
        parts = re.split("(" + "|".join(map(re.escape, self._texts)) + ")", rendered)
        return [(self._texts.get(part, part), part in self._texts) for part in parts if part]

    def ids(self, rendered: str, *, encode: Encode, encode_plain: Encode) -> Int32[np.ndarray, " tokens"]:
        """The ids of the rendered text: those of what marks stood for by `encode_plain`, all else by `encode`."""
        ids = [encode_plain(text) if marked else encode(text) for text, marked in self.parts(rendered)]
        return np.concatenate([np.zeros(0, np.int32), *ids])


def conversation_ids(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    today: date | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Int32[np.ndarray, " prompt"]:
    """The prompt that a conversation of somebody else is, up to and including the opening of the answer.

    Where no text spells a token that was added to the vocabulary, it is the prompt that `PromptFormat` makes of the same messages. Where one does, that
    piece of it is encoded as the characters that it has, and the template does not see it.

    Args:
        messages: the turns, oldest first. Their roles are taken as they stand.
        tokenizer: with a chat template.
        today: the day that a template prints.
        variables: what else the template reads, such as `tools`; texts in them are taken as those of messages.

    Raises:
        ValueError: there is no chat template, it fails, or several texts side by side would spell a special token.
    """
    template = tokenizer.chat_template
    if template is None:
        raise ValueError(
            "the model has no chat template, so it knows no conversations; send token ids, or serve a model with a chat_template.jinja"
        )
    variables = dict(variables or {})
    if not (spelled := added_tokens(tokenizer)):
        return tokenizer.encode(template.render(messages, today=today, **variables))
    added = re.compile("|".join(re.escape(token) for token in sorted(spelled, key=len, reverse=True)))
    marks = Marks(beside=repr((messages, variables)))

    def rendered(change: Callable[[str], str], change_name: Callable[[str], str]) -> str:
        told = [{**_changed(message, change, change_name), "role": message["role"]} for message in messages]
        return template.render(told, today=today, **_changed(variables, change, change_name))

    def hidden(text: str) -> str:
        return added.sub(lambda found: marks.mark(found[0]), text)

    text = rendered(hidden, hidden)
    # The template's own special tokens are there whatever the texts say.
    own = added.findall(rendered(_without_meaning, _name_without_meaning))
    if more := Counter(added.findall(text)) - Counter(own):
        raise ValueError(
            f"chat template {template.name} writes {next(iter(more))!r} with parts of these messages, which would become a special token; "
            "take its parts out of the messages"
        )
    return marks.ids(text, encode=tokenizer.encode, encode_plain=tokenizer.encode_plain)


def _changed(value: Any, change: Callable[[str], str], change_name: Callable[[str], str]) -> Any:
    """A copy of JSON-like data with every text changed, and every name."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change_name(str(key)): _changed(item, change, change_name) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(item, change, change_name) for item in value]
    return value


def _without_meaning(text: str) -> str:
    """A text of the same length and kind that spells nothing."""
    return re.sub(r"[^\W\d_]", "x", re.sub(r"\d", "0", re.sub(r"[^\w\s]|_", "\u00b7", text)))


def _name_without_meaning(name: str) -> str:
    """The name itself, if a template may ask for it."""
    return name if name.isidentifier() else _without_meaning(name)
