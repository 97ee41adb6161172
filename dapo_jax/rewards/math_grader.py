"""The grader `math` compares answers by meaning. `math_reader.py` reads them, `math_equality.py` compares them."""

import re

from dapo_jax.dapo.rollouts import Verdict

TAIL_CHARACTERS = 2000
"""Number of characters read at the end of a response: symbolic parsers are slow, and the answer comes last."""

_ANSWER = re.compile(r"answer\s*:[\s*]*", re.IGNORECASE)
_THE_ANSWER_IS = re.compile(r"\banswers?\b[^\n.:=]{0,100}?(?:\b(?:is|are)\b:?|:|=)", re.IGNORECASE)
_BOLD = re.compile(r"(?<![\w)}])\*\*([^*]+)\*\*|^_([^_]+)_$")
_BOX = re.compile(r"\\f?boxed\s*\{|\\fbox\s*\{")
_LEADING_EQUALS = re.compile(r"^((?:\\\(|\\\[|\$|\s)*)=(?![=>])")
_SENTENCE = re.compile(r"(?<!\\)\b[A-Za-z]{2,}\s+[A-Za-z]{2,}")
_SENTENCE_END = re.compile(r"[.!?](?=\s|\Z)")
# Three digits follow a thousands separator; any other comma separates the entries of a list.
_NUMBER = r"[-+]?\(?[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?:\.\d+)?\)?"
_LEFT_TO_DO = re.compile(rf"{_NUMBER}(?:[-+*]{_NUMBER})+")


def math_grader(response: str, answer: str) -> Verdict:
    r"""Finds the answer that the response states, and compares its meaning with the reference.

    The answer is the text of the last `Answer:`, or else the last `\boxed{}`, or else the response if it is a single line of
    mathematics, or else the text after words such as "the answer is". Any other number in the text does not count, or some
    responses would be right by accident. A last `\boxed{` that does not end, or a last `Answer:` without text, was cut off: there is
    no answer.

    Equal text is correct. Otherwise both are read as mathematics, as a whole (`math_reader.py` lists the notations): 6/8 is 3/4,
    34% is 34, \frac12 is 0.5. If one of the two cannot be read, different text is wrong. Numbers are compared exactly: 0.333 is not
    1/3. A decimal of six digits or more is also equal to a number that rounds to it: 0.333333 is 1/3. An unevaluated sum or product
    of numbers is wrong: 8 + 2 repeats the question and is not 10.

    It has no time limit of its own, so a slow comparison is never taken for a wrong answer. A `GradingPool` has one, and loses the
    verdict instead.
    """
    # These load sympy.
    from dapo_jax.rewards.math_equality import same_meaning
    from dapo_jax.rewards.math_reader import read, text_form

    stated, where = _statement(response[-TAIL_CHARACTERS:])
    stated = None if stated is None else _LEADING_EQUALS.sub(r"\1", _BOLD.sub(r"\1\2", stated))
    if stated is None:
        return Verdict(correct=False, reason=f"{where}: nothing that can be read as mathematics")
    extracted = text_form(stated)
    if extracted and extracted == text_form(answer):
        return Verdict(correct=True, extracted=extracted, reason=f"{where}: equal as text")
    found, gold = read(stated), read(answer)
    if found is not None and _LEFT_TO_DO.fullmatch(re.sub(r"[\s{}]", "", found.text).strip("()")):
        return Verdict(correct=False, extracted=extracted, reason=f"{where}: left to be worked out")
    if found is None or gold is None:
        which = "the answer" if found is None else f"the reference {answer!r}"
        reason = f"{where}: {which} cannot be read as a whole; as text it is not {answer!r}"
        return Verdict(correct=False, extracted=extracted, reason=reason)
    try:
        correct = same_meaning(gold, found)
    except MemoryError:
        raise
    except Exception:
        correct = False
    reason = f"{where}: equal to {answer!r} in meaning" if correct else f"{where}: expected {answer!r}"
    return Verdict(correct=correct, extracted=extracted, reason=reason)


def unread_by_math(answer: str) -> bool:
    """Returns whether the reference cannot be read as a whole, so that it is compared as text."""
    from dapo_jax.rewards.math_reader import read

    return read(answer) is None


def _statement(text: str) -> tuple[str | None, str]:
    """Returns the stated answer, and where it was found. A missing or cut off answer gives None."""
    answer = last[-1].end() if (last := list(_ANSWER.finditer(text))) else None
    line_end = -1 if answer is None else text.find("\n", answer) % (len(text) + 1)
    # The last statement counts: a box after the line of the last `Answer:`, or else that line.
    boxed, found = _last_box(text[line_end + 1 :])
    if found:
        return boxed, r"in the last \boxed{}"
    if answer is not None:
        # Emphasis as in **Answer: 34** opens before the word and closes after the value.
        return text[answer:line_end].strip().strip("*").strip() or None, "after the last 'Answer:'"
    whole = text.strip()
    if whole and "\n" not in whole and not _SENTENCE.search(whole):
        return whole, "the whole response"
    where = "after words such as 'the answer is'"
    announced = list(_THE_ANSWER_IS.finditer(text))
    if not announced:
        return None, where
    line = text[announced[-1].end() :].strip().partition("\n")[0]
    return _SENTENCE_END.split(line)[0].strip() or None, where


def _last_box(text: str) -> tuple[str | None, bool]:
    r"""Returns the content of the last outermost `\boxed{}`, None if it does not end, and whether there is a box."""
    content, at = None, 0
    while opened := _BOX.search(text, at):
        depth, content = 1, None
        for brace in re.finditer(r"\\[{}]|[{}]", text[opened.end() :]):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0:
                at = opened.end() + brace.end()
                content = text[opened.end() : at - 1]
                break
        else:
            return None, True
    return content, at > 0
