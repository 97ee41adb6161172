"""Compares the mathematical meaning of two answers, for the `math` grader.

Numbers are compared exactly. However, a decimal with at least six significant digits also equals a number that rounds to it, such as
1/3 or the square root of 2. Irrational numbers are equal if 50 of their digits agree. Expressions with variables are equal if their
values agree at up to 16 points at which both are real. An undefined function such as f(x) is treated as a variable.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

import sympy
from sympy.core.evalf import PrecisionExhausted

from dapo_jax.rewards.math_reader import ReadAnswer, Relation, Several, is_name, scaled
from dapo_jax.rewards.math_text import UNION, WITHOUT

_REALS = Several("(", (-sympy.oo, sympy.oo), ")")
DIGITS = 50
"""Number of digits that must agree for irrational numbers to be equal."""

MOST_BITS_AT_A_POINT = 1_000_000
"""A point at which a power such as 2^{n^100} has more bits is skipped."""
EXACT_POINTS = 3
"""At the other points, fewer digits must agree. Their purpose is to find different signs and steps, as in |x - 5| and 5 - x."""
_POINTS = ((17, 10, 29), (-17, -10, 29), (7, -13, 11), (-7, 13, 11), (41, 17, 13), (-41, -17, 13), (230, 7, 3), (-230, -7, 3), (5, 3, 97), (18, 2, 13), (1003, 12, 7), (-1003, -12, 7), (23, -101, 7), (-23, 101, 7), (25, 1, 28), (-25, -1, 28))  # fmt: skip
"""At the n-th point (a, b, c), the variables have the values a/c, (a + b)/c, (a + b * 2^n)/c, (a + b * 3^n)/c, ..."""


def same_meaning(gold: ReadAnswer, answer: ReadAnswer) -> bool:
    """Returns whether two answers have the same meaning. If only one is a percentage such as 50%, it equals both 50 and 1/2. An angle of 30° equals both 30 and pi/6."""
    same = _Comparison(gold.decimals | answer.decimals).equal(gold.value, answer.value)
    if same or gold.scale == answer.scale:
        return same
    decimals = {
        n * side.scale: last * side.scale for side in (gold, answer) for n, last in side.decimals.items()
    }
    return _Comparison(decimals).equal(scaled(gold.value, gold.scale), scaled(answer.value, answer.scale))


class _Comparison(NamedTuple):
    decimals: dict[Any, Any]

    def equal(self, gold: Any, answer: Any) -> bool:
        if isinstance(gold, Relation) and isinstance(answer, Relation):
            return self._same_relation(gold, answer)
        first, second = _region(gold), _region(answer)
        if first is not None and second is not None and {_is_region(gold), _is_region(answer)} != {False}:
            return len({first[0], second[0]} - {None}) < 2 and self._same_pieces(first[1], second[1])
        gold, answer = self._value_of(gold, answer), self._value_of(answer, gold)
        if gold is None or answer is None:
            return False
        if isinstance(gold, Several) and isinstance(answer, Several):
            return self._same_items(gold, answer)
        if isinstance(gold, Several) or isinstance(answer, Several):
            several, single = (gold, answer) if isinstance(gold, Several) else (answer, gold)
            # An equal value in another form, as in 1/2 or 0.5, states the same.
            one = several.closed == "or" or (several.opened == r"\{" and len(several.items) == 1)
            return one and all(self.equal(item, single) for item in several.items)
        return self._same_number(gold, answer)

    def _same_items(self, gold: Several, answer: Several) -> bool:
        # Square brackets denote an interval only around two values. Otherwise they are treated as parentheses.
        kinds = {
            "()"
            if several.opened == "[" and len(several.items) != 2
            else several.opened + several.closed.removeprefix("or")
            for several in (gold, answer)
        }
        if kinds == {r"\{\}"}:  # the number of times that an item occurs in a set does not matter
            return self._within(gold, answer, once=False) and self._within(answer, gold, once=False)
        if len(gold.items) != len(answer.items):
            return False
        any_order = kinds <= {r"\{\}", ""} and not _has_order(gold, answer)
        if any_order or kinds == {UNION}:
            return self._within(gold, answer, once=True)
        comparable = len(kinds) == 1 or kinds in ({"()", ""}, {r"\{\}", ""})
        return comparable and all(map(self.equal, gold.items, answer.items))

    def _same_pieces(self, gold: sympy.Set, answer: sympy.Set) -> bool:
        """Returns whether two sets consist of equal intervals and points."""
        first, second = _pieces(gold), _pieces(answer)
        same = all(
            a[2:] == b[2:] and all(map(self.equal, a[:2], b[:2])) for a, b in zip(first, second, strict=False)
        )
        return len(first) == len(second) > 0 and same

    def _within(self, first: Several, second: Several, *, once: bool) -> bool:
        """Returns whether each item of `first` is an item of `second`. With `once`, each item of `second` counts once."""
        left = list(second.items)
        for item in first.items:
            index = next((index for index, candidate in enumerate(left) if self.equal(item, candidate)), None)
            if index is None:
                return False
            del left[index : index + once]
        return True

    def _same_relation(self, gold: Relation, answer: Relation) -> bool:
        gold, answer = self._shortened(gold), self._shortened(answer)
        if gold.signs != answer.signs:
            (name, interval), (other_name, other_interval) = _interval(gold), _interval(answer)
            return name is not None and name == other_name and self.equal(interval, other_interval)
        if all(map(self.equal, gold.sides, answer.sides)):
            return True
        sides = (*gold.sides, *answer.sides)
        if len(sides) != 4 or not all(isinstance(side, sympy.Expr) for side in sides):
            return False
        # One equation must be a multiple of the other. For an inequality, the factor must be positive.
        differences = ((a - b, c - d) for a, b, c, d in _at_points(sides))
        ratios = (sympy.N(a / b, DIGITS, maxn=1000) for a, b in differences if (a, b) != (0, 0))
        first = next(ratios, sympy.nan)
        if not all(ratio.is_finite and _are_close(ratio, first) for ratio in chain([first], ratios)):
            return False
        return bool(first.is_positive if gold.signs[0] in "<≤" else first.is_nonzero)

    def _shortened(self, relation: Relation) -> Relation:
        """If the sides of a chain of equations after the first are one number, as in x = 2 + 3 = 5, keeps only the two ends."""
        first, *inner, last = relation.sides
        number = all(getattr(side, "is_number", False) and self.equal(side, last) for side in inner)
        return Relation((first, last), ("=",)) if set(relation.signs) == {"="} and number else relation

    def _value_of(self, relation: Any, other: Any) -> Any:
        """Returns the value that a relation states, such as 5 for x = 5 or 3 + 2 = 5, or None. If `other` is an interval, a < x < b states one."""
        if not isinstance(relation, Relation):
            return relation
        if set(relation.signs) != {"="}:
            return _interval(relation)[1] if isinstance(other, Several) else None
        *others, value = [side for side in relation.sides if not is_name(side)] or relation.sides[-1:]
        names = [side for side in relation.sides if is_name(side) and side is not value]
        # Without a name, only an equation of numbers has a value. A name in its own value, as in f(x) = f(x - 1) + 2, makes an equation.
        used = _heads(value) & set().union(*map(_heads, names))
        stated = not used if names else getattr(value, "is_number", False)
        return value if stated and all(self.equal(value, other) for other in others) else None

    def _same_number(self, gold: Any, answer: Any) -> bool:
        if gold == answer:
            return True
        if gold.has(sympy.oo, -sympy.oo) or answer.has(sympy.oo, -sympy.oo):
            return False
        difference = gold - answer
        if difference.free_symbols:
            # Comparing the expanded expressions could take very long: (x + y + z)^50 has 1,326 terms.
            pairs = enumerate(_at_points((_with_constant(gold), _with_constant(answer))), 1)
            number = 0
            for number, pair in pairs:
                if not (_are_close if number <= EXACT_POINTS else _are_near)(*pair):
                    return False
            return number > 0
        for decimal, other in ((gold, answer), (answer, gold)):
            last = self.decimals.get(abs(decimal))
            if last is not None and abs(other) not in self.decimals:
                return bool(sympy.N(sympy.Abs(difference), DIGITS) <= last / 2)
        return not (gold.is_Rational and answer.is_Rational) and _are_close(gold, answer)


def _has_order(gold: Several, answer: Several) -> bool:
    """Returns whether the names in the reference, as in x = 1, y = 2, give the order of the values in an answer without names."""
    labels = [getattr(item, "sides", (None,))[0] for item in gold.items]
    names = {str(label).split("_")[0] for label in labels if isinstance(label, sympy.Symbol)}
    return len(names) == len(labels) > 1 and not any(isinstance(item, Relation) for item in answer.items)


def _with_constant(integral: Any) -> Any:
    """Renames the constant of an integral such as x^2 + c to C. The only other symbol must be a usual name of an argument."""
    for constant in sympy.Add.make_args(integral):
        names = [str(name) for name in (integral - constant).free_symbols]
        if str(constant) in ("c", "K") and len(names) == 1 and names[0] in "xtuyz":
            return integral - constant + sympy.Symbol("C", real=True)
    return integral


def _heads(side: Any) -> set[str]:
    """Returns the names of all variables and functions of a side."""
    if isinstance(side, Several):
        return set().union(*map(_heads, side.items))
    return {re.split("['(]", str(letter))[0] for letter in side.free_symbols}


def _are_close(first: Any, second: Any) -> bool:
    """Returns whether two numbers agree to `DIGITS` digits."""
    difference: Any = sympy.Abs(first - second)
    if difference.is_Rational:
        return bool(difference == 0)
    try:
        difference = difference.evalf(DIGITS, strict=True)
    except PrecisionExhausted:  # the difference cannot be distinguished from 0
        return True
    return bool(difference <= sympy.N(sympy.Abs(first), DIGITS) * sympy.Rational(1, 10**DIGITS))


def _are_near(first: Any, second: Any) -> bool:
    """Returns whether two numbers agree to 9 digits, in less time than `_are_close`."""
    try:
        first, second = (number.evalf(strict=True) for number in (first, second))
    except (PrecisionExhausted, OverflowError):  # for example, the difference of two powers such as e^{143^2}
        return True
    return bool(abs(first - second) <= abs(first) * 1e-9 + 1e-50)


def _value_at(point: dict[Any, Any], expression: Any) -> Any:
    """Evaluates an expression. Raises ValueError for a power with more than `MOST_BITS_AT_A_POINT` bits, because responses are untrusted."""
    if not expression.args:
        return point.get(expression, expression)
    values = [_value_at(point, argument) for argument in expression.args]
    if expression.is_Pow and values[1].is_Rational:
        base, exponent = values
        bits = max(abs(base.p), base.q).bit_length() if base.is_Rational else 10
        if bits * abs(exponent) > MOST_BITS_AT_A_POINT:
            raise ValueError(f"a power with the exponent {exponent}")
    return expression.func(*values)


def _values_at(points: list[dict[Any, Any]], expressions: Sequence[Any]) -> Iterator[list[Any]]:
    """Evaluates the expressions at each point. Skips points at which a power is very large, such as 2^{n^100}."""
    for point in points:
        with suppress(ValueError):
            yield [_value_at(point, expression) for expression in expressions]


def _at_points(expressions: Sequence[Any]) -> Iterator[list[Any]]:
    """Evaluates the expressions at points at which all of them are real, with positive and negative values of the variables, or else complex.

    Letters such as n have integer values in floors, ceilings and powers such as (-1)^n. In floors and ceilings, other variables have both kinds of values.
    """
    names = sorted(set().union(*(expression.free_symbols for expression in expressions)), key=str)
    fractions = [
        # With the same degree everywhere, a + d would always equal b + c.
        {name: sympy.Rational(start + step * i**degree, under) for i, name in enumerate(names)}
        for degree, (start, step, under) in enumerate(_POINTS, 1)
    ]
    # These have all remainders, and either of two variables is the larger one at some points.
    integers = [
        {name: sympy.Integer(2 + (k * (2 * i + 1) + i) % 13) for i, name in enumerate(names)}
        for k in range(13)
    ]
    whole = all(str(name)[0] in "ijkmnpqKMN" for name in names)
    stepped = any(expression.has(sympy.floor, sympy.ceiling) for expression in expressions)
    # Even roots and logarithms are real only for positive numbers.
    roots = (root for expression in expressions for root in expression.atoms(sympy.Pow, sympy.log))
    positive = [x.args[0] for x in roots if not (x.is_Pow and (x.exp.is_Integer or x.exp.free_symbols))]
    found = False
    for values in _values_at(
        integers * stepped + fractions * (not (stepped and whole)), [*expressions, *positive]
    ):
        compared, bases = values[: len(expressions)], values[len(expressions) :]
        with suppress(OverflowError):  # for example, 2^{2^{2^76}}
            real = all(value.is_Rational or sympy.N(value).is_real for value in compared)
            if real and all(sympy.N(base).is_nonnegative for base in bases):
                found = True
                yield compared
    if not found:
        for values in _values_at(integers if whole else fractions, expressions):
            if all(sympy.N(value).is_finite for value in values):
                yield values


def _is_region(value: Any) -> bool:
    """Returns whether a value can only mean a set of real numbers: a union, a difference, x ≠ a, or several relations. x ∈ A counts as A."""
    if isinstance(value, Relation) and value.signs == ("=",):
        return _is_region(value.sides[1])
    several = isinstance(value, Several) and value.opened in (UNION, WITHOUT, "")
    return several or getattr(value, "signs", ()) == ("≠",)


def _region(value: Any) -> tuple[Any, sympy.Set] | None:
    """Returns the name, or None, and the set of real numbers that a value describes. Returns None for any other value.

    A list of relations of one name is the union of their sets if the items are separated by "or", otherwise the intersection.
    """
    if isinstance(value, Relation):
        name, of_name = _interval(value)
        if name is None and value.signs in (("=",), ("≠",)) and is_name(value.sides[0]):
            points = Several(r"\{", value.sides[1:], r"\}")
            of_name = points if value.signs == ("=",) else Several(WITHOUT, (_REALS, points), "")
            name = value.sides[0]
        region = None if name is None else _region(of_name)
        return None if region is None else (name, region[1])
    if not isinstance(value, Several):
        return None
    items = value.items
    if value.opened in ("(", "[", r"\{"):
        real = all(
            isinstance(item, sympy.Expr) and item.is_number and item.is_extended_real for item in items
        )
        if real and value.opened == r"\{":
            return None, sympy.FiniteSet(*items)
        first, last, *more = (*items, None)
        if not real or more != [None] or not (first < last or (first == last and value[::2] == ("[", "]"))):
            return None
        return None, sympy.Interval(first, last, value.opened == "(", value.closed == ")")
    regions = [region for region in map(_region, items) if region is not None]
    names = {name for name, _ in regions}
    if value.opened not in (UNION, WITHOUT, "") or len(regions) < len(items) or len(names) > 1:
        return None
    (name,), sets = names, [of_item for _, of_item in regions]
    if value.opened == WITHOUT:
        return name, sympy.Complement(sets[0], sets[1])
    if value.opened == UNION or value.closed == "or":
        return name, sympy.Union(*sets)
    common = sympy.Intersection(*sets)
    return None if name is None or common is sympy.S.EmptySet else (name, common)


def _pieces(region: Any) -> list[tuple[Any, Any, bool, bool]]:
    """Returns the ends of the intervals and points of a set in order, and whether they are excluded. Returns no pieces for any other set."""
    pieces: list[tuple[Any, Any, bool, bool]] = []
    for part in region.args if isinstance(region, sympy.Union) else (region,):
        if isinstance(part, sympy.Interval):
            pieces.append((part.start, part.end, bool(part.left_open), bool(part.right_open)))
        elif isinstance(part, sympy.FiniteSet):
            pieces += [(point, point, False, False) for point in part]
        else:
            return []
    return sorted(pieces, key=lambda piece: (sympy.N(piece[0]), sympy.N(piece[1])))


def _interval(relation: Relation) -> tuple[Any, Any]:
    """Returns the name and the interval of a relation such as a < x < b or x = (a, b). Returns None twice for any other relation."""
    if relation.signs == ("=",) and is_name(relation.sides[0]) and isinstance(relation.sides[1], Several):
        return relation.sides
    sides, signs = (-sympy.oo, *relation.sides, sympy.oo), ("<", *relation.signs, "<")
    index = next((index for index, side in enumerate(sides) if is_name(side)), 0)
    if not set(signs) <= {"<", "≤"} or (len(sides), index) not in ((4, 1), (4, 2), (5, 2)):
        return None, None
    brackets = "(["[signs[index - 1] == "≤"], ")]"[signs[index] == "≤"]
    return sides[index], Several(brackets[0], (sides[index - 1], sides[index + 1]), brackets[1])
