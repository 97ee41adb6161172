"""The `math` grader, which compares answers by meaning. `math_text.py` rewrites answers, `math_reader.py` parses them, and
`math_equality.py` compares them."""

import re

from dapo_jax.dapo.rollouts import Verdict
from dapo_jax.rewards.math_text import is_word, labelled, text_form
from dapo_jax.rewards.numerals import differ_in_unit, upright_unit
from dapo_jax.text.thoughts import without_thoughts

TAIL_CHARACTERS = 2000
"""Number of characters at the end of a response that are searched for the answer. The rest is skipped for speed."""

_ANSWER = re.compile(
    r"(?i)(?:answer|antwort|r[ée]ponse|respuesta|resposta|risposta|ответ|答案|答え|回答|정답|답|الإجابة|الجواب|उत्तर)"
    r"\s*(?:\*\*|__|\*)?\s*[:\uff1a](?:__)?[\s*]*|<(?:final_)?answer>[\s*]*"
)
"""Matches the mark Answer: in several languages, or its tag."""
_THE_ANSWER_IS = re.compile(
    r"(?im)\b(?:answers?|(?:correct|right) (?:option|choice))\b[^\n.:=]{0,100}?(?:\b(?:is|are)\b[:\uff1a]?|[:\uff1a=])|答案[是为為]"
    r"|^[ \t]*(?:#[ \t]*|\*\*|__)+(?:the )?(?:final )?answer(?:\*\*|__)?[ \t]*$|^####(?=[^\nA-Za-z]*\s*\Z)"
)
"""Matches words such as "the answer is", a heading such as ### Final Answer, and #### before a number at the end."""
_IN_JSON = re.compile(
    r"""(?i)(["'])(?:final[_ ]?)?answer\1\s*:\s*(?:(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|\[([^\[\]]*)\]|([^\s\[\]{}"',][^\n,}]*))\s*(?=[,}])|[^\n]*\Z)"""
)
"""Matches an answer in JSON. Without the comma or bracket after it, the answer was cut off, and no group matches."""
_UPRIGHT_MARK = re.compile(r"\\text\w*\s*\{\s*((?:final )?answer\s*:)\s*\}", re.IGNORECASE)
_MARK_IN_BOX = re.compile(r"(\\f?boxed\s*\{\s*(?:\\text\w*\s*\{\s*)?)(?:final )?answer\s*:", re.IGNORECASE)
_DISPLAY = re.compile(
    r"\s*(?:\$\$.*?\$\$|\\\[.*?\\\]|\\begin\s*\{((?:align|gather|equation|multline)\*?)\}.*?\\end\s*\{\1\})",
    re.DOTALL,
)
"""Matches a displayed formula, which may have several lines."""
_BOLD = re.compile(r"(?<![\w)}])\*\*([^*]+)\*\*|^_([^_]+)_$")
_BOX = re.compile(r"\\f?boxed\s*\{|\\fbox\s*\{")
_BETWEEN_BOXES = re.compile(r"(?:[ ,;$]|\\[()\[\],;:]|\\q?quad|(?:\\text\s*\{\s*)?\b(?:and|or)\b(?:\s*\})?)*")
_LEADING_EQUALS = re.compile(r"^((?:\\\(|\\\[|\$|\s)*)=(?![=>])")
_SENTENCE = re.compile(r"(?<!\\)\b[A-Za-z]{2,}\s+[A-Za-z]{2,}")
_SENTENCE_END = re.compile(
    r"[.?](?=\s|\Z)|(?<!\\)!(?=\s*\Z|\s+(?![-=+*/<>≤≥≈]|\\(?:cdot|times|div|approx|le|ge)))"
)
"""Matches the end of a sentence. An exclamation mark before a sign, as in 5! = 120, is a factorial."""


