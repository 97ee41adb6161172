r"""The `gsm8k` grader. It compares the number after `####`, the answer mark of GSM8K.

In a response without this mark, it compares the content of the last `\boxed{}` or `<answer>`, or else the last number.
"""

import re
from fractions import Fraction

from dapo_jax.dapo.rollouts import Verdict
from dapo_jax.rewards.math_grader import answers_in_tags, last_box
from dapo_jax.rewards.numerals import (
    COPULA,
    FILLER,
    PER_AREA,
    UNIT,
    WORD,
    in_digits,
    joined_thousands,
    number,
    placeholder,
    plain,
    value,
)
from dapo_jax.text.thoughts import without_thoughts

_MARK = "####"
_PIECE = r"(?:(?![^\W\d_])(?:\\[A-Za-z]+|[.,:](?=[0-9])|(?<=[0-9])'(?=[0-9])|[^\s=<>.,;:!?#|\"'`~])|(?<=[0-9])[eE][-+]?(?=[0-9]))"
_RUN = re.compile(rf"{_PIECE}+(?: {_PIECE}+)*")
"""Matches a run: digits and all characters joined to them. `3-5`, `1/2` and `1 000` are one run each, but `48 = 48` is two runs."""
_CHANGED_BEFORE = re.compile(
    r"(?:(?i:\b(?:not?|nor|never|neither|minus|plus|negative|times|than|half|twice|double|triple|root|over|least|most|between|below|above|under"
    r"|except|without|odd|even|(?:divid|multipli)ed by|(?:reciprocal|inverse|opposite|negative|square|cube|power|root|multiples?|factors?|half|halves|thirds?|quarters?|\w+ths?) of)"
    r"|n['\u2019]t|\\(?:log|ln|sin|cos|tan))\s*|(?<![A-Za-z])[A-Za-zπ]|(?<![<>])[<>≤≥]\s*)\Z"
)
_CHANGED_AFTER = re.compile(
    r"[\s-]*(?:and an? )?(?i:hal(?:f|ves)|thirds?|quarters?|(?!month|length|width|depth|path)\w+ths?|dozens?|scores?|gross|hundreds?|thousands?|lakhs?"
    r"|crores?|\w+illions?|squared|cubed|base|mod|modulo|divided|multiplied|factorial)\b|[A-Za-zπ](?![^\W\d_])|[A-Za-z]?[\^_]"
)
"""Like `_CHANGED_BEFORE`, matches words and letters next to the last number of a text that change it, as in minus 5, 2x or 5k."""
_FRACTION = re.compile(r"(?:(-) *)?\\[dtc]?frac(?:\{([0-9]+)\}|\s*([0-9]))(?:\{([0-9]+)\}|\s*([0-9]))")
_SPACED_SIGN = re.compile(
    r"(?:(?<==)|(?<![^\s(=:]\$)(?<=\$)|(?<=\bis)|(?<=\bare)|(?<=\bequals)) *- +(?=\\?[$€£¥₹]?\.?[0-9])"
)
"""Matches the sign of a negative number, as in = - 5. Elsewhere, a dash and a space, as in Profit - 5, are not a sign."""
_HEADING = re.compile(r"[*_\s]*[A-Za-z]")
_TAG = re.compile(r"</?[A-Za-z_]+>")
_IN_TAGS = re.compile(r"(?is).*<(?:final_)?answer>(.*?)(?:</|\Z)")
_WORKED_OUT = re.compile(r"^[^A-Za-z<>≤≥≠≈!~]*[0-9][^A-Za-z<>≤≥≠≈!~]*=\s*(?=[^=]*[0-9])")
"""Matches the first sides of an equation of numbers, as in 2 + 3 = 5."""
_WRAPPER = re.compile(r"\\(?:boxed|text|mathrm|mathbf|left|right)(?![A-Za-z])|\\[()\[\]]")


def gsm8k_grader(response: str, answer: str) -> Verdict:
    """Compares numbers exactly. For example, 72, 72.0 and $72 are equal, and so are 1,200 and 1200, and 1/2 and 0.5.

    The reference is a number, or a worked solution that ends in `#### number` as in the dataset's files
    (Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems", https://arxiv.org/abs/2110.14168).
    A response's answer is the number after its last `####`. The rest of that line may contain only pairs of brackets and words that do not change
    the number (`numerals.placeholder`), or else the line is compared as text. A heading such as `#### Step 2: Total`, which begins with a word, has no
    number as its statement and is followed by text, is not a mark. Without `####`, the answer is the content of the last `\\boxed{}` or `<answer>`, the
    value of "answer" in JSON, or else the last number. Thoughts are ignored. A number is parsed with all characters attached to it, so 3-5, 3:30, 5^2, 2x and 5m are compared as text.
    Currency, percent and degree signs are ignored.

    >>> [gsm8k_grader(response, "72").correct for response in ("3 * 24 = 72\\n#### 72", "That is $72.00.", "#### 7")]
    [True, True, False]

    Raises:
        ValueError: the reference has no number.
    """
    expected = _stated(answer.rpartition(_MARK)[2], alone=True)
    if expected is None:
        raise ValueError(f"the gsm8k grader needs a reference with a number; got {answer!r}")
    stated, where = _found(without_thoughts(response))
    if stated is None:
        return Verdict(correct=False, reason=f"no number {where}")
    text, exact = stated
    numbers = exact is not None and expected[1] is not None
    correct, agreement = (
        (exact == expected[1], "equal") if numbers else (text == expected[0], "equal as text")
    )
    reason = f"{where}: {agreement if correct else f'expected {expected[0]}'}"
    return Verdict(correct=correct, extracted=text, reason=reason)


