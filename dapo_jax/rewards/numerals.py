"""Parses numbers in common notations for the graders `math` and `gsm8k`. Values are exact. A text that is not a number as a whole is not parsed."""

import re
from decimal import Decimal
from fractions import Fraction
from unicodedata import decimal, normalize, numeric

_GREEK = """alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega
    Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"""
_SIGNS = {
    "angle": "∠", "triangle": "△", "cap": "∩", "subset": "⊂", "subseteq": "⊆", "land": "∧", "lor": "\u2228", "neg": "¬", "to": "→",
    "emptyset": "∅", "lfloor": "⌊", "rfloor": "⌋", "lceil": "⌈", "rceil": "⌉", "equiv": "≡",
}  # fmt: skip
_PLAIN = str.maketrans({
    # Full-width ASCII is in the first line, hyphens, dashes and minus signs are in the second, spaces and invisible characters in the third.
    **{sign + 0xFEE0: sign for sign in range(33, 127)},
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212\ufe63\uff0d", "-"),
    **dict.fromkeys("\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u200b\u200c\u200d\u2060\ufeff\u00ad", " "),
    **dict.fromkeys("\u00d7\u00b7\u22c5\u2217\u2219", "*"),
    **dict.fromkeys("\u00f7\u2044\u2215", "/"), "≃": "≈", "\u066b": ".", "\u066c": ",", "。": ".", "、": ",", "⩽": "≤", "⩾": "≥",
    **dict.fromkeys("\u00ba\u02da", "°"), "℃": "°C", "℉": "°F",
    **{sign: f"\\{name} " for name, sign in _SIGNS.items()},
    **{sign: f"\\{name} " for sign, name in zip("αβγδεζηθικλμνξρστυφχψωΓΔΘΛΞΠΣΦΨΩ", _GREEK.split(), strict=True)},
    **{sign: "\\frac{{{}}}{{{}}}".format(*Fraction(numeric(sign)).limit_denominator(10).as_integer_ratio()) for sign in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒"},
})  # fmt: skip
_RAISED, _LOWERED = "⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹ⁿⁱ", "₊₋₀₁₂₃₄₅₆₇₈₉ₙᵢ"
_SHIFTED = re.compile(f"([{_RAISED}]+)|[{_LOWERED}]+")
_UNSHIFTED = str.maketrans(_RAISED + _LOWERED, "+-0123456789ni" * 2)

_EXPONENT = r"(?:[eE][-+]?[0-9]{1,4}(?![0-9.]))?"
NUMERAL = re.compile(rf"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+){_EXPONENT}")
"""Matches digits with an optional decimal point and an optional exponent, as in 3e8."""
GROUPED = re.compile(
    rf"[1-9][0-9]{{0,2}}(?:(?:,[0-9]{{3}})+|(?: [0-9]{{3}})+)(?![0-9]|,[0-9])(?:\.[0-9]+)?{_EXPONENT}|{NUMERAL.pattern}"
)
"""Like `NUMERAL`, but also matches numbers with commas or spaces between groups of three digits."""
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:(?P<whole>[0-9]+)\s+(?=[0-9]+\s*/))?(?P<over>{GROUPED.pattern})"
    rf"(?:\s*/\s*(?P<under>{GROUPED.pattern}))?"
)  # fmt: skip
_THOUSANDS = re.compile(
    r"(?<![0-9.,])[1-9][0-9]{0,2}(?: ?(?:\{,\}|,\\!|\\[,;:! ]|~)\s?[0-9]{3})+(?![0-9])"
    r"|(?<![0-9.,])[1-9][0-9]{0,2}(?: [0-9]{3})+(?![0-9]|\s*/)"
)
"""Matches groups of three digits with TeX's signs or single spaces between them."""

_MAGNITUDES = {"hundred": 2, "thousand": 3, "lakh": 5, "million": 6, "crore": 7, "billion": 9, "trillion": 12}
_WORDS_OF_TEN = rf"(?i:{'|'.join(_MAGNITUDES)})"
_MAGNITUDE = re.compile(
    r"(?<![\w.,/{}^\\])(?<![0-9}] )(?=[0-9.,]*[1-9])([0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?)(?![0-9])"
    rf"(?:[\s~-]*({_WORDS_OF_TEN})|\s*\\(?:text|mathrm)\s*\{{\s*({_WORDS_OF_TEN})\s*\}})(?![\w-]|\s+(?:{_WORDS_OF_TEN}|and)\b)"
)
"""Matches a number with a power of ten in words. The denominator of a fraction, a power and one of several words are not matched."""