def math_grader(response: str, answer: str) -> Verdict:
    r"""Finds the answer stated in the response and compares its meaning with the reference.

    The answer is the content of the last `\boxed{}`. If no box is after the last `Answer:`, it is the text after this mark. Without either, a single
    line of mathematics is itself the answer. In other responses, the answer is the text after words such as "the answer is" or a heading such as
    `### Answer`. A displayed formula after these marks may have several lines. Other numbers are ignored, because they may match by accident, and so
    are thoughts. If the last `\boxed{` is not closed, or the last `Answer:` has no text, the response was cut off and has no answer. A choice with its
    label, such as (B) 7, is B if the reference is a letter from A to J, otherwise 7. The value of "answer" in JSON is an answer, too.

    Equal text is correct. Otherwise, both answers are parsed as mathematics (`math_reader.py` lists the notations), so 6/8 equals 3/4. If either
    cannot be parsed as a whole, the answer is wrong. Numbers are compared exactly, so 0.333 does not equal 1/3. A decimal with at least six
    significant digits also equals a number that rounds to it, so 0.333333 equals 1/3. An unevaluated sum, product or quotient of numbers, such as
    8 + 2, is wrong, unless the reference is also unevaluated, because it may only repeat the question. If the reference is a worked solution with a
    `\boxed{}`, its content is the reference.

    This function has no time limit. If a comparison in a `GradingPool` exceeds the pool's time limit, its verdict is lost, so that
    slow comparisons can be distinguished from wrong answers.
    """
    # Imported here because these modules import sympy, which loads slowly.
    from dapo_jax.rewards.math_equality import same_meaning
    from dapo_jax.rewards.math_reader import read

    answer = _reference(answer)
    stated, where = _statement(without_thoughts(response)[-TAIL_CHARACTERS:])
    stated = None if stated is None else _LEADING_EQUALS.sub(r"\1", _BOLD.sub(r" \1\2 ", stated))
    if stated is None:
        return Verdict(correct=False, reason=f"{where}: no answer found")
    choice, right = labelled(stated), labelled(answer)
    if right and right[1] and ":" not in answer.partition(right[1])[0]:
        # The content is compared if the response has it, with the same letter or without a letter.
        answer = right[choice is None or (choice[1] != "" and choice[0] == right[0])]
    extracted, wanted = text_form(stated), text_form(answer)
    if extracted != wanted and choice:
        letter, content = choice
        stated = letter if re.fullmatch("[A-J]", wanted) else content or stated
        extracted = text_form(stated)
    same = extracted == wanted or (is_word(wanted) and extracted.lower() == wanted)
    if extracted and same and not differ_in_unit(stated, answer):
        return Verdict(correct=True, extracted=extracted, reason=f"{where}: equal as text")
    stated_value, gold = read(stated), read(answer)
    if stated_value is not None and stated_value.undone and not (gold is not None and gold.undone):
        return Verdict(correct=False, extracted=extracted, reason=f"{where}: unevaluated arithmetic")
    if stated_value is None or gold is None:
        which = "the answer" if stated_value is None else f"the reference {answer!r}"
        reason = f"{where}: {which} cannot be parsed, and the answer's text differs from {answer!r}"
        return Verdict(correct=False, extracted=extracted, reason=reason)
    try:
        correct = same_meaning(gold, stated_value)
        in_units = upright_unit(answer, stated), upright_unit(stated, answer)
        if not correct and in_units != (answer, stated):
            gold, stated_value = map(read, in_units)
            correct = gold is not None and stated_value is not None and same_meaning(gold, stated_value)
        correct = correct and not differ_in_unit(stated, answer)
    except MemoryError:
        raise
    except Exception:  # sympy may fail in many ways, and an answer that cannot be compared is wrong
        correct = False
    reason = f"{where}: equal to {answer!r} in meaning" if correct else f"{where}: expected {answer!r}"
    return Verdict(correct=correct, extracted=extracted, reason=reason)


def unread_by_math(answer: str) -> bool:
    """Returns True if the reference cannot be parsed as a whole and is therefore compared as text."""
    from dapo_jax.rewards.math_reader import read

    return read(_reference(answer)) is None


def _reference(answer: str) -> str:
    r"""Returns the content of the last `\boxed{}` in a reference, such as a worked solution of MATH, or else the reference."""
    return last_box(answer)[0] or answer


def _statement(text: str) -> tuple[str | None, str]:
    """Returns the stated answer, or None if it is missing or was cut off. Also returns the place where it was found or expected, in words."""
    text = _MARK_IN_BOX.sub(r"\1", _UPRIGHT_MARK.sub(r"\1 ", answers_in_tags(text)))
    answer = last[-1].end() if (last := list(_ANSWER.finditer(text))) else None
    text = text if answer is None else text[:answer] + re.sub("(?i)</(?:final_)?answer>", "\n", text[answer:])
    # A box after the last `Answer:`, also on its line, takes precedence, because it is the response's last statement.
    boxed, has_box = last_box(text[answer:])
    if has_box:
        return boxed, r"in the last \boxed{}"
    if answer is not None:
        display = _DISPLAY.match(text, answer)
        line = text[answer : text.find("\n", display.end() if display else answer) % (len(text) + 1)]
        line = _unemphasized(line)
        return line or None, "after the last 'Answer:'"
    whole = text.strip()
    where = "after words such as 'the answer is'"
    announced = list(_THE_ANSWER_IS.finditer(text))
    if not announced:
        if whole and "\n" not in whole and not _SENTENCE.search(whole):
            return whole, "the whole response"
        return None, where
    for mark in reversed(announced):
        if display := _DISPLAY.match(text, mark.end()):
            return display[0], where
        line = text[mark.end() :].strip().partition("\n")[0]
        end = _SENTENCE_END.search(line)
        if end is None or end[0] != "?":  # a question is not a statement
            return _unemphasized(line[: end.start()] if end else line) or None, where
    return None, where


def _unemphasized(line: str) -> str:
    """Removes closing emphasis, which opened before the answer, as in **Answer: 34**, and a line break of TeX."""
    line = re.sub(r"(?<=\S)\*\*(?=\s|$)", "", line).strip().strip("*`").strip()
    return line.removesuffix("\\\\").strip()


def answers_in_tags(text: str) -> str:
    """Writes answers in JSON between tags. An answer that was cut off is empty."""
    return _IN_JSON.sub(lambda found: f"<answer>{''.join(filter(None, found.groups()[1:]))}</answer>", text)


def last_box(text: str) -> tuple[str | None, bool]:
    r"""Returns the content of the last outermost `\boxed{}`, or None if it is not closed. Also returns whether there is a box.

    Boxes with only commas, "and" or "or" between them are one list.
    """
    contents: list[str] = []
    at = 0
    while opened := _BOX.search(text, at):
        contents, depth = contents if _BETWEEN_BOXES.fullmatch(text, at, opened.start()) else [], 1
        for brace in re.finditer(r"\\[{}]|[{}]", text[opened.end() :]):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0:
                at = opened.end() + brace.end()
                contents.append(text[opened.end() : at - 1])
                break
        else:
            return None, True
    return ", ".join(dict.fromkeys(contents)), at > 0
