r"""A second reader of answers, for comparison with the graders: it shares no code with them.

It rewrites LaTeX to Python's notation and lets sympy's own parser read that. It knows the notations of the published references, and
it is stricter than a grader: None for everything else.
"""

import math
import re
from fractions import Fraction

import sympy
from sympy.parsing.sympy_parser import (
    convert_xor,
    implicit_multiplication,
    parse_expr,
    rationalize,
    split_symbols,
    standard_transformations,
)

_KNOWN = frozenset({"sqrt", "pi", "cot", "I", "oo"})
_RULES = (*standard_transformations, convert_xor, rationalize, split_symbols, implicit_multiplication)
_NAMES = {"sqrt": sympy.sqrt, "pi": sympy.pi, "cot": sympy.cot, "oo": sympy.oo, "I": sympy.I, "e": sympy.E}
_ANYWHERE = "is the an he it only result correct equation perimeter greatest answer of in to for"
_AFTER = (
    "arrangements cakes carton child combination days dime gallons guests hens hour inches leaf liter meters mile milligram millimeters "
    "nickel pen point points rabbits strawberries times videos week wheels cm degrees cents"
)


def without_words(text: str) -> str:
    """The text without the words around it that change no number: of all words of the tests, these are the only ones."""
    lead, tail = "|".join(_ANYWHERE.split()), "|".join(_ANYWHERE.split() + _AFTER.split())
    text = re.sub(rf"^(?:(?:{lead}) )+", "", text.strip())
    return re.sub(rf"(?: (?:{tail})\.?)+$", "", text).strip()


def number(text: str) -> Fraction | str:
    """The number that the whole of the text is, in one of the forms of a reference; or else the text itself."""
    text = re.sub(r"(?<=\d)°$", "", without_words(text))
    text = re.sub(r"^\\[,!()]", "", text.strip().rstrip(".,; ").lstrip(",:; "))
    # Signs and zeros that change nothing: 5/+8, 010, 0+.5, 1!
    text = re.sub(r"(?<!\d)0\+(?=\.)|(?<![\d)}])\+|(?<![\d.,])0+(?=\d)|(?<=(?<!\d)1)!", "", text)
    plain = re.sub(r"^\$|^\\\$|\\\$$|\\?[%]$|\\ |[$]$", " ", text).strip()
    plain = re.sub(r"^([-+]?)\s*\\?\$\s*", r"\1", plain)
    sign, plain = (-1, plain[1:].strip()) if plain.startswith("-") else (1, plain.removeprefix("+").strip())
    while re.fullmatch(r"[({][^(){}]*[)}]", plain) and "," not in plain:
        plain = plain[1:-1].strip()
    forms = {
        r"(\d{1,3}(?:[, ]\d{3})+|\d+)": lambda a: Fraction(re.sub("[, ]", "", a)),
        r"(\d{1,3}(?:,\d{3})+|\d*)(\.\d+)": lambda a, b: Fraction((a.replace(",", "") or "0") + b),
        r"(\d*\.?\d+)\s*/\s*\(?(\d*\.?\d+)\)?": lambda a, b: Fraction(a) / Fraction(b),
        r"\\frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(-?\d+)\s*\}": lambda a, b: Fraction(int(a), int(b)),
        r"\\frac\s*(\d)\s*(\d)": lambda a, b: Fraction(int(a), int(b)),
        r"(\d+)(?:\s+|\s*\+\s*)(\d+)\s*/\s*(\d+)": lambda a, b, c: int(a) + Fraction(int(b), int(c)),
        r"(\d+)\s*\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}": lambda a, b, c: (
            int(a) + Fraction(int(b), int(c))
        ),
        r"(\d*\.?\d+)[eE]([-+]?\d{1,3})": lambda a, b: Fraction(a) * Fraction(10) ** int(b),
        r"(\d*\.?\d+)\s*\\times\s*10\s*\^\s*\{?\s*([-+]?\d{1,3})\s*\}?": lambda a, b: (
            Fraction(a) * Fraction(10) ** int(b)
        ),
        r"(\d*\.?\d+)\s*\^\s*\{?\s*([-+]?\d{1,3})\s*\}?": lambda a, b: Fraction(a) ** int(b),
        r"(\d*)\.(\d*)\\overline\s*\{\s*(\d+)\s*\}": lambda a, b, c: (
            Fraction(f"{a or 0}.{b or 0}") + Fraction(int(c), 10 ** len(b) * (10 ** len(c) - 1))
        ),
        r"(\d{1,3})!": lambda a: Fraction(math.factorial(int(a))),
    }
    for form, read in forms.items():
        if found := re.fullmatch(form, plain, re.ASCII):
            try:
                return sign * read(*found.groups())
            except ZeroDivisionError:
                return text
    return text


