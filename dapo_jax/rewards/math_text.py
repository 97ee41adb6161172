"""Rewrites answers in one notation for `math_reader.py`, and compares them as text, without sympy, which loads slowly."""

import re
from functools import lru_cache

from dapo_jax.rewards import numerals

UNION, WITHOUT = "\u222a", "\u2216"
_COMMANDS = {
    name: written for names, written in (
        ("left right displaystyle textstyle limits big Big bigg Bigg bigl bigr Bigl Bigr boxed fbox quad qquad thinspace"
         " scriptstyle bf it rm tt sf tiny small normalsize large Large LARGE huge Huge blacksquare qed nonumber notag", " "),
        ("dfrac tfrac cfrac nicefrac sfrac", r"\frac"), ("dbinom tbinom", r"\binom"), ("times cdot ast", "*"), ("div", "/"), ("pm", "±"), ("mp", "∓"), ("lt", "<"), ("gt", ">"),
        ("le leq leqslant", "≤"), ("ge geq geqslant", "≥"), ("ne neq", "≠"), ("approx", "≈"), ("in", "∈"), ("cup", UNION), ("setminus backslash", WITHOUT), ("lvert rvert vert mid", "|"),
        ("dots ldots cdots dotsc", "…"), ("infty", "∞"), ("pi", "π"), ("degree", "°"), ("imath", "i"), ("lbrace", r"\{"), ("rbrace", r"\}"),
        ("varnothing", r"\emptyset"), ("colon", ":"), ("measuredangle", r"\angle"), ("overrightarrow", r"\vec"),
    ) for name in names.split()
}  # fmt: skip
"""Replacements for LaTeX commands, by command name. Commands that are not listed are kept."""
_MONEY = re.compile(r"(?<![0-9.,])(?:\bUS\s*)?(?:\\\$|[€£¥₹])|(?:\\\$|[€£¥₹¢])(?![0-9.,])")
_ONE_DOLLAR = re.compile(r"^\s*([-+]?)\s*\$|(?<=[^0-9]\s)\$(?=[0-9.])|(?<=\()\$(?=[0-9.])|\$\s*$")
UPRIGHT = r"\\(text(?:normal|bf|rm|it|sf|tt|sc|up|md)?|mbox|math(?:rm|bf|it|sf|tt)|boldsymbol|bm|operatorname)\s*\{([^{}]*)\}"
_PERCENT = r"\\%|\\(?:text|mathrm)\s*\{\s*(?:percent|per cent|pct|\\?%)\s*\}|(?<![A-Za-z])(?:percent|per cent|pct)(?![A-Za-z])"
END = re.compile(r"(?:(?<![.,;])[.,;]|\s)+$")
_INVISIBLE = re.compile(
    r"\\(?:[hv]space\*?|tag\*?|label)\s*\{[^{}]*\}|\\(?:text)?color\s*(?:\[\w*\]\s*)?\{[^{}]*\}(?=\s*[^\s}])"
)
"""Matches spaces, labels and colours, which do not change an answer. A colour is followed by the text that it colours."""
_ALIGNED = re.compile(
    r"\\begin\s*\{((?:align(?:ed)?|gather(?:ed)?|equation|split|cases)\*?)\}((?:(?!\\begin|\\end).)*)\\end\s*\{\1\}",
    re.DOTALL,
)
_NEXT_SIDE = r"[=<>≤≥≈]|\\(?:leq?|geq?|leqslant|geqslant|lt|gt|approx)(?![A-Za-z])"
_INFIX = r"\{((?:[^{}]|\{[^{}]*\})*?)\\(over|choose)(?![A-Za-z])((?:[^{}]|\{[^{}]*\})*)\}"
_CHOICE = r"(?:\([A-J]\)|[A-J])"
_LABEL = re.compile(
    r"\s*(?:(?i:option|choice)\s+)?(?:[(\[]([A-J])[)\]](?=[\s.:]|$)|([A-J])(?:[.:)](?=\s|$)|$))\s*[.:]?\s*(.*?)\s*",
    re.DOTALL,
)
"""Matches a choice with its label, such as (B) 7. The groups are the letter, in one of two, and the content."""
_NO_CONTENT = re.compile(
    r"[-+*/^_=<>≤≥≠≈±|!,;&°%]|(?:is|are|was|isn't|can|cannot|does|or|and|nor|but|if|not|plus|minus|times)\b"
    r"|.*(?<![A-Za-z\\])[A-J](?![A-Za-z])",
    re.DOTALL,
)
"""Matches texts after a letter that are not the content of one choice, such as the rest of a formula, or further letters."""
_NUMBERS = {"R": "\u211d", "Z": "\u2124", "N": "\u2115", "Q": "\u211a", "C": "\u2102"}
_WHOLE_TEXTS = {
    r"(?:all|any|every) real numbers?|all reals": "\u211d",
    r"(?:there (?:is|are) |the (?:equation|inequality|system) has )?no (?:real )?(?:solutions?|roots?)|(?:the )?empty set": r"\\emptyset",
    r"(?:the limit |it )?(?:does not|doesn['\u2019]t) exist|DNE": r"\\text{DNE}",
}
"""Replacements for texts in words as a whole, also in upright type."""
_NAMES_OF_BASES = (
    "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
)
_BASES = {word: base for base, word in enumerate(_NAMES_OF_BASES.split(), 2)}
_BASE = rf"_\s*\{{\s*(?:\\(?:text|mathrm)\s*\{{\s*)?({'|'.join(_BASES)})\s*\}}(?:\s*\}})?"
_MODULUS = r"(\()?\s*(?:\\[pb]?mod|\\text\s*\{\s*mod\s*\}|(?<![A-Za-z\\])mod)(?![A-Za-z])\s*\{?\s*(\w+)\s*\}?\s*(?(1)\))"
_MATRIX = r"\\(begin|end)\s*\{(?:(?:small|[pb])?matrix|array)\}(?:\s*\{[lcr| ]*\})?"