FILLER, UNIT, COPULA, PER_AREA = "\0", "\3", "\4", "\5"
"""Placeholders for words that do not change a number: anywhere, only after the number, words such as "is", and square or cubic before a unit."""
WORD = re.compile(r"[A-Za-z]+(?:['\u2019][A-Za-z]+)*")
_UNITS = """
    meter metre centimeter centimetre millimeter kilometer kilometre inch inches foot feet yard mile acre hectare liter litre milliliter gallon quart
    pint cup ounce pound gram kilogram milligram ton tonne second minute hour day week month year degree radian celsius fahrenheit kelvin dollar cent
    euro rupee peso yen yuan buck dime nickel penny pennies watt volt joule newton hertz calorie byte mph kph kmh unit point mark percentage way time
    people person men man women woman child children boy girl student kid friend player teacher member guest worker employee passenger customer piece
    book page apple orange banana egg cookie marble box boxes card bag bottle pencil pen block game tree ticket sticker flower candy candies car truck
    bus buses bike wheel animal dog cat cow hen chicken fish bird sheep rabbit toy ball doll bead coin stamp shirt hat photo picture cake pie pizza
    slice sandwich meal serving seed plant leaf leaves rose shell tile brick row table chair room floor house seat bar basket jar can glass glasses
    package letter word question problem lesson class classes movie song story stories step trip clip item vote gift video phone goal face edge
    vertices side triangle digit outcome combination permutation arrangement"""
_FILLERS = """
    the this that these an it its there so thus hence therefore then finally answer answers result value values solution solutions total final correct
    required of in for to we get have obtain find he she they has had you i'd per hope our usd eur gbp inr us about approximately approx roughly
    exactly only number amount count cost price area perimeter volume length width height distance speed age probability chance measure equation
    function altogether here largest smallest greatest special identity matrix old left remaining long tall wide away"""
_SHORT_UNITS = """cm mm km kg mg ml mL ft in lb lbs oz yd mi hr hrs sec min cc gal mol Hz kHz MHz GHz kW kWh cal rad deg pt pts pcs st nd rd th"""
_WORDS = {
    **dict.fromkeys(_UNITS.split(), UNIT),
    **dict.fromkeys(_FILLERS.split(), FILLER),
    **dict.fromkeys(("square", "cubic", "sq", "cu"), PER_AREA),
    **dict.fromkeys(("is", "are", "was", "were", "equal", "equals", "it's"), COPULA),
}
_SIZES = """
    mm millimeter millimetre|cm centimeter centimetre|m meter metre|km kilometer kilometre kph kmh|inch inche|foot feet ft|yard yd|mile mi mph;
    mg milligram|g gram|kg kilogram|ounce oz|pound lb|ton tonne;second sec s|minute min|hour hr h|day|week|month|year;
    ml mL milliliter|l L liter litre|gallon gal|quart|pint|cup;cent ¢|dollar buck \\$ USD|euro € EUR|yen ¥|rupee ₹ INR|£ GBP;
    deg degree circ °|rad radian;celsiu °C|fahrenheit °F|kelvin;acre|hectare;watt W|kW;Hz hertz|kHz|MHz|GHz"""
_KINDS = {
    word: (kind, size)
    for kind, sizes in enumerate(_SIZES.split(";"))
    for size in sizes.split("|")
    for word in size.split()
}


_NAMED = re.compile(
    r"(?:\b(square|sq|cubic|cu)\b\.?\s*)?(?:([A-Za-z]+?)s?\b(?!\s*=)|(\\\$|[¢€£¥₹]|°[CF]?))(?:[\s}$]*\^\s*\{?([23]))?"
)
"""Matches a word or sign that may be a unit, and its power: square or cubic before it, or an exponent after it."""


def differ_in_unit(*texts: str) -> bool:
    """Returns whether two texts name different units of one kind, such as cm and m, cm and cm^2, or $ and cents. A text may also name no unit."""
    first, second = map(_units, texts)
    return any(first[kind] != second[kind] for kind in first.keys() & second.keys())


def upright_unit(text: str, other: str) -> str:
    """Writes a unit after the number at the end of a text in upright type: m/s, or a letter for the unit that the other text names."""
    unit = re.search(r"(?<=[0-9}$])\s*(?:(m/s)(\s*\^\s*\{?2\}?)?|([mgshL]))[\s.]*$", text)
    if unit is None or not (unit[1] or _units(text) == _units(other)):
        return text
    return rf"{text[: unit.start()]}\text{{ {unit[1] or unit[3]}}}{unit[2] or ''}"


