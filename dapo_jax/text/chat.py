"""Renders messages as text with a model's Jinja chat template, in the format that the model was trained on.

A downloaded template is not trusted, so it runs in Jinja's `ImmutableSandboxedEnvironment`, as in transformers.
"""

import json
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from datetime import date, datetime, time
from functools import cached_property, partial
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

    def __init__(self, source: str | bytes, *, name: str, special_tokens: Mapping[str, str] | None = None) -> None:  # fmt: skip
        """Stores the source. The template is compiled when it is first rendered, so a model with an invalid template still loads.

        `name` is the template's name in error messages. `special_tokens` are variables for the template, such as `eos_token`.
        """
        try:
            self.source, self.name = source if isinstance(source, str) else source.decode("utf-8"), name
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} is not UTF-8: {error}") from error
        self._special_tokens = dict(special_tokens or {})
        self.with_tools = self
        """The template for conversations with tools, if the model has another one for them."""

    def render(
        self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None, *, today: date | None = None
    ) -> str:  # fmt: skip
        """Returns the text of a conversation, including the generation prompt that begins the answer.

        The role `developer` becomes `system` if the template does not know it. `variables` are further template variables, such as
        Qwen3's `enable_thinking`. The template gets `today` as the current date, and never the system clock, so the same conversation
        always renders to the same text.

        Raises ValueError if the template is not valid Jinja, refuses these messages, fails, tries to leave the sandbox, or outputs
        more than `MOST_RENDERED` characters.
        """
        known = {"tools": None, "documents": None, **self._special_tokens, **(variables or {})}
        known |= {"messages": list(messages), "add_generation_prompt": True}
        if not re.search(r"""["']developer["']""", self.source):
            system = {"role": "system"}
            known["messages"] = [{**m, **system} if m.get("role") == "developer" else m for m in messages]
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

    def whole(
        self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None, *, today: date | None = None, given: int = 0
    ) -> str:  # fmt: skip
        """Renders canonical messages like `render`, and checks that the text contains all of them except the first `given` messages.

        With `tools`, the template `with_tools` is used. For the check, a second rendering has a mark in each text, or in each call, because some
        templates write only the calls of a message. Raises ValueError if a message is missing, and ToolsError if the text does not depend on the tools.
        """
        variables = variables or {}
        used = self.with_tools if variables.get("tools") else self
        marked, needed = deepcopy([dict(message) for message in messages]), list[int]()
        for index, message in enumerate(marked):
            calls, is_system = message.get("tool_calls", []), message["role"] in ("system", "developer")
            needed.append(len(calls) or int(not is_system or message["content"].strip() != ""))
            for call in calls:
                call["function"]["arguments"][f"zq{index}qz"] = ""
            message["content"] += "" if calls else f"zq{index}qz"
        text, without = used.render(messages, variables, today=today), {**variables, "tools": None}
        if variables.get("tools") and text == used.render(messages, without, today=today):
            raise ToolsError(
                f"chat template {used.name} does not use the variable `tools`: use a model whose template does, such as Qwen2.5's, or describe the "
                "tools in the system message, and pass no tools"
            )
        try:
            marked_text = used.render(marked, variables, today=today).casefold()
        except ValueError:  # the template refuses the marks, so the check is impossible
            return text
        on_purpose = "leaves out messages on purpose" in used.source  # for example in a comment
        for index, least in enumerate(needed[given:]):
            if marked_text.count(f"zq{index + given}qz") < least and not on_purpose:
                raise ValueError(
                    f"chat template {used.name} leaves out message {index} (role {messages[index + given]['role']!r}) or one of its tool calls: give it "
                    "another role, such as 'user', or use a template that writes this message"
                )
        return text

    @cached_property
    def _compiled(self) -> jinja2.Template:
        extensions = [loopcontrols, _Generation]
        sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        # Jinja's own `tojson` would escape characters for HTML.
        sandbox.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        del sandbox.filters["random"]  # the same messages must always render to the same prompt
        return sandbox.from_string(self.source, globals={"raise_exception": _refuse})


class ToolsError(ValueError):
    """The chat template does not write the tools, whatever the messages are."""


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
        remedy = "set data.template_date to a day such as 2024-07-26 (from Python: today=)"
        _refuse(f"it prints today's date, but no date is set: {remedy}")
    if "s" in re.findall(r"%[-_0^#]*[0-9]*[EO]?(.)", pattern):
        _refuse(f"strftime_now({pattern!r}): %s depends on the machine's time zone")
    return datetime.combine(today, time()).strftime(pattern)


def _refuse(message: str) -> NoReturn:
    raise _RefusedError(message)
