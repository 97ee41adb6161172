r"""Parses answers as mathematics. An answer is parsed as a whole or not at all.

The notations below are supported. An answer with any other word, sign or notation is not parsed, so that a part is never mistaken for the whole:

* numbers as in `numerals.py`, mixed numbers (`2 2/3`, `2\frac23`), repeating decimals (`0.\overline{3}`), thousands separated by `,`, `{,}`,
  `,\!` or thin spaces; `+ - \pm * / ^ !`, fractions, binomial coefficients, roots (odd roots of negative numbers are real), absolute values, floors and ceilings,
  trigonometric functions, exponentials and logarithms, `\pi`, `e`, `i`, letters with subscripts;
* `=`, `\approx` and inequalities; intervals (also `]0,1[`), tuples, sets, unions, differences of sets, lists, ratios, matrices with a factor.

Wrappers (`$`, `\boxed`, `\left`), the words in `numerals.py`, units (words, `\text{}`, degrees, currencies) and punctuation are ignored.
A percentage such as 50% is parsed as 50, and the comparison also accepts 1/2 for it, as pi/6 for 30 degrees. A comma is a decimal comma only after four or more digits and
before one or two, as in `1000,99`. Two or three capitals, as in `AB = 5`, are a name, not a product.

Notations that are ambiguous out of context are not supported: number bases (`2516_8`), other overlines, lists with dots, primes except in names (`f'(x) =`),
degrees with minutes, powers of powers without braces, and text that can be parsed in two ways (`1/2x`, `3 4`).
"""

import re
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import sympy

from dapo_jax.rewards import numerals
from dapo_jax.rewards.math_text import END, UNION, UPRIGHT, WITHOUT, is_word, simplified
from dapo_jax.rewards.numerals import COPULA, FILLER, PER_AREA, UNIT, WORD, placeholder

MOST_BITS = 20_000
"""Maximum size in bits of a power such as 2^1000. An answer with a larger power is not parsed."""
SIGNIFICANT = 6
"""A decimal with at least this many significant digits also equals every number that rounds to it, such as 1/3 for 0.333333."""


class Several(NamedTuple):
    """Several values: an interval `(1,2]`, a tuple, a set, a union (`opened=UNION`), a difference of two sets (`opened=WITHOUT`), a ratio (`opened=":"`), a list (`opened=""`, `closed="or"` if "or" separates its items),
    or a matrix (`opened="⟦"`). The rows of a matrix are tuples, or numbers if it has one column."""

    opened: str
    items: tuple[Any, ...]
    closed: str


class Relation(NamedTuple):
    """A relation such as a < b <= c, with one sign between each pair of adjacent sides. Relations with only > and ≥ are turned round."""

    sides: tuple[Any, ...]
    signs: tuple[str, ...]


class ReadAnswer(NamedTuple):
    """The parsed meaning of a text. `scale` is 1/100 for a percentage, pi/180 for degrees, and otherwise 1. `decimals` maps each decimal with at least six
    significant digits to the place value of its last digit. `undone` is True if a sum, product or quotient of numbers is left to be worked out, as in 17*23."""

    value: Any
    scale: Any
    decimals: dict[Any, Any]
    undone: bool


_NATURAL = ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "exp", "asin", "acos", "atan")
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(sympy, name) for name in _NATURAL},
    **{f"arc{name}": getattr(sympy, f"a{name}") for name in ("sin", "cos", "tan")},
    **dict.fromkeys(("log", "lg"), lambda argument, base=10: sympy.log(argument, base)),
    "ln": sympy.log, "tg": sympy.tan, "ctg": sympy.cot, "arctg": sympy.atan,
}  # fmt: skip
_GREEK = (
    "alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|vartheta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau|upsilon|phi|varphi"
    "|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Upsilon|Phi|Psi|Omega"
)
_UNIT_LETTERS = frozenset("mgshLlJNWVACF")
"""One-letter units in upright type, as in \\text{m}. A letter in italics is a variable."""

