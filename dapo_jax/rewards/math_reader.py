r"""Parses answers as mathematics. An answer is parsed as a whole or not at all.

The notations below are supported. An answer with any other notation is not parsed, so that a part is never mistaken for the whole answer:

* numbers as in `numerals.py`, mixed numbers (`2 2/3`, `2\frac23`), repeating decimals (`0.\overline{3}`), thousands separated by
  `,`, `{,}`, `,\!` or thin spaces;
* `+ - \pm * / ^ !`, fractions, binomial coefficients, roots, absolute values, trigonometric functions, exponentials and
  logarithms, `\pi`, `e`, `i`, letters with subscripts;
* `=`, `\approx` and inequalities; intervals, tuples, sets, unions, lists, matrices.

Wrappers (`$`, `\boxed`, `\left`, the words of a sentence), units (words, `\text{}`, degrees, currencies) and punctuation are ignored.
A percentage such as 50% is parsed as 50, and the comparison also accepts 1/2 for it.

Notations that are ambiguous out of context are not supported: number bases (`2516_8`), other overlines, lists with dots, primes,
powers of powers without braces, and text that can be parsed in two ways (`1/2x`, `3 4`).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sympy

from dapo_jax.rewards.numerals import CHANGING_AFTER, CHANGING_BEFORE, GROUPED, NUMERAL, plain, value

MOST_BITS = 20_000
"""Maximum size in bits of a power such as 2^1000. An answer with a larger power is not parsed."""
SIGNIFICANT = 6
"""A decimal with at least this many significant digits also equals every number that rounds to it, such as 1/3 for 0.333333."""


class UnreadableError(ValueError):
    """The text cannot be parsed as a whole."""


@dataclass(frozen=True)
class Several:
    """Several values: an interval `(1,2]`, a tuple, a set, a matrix (`opened="matrix"`), a union (`UNION`), or a list without brackets."""

    opened: str
    items: tuple[Any, ...]
    closed: str


@dataclass(frozen=True)
class Relation:
    """A relation such as a < b <= c, with one sign between each pair of adjacent sides."""

    sides: tuple[Any, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True)
class ReadAnswer:
    """The parsed meaning of a text. `decimals` maps each decimal with at least six significant digits to the place value of its last digit."""

    text: str
    value: Any
    percent: bool
    decimals: dict[Any, Any]


UNION = "\u222a"


def _each(names: str, written: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), written)


_COMMANDS = {
    **_each("left right displaystyle textstyle limits big Big bigg Bigg bigl bigr Bigl Bigr boxed fbox", ""),
    **_each("quad qquad thinspace", " "), **_each("dfrac tfrac cfrac", r"\frac"), **_each("dbinom tbinom", r"\binom"),
    **_each("times cdot ast", "*"), **_each("le leq leqslant", "≤"), **_each("ge geq geqslant", "≥"), **_each("ne neq", "≠"),
    **_each("lvert rvert vert mid", "|"), **_each("dots ldots cdots dotsc", "…"),
    "div": "/", "lt": "<", "gt": ">", "approx": "≈", "pm": "±", "mp": "∓", "in": "∈", "cup": UNION, "infty": "∞", "pi": "π",
    "degree": "°", "imath": "i", "lbrace": r"\{", "rbrace": r"\}", "varnothing": r"\emptyset",
}  # fmt: skip
"""Replacements for LaTeX commands, by command name. Commands that are not listed are kept."""
_NATURAL = ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "exp", "asin", "acos", "atan")
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(sympy, name) for name in _NATURAL},
    "arcsin": sympy.asin,
    "arccos": sympy.acos,
    "arctan": sympy.atan,
    "ln": sympy.log,
    "log": lambda argument, base=10: sympy.log(argument, base),
}
_GREEK = _each(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau upsilon phi "
    "varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega",
    "",
)
_SIGNS = str.maketrans({"≃": "≈", "⩽": "≤", "⩾": "≥"})
_SMALL_UNITS = _each(
    "cm mm km kg mg ml mL ft in lb lbs oz yd mi mph kph kmh hr hrs min sec day men deg rad cc gal mol Hz kHz MHz GHz kW kWh US USD EUR "
    "GBP st nd rd th pts pcs sq cup egg hen bus box car boy way row ton bag dog cat pen man",
    "",
)
"""Units and nouns with two or three letters, which are ignored. Other words of this length, unless in a sentence, are products of variables."""
_UNIT_LETTERS = frozenset("mgshLlJNWVACKF")
"""One-letter units in upright type, as in \\text{m}. A letter in italics is a variable."""

_COMMAND = re.compile(r"\\([A-Za-z]+)")
_MONEY = re.compile(r"(?<![0-9.,])(?:\\\$|[€£¥₹])|(?:\\\$|[€£¥₹¢])(?![0-9.,])")
_ONE_DOLLAR = re.compile(r"^\s*([-+]?)\s*\$|(?<=[\s(])\$(?=[0-9.])|\$\s*$")
_JOINED_THOUSANDS = re.compile(
    r"(?<![0-9.,])[1-9][0-9]{0,2}(?:(?:\{,\}|,\\!\s?|\\[,;:! ]|~)[0-9]{3})+(?![0-9])|(?<![0-9.,])[1-9][0-9]{0,2}(?: [0-9]{3})+(?![0-9]|\s*/)"
)
_SPACING = re.compile(r"(?:\\[,;:! ]|~|\s)+")
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\(?:overline|bar|dot)\s*(?:\{([0-9]+)\}|([0-9]))")
_UPRIGHT = re.compile(
    r"\\(text|textbf|textrm|textit|mbox|mathrm|mathbf|mathit|mathsf|boldsymbol|operatorname)\s*\{([^{}]*)\}"
)
_CONJUNCTION = re.compile(r",?\s*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])\s*,?")
_PERCENT = re.compile(
    r"\\%|(?:\\(?:text|mathrm)\s*\{\s*)?(?<![A-Za-z])(?:percent|per cent|pct)(?![A-Za-z])(?:\s*\})?"
)
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}[,.]?\s+[A-Za-z]{2,}")
_WORDS = re.compile(r"\\[A-Za-z]+|[A-Za-z]{2,}")
_MARKS = re.compile(r"\$\$?|\\[()\[\]]")
_UNIT_POWER = re.compile(
    "\0(?:\\s*\\^\\s*\\{?[23]\\}?)?(?:\\s*/\\s*(?:\0|[A-Za-z](?![A-Za-z]))(?:\\^\\{?[23]\\}?)?)?"
)
_BOUNDS = ("least", "most", "between", "below", "above", "under", "except", "without")
_CHANGING = frozenset(CHANGING_BEFORE + CHANGING_AFTER + _BOUNDS)


def text_form(text: str) -> str:
    r"""Removes wrappers, white space and punctuation, so that answers can be compared as text.

    >>> text_form(r"$\text{ Blue }.$"), text_form(r"2516_{8}"), text_form(r"\left( 3, 4 \right)")
    ('blue', '2516_8', '(3,4)')
    """
    found = _UPRIGHT.sub(r" \2 ", _simplified(text)).strip()
    found = re.sub(r"^(?:\$\$?|\\[(\[])|(?:\$\$?|\\[)\]])(?=[.,;]?$)", "", re.sub(r"\s+", " ", found)).strip()
    found = re.sub(r"(?<![0-9]) | (?![0-9])", "", found)
    found = re.sub(r"([_^])\{(\w)\}", r"\1\2", found).rstrip(".,;")
    found = re.sub(r"^\{(.*)\}$", r"\1", found) if found.count("{") == 1 else found
    bare = re.sub(r"^\(([A-Za-z]+)\)$", r"\1", found)
    return bare if len(bare) < 3 or re.search(r"[0-9\\]", bare) else bare.casefold()


def _simplified(text: str) -> str:
    """Replaces alternative notations by a single one, and removes currency signs and spacing commands."""
    text = plain(text).translate(_SIGNS)
    # In a matrix, a double backslash separates rows. Elsewhere it is a backslash that was escaped twice.
    text = text.replace("\\\\", "\1" if "matrix" in text else "\\")
    text = re.sub(r"\\begin\s*\{[pb]?matrix\}", "⟦", re.sub(r"\\end\s*\{[pb]?matrix\}", "⟧", text))
    text = re.sub(r"(?<=[0-9])\s*[xX]\s*(?=10\s*\^)", "*", _MONEY.sub(" ", text))
    text = _JOINED_THOUSANDS.sub(lambda match: re.sub("[^0-9]", "", match[0]), text)
    text = _COMMAND.sub(lambda match: _COMMANDS.get(match[1], match[0]), text)
    text = re.sub(r"\.{3,}", "…", re.sub(r"\s!=", "≠", _PERCENT.sub("%", text)))
    if text.count("$") == 1:
        text = _ONE_DOLLAR.sub(r" \1", text)  # a currency sign
    return _SPACING.sub(" ", text)


@lru_cache(maxsize=4096)
def read(text: str) -> ReadAnswer | None:
    """Parses the text. Returns None if it cannot be parsed as a whole."""
    if re.search("[\0\1\2]", text):  # this module uses these characters as placeholders
        return None
    try:
        core, percent = _core(_simplified(text))
        reader = _FormulaParser(core)
        found = reader.statement()
        return ReadAnswer(core, found, percent, reader.decimals)
    except (UnreadableError, RecursionError, ArithmeticError, TypeError, ValueError):
        return None


def _core(text: str) -> tuple[str, bool]:
    """Removes words and units from a text. Returns the remaining formula and whether it is a percentage. The text must contain exactly one formula."""
    text = _CONJUNCTION.sub("\2", re.sub(r"\\(?:text|mbox|mathrm)\s*\{\s*(and|or)\s*\}", r" \1 ", text))
    text = _UPRIGHT.sub(_upright, text)
    parts = _MARKS.split(text)
    if len(parts) > 1:
        if len(parts) % 2 == 0:
            raise UnreadableError("a formula that is not closed")
        # Text between math delimiters is mathematics, and all letters outside them are prose.
        text = "".join(
            f" {part} " if place % 2 else re.sub(r"[A-Za-z]+", _word, part)
            for place, part in enumerate(parts)
        )
    else:
        prose = bool(_PROSE.search(text))
        text = _WORDS.sub(lambda match: _letters(match, prose), text)
    # Removes possessive endings, as in Brandon's, and words in parentheses.
    text = re.sub("\0'(?:[a-z]|\0)|\\(\\s*\0[\0\\s]*\\)", "\0", text)
    if not any(rf"\{name}" in text for name in _FUNCTIONS):
        text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|°", "", text)
    pieces = [piece.strip(' "`,;:?').rstrip(". ") for piece in _UNIT_POWER.split(text)]
    where = [place for place, piece in enumerate(pieces) if re.search(r"[^\s()\[\]{}-]", piece)]
    # Skips single letters that are not the last piece. They are words, or names as in "the value of x is 5".
    where = [place for place in where if place == where[-1] or not re.fullmatch("[A-Za-z]", pieces[place])]
    if len(where) != 1:
        raise UnreadableError("no mathematics, or several pieces")
    core = pieces[where[0]]
    if where[0] and re.match(r"[-+*/^_!|] |[+*/^_!]", core):
        raise UnreadableError("a word is a part of the formula")
    core = core.strip("= ") if "\0" in text else core
    core = core.removeprefix("≈")
    return re.sub(r"\s*%$", "", core), core.endswith("%")


def _word(match: re.Match[str]) -> str:
    if match[0].lower() in _CHANGING:
        raise UnreadableError(f"{match[0]} changes the number")
    return "\0"


def _upright(match: re.Match[str]) -> str:
    """Replaces upright text such as \text{...}, which may contain a function name, a letter or words."""
    style, inner = match[1], match[2].strip()
    if inner in _FUNCTIONS:
        return rf"\{inner} "
    if style == "operatorname" or re.match(r"\s*[(\[_]", match.string[match.end() :]):
        raise UnreadableError(f"an unknown function {inner}")
    letter = len(inner) == 1 and inner.isalpha()
    if letter and (style.startswith(("mathb", "mathi", "bold")) or inner not in _UNIT_LETTERS):
        return f" {inner} "
    glued = re.search(r"[0-9]([A-Za-z]+)", inner)
    if glued and glued[1] not in _SMALL_UNITS and glued[1] not in _UNIT_LETTERS:
        raise UnreadableError(f"{glued[1]} is not a separate word")
    return " " + re.sub(r"[A-Za-z]+", _word, inner) + " "


def _letters(match: re.Match[str], prose: bool) -> str:
    """Replaces letters outside math delimiters. They may be a command, a word or a product of variables."""
    letters = match[0]
    if letters.startswith("\\"):
        return letters
    if letters == "sec" and not match.string[match.end() :].strip(" .$"):
        return "\0"  # "sec" at the end of the text means seconds; elsewhere, it is the secant function
    if letters in _FUNCTIONS or letters == "sqrt":
        return rf"\{letters}"
    if letters in ("pi", "infinity", "infty"):
        return "π" if letters == "pi" else "∞"
    if letters in _SMALL_UNITS:
        return "\0"
    if not prose and len(letters) <= 3:
        return letters
    before, after = match.string[: match.start()][-1:], match.string[match.end() :][:1]
    if re.match(r"[0-9)}_^]", before) or re.match(r"[(\[{_0-9]", after):
        raise UnreadableError(f"{letters} is not a separate word")
    return _word(match)


class _FormulaParser:
    """A recursive descent parser with one method per grammar rule. Raises UnreadableError for text that matches no rule."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.decimals: dict[Any, Any] = {}
        self.depth = self.bars = 0
        self.plus_minus = 1
        self.divided = False

    def statement(self) -> Any:
        """Parses the whole text. If it contains a plus-minus sign, returns both values."""
        found = self._all()
        if not set("±∓") & set(self.text):
            return found
        self.at, self.plus_minus = 0, -1
        other = self._all()
        if isinstance(found, Several) and found.opened in ("", r"\{"):
            return Several(found.opened, found.items + other.items, found.closed)
        return Several("", (found, other), "")

    def _all(self) -> Any:
        found = self._items()
        if self._take(r"\S"):
            raise UnreadableError(f"at {self.text[self.at - 1 :]!r}")
        return found[0] if len(found) == 1 else Several("", tuple(found), "")

    def _take(self, pattern: str) -> re.Match[str] | None:
        match = re.compile(rf"\s*(?:{pattern})").match(self.text, self.at)
        if match:
            self.at = match.end()
        return match

    def _sees(self, pattern: str) -> bool:
        return re.compile(rf"\s*(?:{pattern})").match(self.text, self.at) is not None

    def _need(self, pattern: str) -> None:
        if not self._take(pattern):
            raise UnreadableError(f"expected {pattern} at {self.text[self.at :]!r}")

    def _items(self) -> list[Any]:
        found = [self._relation()]
        while self._take("[,;\2]"):
            found.append(self._relation())
        return found

    def _relation(self) -> Any:
        sides, signs = [self._union()], []
        while sign := self._take(r"<=|>=|[=<>≤≥≠≈∈]"):
            signs.append({"<=": "≤", ">=": "≥", "∈": "="}.get(sign[0].strip(), sign[0].strip()))
            sides.append(self._union())
        if "≈" in signs:
            # Keeps the exact sides before the first ≈. If there is only a name such as x before it, keeps the value after it, too.
            exact = signs.index("≈")
            end = exact + 2 if exact == 0 and is_name(sides[0]) else exact + 1
            sides, signs = sides[:end], ["="] * (end - 1)
        return Relation(tuple(sides), tuple(signs)) if signs else sides[0]

    def _union(self) -> Any:
        parts = [self._sum()]
        while self._take(UNION):
            parts.append(self._sum())
        if len(parts) == 1:
            return parts[0]
        if not all(isinstance(part, Several) for part in parts):
            raise UnreadableError("a union of numbers")
        return Several(UNION, tuple(parts), "")

    def _sum(self) -> Any:
        found = None
        while found is None or self._sees("[-+±∓]"):
            sign = self._sign()
            term = self._product()
            if found is None and sign == 1:
                found = term
            else:
                found = _number(0 if found is None else found) + sign * _number(term)
        return found

    def _sign(self) -> int:
        match = self._take("[-+±∓]")
        if match is None:
            return 1
        return {"-": -1, "±": self.plus_minus, "∓": -self.plus_minus}.get(match[0].strip(), 1)

    def _product(self) -> Any:
        self.divided = False
        found = self._factor()
        while True:
            if sign := self._take(r"\*(?!\*)|/"):
                factor = _number(self._sign() * _number(self._factor()))
                divided = sign[0].strip() == "/"
                if divided and factor == 0:
                    raise UnreadableError("a division by zero")
                found = _number(found) / factor if divided else _number(found) * factor
                self.divided = divided
            elif self._sees(r"[A-Za-zπ({√]|\\(?!\}|rangle)") or (not self.bars and self._sees(r"\|")):
                if self.divided:
                    raise UnreadableError("1/2x is ambiguous")
                found = _number(found) * _number(self._factor())
            else:
                return found

    def _factor(self) -> Any:
        found = self._base()
        if self._take("!"):
            found = _number(found)
            if self._sees("!") or not (found.is_Symbol or (found.is_Integer and 0 <= found <= 1000)):
                raise UnreadableError("a factorial that is not evaluated")
            found = sympy.factorial(found)
        if self._take(r"\^|\*\*"):
            found = _power(_number(found), _number(self._exponent()))
        if self._sees(r"\^|\*\*|!|_"):
            raise UnreadableError("a power of a power, or a number with a subscript")
        return found

    def _exponent(self) -> Any:
        sign = self._sign()
        return sign * _number(self._base() if self._sees(r"[({\\A-Za-zπ]") else self._numeral())

    def _argument(self) -> Any:
        r"""Parses the argument of \frac or \sqrt: a group, a digit, a letter or a command."""
        if digit := self._take("[0-9]"):
            return sympy.Integer(digit[0].strip())
        if not self._sees(r"[{(A-Za-zπ\\]"):
            raise UnreadableError("no argument")
        return _number(self._base())

    def _base(self) -> Any:
        if self._take(r"\\frac(?![A-Za-z])"):
            over, under = self._argument(), self._argument()
            if under == 0:
                raise UnreadableError("a division by zero")
            return over / under
        if self._take(r"\\binom(?![A-Za-z])"):
            above, below = self._argument(), self._argument()
            if not all(each.is_Integer and 0 <= each <= 1000 for each in (above, below)):
                raise UnreadableError("a binomial coefficient that is not evaluated")
            return sympy.binomial(above, below)
        if self._take(r"\\sqrt(?![A-Za-z])|√"):
            root = sympy.Integer(2)
            if self._take(r"\["):
                root = _number(self._sum())
                self._need(r"\]")
            long = self.text[self.at - 1] == "√" and self._sees("[0-9]")
            return _power(self._numeral() if long else self._argument(), root**-1)
        if self._take("⟦"):
            return self._matrix()
        if name := self._take(rf"\\({'|'.join(_FUNCTIONS)})(?![A-Za-z])"):
            return self._function(name[1])
        if name := self._take(rf"\\({'|'.join(_GREEK)})(?![A-Za-z])|([A-Za-z])"):
            return self._letter(name[1] or name[2])
        if self._take("π"):
            return sympy.pi
        if self._take("∞"):
            return sympy.oo
        if self._take(r"\|"):
            self.bars += 1
            found = sympy.Abs(_number(self._sum()))
            self.bars -= 1
            self._need(r"\|")
            return found
        if opened := self._take(r"\(|\[|\\\{|\{|\\langle"):
            return self._bracket(opened[0].strip())
        return self._mixed()

    def _bracket(self, opened: str) -> Any:
        bars, self.bars, divided = self.bars, 0, self.divided
        self.depth += 1
        items = self._items()
        self.depth -= 1
        self.bars, self.divided = bars, divided
        closed = self._take({"{": r"\}", r"\{": r"\\\}", r"\langle": r"\\rangle"}.get(opened, r"[)\]]"))
        if closed is None:
            raise UnreadableError("a bracket that is not closed")
        pair = (opened, closed[0].strip())
        if len(items) == 1 and pair in (("(", ")"), ("{", "}")):
            return items[0]
        if pair == ("{", "}"):
            pair = (r"\{", r"\}")
        return Several(pair[0], tuple(items), pair[1])

    def _matrix(self) -> Several:
        self.depth += 1
        rows = [[self._sum()]]
        while sign := self._take("&|\1"):
            if sign[0].strip() == "&":
                rows[-1].append(self._sum())
            elif not self._sees("⟧"):
                rows.append([self._sum()])
        self.depth -= 1
        self._need("⟧")
        return Several("matrix", tuple(Several("(", tuple(row), ")") for row in rows), "")

    def _function(self, name: str) -> Any:
        base, power = (), None
        if name == "log" and self._take("_"):
            base = (self._argument(),)
        if self._take(r"\^"):
            power = _number(self._exponent())
            if power == -1 and name in ("sin", "cos", "tan"):
                name, power = f"arc{name}", None
            elif not power.is_positive:
                raise UnreadableError("sin^-2 is ambiguous")
        # sin(x)^2 is the square of the sine, but sin x^2 is the sine of x^2. In sin 2x, the argument is the product 2x.
        bracketed = self._sees(r"[({]")
        argument = _number(self._base() if bracketed else self._factor())
        while not bracketed and self._sees(rf"[A-Za-zπ]|\\(?:frac|sqrt|{'|'.join(_GREEK)})(?![A-Za-z])"):
            argument *= _number(self._factor())
        found = _FUNCTIONS[name](argument, *base)
        return _number(found) if power is None else _power(_number(found), power)

    def _letter(self, name: str) -> Any:
        if index := self._take(r"_\s*(?:\{([A-Za-z0-9+\-, ]*)\}|([A-Za-z0-9]))"):
            return sympy.Symbol(f"{name}_{(index[1] or index[2] or '').replace(' ', '')}", real=True)
        if name in "ei" and len(name) == 1:
            return sympy.E if name == "e" else sympy.I
        if name in "fgh" and self._take(r"\("):
            argument = _number(self._bracket("("))
            return sympy.Function(name)(argument)
        return sympy.Symbol(name, real=True)

    def _mixed(self) -> Any:
        start = self.at
        found = self._numeral()
        if not self.text[start : self.at].strip().isdigit():
            return found
        part = self._take(r"(?<=[0-9])\s+([0-9]+)\s*/\s*([0-9]+)(?![0-9.,]*[0-9])")
        if part:
            self.divided = True
        else:
            part = self._take(r"\\frac\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))")
        if not part:
            return found
        over, under = [int(group) for group in part.groups() if group]
        if not 0 < over < under:
            raise UnreadableError("neither a mixed number nor clearly a product")
        return found + sympy.Rational(over, under)

    def _numeral(self) -> Any:
        if part := self._take(_REPEATING.pattern):
            whole, fixed, again = part[1] or "0", part[2], part[3] or part[4]
            nines = 10 ** len(again) - 1
            return sympy.Rational(int(whole + fixed) * nines + int(again), nines * 10 ** len(fixed))
        part = self._take(NUMERAL.pattern if self.depth else GROUPED.pattern)
        if part is None:
            raise UnreadableError("no number")
        text = part[0].strip()
        found = sympy.Rational(*value(text).as_integer_ratio())
        mantissa, _, exponent = text.lower().partition("e")
        whole, point, places = mantissa.partition(".")
        if point and len((whole + places).lstrip("0")) >= SIGNIFICANT:
            self.decimals[found] = sympy.Rational(10) ** (int(exponent or 0) - len(places))
        return found


