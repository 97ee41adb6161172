"""Parses numbers in common notations for the graders `math` and `gsm8k`. Values are exact. A text that is not a number as a whole is not parsed."""

import re
from decimal import Decimal
from fractions import Fraction
from unicodedata import numeric


def _fraction(sign: str) -> str:
    over, under = Fraction(numeric(sign)).limit_denominator(8).as_integer_ratio()
    return rf"\frac{{{over}}}{{{under}}}"


_PLAIN = str.maketrans(
    {
        # Hyphens, dashes and minus signs are in the first line, spaces in the second.
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212\ufe63\uff0d", "-"),
        **dict.fromkeys("\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f", " "),
        **dict.fromkeys("\u00d7\u00b7\u22c5\u2217\u2219", "*"),
        **dict.fromkeys("\u00f7\u2044\u2215", "/"),
        **{sign: _fraction(sign) for sign in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"},
    }
)
_RAISED, _LOWERED = "⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "₊₋₀₁₂₃₄₅₆₇₈₉"
_SHIFTED = re.compile(f"(?P<raised>[{_RAISED}]+)|[{_LOWERED}]+")
_UNSHIFTED = str.maketrans(_RAISED + _LOWERED, "+-0123456789" * 2)

_EXPONENT = r"(?:[eE][-+]?[0-9]{1,4}(?![0-9.]))?"
NUMERAL = re.compile(rf"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+){_EXPONENT}")
"""Matches digits with an optional decimal point and an optional exponent, as in 3e8."""
GROUPED = re.compile(
    rf"[1-9][0-9]{{0,2}}(?:[, ][0-9]{{3}})+(?![0-9]|,[0-9])(?:\.[0-9]+)?{_EXPONENT}|{NUMERAL.pattern}"
)
"""Like `NUMERAL`, but also matches numbers with commas or spaces between groups of three digits."""
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:(?P<whole>[0-9]+)\s+(?=[0-9]+\s*/))?(?P<over>{GROUPED.pattern})"
    rf"(?:\s*/\s*(?P<under>{GROUPED.pattern}))?"
)  # fmt: skip

CHANGING_BEFORE = ("not", "minus", "plus", "negative", "times", "than", "half", "twice", "double", "root", "over")  # fmt: skip
CHANGING_AFTER = (
    "half", "halves", "third", "thirds", "quarter", "quarters", "fourths", "fifths", "tenths", "hundredths", "dozen", "hundred",
    "hundreds", "thousand", "thousands", "million", "millions", "billion", "billions", "trillion", "trillions", "squared", "cubed",
    "base", "mod", "modulo", "divided", "multiplied", "factorial",
)  # fmt: skip
"""Words that change the value of a number if they precede it (`CHANGING_BEFORE`) or follow it (`CHANGING_AFTER`)."""


def plain(text: str) -> str:
    """Rewrites Unicode characters as ASCII or LaTeX: minus, times and division signs, spaces, fractions such as ½, super- and subscripts."""

    def unshifted(match: re.Match[str]) -> str:
        return ("^" if match["raised"] else "_") + "{" + match[0].translate(_UNSHIFTED) + "}"

    return _SHIFTED.sub(unshifted, text).translate(_PLAIN)


def value(numeral: str) -> Fraction:
    """Returns the exact value of a text that `NUMERAL` or `GROUPED` matches. `int` is not used, because it rejects more than 4,300 digits."""
    return Fraction(Decimal(numeral.replace(",", "").replace(" ", "")))


def number(text: str) -> Fraction | None:
    """Parses the whole text as a number, such as 12, -1.5, 3e8, 1/2 or 2 2/3. Returns None for any other text.

    >>> number("-2 2/3"), number("1,200.50"), number("3-5")
    (Fraction(-8, 3), Fraction(2401, 2), None)
    """
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    found = value(match["over"])
    if match["under"] is not None:
        under = value(match["under"])
        if not under:
            return None
        found /= under
    if match["whole"] is not None:
        if not 0 < found < 1:
            return None
        found += value(match["whole"])
    return -found if match["sign"] == "-" else found