def text_form(text: str) -> str:
    r"""Removes wrappers, white space and punctuation, and writes words in lower case, so that answers can be compared as text.

    >>> text_form(r"$\text{ Blue }.$"), text_form(r"2516_{8}"), text_form(r"\left( 3, 4 \right)"), text_form("B and D")
    ('blue', '2516_8', '(3,4)', 'BD')
    """
    text = re.sub(r"\s+", " ", re.sub(UPRIGHT, r" \2 ", simplified(text))).strip()
    text = re.sub(r"^(?:\$\$?|\\[(\[])\s*(.*?)\s*(?:\$\$?|\\[)\]])(?=[.,;]?$)", r"\1", text)
    if not re.search(r"[+*/^_=<>|\\]", text):  # letters between operators are variables
        text = re.sub(r"[A-Za-z]{2,}", lambda run: run[0].lower() if is_word(run[0]) else run[0], text)
    # A space between digits or decimal points, or between a comma and three digits, separates two numbers.
    text = re.sub(r" (?<![0-9.] (?=[0-9.]))(?<!, (?=[0-9]{3}(?![0-9])))", "", text)
    text = re.sub(r"([_^])\{(\w)\}|(?<=[0-9A-F])(_)\{([0-9]{2})\}$", r"\1\2\3\4", END.sub("", text))
    text = re.sub(r"^\(([0-9A-F]+)\)(?=_[0-9]+$)", r"\1", text)
    text = re.sub(r'^["“](.*)["”]$', r"\1", text)
    text = re.sub(r"(?i)(?<=[0-9])([ap])\.?m\b\.?$", lambda time: f"{time[1].lower()}m", text)
    if re.fullmatch(rf"{_CHOICE}(?:(?:\\?[,;&]|and)+{_CHOICE})+", text):  # several choices, such as B,D
        return re.sub("and|[^A-J]", "", text)
    return re.sub(r"^\(([A-Za-z]+)\)$", r"\1", re.sub(r"^\{([^{]*)\}$", r"\1", text))


def labelled(text: str) -> tuple[str, str] | None:
    r"""Returns the letter and the content of a choice with its label, or None for any other text.

    >>> labelled(r"\textbf{(B) }7"), labelled("C. Paris"), labelled("Option D"), labelled("(A) and (C)"), labelled("(A) + 1")
    (('B', '7'), ('C', 'Paris'), ('D', ''), None, None)
    """
    text = re.sub(rf"^[\s$]*{UPRIGHT}", r" \2 ", simplified(text)).strip("$ ")
    choice = _LABEL.fullmatch(text[1:-1] if text[:1] + text[-1:] == "{}" else text)
    return None if choice is None or _NO_CONTENT.match(choice[3]) else (choice[1] or choice[2], choice[3])