def _units(text: str) -> dict[int, tuple[str, str]]:
    """Maps each kind of unit in a text to the first name and the power of the unit. A single dollar sign is a unit, but two enclose a formula."""
    text = plain(text)
    text = re.sub(r"(?<!\\)\$", r"\\$", text) if len(re.findall(r"(?<!\\)\$", text)) == 1 else text
    text = re.sub(
        r"(?<=[0-9}])((?:\s|~|\\[, ]|\\(?:text|mathrm)\s*\{)*)in\b(?=[\s.}$]*(?:$|\^))", r"\1inch", text
    )
    text = re.sub(r"(?:°|\^\s*\{?\s*\\circ\s*\}?)\s*(?:\\(?:text|mathrm)\s*\{\s*)?([CF])\b", r"°\1", text)
    units = dict[int, tuple[str, str]]()
    for unit in _NAMED.finditer(text):
        if known := _KINDS.get(unit[2] or unit[3]):
            # The power of a letter in italics may be the power of a variable.
            is_unit = len(unit[2] or "") > 1 or re.search(
                r"\\(?:text|mathrm|mbox)\s*\{[\s~]*\Z", text[: unit.start(2)]
            )
            power = unit[4] or {"s": "2", "c": "3"}.get((unit[1] or "")[:1], "")
            units[known[0]] = known[1], power if is_unit else ""
    return units


def placeholder(word: str) -> str:
    """Returns the placeholder of a word that does not change a number, or an empty text for any other word, such as eighths.

    >>> placeholder("The") == FILLER, placeholder("apples") == UNIT, placeholder("isn't"), placeholder("eighths")
    (True, True, '', '')
    """
    small = word.lower()
    unit = word in _SHORT_UNITS.split() or _WORDS.get(small.removesuffix("s")) == UNIT
    return _WORDS.get(small, UNIT if unit else "")


def plain(text: str) -> str:
    """Rewrites Unicode characters as ASCII or LaTeX: signs, spaces, fractions such as ½, super- and subscripts, digits of all scripts, and letters such as 𝑥."""
    if text.isascii():
        return text
    text = re.sub(r"[^\W_]", _folded, text)
    shifted = _SHIFTED.sub(lambda run: f"{'^' if run[1] else '_'}{{{run[0].translate(_UNSHIFTED)}}}", text)
    return shifted.translate(_PLAIN)


def _folded(match: re.Match[str]) -> str:
    """Returns the ASCII digit of a decimal digit of any script, and the plain form of a mathematical letter. Returns other letters unchanged."""
    letter = match[0]
    digit = decimal(letter, None)
    if digit is not None:
        return str(int(digit))
    return normalize("NFKC", letter) if "\U0001d400" <= letter <= "\U0001d7ff" else letter


def in_digits(text: str) -> str:
    r"""Writes a number with a word such as million, which may be upright text in TeX, as one numeral.

    >>> in_digits("$1.5 million"), in_digits(r"3\text{ thousand}"), in_digits("3 thousandths"), in_digits("1/2 million")
    ('$1.5e6', '3e3', '3 thousandths', '1/2 million')
    """
    return _MAGNITUDE.sub(lambda match: f"{match[1]}e{_MAGNITUDES[(match[2] or match[3]).lower()]}", text)


def joined_thousands(text: str) -> str:
    """Removes TeX's signs and spaces between groups of three digits.

    >>> joined_thousands("9{,}500 and 10\\\\,000 and 1 000 000")
    '9500 and 10000 and 1000000'
    """
    return _THOUSANDS.sub(lambda match: re.sub("[^0-9]", "", match[0]), text)


def value(numeral: str) -> Fraction:
    """Returns the exact value of a text that `NUMERAL` or `GROUPED` matches. `int` is not used, because it rejects more than 4,300 digits."""
    return Fraction(Decimal(numeral.replace(",", "").replace(" ", "")))


def number(text: str) -> Fraction | None:
    """Parses the whole text as a number, such as 12, -1.5, 3e8, 1/2 or 2 2/3. Returns None for any other text.

    >>> number("-2 2/3"), number("1,200.50"), number("3-5")
    (Fraction(-8, 3), Fraction(2401, 2), None)
    """
    if (match := _NUMBER.fullmatch(text)) is None:
        return None
    over, under, whole = value(match["over"]), value(match["under"] or "1"), value(match["whole"] or "0")
    if not under or (match["whole"] and not (whole and 0 < over / under < 1)):
        return None
    return (over / under + whole) * (-1 if match["sign"] == "-" else 1)
