"""Chat templates: the Jinja text that comes with a model turns messages into the one string it was trained on.

A template is somebody else's program. It runs in a sandbox (`dapo_jax.text.sandbox`), sees plain data only, and whatever it raises comes
back as a ValueError that names the template.
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
from jinja2.utils import Namespace

from dapo_jax.text.sandbox import Sandbox, TooMuchError

Message = Mapping[str, Any]
"""One turn: `role` and `content`, and whatever else the template knows, such as `name`."""


class ChatTemplate:
    """A chat template with the special tokens it may print.

    >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", name="doc")
    >>> template.render([{"role": "user", "content": "1+1"}])
    '<user>1+1'
    """

    def __init__(
        self,
        source: str,
        *,
        name: str,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """Keeps the text; it is compiled when it is first rendered, so a model whose template is broken still loads.

        Args:
            source: the template.
            name: what errors call it, such as the file it was read from.
            special_tokens: `bos_token`, `eos_token` and so on, as the template may name them.
        """
        self.source, self.name = source, name
        self._special_tokens = dict(special_tokens or {})

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        /,
        *,
        today: date | None = None,
        **named: Any,
    ) -> str:
        """The text of a conversation, up to and including the opening of the answer that is to be sampled.

        Args:
            messages: the turns, oldest first.
            variables: what else the template reads, such as Qwen3's `enable_thinking`, by any names.
            today: the day that a template prints which asks for one, at midnight. The clock is never asked: one conversation
                has one text.
            named: more variables.

        Raises:
            ValueError: the template is no Jinja, refuses these messages, fails, tries to leave the sandbox, or does not come to
                an end within it.
        """
        known = {"tools": None, "documents": None, **self._special_tokens, **(variables or {}), **named}
        dated = {"strftime_now": lambda pattern: _printed(pattern, today)}
        try:
            told = {str(key): _plain(value) for key, value in known.items()}
            told |= {"messages": [_plain(message) for message in messages], "add_generation_prompt": True}
            return self._sandbox.rendered(self._compiled, {**dated, **told})
        except TooMuchError as error:
            raise ValueError(f"chat template {self.name} asks for too much: {error}") from error
        except SecurityError as error:
            raise ValueError(f"chat template {self.name} tries to leave its sandbox: {error}") from error
        except _RefusedError as error:
            raise ValueError(f"chat template {self.name} refuses the messages: {error}") from error
        except Exception as error:  # what somebody else's program may raise has no bounds
            raise ValueError(
                f"chat template {self.name} fails with {type(error).__name__}: {error}; its variables are those of "
                "data.chat_template_kwargs"
            ) from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return self._sandbox.compiled(self.source)

    @cached_property
    def _sandbox(self) -> Sandbox:
        sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        sandbox.filters["tojson"] = sandbox.counted("tojson", _to_json)
        known: dict[str, Any] = {
            "raise_exception": _refuse,
            "dict": lambda *pairs, **named: dict(*pairs, **named),  # the class itself has more to reach for
            "namespace": _namespace,
        }
        sandbox.globals.update(known)
        return sandbox


class _RefusedError(TemplateError):
    """A template's own `raise_exception`."""


class _Generation(Extension):
    """`{% generation %}`: marks what the assistant said, for training masks; here only its text counts."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface: it is read, never changed)

    def parse(self, parser: Parser) -> nodes.Node:
        """The marked block, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _CheckedNamespace(Namespace):
    """Jinja's `namespace`, without names that Python itself gives a meaning to."""

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _namespace(*pairs: Any, **named: Any) -> Namespace:
    attributes = dict(*pairs, **named)
    for name in attributes:
        _check_name(name)
    return _CheckedNamespace(attributes)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


def _printed(pattern: str, today: date | None) -> str:
    if today is None:
        raise _RefusedError(
            "it prints today's date, and none was given: set data.template_date to a day such as 2024-07-26 (from Python: today=)"
        )
    if "s" in re.findall(r"%[-_0^#]*[0-9]*[EO]?(.)", pattern):
        raise _RefusedError(
            f"strftime_now({pattern!r}) depends on the time zone of the machine: %s cannot be used"
        )
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
    """Plain JSON, where Jinja's own filter would escape it for a web page."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _plain(value: Any) -> Any:
    """A copy of JSON-like data; anything else may have methods that the sandbox does not know to forbid."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise ValueError(f"{value!r} ({type(value).__name__}) is not text, a number, a list or a mapping")
