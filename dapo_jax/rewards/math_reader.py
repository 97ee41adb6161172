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
from sympy.core.function import AppliedUndef

from dapo_jax.rewards.numerals import COPULA, FILLER, GROUPED, NUMERAL, PER_AREA, UNIT, WORD, placeholder, plain, value

MOST_BITS = 20_000
"""Maximum size in bits of a power such as 2^1000. An answer with a larger power is not parsed."""
SIGNIFICANT = 6
"""A decimal with at least this many significant digits also equals every number that rounds to it, such as 1/3 for 0.333333."""


class UnreadableError(ValueError):
    """The text cannot be parsed as a whole."""


@dataclass(frozen=True)
class Several:
    """Several values: an interval `(1,2]`, a tuple, a set, a matrix (`opened="matrix"`), a union (`UNION`), or a list without brackets.

    `closed` is "or" for a list without brackets whose items are separated by this word.
    """

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
    """The parsed meaning of a text. `decimals` maps each decimal with at least six significant digits to the place value of its last digit.

    `undone` is True if a sum, a product or a quotient of numbers is left to be worked out, as in 17*23.
    """

    value: Any
    percent: bool
    decimals: dict[Any, Any]
    undone: bool


UNION = "\u222a"


def _each(names: str, written: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), written)


_COMMANDS = {
    **_each("left right displaystyle textstyle limits big Big bigg Bigg bigl bigr Bigl Bigr boxed fbox", " "),
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
_UNIT_LETTERS = frozenset("mgshLlJNWVACF")
"""One-letter units in upright type, as in \\text{m}. A letter in italics is a variable."""

_COMMAND = re.compile(r"\\([A-Za-z]+)")
_MONEY = re.compile(r"(?<![0-9.,])(?:\bUS\s*)?(?:\\\$|[€£¥₹])|(?:\\\$|[€£¥₹¢])(?![0-9.,])")
_ONE_DOLLAR = re.compile(r"^\s*([-+]?)\s*\$|(?<=[^0-9]\s)\$(?=[0-9.])|(?<=\()\$(?=[0-9.])|\$\s*$")
_JOINED_THOUSANDS = re.compile(
    r"(?<![0-9.,])[1-9][0-9]{0,2}(?: ?(?:\{,\}|,\\!|\\[,;:! ]|~)\s?[0-9]{3})+(?![0-9])|(?<![0-9.,])[1-9][0-9]{0,2}(?: [0-9]{3})+(?![0-9]|\s*/)"
)
_SPACING = re.compile(r"(?:\\[,;:! ]|~|\s)+")
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\(?:overline|bar|dot)\s*(?:\{([0-9]+)\}|([0-9]))")
_UPRIGHT = re.compile(r"\\(text[a-z]*|mbox|math(?:rm|bf|it|sf|tt)|boldsymbol|operatorname)\s*\{([^{}]*)\}")
_CONJUNCTION = re.compile(r",?\s*(?<![A-Za-z\\])(and|or)(?![A-Za-z])\s*,?")
_PERCENT = re.compile(
    r"\\%|(?:\\(?:text|mathrm)\s*\{\s*)?(?<![A-Za-z])(?:percent|per cent|pct)(?![A-Za-z])(?:\s*\})?"
)
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}[,.]?\s+[A-Za-z]{2,}")
_BARE = re.compile(rf"(?:\\[A-Za-z]+|§_\{{\w+\}})|{WORD.pattern}")
_DECIMAL_COMMA = "([0-9]{4,}),([0-9]{1,2})(?![0-9.,])"
"""A comma after four or more digits and before one or two, which cannot separate thousands, is a decimal comma."""
_POWER_OF_TEN = r"10\s*(?:\^|\*\*)"
_FIGURE = re.compile(r"(?:\bm\s*)?\\(angle|triangle|overline|vec)\s*\{?\s*([A-Z0-9]{2,4}|[A-Z])(?![A-Za-z])\s*\}?|\|\s*([A-Z]{2})\s*\|(?=\s*=)")
"""Names such as \\angle ABC or |AB|. The symbol § with the name as its index replaces them."""
_END = re.compile(r"(?:(?<![.,;])[.,;]|\s)+$")
_MARKS = re.compile(r"\$\$?|\\[()\[\]]")
_AFTER_NUMBER = rf"{UNIT}(?:\s*\^\s*\{{?[23]\}}?)?(?:\s*/\s*(?:{UNIT}|[{''.join(_UNIT_LETTERS)}](?![A-Za-z]))(?:\^\{{?[23]\}}?)?)?"
_PLACEHOLDERS = re.compile(rf"({FILLER}|{COPULA}|(?:{PER_AREA}\s*)?{_AFTER_NUMBER})")
_MATRIX = re.compile(
    r"(\\begin)\s*\{(?:small|[pb])?matrix\}|\\end\s*\{(?:small|[pb])?matrix\}"
    r"|(?:\\left\s*)?[\[(]\s*(\\begin)\s*\{array\}\s*\{[lcr| ]*\}|\\end\s*\{array\}\s*(?:\\right\s*)?[\])]"
)