def is_word(text: str) -> bool:
    """Returns whether a text is a word, not variables. A word of four or more letters holds a vowel and a letter after e."""
    if len(text) <= 3:
        return text.lower() in ("no", "yes", "odd", "all", "any", "red", "one", "two", "six", "ten")
    letters = re.fullmatch("(?i)(?=.*[aeiou])(?=.*[f-z])[a-z,.'()-]+", text)
    return letters is not None and (text.isupper() or text[1:].islower())


@lru_cache(maxsize=4096)
def simplified(text: str) -> str:
    """Replaces alternative notations by a single one, and removes currency signs and spacing commands."""
    text = _INVISIBLE.sub(" ", numerals.plain(text)).replace("{:}", ":")
    text = _ALIGNED.sub(
        _in_one_line, re.sub(_INFIX, _prefixed, text) if r"\over" in text or r"\choose" in text else text
    )
    # In a matrix, a double backslash separates rows. Elsewhere it is a backslash that was escaped twice.
    text = text.replace("\\\\", "\1" if re.search("matrix|array", text) else "\\")
    text = re.sub(_MATRIX, lambda match: "⟦(" if match[1] == "begin" else ")⟧", text)
    if "⟦" in text:
        text = re.sub(r"\x01\s*(?=\)⟧)", "", text.replace("&", ",")).replace("\1", "),(")
    text = re.sub(
        r"\\mathbb\s*(?:([RZNQC])|\{\s*([RZNQC])\s*\})", lambda name: _NUMBERS[name[1] or name[2]], text
    )
    for words, meaning in _WHOLE_TEXTS.items():
        text = re.sub(rf"\A[\s$]*(?:\\(?:text|mathrm)\s*\{{)?\s*(?i:{words})\s*\}}?[\s$.]*\Z", meaning, text)
    text = re.sub(r"\u211d\s*(?:-|\\(?=\s))\s*(?=\\\{)", f"\u211d{WITHOUT}", text)
    text = re.sub(r"\\\{\s*(?:\\right\s*)?\\\}", r"\\emptyset", text)
    text = re.sub(_MODULUS, r"\\pmod{\2}", re.sub(_BASE, lambda match: f"_{{{_BASES[match[1]]}}}", text))
    text = re.sub(r"\\dot\s*\{(\d)\}(\d*)\\dot\s*\{(\d)\}", r"\\overline{\1\2\3}", text)
    text = re.sub(r"\(\s*([fgh])\s*\\circ\s*([fgh])\s*\)\s*\(([^()]*)\)", r"\1(\2(\3))", text)
    text = re.sub(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})", "°", text)
    text = re.sub(r"(?<=[0-9])\s*[xX]\s*(?=10\s*\^)", "*", _MONEY.sub(" ", text))
    text = numerals.in_digits(numerals.joined_thousands(text))
    text = re.sub(r"\\([A-Za-z]+)", lambda match: _COMMANDS.get(match[1], match[0]), text)
    text = re.sub(r"\.{3,}", "…", re.sub(r"\s!=", "≠", re.sub(_PERCENT, "%", text)))
    if text.count("$") == 1:
        text = _ONE_DOLLAR.sub(r" \1", text)  # a currency sign
    return re.sub(r"(?:\\[,;:! ]|~|\s)+", " ", text)


def _prefixed(match: re.Match[str]) -> str:
    r"""Writes {a \over b} and {a \choose b} as commands with two arguments."""
    return rf"\{'frac' if match[2] == 'over' else 'binom'}{{{match[1]}}}{{{match[3]}}}"


def _in_one_line(match: re.Match[str]) -> str:
    """Joins the rows of an alignment. A row that begins with a sign such as = continues the row before it; other rows are items of a list."""
    name, rows = match[1], match[2]
    if name == "cases" and "&" in rows:  # a function with conditions, which is compared as text
        rows = re.sub(r",?\s*&\s*(?:\\text\s*\{\s*(?:if|for|when)\s*\})?", "&", rows)
        return re.sub(r"[,;]?\s*\\\\", "\1", f"{name}({rows})")
    rows = re.sub(r"\s*\\\\(?:\[[^\]]*\])?\s*", "\1", rows.replace("&", " ")).strip("\1 \n,")
    return re.sub(rf",?\x01\s*({_NEXT_SIDE})|,?\x01", lambda row: f" {row[1]}" if row[1] else ", ", rows)