def is_name(side: Any) -> bool:
    """Returns whether a side of an equation is a name for the other side, as in `x = 5`, `f(2) = 5`, `a + b = 5` or `x^2 = 5`, but not in `2x = 5`."""
    if isinstance(side, Several):  # (x, y) = (1, 2)
        return all(isinstance(item, sympy.Symbol) for item in side.items)
    if not isinstance(side, sympy.Expr):
        return False
    terms: tuple[Any, ...] = sympy.Add.make_args(side)
    pairs = (term.as_coeff_Mul() for term in terms)
    return all(abs(factor) == 1 and not rest.is_number for factor, rest in pairs)


def _number(found: Any) -> Any:
    if not isinstance(found, sympy.Expr) and not isinstance(found, int):
        raise UnreadableError("arithmetic with lists or relations")
    if isinstance(found, sympy.Expr) and found.has(sympy.nan, sympy.zoo):
        raise UnreadableError("an undefined value")
    return found


def _power(base: Any, exponent: Any) -> Any:
    """Returns a power. Raises UnreadableError if it would be very large, because responses are untrusted."""
    if exponent.is_Rational:
        size = abs(exponent)
        if base.is_Rational:
            bits = max(abs(base.p), base.q).bit_length()
            if bits > 1 and bits * size > MOST_BITS:
                raise UnreadableError("a very large power")
        elif size > (50 if base.is_Add else 1000):
            raise UnreadableError("a very large power")
    if base == 0 and not exponent.is_positive:
        raise UnreadableError("an undefined value")
    return base**exponent
