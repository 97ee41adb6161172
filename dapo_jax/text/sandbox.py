"""The sandbox that chat templates run in: Jinja's own, with limits to what a template may spend.

Jinja's sandbox keeps a template away from Python's objects, but not from loops inside loops, from `'x' * 10**11`, or from a list
that holds the list before it nine times, forty times over. Here every turn of a loop, every call, filter and test, and every text
and list that is made costs what it is large; a template that has spent `WORK` is refused, and so is a value over `LARGEST`. What
grows faster than what it is made of is looked at before it is made.
"""

import functools
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from types import GeneratorType
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer

WORK = 200_000
"""The work that one rendering may spend: a turn of a loop, a call, or 256 characters cost 1. Conversations of a million characters take less."""
LARGEST = 4 << 20
"""Characters of a text; an entry of a list or a mapping counts as 8 and what is in it."""
LARGEST_SOURCE = 1 << 20
_LARGEST_NUMBER = 1000
"""The largest number that a filter or a method may be given: a width, an indentation, a count."""
_LARGEST_BITS = 4096
_WIDE = re.compile(r"[0-9]{4}|\*|\{[^{}]*\{")
"""In a format: a field of a thousand characters or more, or as wide as an argument says."""


class TooMuchError(SecurityError):
    """A template spends more than it may."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a budget, in which a forbidden attribute ends the rendering where Jinja would print nothing for it."""

    _ADDRESS = re.compile(r" at 0x[0-9a-f]+>", re.IGNORECASE)
    """How Python writes an object that has no text of its own."""
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(
            optimized=False, finalize=pass_context(lambda _, value: self.measured(value)), **options
        )
        self._spent = threading.local()
        del self.globals["lipsum"]
        self.filters = {name: self.counted(name, filter) for name, filter in self.filters.items()}
        self.filters["_measured"] = self.measured
        self.filters["_turn"] = self._turn
        self.tests = {name: self.counted(name, test) for name, test in self.tests.items()}

    def rendered(self, template: Template, variables: Mapping[str, Any]) -> str:
        """The text that a template of `compiled` makes of `variables`.

        Raises:
            SecurityError: it asks for what is forbidden, or (`TooMuchError`) for too much.
        """
        self._spent.work = 0
        pieces: list[str] = []
        length = 0
        for piece in template.generate(variables):
            length += len(piece)
            if length > LARGEST:
                raise TooMuchError(f"it prints more than {LARGEST:,} characters")
            pieces.append(piece)
        text = "".join(pieces)
        told = str([value for value in variables.values() if not callable(value)])
        # A question may speak of an address; one that the template itself prints differs from process to process.
        if own := set(self._ADDRESS.findall(text)) - set(self._ADDRESS.findall(told)):
            raise SecurityError(f"it prints an object{min(own)}, whose address is another in each process")
        return text

    def compiled(self, source: str) -> Template:
        """The template with all that is counted put in.

        Raises:
            TooMuchError: it is too long. What else Jinja or Python raise of a source that is no template has no bounds.
        """
        if len(source) > LARGEST_SOURCE:
            raise TooMuchError(f"it has {len(source):,} characters, over {LARGEST_SOURCE:,}")
        tree = _Measuring().visit(self.parse(source))
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Called for every access that the sandbox forbids."""
        raise SecurityError(f"attribute {attribute!r} of a {type(obj).__name__} is not for templates")

    def measured(self, value: Any) -> Any:
        """`value`, after its size was spent.

        Raises:
            TooMuchError: it is too large, or the budget is spent.
        """
        if isinstance(value, GeneratorType):
            return self._item_by_item(value)
        size = _size(value)
        if size > LARGEST:
            raise TooMuchError(f"it makes a {type(value).__name__} of more than {LARGEST:,} characters")
        self._spend(1 + size // 256)
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Called for each of `intercepted_binops`."""
        if operator == "*":
            _check_product(left, right)
        elif operator == "**" and _bits(left) * abs(right) > _LARGEST_BITS:
            raise TooMuchError(f"a power is a number of more than {_LARGEST_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        return self.measured(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Called for every method that a template takes hold of."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def call(self, context: Context, function: Any, *arguments: Any, **named: Any) -> Any:
        """Called for every call in a template."""
        of = getattr(function, "__self__", None)
        if isinstance(of, str):
            self.measured(of)
            _check_method(function.__name__, of, arguments)
        if isinstance(of, str | bytes | int | float):
            _check_numbers((*arguments, *named.values()))
        for argument in (*arguments, *named.values()):
            self.measured(argument)
        return self.measured(super().call(context, function, *arguments, **named))

    def counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter or a test that spends what it is given and what it gives."""
        passed = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def counted(*arguments: Any, **named: Any) -> Any:
            before, (value, *others) = arguments[:passed], arguments[passed:]
            value = self.measured(value)
            for other in (*others, *named.values()):
                self.measured(other)
            if name not in self._NUMBERS:
                _check_numbers((*others, *named.values()))
            _check_filter(name, value, others, named)
            return self.measured(function(*before, value, *others, **named))

        return counted

    _NUMBERS = frozenset({"eq", "==", "equalto", "ne", "!=", "gt", ">", "greaterthan", "ge", ">=", "lt", "<", "lessthan", "le", "<=", "in",
                          "sameas", "divisibleby", "default", "d", "int", "float", "map", "select", "reject", "selectattr",
                          "rejectattr", "sum"})  # fmt: skip
    """Filters and tests to which a number is a value, and no width."""

    def _turn(self, literal: int) -> None:
        """Spends a turn of a loop, in which `literal` characters stand in the template itself."""
        self._spend(1 + literal // 256)

    def _item_by_item(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self._spend(1)
            yield item

    def _spend(self, work: int) -> None:
        self._spent.work += work
        if self._spent.work > WORK:
            raise TooMuchError("it does not come to an end: too many turns of loops, calls and characters")


class _Measuring(NodeTransformer):
    """Has every value that is made without a call measured, and every turn of a loop counted."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - Jinja's name
        literal = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        turn = nodes.Filter(nodes.Const(literal), "_turn", [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(turn).set_lineno(node.lineno))
        return node

    def _made(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load":
            return node
        return nodes.Filter(node, "_measured", [], [], None, None).set_lineno(node.lineno)

    visit_Concat = visit_List = visit_Dict = visit_Tuple = _made  # noqa: N815

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        """A slice is a copy."""
        if isinstance(node.arg, nodes.Slice):
            return self._made(node)
        return self.generic_visit(node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        """Counts both sides of a comparison, which reads them in full."""
        self.generic_visit(node)
        for part in (node, *node.ops):
            part.expr = nodes.Filter(part.expr, "_measured", [], [], None, None, lineno=node.lineno)
        return node


def _size(value: Any) -> int:
    """Characters and entries of a value, counted until they are over `LARGEST`."""
    if isinstance(value, str | bytes):
        return len(value)
    size, left = 0, [value]
    while left and size <= LARGEST:
        one = left.pop()
        if isinstance(one, str | bytes):
            size += len(one)
        elif isinstance(one, range):
            size += 8 * len(one)
        elif isinstance(one, Mapping):
            size += 8 * len(one)
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            size += 8 * len(one)
            left += one
    return size


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _check_product(left: Any, right: Any) -> None:
    for many, times in ((left, right), (right, left)):
        if (
            isinstance(many, str | bytes | list | tuple)
            and isinstance(times, int)
            and _size(many) * times > LARGEST
        ):
            raise TooMuchError(
                f"it repeats a {type(many).__name__} {times:,} times, to more than {LARGEST:,} characters"
            )
    if _bits(left) + _bits(right) > _LARGEST_BITS:
        raise TooMuchError(f"a product is a number of more than {_LARGEST_BITS} bits")


def _check_format(text: str) -> None:
    if _WIDE.search(text):
        raise TooMuchError(
            f"the format {text[:40]!r} has a field of a thousand characters or more, or of any width"
        )


def _check_numbers(values: Any) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > _LARGEST_NUMBER:
            raise TooMuchError(f"it asks for a width or a count of {str(value)[:20]}, over {_LARGEST_NUMBER}")


def _check_method(name: str, text: str, arguments: Any) -> None:
    """Methods of texts whose result may be as large as the product of two of them."""
    if name == "translate":
        raise SecurityError("translate is not for templates")
    if name in ("join", "replace") and arguments:
        _check_filter(name, *((arguments[0], [text]) if name == "join" else (text, arguments)), {})


def _check_filter(name: str, value: Any, others: Any, named: Mapping[str, Any]) -> None:
    """Filters whose result may be as large as the product of two values."""
    if name == "join":
        between = others[0] if others else named.get("d", "")
        if hasattr(value, "__len__") and len(value) * len(str(between)) > LARGEST:
            raise TooMuchError(f"it joins {len(value)} texts to more than {LARGEST:,} characters")
    elif name == "replace":
        old, new = (*others, named.get("s", ""), named.get("new", ""))[:2]
        if str(value).count(str(old)) * len(str(new)) > LARGEST:
            raise TooMuchError(f"it replaces texts by more than {LARGEST:,} characters")
    elif name == "format":
        _check_format(str(value))
    elif name == "sum" and not isinstance(
        start := named.get("start", others[1] if len(others) > 1 else 0), int | float
    ):
        raise TooMuchError(f"it adds up what begins with a {type(start).__name__}")
    elif name == "random":
        raise SecurityError(
            "the filter random draws anew each time, and a prompt must stay the same: choose an entry by its place"
        )
    elif name in ("urlize", "pprint", "xmlattr"):
        raise SecurityError(f"the filter {name} is not for templates")