def text_form(text: str) -> str:
    r"""Removes wrappers, white space and punctuation, and writes words in lower case, so that answers can be compared as text.

    >>> text_form(r"$\text{ Blue }.$"), text_form(r"2516_{8}"), text_form(r"\left( 3, 4 \right)"), text_form("CBA")
    ('blue', '2516_8', '(3,4)', 'CBA')
    """
    found = _UPRIGHT.sub(r" \2 ", _simplified(text)).strip()
    found = re.sub(r"^(?:\$\$?|\\[(\[])|(?:\$\$?|\\[)\]])(?=[.,;]?$)", "", re.sub(r"\s+", " ", found)).strip()
    if not re.search(r"[+*/^_=<>|\\]", found):  # letters between operators are variables
        found = re.sub(r"[A-Za-z]{2,}", lambda run: run[0].lower() if is_word(run[0]) else run[0], found)
    # A space between digits or decimal points, or between a comma and three digits, separates two numbers.
    found = re.sub(r" (?<![0-9.] (?=[0-9.]))(?<!, (?=[0-9]{3}(?![0-9])))", "", found)
    found = re.sub(r"([_^])\{(\w)\}", r"\1\2", _END.sub("", found))
    found = re.sub(r"^\{(.*)\}$", r"\1", found) if found.count("{") == 1 else found
    return re.sub(r"^\(([A-Za-z]+)\)$", r"\1", found)


def same_text(found: str, gold: str) -> bool:
    """Compares two results of `text_form`. Case is ignored if the reference `gold` consists of words."""
    words = re.fullmatch(r"[a-z ,.'()-]+", gold) and is_word(gold)
    return found == gold or (bool(words) and found.lower() == gold)


def is_word(letters: str) -> bool:
    """Returns whether letters are a word, not a product of variables. Two or three letters are a word if they hold a vowel and a letter after e."""
    if letters.isupper() and len(letters) <= 3:
        return False
    return letters[1:].islower() and len(letters) > 3 or bool(re.search("[aeiou]", letters, re.I) and re.search("[f-z]", letters, re.I))


def _simplified(text: str) -> str:
    """Replaces alternative notations by a single one, and removes currency signs and spacing commands."""
    text = plain(text).translate(_SIGNS)
    # In a matrix, a double backslash separates rows. Elsewhere it is a backslash that was escaped twice.
    text = text.replace("\\\\", "\1" if re.search("matrix|array", text) else "\\")
    text = _MATRIX.sub(lambda match: "⟦" if match[1] or match[2] else "⟧", text)
    text = re.sub(r"\\mathbb\s*\{?\s*R\s*\}?", "ℝ", re.sub(r"\^\s*\{?\s*\\circ\s*\}?", "°", text))
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
    if re.search("[\0-\5§]", text):  # this module uses these characters as placeholders
        return None
    try:
        core, percent = _core(_simplified(text))
        reader = _FormulaParser(core)
        found = reader.statement()
        return ReadAnswer(found, percent, reader.decimals, reader.undone)
    except (UnreadableError, RecursionError, ArithmeticError, TypeError, ValueError):
        return None