_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\(?:overline|bar|dot)\s*(?:\{([0-9]+)\}|([0-9]))")
_CONJUNCTION = re.compile(r",?\s*(?<![A-Za-z\\])(and|or)(?![A-Za-z])\s*,?")
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}[,.]?\s+[A-Za-z]{2,}")
_BARE = re.compile(rf"(?:\\[A-Za-z]+|[§A-Za-z]_\{{\w+\}})|{WORD.pattern}")
_DECIMAL_COMMA = "([0-9]{4,}),([0-9]{1,2})(?![0-9.,])"
"""A comma after four or more digits and before one or two, which cannot separate thousands, is a decimal comma."""
_SCALES = {"%": sympy.Rational(1, 100), r"°(?!\s*[CF])": sympy.pi / 180}
_DEGREES = r"°\s*[CF]?(?=\s*(?:[,;)\]\2=≈%]|\\\}|$))"
_FACTOR = r"[A-Za-zπ§({√]|\\(?!\}|rangle|rfloor|rceil)|(?:(?<=[A-Za-z)}!])|(?<=[A-Za-z)}!]\s))[0-9]+\s*\^"
"""Matches the start of a factor without a sign before it. A number must have an exponent, as in 2^n3^m."""
_POWER_OF_TEN = r"10\s*(?:\^|\*\*)"
_FIGURE = (
    r"(?:\bm\s*)?\\(angle|triangle|overline|vec)\s*(?:([A-Z]{1,4})(?![A-Za-z])|\{\s*([A-Z]{1,4})\s*\})|\|\s*([A-Z]{2})\s*\|(?=\s*=)"
    r"|\\(vec)\s*(?:\{\s*([a-z])\s*\}|([a-z])(?![A-Za-z]))"
    r"|\\frac\s*\{\s*(?:d|\\partial)\s*([A-Za-z])\s*\}\s*\{\s*(?:d|\\partial)\s*([A-Za-z])\s*\}(?=\s*=)"
)
"""Names such as \\angle ABC, |AB|, \\vec{v} or \\frac{dy}{dx} =. The symbol § with the name as its index replaces them."""
_UNIT_POWER = r"(?:\s*\^\s*(?:[23]|\{[23]\}))?"
_PER = rf"\s*/\s*(?:{UNIT}|[{''.join(_UNIT_LETTERS)}](?![A-Za-z])){_UNIT_POWER}"
_PLACEHOLDERS = re.compile(rf"({FILLER}|{COPULA}|(?:{PER_AREA}\.?\s*)?{UNIT}{_UNIT_POWER}(?:{_PER})?)")
_SET = r"\\\{\s*([A-Za-z])\s*(?:∈\s*\u211d\s*)?[|:]\s*(?=(?:[^{}]|(?<!\\)\{[^{}]*\})*\1)((?:[^{}|:\\]|\\(?![{}])|(?<!\\)\{[^{}]*\})*)\\\}"
r"""Matches a set such as \{x | x > 3\}, which is read as its condition."""
_REST_OF_MIXED = r"(?<=[0-9])\s+([0-9]+)\s*/\s*([0-9]+)(?![0-9.,]*[0-9])|\\frac\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))"
_CALL = r"\(\s*([-0-9./]+|[A-Za-z§](?:\s*,\s*[A-Za-z])*|[A-Z]\s*[=<>≤≥]\s*[-0-9./]+)\s*\)(?=\s*[=≈])"
"""Matches the argument of a call that names a value, as in P(2) = 5 or P(X = 2) = 1/3."""
_DERIVATIVE = r"(?:'+|\^\s*\{?\s*(?:\\prime\s*)+\}?)"
_INVERSE, _OF_MATRIX = r"\^\s*\{\s*-\s*1\s*\}(?=\s*\()", r"\^\s*(?:\{[^{}]*\}|\w)(?=\s*=[^=]*⟦)"
"""The marks of names such as f'(x), f^{-1}(x) and, before a matrix, A^{-1} =."""
_spaced = lru_cache(maxsize=None)(lambda pattern: re.compile(rf"\s*(?:{pattern})"))
_CONSTANTS = {"π": sympy.pi, "\u211d": Several("(", (-sympy.oo, sympy.oo), ")")}


@lru_cache(maxsize=4096)
def read(text: str) -> ReadAnswer | None:
    """Parses the text. Returns None if it cannot be parsed as a whole."""
    if text.isascii() and text.isdigit():  # for speed
        return ReadAnswer(sympy.Rational(*numerals.value(text).as_integer_ratio()), sympy.S.One, {}, False)
    if re.search("[\0-\5§]", text):  # this module uses these characters as placeholders
        return None
    try:
        core, scale = _core(simplified(text))
        reader = _FormulaParser(core)
        value = reader.statement()
        return ReadAnswer(value, scale, reader.decimals, reader.undone)
    except (RecursionError, ArithmeticError, TypeError, ValueError):
        return None


