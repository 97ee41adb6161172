"""The `dapo` and `dapo_boxed` graders, which reproduce the grading rule of DAPO's released code, including its false negatives.

The rule is from verl's recipe (`verl/utils/reward_score/math_dapo.py`). The text after the last `Answer:` in the last 300 characters
of a response is normalized and compared with the normalized reference as a string. The normalization comes from the appendix of Lewkowycz
et al. 2022, "Solving Quantitative Reasoning Problems with Language Models" (Minerva). To compare answers by meaning, use the `math` grader.
"""

import re
from functools import lru_cache

from dapo_jax.dapo.rollouts import Verdict

TAIL_CHARACTERS = 300
"""Number of characters at the end of a response that are searched for `Answer:`."""
BOX_CHARACTERS = 100
"""Number of characters at the end of a response that `dapo_boxed` searches for `\\boxed{}`."""

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
"""Matches from `Answer:` to the end of the line, so a second `Answer:` on the same line belongs to the first match, as in the released code."""
_BOX = r"\boxed{"

_REWRITTEN = (
    ("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text"),
    (r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}"),
)  # fmt: skip
"""Replacements for articles, spaces, conjunctions and a few LaTeX commands, applied to the whole text in this order."""

_DROPPED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue", "points", "feet", "minutes",
    "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students", "childrentickets", "multiples",
    r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}", r"\text{}",
    r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots",
)  # fmt: skip
"""Units, filler words and spacing commands, which are removed after `_REWRITTEN`, in this order and even inside longer words, as in the released code."""

_UNWRAPPED = (
    (re.compile(r".*?\$(.*?)\$.*"), r"$\1$"),
    *((re.compile(rf"\\{name}\{{(.*?)\}}"), r"\1") for name in ("text", "textbf", "overline")),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)
"""Patterns that are applied last. They keep only the text inside dollar signs or wrappers such as \\text{}, and add the missing braces in \\frac12."""


@lru_cache(maxsize=4096)
def normal_form(answer: str) -> str:
    r"""Returns the normalized text that the released code compares.

    >>> normal_form(r"x = \$1,234 dollars"), normal_form(r"\frac12"), normal_form("$34$."), normal_form("34%")
    ('1234', '\\frac{1}{2}', '34', '34%')
    """
    text = answer.rpartition("=")[2]
    for old, new in (*_REWRITTEN, *((word, "") for word in _DROPPED)):
        text = text.replace(old, new)
    for pattern, new in _UNWRAPPED:
        text = pattern.sub(new, text)
    text = text.replace("$", "")
    without_commas = text.replace(",", "")
    return (without_commas if without_commas.isdigit() else text).strip()


def dapo_grader(response: str, answer: str) -> Verdict:
    """Grades by the rule of the paper's released code. A response without `Answer:` is wrong."""
    stated = _ANSWER.findall(response[-TAIL_CHARACTERS:])
    if not stated:
        return Verdict(correct=False, reason=f"no 'Answer:' in the last {TAIL_CHARACTERS} characters")
    return _compared(stated[-1], answer, "after the last 'Answer:'")


def dapo_boxed_grader(response: str, answer: str) -> Verdict:
    r"""Like `dapo_grader`, but if a response has no `Answer:`, compares the content of its last `\boxed{}`, as in a later version of the released code."""
    verdict = dapo_grader(response, answer)
    if verdict.extracted is not None:
        return verdict
    boxed = last_boxed(response[-BOX_CHARACTERS:])
    if boxed is None:
        return Verdict(correct=False, reason=rf"{verdict.reason}, no \boxed{{}} in the last {BOX_CHARACTERS}")
    return _compared(boxed, answer, r"in the last \boxed{}")


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{}`, or None if there is no box or it is not closed.

    >>> last_boxed(r"\boxed{1} so \boxed{\frac{1}{2}}."), last_boxed(r"\boxed{1} and \boxed{2")
    ('\\frac{1}{2}', None)
    """
    _, mark, after = text.rpartition(_BOX)
    depth = 1
    for end, character in enumerate(after if mark else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return after[:end]
    return None


def _compared(stated: str, answer: str, where: str) -> Verdict:
    extracted, expected = normal_form(stated), normal_form(answer)
    correct = extracted == expected
    reason = f"{where}: equal" if correct else f"{where}: expected {expected!r}"
    return Verdict(correct=correct, extracted=extracted, reason=reason)
