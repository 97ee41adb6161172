"""Generated programs of one line for a small model, with demonstrations by a careless programmer for a warm start.

A prompt is an expression in postfix notation over x and digits, such as `x3+2*:`. The answer to it is a Python function of one line:

    f=lambda x:(x+3)*2

The careless programmer often leaves out all brackets, which is right for about half of the expressions, and sometimes forgets the last bracket. So
the demonstrations show the form, but fewer than half of them are right. Reinforcement learning has to discover that all brackets are always right.

The answer of a row has the values of the function at `POINTS`, which the grader `code` compares. All random choices depend only on SPLIT_SEED.
If a constant in this module changes, a new dataset is prepared.
"""

import itertools
import json
from collections.abc import Iterator
from typing import Any, ClassVar

from dapo_jax.data.own_builder import OwnBuilder, chosen, named, uniform

START = "f=lambda x:"
POINTS = (-3, 0, 1, 4, 10)
"""Two polynomials of degree 4 or less that agree at five points are equal, and no expression has a higher degree."""
STYLES = {"bare": 0.60, "bracketed": 0.15, "cut": 0.25}
"""Probability of each style in a demonstration: without brackets, with all brackets, and with all but the last bracket."""
PROMPTS = {"train": 8000, "test": 1000}
LONG = 0.75
"""Fraction of the prompts with three operations instead of two."""
DEMONSTRATIONS = 8
"""Number of demonstrations per prompt."""
SPLIT_SEED = 0


def postfix(number: int) -> str:
    """Returns a random expression with two or three operations. `number` selects one of many.

    >>> [postfix(number) for number in range(3)]
    ['x54+-2*', '76-x*x-', '9xx*9-+']
    """
    operations, text, open_operands = 2 + (uniform("length", SPLIT_SEED, number) < LONG), "", 0
    operands_left = operations + 1
    for place in range(2 * operations + 1):
        luck = [uniform(kind, SPLIT_SEED, number, place) for kind in ("operand", "which")]
        if operands_left and (open_operands < 2 or luck[0] < 0.5):
            text += chosen({"x": 4.0, **dict.fromkeys("0123456789", 0.6)}, luck[1])
            operands_left, open_operands = operands_left - 1, open_operands + 1
        else:
            text += chosen(dict.fromkeys("+-*", 1.0), luck[1])
            open_operands -= 1
    return text


def infix(expression: str, brackets: bool) -> str:
    """Returns an expression in the notation of Python, with brackets around each operation except the last, or without brackets.

    >>> infix("x3+2*", True), infix("x3+2*", False)
    ('(x+3)*2', 'x+3*2')
    """
    stack = list[str]()
    for mark in expression:
        if mark in "+-*":
            right, left = stack.pop(), stack.pop()
            wrapped = [f"({part})" if brackets and len(part) > 1 else part for part in (left, right)]
            stack.append(mark.join(wrapped))
        else:
            stack.append(mark)
    return stack[0]


def value(expression: str, x: int) -> int:
    """Returns the value of a postfix expression.

    >>> value("x3+2*", 4)
    14
    """
    stack = list[int]()
    for mark in expression:
        if mark in "+-*":
            right, left = stack.pop(), stack.pop()
            stack.append({"+": left + right, "-": left - right, "*": left * right}[mark])
        else:
            stack.append(x if mark == "x" else int(mark))
    return stack[0]


def demonstration(expression: str, draw: int) -> str:
    """Returns a careless programmer's function. `draw` selects one of many.

    >>> sorted({demonstration("x3+2*", draw) for draw in range(20)})
    ['f=lambda x:(x+3)*2', 'f=lambda x:(x+3*2', 'f=lambda x:x+3*2']
    """
    style = chosen(STYLES, uniform("style", SPLIT_SEED, expression, draw))
    program = infix(expression, brackets=style != "bare")
    if style == "cut":
        program = "".join(program.rpartition(")")[::2])
    return START + program


def split_expressions() -> dict[str, list[str]]:
    """Returns the different expressions of each split. All of them contain x."""
    found, numbers = dict[str, None](), itertools.count()
    while len(found) < sum(PROMPTS.values()):
        expression = postfix(next(numbers))
        if "x" in expression:
            found[expression] = None
    expressions = iter(found)
    return {split: [*itertools.islice(expressions, count)] for split, count in PROMPTS.items()}


class Builder(OwnBuilder):
    """TFDS builder for the programs. Rows are in the order of `split_expressions`."""

    name = "one_line_programs"
    DESCRIPTION = "Expressions in postfix notation, with programs by a careless programmer."
    TEXTS = ("prompt", "answer", "response")
    LISTS = ("responses",)
    BUILDER_CONFIGS: ClassVar = named(
        "postfix", *(SPLIT_SEED, POINTS, STYLES, PROMPTS, LONG, DEMONSTRATIONS, postfix(0))
    )

    def splits(self) -> dict[str, Iterator[dict[str, Any]]]:
        """Returns the rows of each split. A row's `response` is the first of its `responses`."""
        return {split: _rows(expressions) for split, expressions in split_expressions().items()}


def _rows(expressions: list[str]) -> Iterator[dict[str, Any]]:
    for expression in expressions:
        tests = {
            "fn_name": "f",
            "inputs": [[x] for x in POINTS],
            "outputs": [value(expression, x) for x in POINTS],
        }
        shown = [demonstration(expression, draw) for draw in range(DEMONSTRATIONS)]
        row = {"prompt": f"{expression}:", "answer": json.dumps(tests)}
        yield row | {"response": shown[0], "responses": shown}