def _core(text: str) -> tuple[str, Any]:
    """Removes words and units from a text. Returns the remaining formula and its `ReadAnswer.scale`. The text must contain exactly one formula."""
    text = re.sub(r"\\(?:text|mbox|mathrm)\s*\{\s*(and|or)\s*\}", r" \1 ", text)
    text = _CONJUNCTION.sub(lambda match: "\2" if match[1] == "or" else ",", text)
    text = re.sub(_FIGURE, lambda match: f"§_{{{''.join(filter(None, match.groups()))}}}", text)
    text = re.sub(UPRIGHT, _upright, text)
    parts = re.split(r"\$\$?|\\[()\[\]]", re.sub(_SET, r"\2", text))
    _require(len(parts) % 2, "a formula that is not closed")
    # Letters between math delimiters, and in a text without delimiters and sentences, may be variables.
    prose = len(parts) > 1 or bool(_PROSE.search(text))
    replacements = [partial(_letters, prose=prose), partial(_letters, prose=False)] * len(parts)
    text = f" {' '.join(map(_BARE.sub, replacements, parts))} "
    text = re.sub(rf"\(\s*{UNIT}\s*\)", UNIT, text)
    text = re.sub(rf"(?<!\S)[A-Za-z]\s+(?={COPULA})", " ", text)  # a name, as in "the value of x is 5"
    pieces = [re.sub(r'^\s*(["`])(.*)\1\s*$', r"\2", piece) for piece in _PLACEHOLDERS.split(text)]
    pieces = [END.sub("", piece.lstrip(" ,;:")) for piece in pieces]
    where = [index for index in range(0, len(pieces), 2) if pieces[index]]
    _require(len(where) == 1, "no mathematics, or several pieces")
    core, before, after = pieces[where[0]], pieces[: where[0]], pieces[where[0] + 1 :]
    _require(UNIT not in "".join(before).rpartition(COPULA)[2], "a unit before the number")
    _require(not (core.endswith("%") and UNIT in "".join(after)), "a unit after a percentage")
    _require(not (before and re.match(r"[-+*/^_!|] |[+*/^_!]", core)), "a word is a part of the formula")
    core = (core.lstrip("= ") if before else core).removeprefix("≈")
    items = 1 + len(re.findall(r"[;\2]|,(?![0-9]{3}(?![0-9]))", core))
    closer = r"(?:[)\]]|\\\})" if re.match(r"[(\[]|\\\{", core) else ""
    scales = [each for sign, each in _SCALES.items() if len(re.findall(sign, core)) == items]
    core = re.sub(rf"\s*%(?=\s*(?:[,;\2]|{closer}$))", "", core)
    return core, scales[0] if scales else sympy.S.One


def _upright(match: re.Match[str]) -> str:
    """Replaces upright text such as \text{...}, which may contain a function name, a letter or words."""
    style, inner = match[1], match[2].strip()
    if inner in _FUNCTIONS:
        return rf"\{inner} "
    followed = re.match(r"\s*[(\[_]", match.string[match.end() :])
    _require(style != "operatorname" and not followed, f"an unknown function {inner}")
    variable = inner not in _UNIT_LETTERS or style[:5] in ("mathb", "mathi", "bolds", "bm")
    if len(inner) == 1 and inner.isalpha() and variable:
        return f" {inner} "
    units = _UNIT_LETTERS | ({"in"} if inner == "in" else set())
    words = {word: UNIT if word in units else placeholder(word) for word in WORD.findall(inner)}
    _require(all(words.values()), f"{inner} may change the number")
    return f" {WORD.sub(lambda word: words[word[0]], inner)} "