def same_number(one: str, other: str) -> bool:
    """Whether both are one number, or one text up to spaces and marks around it; a percentage is its number or its hundredth."""
    first, second = number(one), number(other)
    if isinstance(first, str) or isinstance(second, str):
        marks = r"\s|\\ |(?<![\d.,])0+(?=\d)|(?<![\d)}])\+"
        bare = [re.sub(marks, "", str(text)) for text in (first, second)]
        return bare[0] == bare[1]
    percent = ("%" in one) - ("%" in other)
    return (
        first == second
        or (percent == 1 and first / 100 == second)
        or (percent == -1 and first == second / 100)
    )


def value(text: str) -> tuple[str, list[sympy.Expr]] | None:
    """The shape of an answer (its brackets and signs) and its numbers in their order; None if it cannot be read."""
    text = re.sub(r"(?<=\d)°$", "", without_words(text))
    text = re.sub(r"\\(?:left|right)(?![a-z])|\\!", "", text).replace(r"\$", "").strip("$ ")
    text = re.sub(r"(?<=\d),\s*(?=\d{3}(?!\d))", "", text) if not re.search(r"[([]", text) else text
    units = rf"\s*\\(?:text|mbox)\{{ *(?:{'|'.join(_AFTER.split())}) *\}}(\^2)?$|\s*\^\\circ\s*$"
    text = re.sub(units, "", text.rstrip(". "))
    text = re.sub(r"^[a-z]\s*(?:=|\\in)", "", text)
    text = text.replace(r"\begin{pmatrix}", "<").replace(r"\end{pmatrix}", ">").replace(r"\\", ";")
    text = re.sub(r"\\[dt]?frac", "frac", text).replace(r"\pi", " pi ").replace(r"\cot", " cot ")
    text = re.sub(r"frac\s*(\d)\s*(\d)", r"frac{\1}{\2}", re.sub(r"\\sqrt\s*(\d)", r"\\sqrt{\1}", text))
    text = re.sub(r"frac(\d)\{", r"frac{\1}{", re.sub(r"(frac\{[^{}]*\})(\d)", r"\1{\2}", text))
    for _ in range(3):
        text = re.sub(r"\\sqrt\s*\{([^{}]*)\}", r" sqrt(\1) ", text)
        text = re.sub(r"(?<![\d.])(\d+)\s*frac\{(\d+)\}\{(\d+)\}", r"(\1+\2/\3)", text)
        text = re.sub(r"frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"((\1)/(\2))", text)
    text = (
        text.replace(r"\infty", "oo")
        .replace(r"\pm", "±")
        .replace(r"\cup", "@")
        .replace(r"\{", "<")
        .replace(r"\}", ">")
    )
    if re.search(r"[\\{}_!:'|~√π=]|\d\s+\d|\d\.\d*\.|\^\s*\d*\s*\^|/[^()]*[a-z]", text):
        return None
    shape, numbers = "", []
    for part in re.split(r"(^[\[(<]|[\])>]$|[\])]\s*@\s*[\[(]|[,;±&])", text):
        if re.fullmatch(r"\s*([\[\](),;±&<>]|[\])]\s*@\s*[\[(])\s*", part):
            shape += part.replace(" ", "")
        elif part.strip():
            found = _expression(part)
            if found is None:
                return None
            numbers.append(found)
            shape += "."
    return shape, numbers


def equal(one: str, other: str) -> bool:
    """Whether both can be read, have the same shape, and equal numbers."""
    first, second = value(one), value(other)
    if first is None or second is None or first[0] != second[0]:
        return False
    pairs = zip(first[1], second[1], strict=True)
    return all(a == b or (a - b).is_zero or sympy.simplify(a - b) == 0 for a, b in pairs)


def _expression(text: str) -> sympy.Expr | None:
    # A product of letters, or names that are known.
    if any(len(word) > 1 and word not in _KNOWN for word in re.findall("[A-Za-z]+", text)):
        return None
    text = re.sub(r"(?<![a-z])i(?![a-z])", " I ", text)
    try:
        found = parse_expr(text, local_dict=_NAMES, transformations=_RULES)
    except Exception:
        return None
    return found if isinstance(found, sympy.Expr) else None