def _found(text: str) -> tuple[tuple[str, Fraction | None] | None, str]:
    """Returns the stated number as in `_stated`, and the place where it was found or expected, in words."""
    _, marked, after = text.rpartition(_MARK)
    # After the mark, only the rest of the line is used, or the next line that is not empty.
    line, _, rest = after.strip().partition("\n")
    stated = _stated(line, alone=True) if marked else None
    if marked and not (rest.strip() and _HEADING.match(line) and (stated is None or stated[1] is None)):
        return stated, f"after the last {_MARK!r}"
    text = answers_in_tags(rest if marked else text)
    boxed, has_box = last_box(text)
    if has_box:
        return _stated(boxed or "", alone=True), r"in the last \boxed{}"
    if tagged := _IN_TAGS.match(text):
        return _stated(tagged[1], alone=True), "in the last <answer>"
    return _stated(text, alone=False), "as the last number"


def unread_by_gsm8k(answer: str) -> bool:
    """Returns True if the reference as a whole is not a number and is therefore compared as text."""
    expected = _stated(answer.rpartition(_MARK)[2], alone=True)
    return expected is None or expected[1] is None


def _stated(text: str, *, alone: bool) -> tuple[str, Fraction | None] | None:
    """Returns the last run (see `_RUN`) and its value. Instead of a value, returns None if the run is not a number or, with `alone`, not the only run."""
    if text.isascii() and text.strip().isdigit():  # for speed
        return text.strip(), value(text.strip())
    text = _WRAPPER.sub(" ", _TAG.sub(" ", in_digits(joined_thousands(plain(text)))))
    text = re.sub(r"(?<=[0-9])\s*(?:[xX]|\\times|\\cdot)\s*(?=[0-9])", "*", text)
    text = re.sub(r"(?<=[0-9])\s*\*\s*10\s*\^\s*(\{)?([-+]?[0-9]+)(?(1)\})(?!\.?[0-9])", r"e\2", text)
    text = _FRACTION.sub(lambda m: f"{m[1] or ' '}{m[2] or m[3]}/{m[4] or m[5]}", text)
    text = _SPACED_SIGN.sub(" -", text)
    text = _WORKED_OUT.sub("", text) if alone else text
    runs = [run for run in _RUN.finditer(text) if re.search("[0-9]", run[0])]
    if not runs:
        return None
    last = runs[-1]
    opened = last[0].lstrip("([{*:,$€£¥₹\\ ")
    core = re.sub(r"^[-*+] +|\s[-+/]+$", "", opened.rstrip(")]}([{*_°%¢$€£¥₹\\ "))
    start = last.end() - len(opened)
    joined = re.search(r"[A-Za-z]-", text[max(0, last.start() - 1) : last.start() + 1])
    before, after = _CHANGED_BEFORE.search(text[: last.start()]), _CHANGED_AFTER.match(text, last.end())
    whole = re.sub(r"(?<![0-9])(?<![0-9] )\\?[$€£¥₹]", "", core).strip()
    if joined or (alone and not _is_statement(text[:start], text[start + len(core) :])):
        whole = text
    elif before or after:
        whole = text[before.start() if before else last.start() : after.end() if after else last.end()]
    elif (exact := number(whole)) is not None:
        return whole.replace(",", ""), exact
    return " ".join(whole.split()), None


def _is_statement(before: str, after: str) -> bool:
    """Returns whether the texts next to a number hold only words that do not change it (`numerals.placeholder`), pairs of brackets, and punctuation."""
    before = re.sub(r"(?<![A-Za-z])[A-Za-z]\s*=\s*$", "", before)
    after = re.sub("(?<=[a-z])/(?:[hs](?![a-z])|(?=[a-z]))", " ", after)
    kinds = ["".join(placeholder(word) or "?" for word in WORD.findall(text)) for text in (before, after)]
    known = re.fullmatch(f"[{FILLER}{COPULA}]*#(?:[{FILLER}{COPULA}]|{PER_AREA}?{UNIT})*", "#".join(kinds))
    opened = re.sub(r"[\s:=]|\\?[$€£¥₹]|\*\*", "", WORD.sub("", before))
    closed = re.sub(r"[\s.,;°¢]|\\?[%$€£¥₹]|\*\*|\(\)", "", WORD.sub("", after))
    return known is not None and closed == opened[::-1].translate(str.maketrans("([{", ")]}"))