def _letters(match: re.Match[str], *, prose: bool) -> str:
    """Replaces letters: a command, a word, a function, the name of a figure such as AB, or a product of up to three variables."""
    letters, before, after = match[0], match.string[: match.start()][-1:], match.string[match.end() :]
    if prose and letters in ("a", "A", "I") and not before.strip() and re.match(r"\s+[A-Za-z]{2}", after):
        return FILLER
    if letters[0] == "\\" or "_" in letters or len(letters) == 1:
        return letters
    if letters == "sec" and not after.strip(" .$"):
        return UNIT  # "sec" at the end of the text means seconds; elsewhere, it is the secant function
    if letters in _FUNCTIONS or letters == "sqrt":
        return rf"\{letters}"
    if letters in ("pi", "infinity", "infty", "inf", "oo"):
        return "π" if letters == "pi" else "∞"
    kind = placeholder(letters)
    joined = re.match(r"[0-9)}_^]", before) or re.match(r"[(\[{_^0-9]|\s*=", after)
    if kind and (prose or not joined or (kind == UNIT and before not in tuple("_^}"))):
        return kind
    if letters.isupper() and re.match(r"\s*[=≈]", after):
        return f"§_{{{letters}}}"
    variables = len(letters) <= 3 and letters.isalpha() and not letters.isupper() and not is_word(letters)
    _require(variables and not prose, f"{letters} is not known")
    return letters


