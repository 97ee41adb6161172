r"""A second reader of numbers, for comparison with the graders: it shares no code with them, and is stricter."""

import math
import re
from fractions import Fraction


def number(text: str) -> Fraction | str:
    """The number that the whole of the text is, in one of the forms of a reference; or else the text itself."""
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
        marks = r"[\s${}]|\\ |(?<![\d.,])0+(?=\d)|(?<![\d)}])\+"
        bare = [re.sub(marks, "", str(text)) for text in (first, second)]
        return bare[0] == bare[1]
    percent = ("%" in one) - ("%" in other)
    return (
        first == second
        or (percent == 1 and first / 100 == second)
        or (percent == -1 and first == second / 100)
    )