def _core(text: str) -> tuple[str, bool]:
    """Removes words and units from a text. Returns the remaining formula and whether it is a percentage. The text must contain exactly one formula."""
    text = re.sub(r"\\(?:text|mbox|mathrm)\s*\{\s*(and|or)\s*\}", r" \1 ", text)
    text = _CONJUNCTION.sub(lambda match: "\2" if match[1] == "or" else ",", text)
    text = _FIGURE.sub(lambda match: f"§_{{{match[1] or ''}{match[2] or match[3]}}}", text)
    text = _UPRIGHT.sub(_upright, text)
    parts = _MARKS.split(text)
    if len(parts) % 2 == 0:
        raise UnreadableError("a formula that is not closed")
    # Text between math delimiters is mathematics, and all letters outside them are prose.
    prose = len(parts) == 1 and bool(_PROSE.search(text))
    for place in range(len(parts)):
        if place % 2 or not prose and len(parts) == 1:
            parts[place] = _BARE.sub(lambda match: _letters(match, prose), parts[place])
        else:
            part = re.sub(r"(?<!\S)[aAI](?=\s+[A-Za-z]{2})", "the", parts[place])
            parts[place] = _BARE.sub(lambda match: _letters(match, prose), part) if prose else WORD.sub(_word, part)
    text = f" {' '.join(parts)} "
    text = re.sub(rf"\(\s*{UNIT}\s*\)", UNIT, text)
    text = re.sub(rf"(?<!\S)[A-Za-z]\s+(?={COPULA})", " ", text)  # a name, as in "the value of x is 5"
    pieces = [re.sub(r'^\s*(["`])(.*)\1\s*$', r"\2", piece) for piece in _PLACEHOLDERS.split(text)]
    pieces = [_END.sub("", piece.lstrip(" ,;:")) for piece in pieces]
    where = [place for place in range(0, len(pieces), 2) if pieces[place]]
    if len(where) != 1:
        raise UnreadableError("no mathematics, or several pieces")
    core, before, after = pieces[where[0]], pieces[: where[0]], pieces[where[0] + 1 :]
    if UNIT in "".join(before) or (core.endswith("%") and UNIT in "".join(after)):
        raise UnreadableError("a unit before the number, or after a percentage")
    if before and re.match(r"[-+*/^_!|] |[+*/^_!]", core):
        raise UnreadableError("a word is a part of the formula")
    core = (core.lstrip("= ") if before else core).removeprefix("≈")
    return re.sub(r"\s*%$", "", core), core.endswith("%")


def _word(match: re.Match[str]) -> str:
    """Returns the placeholder of a word in prose. A single letter remains, because it may be a name."""
    found = placeholder(match[0]) or (match[0] if len(match[0]) == 1 else "")
    if not found:
        raise UnreadableError(f"{match[0]} may change the number")
    return found


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
    return f" {WORD.sub(lambda word: UNIT if word[0] in _UNIT_LETTERS else _word(word), inner)} "


def _letters(match: re.Match[str], prose: bool) -> str:
    """Replaces letters outside math delimiters. They may be a command, a word, the name of a figure such as AB, or a product of variables."""
    letters = match[0]
    if letters[0] in "\\§" or len(letters) == 1:
        return letters
    before, after = match.string[: match.start()][-1:], match.string[match.end() :]
    if letters == "sec" and not after.strip(" .$"):
        return UNIT  # "sec" at the end of the text means seconds; elsewhere, it is the secant function
    if letters in _FUNCTIONS or letters == "sqrt":
        return rf"\{letters}"
    if letters in ("pi", "infinity", "infty"):
        return "π" if letters == "pi" else "∞"
    found = placeholder(letters)
    joined = re.match(r"[0-9)}_^]", before) or re.match(r"[(\[{_^0-9]|\s*=", after)
    if found == UNIT and before not in tuple("_^}") or (found and (prose or not joined)):
        return found
    if letters.isupper() and re.match(r"\s*[=≈]", after):
        return f"§_{{{letters}}}"
    if prose or len(letters) > 3 or letters.isupper() or "'" in letters:
        raise UnreadableError(f"{letters} is not known")
    return letters