class _FormulaParser:
    """A recursive descent parser with one method per grammar rule. Raises ValueError for text that matches no rule."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.decimals: dict[Any, Any] = {}
        self.depth = self.bars = self.angle = 0
        self.plus_minus = 1
        self.signs = self.most_signs = 0
        self.divided = self.undone = False

    def statement(self) -> Any:
        """Parses the whole text. If it contains a plus-minus sign, returns both values."""
        value = self._all()
        if not set("±∓") & set(self.text):
            return value
        _require("∓" in self.text or self.most_signs < 2, "several plus-minus signs that may be independent")
        self.at, self.plus_minus = 0, -1
        other = self._all()
        if isinstance(value, Several) and value.opened in ("", r"\{"):
            # In 0, ±2, the item 0 has one value.
            others = tuple(new for item, new in zip(value.items, other.items, strict=True) if new != item)
            return Several(value.opened, value.items + others, value.closed)
        return Several("", (value, other), "")

    def _all(self) -> Any:
        items = self._separated(self._item, "[,;\2]")
        _require(not self._take(r"\S"), f"at {self.text[self.at - 1 :]!r}")
        closed = "or" if self.text.count("\2") == len(items) - 1 else ""
        return items[0] if len(items) == 1 else Several("", tuple(items), closed)

    def _take(self, pattern: str) -> re.Match[str] | None:
        if match := _spaced(pattern).match(self.text, self.at):
            self.at = match.end()
        return match

    def _sees(self, pattern: str) -> bool:
        return _spaced(pattern).match(self.text, self.at) is not None

    def _separated(self, parse: Callable[[], Any], sign: str) -> list[Any]:
        items = [parse()]
        while self._take(sign):
            items.append(parse())
        return items

    def _item(self) -> Any:
        """Parses an item of a list or set, and counts its plus-minus signs."""
        outer, self.signs = self.signs, 0
        value = self._relation()
        self.most_signs, self.signs = max(self.most_signs, self.signs), outer
        return value

    def _relation(self) -> Any:
        undone, sides, signs, numbers, sign = self.undone, [], [], [], None
        while not sides or sign:
            self.undone = False
            parts = self._separated(self._union, ":")
            sides.append(parts[0] if len(parts) == 1 else Several(":", tuple(parts), ""))
            if not isinstance(sides[-1], sympy.Expr) or sides[-1].is_number:
                numbers.append(self.undone)
            if sign := self._take(r"<=|>=|[=<>≤≥≠≈∈]"):
                signs.append({"<=": "≤", ">=": "≥", "∈": "="}.get(sign[0].strip(), sign[0].strip()))
        # In x = 17*23 = 391, the number is worked out.
        self.undone = undone or (bool(numbers) and all(numbers))
        if "≈" in signs:
            # Keeps the exact sides before the first ≈. If there is only a name such as x before it, keeps the value after it, too.
            exact = signs.index("≈")
            end = exact + 2 if exact == 0 and is_name(sides[0]) else exact + 1
            sides, signs = sides[:end], ["="] * (end - 1)
        if set(signs) <= {">", "≥"}:  # also if there is no sign
            sides, signs = sides[::-1], [{">": "<", "≥": "≤"}[sign] for sign in signs[::-1]]
        return Relation(tuple(sides), tuple(signs)) if signs else sides[0]

    def _union(self) -> Any:
        sets = self._separated(self._sum, UNION)
        sign = UNION if len(sets) > 1 or not self._take(WITHOUT) else WITHOUT
        sets += [self._sum()] if sign == WITHOUT else []
        _require(len(sets) == 1 or all(isinstance(item, Several) for item in sets), "a union of numbers")
        return sets[0] if len(sets) == 1 else Several(sign, tuple(sets), "")

    def _sum(self) -> Any:
        if infinity := self._take(r"[-+]?\s*∞"):  # arithmetic with it has no exact value
            return -sympy.oo if "-" in infinity[0] else sympy.oo
        total, numbers = None, 0
        while total is None or self._sees("[-+±∓]"):
            second = total is not None and self._sees(r"\+\s*-")  # the minus in 3 + -2
            sign = self._sign() * (self._sign() if second else 1)
            term = self._product()
            numbers += isinstance(term, sympy.Rational)
            self.undone |= numbers > 1
            if total is None and getattr(term, "opened", "") == "⟦":
                term, sign = scaled(term, sign), 1
            total = term if total is None and sign == 1 else _number(total or 0) + sign * _number(term)
        return total

    def _sign(self) -> int:
        sign = self._take("[-+±∓]")
        self.signs += sign is not None and sign[0].strip() == "±"
        return {"-": -1, "±": self.plus_minus, "∓": -self.plus_minus}.get(sign[0].strip() if sign else "", 1)

    def _product(self) -> Any:
        self.divided, tens = False, self._sees(_POWER_OF_TEN)
        product = self._factor()
        over, under = [tens] * isinstance(product, sympy.Rational), 0
        while True:
            # Two factors that are numbers are left to be worked out, except in 3*10^8.
            self.undone |= len(over) > 2 or (len(over) == 2 and sum(over) != 1) or under > 1
            tens = self._sees(rf"\*\s*{_POWER_OF_TEN}")
            sign = self._take(r"\*(?!\*)|/")
            if not (sign or self._sees(_FACTOR) or (not self.bars and self._sees(r"\|"))):
                return scaled(self._base(), _number(product)) if self._sees("⟦") else product
            _require(sign or not self.divided, "1/2x is ambiguous")
            factor = _number((self._sign() if sign else 1) * _number(self._factor()))
            self.divided = sign is not None and sign[0].strip() == "/"
            _require(not self.divided or factor != 0, "a division by zero")
            letters = factor.free_symbols or _number(product).free_symbols
            product = product / factor if self.divided else product * factor
            _require(product != 0 or not letters, "0 times a variable, which may be a word")
            under += self.divided and factor.is_Rational
            over += [tens] if factor.is_Rational and not self.divided else []

    def _factor(self) -> Any:
        value = self._base()
        if self._take("!"):
            value = _number(value)
            _require(_is_count(value) and not self._sees("!"), "a factorial that is not evaluated")
            value = sympy.factorial(value)
        if self._take(r"\^|\*\*"):
            value = _power(_number(value), _number(self._exponent()))
        _require(not self._sees(r"\^|\*\*|!|_"), "a power of a power, or a number with a subscript")
        if not self._take("°" if self.angle else _DEGREES):
            return value
        return _number(value) * (sympy.pi / 180 if self.angle else 1)

    def _exponent(self) -> Any:
        sign = self._sign()
        return sign * _number(self._base() if self._sees(r"[({\\A-Za-zπ]") else self._numeral())

    def _argument(self) -> Any:
        r"""Parses the argument of \frac or \sqrt: a group, a digit, a letter or a command."""
        digit = self._take("[0-9]")
        _require(digit or self._sees(r"[{(A-Za-zπ\\]"), "no argument")
        return sympy.Integer(digit[0].strip()) if digit else _number(self._base())

    def _base(self) -> Any:
        if self._take(r"\\frac(?![A-Za-z])"):
            over, under = self._argument(), self._argument()
            _require(under != 0, "a division by zero")
            return over / under
        if self._take(r"\\binom(?![A-Za-z])"):
            above, below = self._argument(), self._argument()
            _require(_is_count(above) and _is_count(below), "a binomial left to do")
            return sympy.binomial(above, below)
        if self._take(r"\\sqrt(?![A-Za-z])|√"):
            root = _number(self._sum()) if (opened := self._take(r"\[")) else sympy.Integer(2)
            _require(not opened or self._take(r"\]"), "a root that is not closed")
            long = self.text[self.at - 1] == "√" and self._sees("[0-9]")
            return _power(self._numeral() if long else self._argument(), root**-1)
        if name := self._take(rf"\\({'|'.join(_FUNCTIONS)})(?![A-Za-z])"):
            return self._function(name[1])
        if name := self._take(rf"\\({_GREEK})(?![A-Za-z])|([A-Za-z§])"):
            return self._letter(name[1] or name[2])
        if sign := self._take("[π\u211d]"):
            return _CONSTANTS[sign[0].strip()]
        if self._take(r"\|"):
            self.bars += 1
            value = sympy.Abs(_number(self._sum()))
            self.bars -= 1
            _require(self._take(r"\|"), "an absolute value that is not closed")
            return value
        if opened := self._take(r"\\l(floor|ceil)(?![a-z])"):
            value = {"floor": sympy.floor, "ceil": sympy.ceiling}[opened[1]](_number(self._sum()))
            _require(self._take(rf"\\r{opened[1]}(?![a-z])"), "a bracket that is not closed")
            return value
        if self._take(r"\\emptyset(?![A-Za-z])"):
            return Several(r"\{", (), r"\}")
        if opened := self._take(r"\(|\[|\]|⟦|\\\{|\{|\\langle"):
            return self._bracket(opened[0].strip())
        return self._mixed()

    def _bracket(self, opened: str) -> Any:
        bars, self.bars, divided = self.bars, 0, self.divided
        self.depth += 1
        items = self._separated(self._item if opened == r"\{" else self._relation, "[,;\2]")
        self.depth -= 1
        self.bars, self.divided = bars, divided
        closers = {"{": r"\}", "⟦": "⟧", r"\{": r"\\\}", r"\langle": r"\\rangle", "[": r"[)\]\[]", "]": r"[\]\[]"}  # fmt: skip
        closed = self._take(closers.get(opened, r"[)\]]"))
        _require(closed, "a bracket that is not closed")
        if opened == "{" and len(items) > 1:
            return Several(r"\{", tuple(items), r"\}")
        ends = opened, closed[0].strip() if closed else ""
        _require("".join(ends) not in ("][", "]]", "[[") or len(items) == 2, "not an interval")
        if all(getattr(item, "opened", "") == "[" for item in items) and ends == (
            "[",
            "]",
        ):  # the rows of a matrix
            items, ends = [item._replace(opened="(", closed=")") for item in items], ("⟦", "⟧")
        opened, closed = {"][": "()", "]]": "(]", "[[": "[)", r"\langle\rangle": "()"}.get(
            "".join(ends), ends
        )
        several = Several(opened, tuple(items), closed)
        single = opened + closed in ("()", "{}") or getattr(items[0], "opened", "") == "⟦"
        return items[0] if single and len(items) == 1 else several

    def _function(self, name: str) -> Any:
        base, power = (), None
        if name == "log" and self._take("_"):
            base = (self._argument(),)
        if self._take(r"\^"):
            power = _number(self._exponent())
            if power == -1 and name in ("sin", "cos", "tan"):
                name, power = f"arc{name}", None
            _require(power is None or power.is_positive, "sin^-2 is ambiguous")
        # sin(x)^2 is the square of the sine, but sin x^2 is the sine of x^2. In sin 2x, the argument is the product 2x.
        bracketed = self._sees(r"[({]")
        self.angle += 1
        argument = _number(self._base() if bracketed else self._factor())
        while not bracketed and self._sees(rf"[A-Za-zπ]|\\(?:frac|sqrt|{_GREEK})(?![A-Za-z])"):
            argument *= _number(self._factor())
        self.angle -= 1
        value = _number(_FUNCTIONS[name](argument, *base))
        return value if power is None else _power(value, power)

    def _letter(self, name: str) -> Any:
        if index := self._take(r"_\s*(?:\{([A-Za-z0-9+\-, ]*)\}|([A-Za-z0-9]))"):
            return sympy.Symbol(f"{name}_{(index[1] or index[2] or '').replace(' ', '')}", real=True)
        if name in "ei" and len(name) == 1:
            return sympy.E if name == "e" else sympy.I
        function = name in "fgh"
        if mark := self._take(rf"{_DERIVATIVE}(?=\s*[(=])|{_INVERSE if function else _OF_MATRIX}"):
            name += re.sub(r"[\s^{}]", "", mark[0].replace(r"\prime", "'"))
        if not function and (call := self._take(_CALL)):
            return sympy.Symbol(f"{name}({call[1]})", real=True)
        if function and self._take(r"\("):  # equal arguments give equal values
            return sympy.Symbol(f"{name}({_number(self._bracket('('))})", real=True)
        return sympy.Symbol(name, real=True)

    def _mixed(self) -> Any:
        start = self.at
        number = self._numeral()
        whole = self.text[start : self.at].strip().isdigit()
        if not (whole and (rest := self._take(_REST_OF_MIXED))):
            return number
        self.divided = "/" in rest[0]
        over, under = [int(group) for group in rest.groups() if group]
        _require(number and 0 < over < under, "neither a mixed number nor clearly a product")
        return number + sympy.Rational(over, under)

    def _numeral(self) -> Any:
        if match := self._take(_REPEATING.pattern):
            whole, fixed, again = match[1] or "0", match[2], match[3] or match[4]
            nines = 10 ** len(again) - 1
            return sympy.Rational(int(whole + fixed) * nines + int(again), nines * 10 ** len(fixed))
        whole = rf"(?<!,){_DECIMAL_COMMA}|{numerals.GROUPED.pattern.replace('(?: [0-9]{3})+', '(?!)')}"
        match = self._take(numerals.NUMERAL.pattern if self.depth else whole)
        text = re.sub(rf"^{_DECIMAL_COMMA}$", r"\1.\2", match[0].strip() if match else "")
        _require(text, "no number")
        number = sympy.Rational(*numerals.value(text).as_integer_ratio())
        mantissa, _, exponent = text.lower().partition("e")
        whole, point, places = mantissa.partition(".")
        if point and len((whole + places).lstrip("0")) >= SIGNIFICANT:
            self.decimals[number] = sympy.Rational(10) ** (int(exponent or 0) - len(places))
        return number


def is_name(side: Any) -> bool:
    """Returns whether a side of an equation is a name for the other side: one symbol, one call such as f(2), or a tuple of symbols."""
    sides = side.items if isinstance(side, Several) and side.opened in ("(", ":") else (side,)
    return all(isinstance(symbol, sympy.Symbol) for symbol in sides)


def _require(condition: object, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


def _number(value: Any) -> Any:
    _require(isinstance(value, sympy.Expr | int), "arithmetic with lists or relations")
    _require(isinstance(value, int) or not value.has(sympy.nan, sympy.zoo), "an undefined value")
    return value


def _is_count(value: Any) -> bool:
    """Returns whether the value may have a factorial: a small integer, or an expression such as 2n - 1, which grows slowly."""
    most = max(map(abs, value.atoms(sympy.Number)), default=0)
    if value.free_symbols:
        return bool(most <= 100) and not value.atoms(sympy.Pow, sympy.Function)
    return bool(value.is_Integer and 0 <= value <= 1000)


def scaled(value: Any, factor: Any) -> Any:
    """Multiplies a value, each item of several values, or the value of a name, as in x = 5, by a factor. Returns other relations unchanged."""
    if isinstance(value, Several):
        return value._replace(items=tuple(scaled(item, factor) for item in value.items))
    if not isinstance(value, Relation):
        return _number(value) * factor
    name, *number = value.sides
    named = value.signs == ("=",) and is_name(name)
    return value._replace(sides=(name, scaled(number[0], factor))) if named else value


def _power(base: Any, exponent: Any) -> Any:
    """Returns a power. Raises ValueError if it would be very large, because responses are untrusted."""
    _require(base != 0 or exponent.is_positive, "an undefined value")
    if exponent.is_Rational:
        bits = max(abs(base.p), base.q).bit_length() if base.is_Rational else 0
        most = MOST_BITS / bits if bits > 1 else MOST_BITS if bits else 50 if base.is_Add else 1000
        _require(abs(exponent) <= most or bits == 1, "a very large power")
        if exponent.q % 2 and exponent.q > 1 and base.is_real and not base.is_nonnegative:
            # An odd root of a negative number is real, unlike the principal root.
            return sympy.Abs(base) ** exponent * (sympy.sign(base) if exponent.p % 2 else 1)
    return base**exponent
