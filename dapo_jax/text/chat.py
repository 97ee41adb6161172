"""Renders messages as text with a model's Jinja chat template, in the format that the model was trained on.

A downloaded template is not trusted, so it runs in Jinja's `ImmutableSandboxedEnvironment`, as in transformers.
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
"""One message: `role`, `content`, and any other fields that the template uses, such as `name`."""

MOST_RENDERED = 4 << 20
"""Maximum number of characters that a template may output."""


class ChatTemplate:
    """A chat template and the special tokens that it may use.

    >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", name="doc")
    >>> template.render([{"role": "user", "content": "1+1"}])
    '<user>1+1'
    """

    def __init__(self, source: str, *, name: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Stores the source. The template is compiled when it is first rendered, so a model with an invalid template still loads.

        Args:
            source: the text of the template.
            name: the template's name in error messages, for example its file.
            special_tokens: `bos_token`, `eos_token` and so on, as variables for the template.
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
        """Returns the text of a conversation, including the generation prompt that begins the answer.

        Args:
            messages: the messages, oldest first.
            variables: further template variables by name, such as Qwen3's `enable_thinking`.
            today: the date that the template gets as the current date, at midnight. The system clock is never used, so the
                same conversation always renders to the same text.

        Raises:
            ValueError: the template is not valid Jinja, refuses these messages, fails, tries to leave the sandbox, or outputs
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
                    _refuse(f"the rendered text has more than {MOST_RENDERED:,} characters")
        except SecurityError as error:
            raise ValueError(f"chat template {self.name} tries to leave its sandbox: {error}") from error
        except _RefusedError as error:
            raise ValueError(f"chat template {self.name} refuses the messages: {error}") from error
        except Exception as error:  # a template may raise any exception
            raise ValueError(
                f"chat template {self.name} fails with {type(error).__name__}: {error}; set its variables in data.chat_template_kwargs"
            ) from error
        return "".join(pieces)

    @cached_property
    def _compiled(self) -> jinja2.Template:
        sandbox = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        sandbox.filters["tojson"] = _to_json
        del sandbox.filters["random"]  # the same messages must always render to the same prompt
        return sandbox.from_string(self.source, globals={"raise_exception": _refuse})


def template_of(content: bytes, name: str, special_tokens: Mapping[str, str] | None = None) -> ChatTemplate:
    """Returns the chat template from a file's content.

    Raises:
        ValueError: the content is not UTF-8.
    """
    try:
        return ChatTemplate(content.decode("utf-8"), name=name, special_tokens=special_tokens)
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8: {error}") from error


class _RefusedError(TemplateError):
    """Raised when a template calls `raise_exception`, or does anything else that this module refuses."""


class _Generation(Extension):
    """Accepts `{% generation %}`, which marks the assistant's text for training masks. The marked text is rendered like any other text."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface, and only read)

    def parse(self, parser: Parser) -> nodes.Node:
        """Returns the marked block as a node with its own scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _date(pattern: str, today: date | None) -> str:
    if today is None:
        _refuse(
            "it prints today's date, but no date is set: set data.template_date to a day such as 2024-07-26 (from Python: today=)"
        )
    if "s" in re.findall(r"%[-_0^#]*[0-9]*[EO]?(.)", pattern):
        _refuse(f"strftime_now({pattern!r}): %s depends on the machine's time zone")
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
    """Replaces Jinja's own `tojson` filter, which would escape characters for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