class _FormulaParser:
    """A recursive descent parser with one method per grammar rule. Raises UnreadableError for text that matches no rule."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.decimals: dict[Any, Any] = {}
        self.depth = self.bars = self.angle = 0
        self.plus_minus = 1
        self.divided = self.undone = False

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
        closed = "or" if self.text.count("\2") == len(found) - 1 else ""
        return found[0] if len(found) == 1 else Several("", tuple(found), closed)

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
        undone, self.undone = self.undone, False
        sides, signs, numbers = [self._union()], [], []
        while True:
            if not isinstance(sides[-1], sympy.Expr) or sides[-1].is_number:
                numbers.append(self.undone)
            sign, self.undone = self._take(r"<=|>=|[=<>≤≥≠≈∈]"), False
            if not sign:
                break
            signs.append({"<=": "≤", ">=": "≥", "∈": "="}.get(sign[0].strip(), sign[0].strip()))
            sides.append(self._union())
        # In x = 17*23 = 391, the number is worked out.
        self.undone = undone or (bool(numbers) and all(numbers))
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
        found, numbers = None, 0
        while found is None or self._sees("[-+±∓]"):
            plus = found is not None and self._sees(r"\+\s*-")
            sign = self._sign() * (self._sign() if plus else 1)
            term = self._product()
            numbers += isinstance(term, sympy.Rational)
            self.undone |= numbers > 1
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
        tens = self._sees(_POWER_OF_TEN)
        found = self._factor()
        over, under = [tens] * isinstance(found, sympy.Rational), 0
        while True:
            # Two factors that are numbers are left to be worked out, except in 3*10^8.
            self.undone |= len(over) > 2 or (len(over) == 2 and sum(over) != 1) or under > 1
            tens = self._sees(r"\*?\s*" + _POWER_OF_TEN)
            if sign := self._take(r"\*(?!\*)|/"):
                factor = _number(self._sign() * _number(self._factor()))
                divided = sign[0].strip() == "/"
                if divided and factor == 0:
                    raise UnreadableError("a division by zero")
                found = _number(found) / factor if divided else _number(found) * factor
                self.divided = divided
                if factor.is_Rational:
                    over, under = (over, under + 1) if divided else ([*over, tens], under)
            elif self._sees(r"[A-Za-zπ§({√]|\\(?!\}|rangle)") or (not self.bars and self._sees(r"\|")):
                if self.divided:
                    raise UnreadableError("1/2x is ambiguous")
                factor = _number(self._factor())
                found = _number(found) * factor
                over = [*over, False] if factor.is_Rational else over
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
        if self._take(r"°\s*[CF]?(?=\s*(?:[,;)\]\2=≈%]|\\\}|$))"):
            return _number(found) * sympy.pi / 180 if self.angle else found
        if self.angle and self._take("°"):
            return _number(found) * sympy.pi / 180
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
        if name := self._take(rf"\\({'|'.join(_GREEK)})(?![A-Za-z])|([A-Za-z§])"):
            return self._letter(name[1] or name[2])
        if self._take("π"):
            return sympy.pi
        if self._take("∞"):
            return sympy.oo
        if self._take("ℝ"):
            return Several("(", (-sympy.oo, sympy.oo), ")")
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
        self.angle += 1
        argument = _number(self._base() if bracketed else self._factor())
        while not bracketed and self._sees(rf"[A-Za-zπ]|\\(?:frac|sqrt|{'|'.join(_GREEK)})(?![A-Za-z])"):
            argument *= _number(self._factor())
        self.angle -= 1
        found = _FUNCTIONS[name](argument, *base)
        return _number(found) if power is None else _power(_number(found), power)

    def _letter(self, name: str) -> Any:
        if index := self._take(r"_\s*(?:\{([A-Za-z0-9+\-, ]*)\}|([A-Za-z0-9]))"):
            return sympy.Symbol(f"{name}_{(index[1] or index[2] or '').replace(' ', '')}", real=True)
        if name in "ei" and len(name) == 1:
            return sympy.E if name == "e" else sympy.I
        if name not in "fgh" and (call := self._take(r"\(\s*([-0-9./]+|[A-Za-z§](?:\s*,\s*[A-Za-z])*)\s*\)(?=\s*[=≈])")):
            return sympy.Symbol(f"{name}({call[1]})", real=True)  # P(2) = 5 names a value
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
        part = self._take(NUMERAL.pattern if self.depth else rf"(?<!,){_DECIMAL_COMMA}|{GROUPED.pattern.replace('[, ]', ',')}")
        if part is None:
            raise UnreadableError("no number")
        text = re.sub(rf"^{_DECIMAL_COMMA}$", r"\1.\2", part[0].strip())
        found = sympy.Rational(*value(text).as_integer_ratio())
        mantissa, _, exponent = text.lower().partition("e")
        whole, point, places = mantissa.partition(".")
        if point and len((whole + places).lstrip("0")) >= SIGNIFICANT:
            self.decimals[found] = sympy.Rational(10) ** (int(exponent or 0) - len(places))
        return found


def is_name(side: Any) -> bool:
    """Returns whether a side of an equation is a name for the other side: one symbol, one call such as f(2), or a tuple of symbols."""
    if isinstance(side, Several):  # (x, y) = (1, 2)
        return side.opened == "(" and all(isinstance(item, sympy.Symbol) for item in side.items)
    return isinstance(side, sympy.Symbol | AppliedUndef)


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
    if exponent.is_Rational and exponent.q % 2 and not exponent.is_Integer and base.is_real and not base.is_nonnegative:
        # An odd root of a negative number is real, unlike the principal root.
        return sympy.Abs(base) ** exponent * (sympy.sign(base) if exponent.p % 2 else 1)
    return base**exponent
