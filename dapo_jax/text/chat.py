"""Chat templates: the Jinja text in a model's folder turns messages into the string that the model was trained on.

The template of a downloaded model is not trusted. It runs in Jinja's `ImmutableSandboxedEnvironment`, as in transformers.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]
"""One turn: `role`, `content`, and any other field that the template reads, such as `name`."""

MOST_RENDERED = 4 << 20
"""Characters that a template may print."""


class ChatTemplate:
    """A chat template with the special tokens that it may print.

    >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", name="doc")
    >>> template.render([{"role": "user", "content": "1+1"}])
    '<user>1+1'
    """

    def __init__(self, source: str, *, name: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Keeps the source. It is compiled at the first rendering, so a model with a broken template still loads.

        Args:
            source: the template.
            name: its name in error messages, such as the file that it was read from.
            special_tokens: `bos_token`, `eos_token` and so on, which the template may name.
        """
        self.source, self.name = source, name
        self._special_tokens = dict(special_tokens or {})

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        *,
        today: date | None = None,
    ) -> str:
        """Returns the text of a conversation, up to and including the opening of the answer that is to be sampled.

        Args:
            messages: the turns, oldest first.
            variables: further variables of the template by name, such as Qwen3's `enable_thinking`.
            today: the day for templates that print a date, at midnight. The clock is never used, so that a conversation
                always has the same text.

        Raises:
            ValueError: the template is not valid Jinja, refuses these messages, fails, tries to leave the sandbox, or prints
                more than `MOST_RENDERED` characters.
        """
        known = {"tools": None, "documents": None, **self._special_tokens, **(variables or {})}
        known |= {"messages": list(messages), "add_generation_prompt": True}
        known.setdefault("strftime_now", lambda pattern: _date(pattern, today))
        pieces, length = [], 0
        try:
            for piece in self._compiled.generate(known):
                pieces.append(piece)
                length += len(piece)
                if length > MOST_RENDERED:
                    _refuse(f"their text has more than {MOST_RENDERED:,} characters")
        except SecurityError as error:
            raise ValueError(f"chat template {self.name} tries to leave its sandbox: {error}") from error
        except _RefusedError as error:
            raise ValueError(f"chat template {self.name} refuses the messages: {error}") from error
        except Exception as error:  # a template may raise anything
            raise ValueError(
                f"chat template {self.name} fails with {type(error).__name__}: {error}; data.chat_template_kwargs has its variables"
            ) from error
        return "".join(pieces)

    @cached_property
    def _compiled(self) -> jinja2.Template:
        sandbox = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        sandbox.filters["tojson"] = _to_json
        del sandbox.filters["random"]  # the same messages must always give the same prompt
        return sandbox.from_string(self.source, globals={"raise_exception": _refuse})


def template_of(content: bytes, name: str, special_tokens: Mapping[str, str] | None = None) -> ChatTemplate:
    """Returns the chat template of a file.

    Raises:
        ValueError: the content is not UTF-8.
    """
    try:
        return ChatTemplate(content.decode("utf-8"), name=name, special_tokens=special_tokens)
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8: {error}") from error


class _RefusedError(TemplateError):
    """Raised by a template's own `raise_exception`."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training masks. It is rendered like any other text."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface: it is read, never changed)

    def parse(self, parser: Parser) -> nodes.Node:
        """Returns the marked block, in its own scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _date(pattern: str, today: date | None) -> str:
    if today is None:
        _refuse(
            "it prints today's date, and none was given: set data.template_date to a day such as 2024-07-26 (from Python: today=)"
        )
    if "s" in re.findall(r"%[-_0^#]*[0-9]*[EO]?(.)", pattern):
        _refuse(f"strftime_now({pattern!r}): %s depends on the time zone of the machine")
    return datetime.combine(today, time()).strftime(pattern)


def _refuse(message: str) -> NoReturn:
    raise _RefusedError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns plain JSON. Jinja's own filter escapes it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
