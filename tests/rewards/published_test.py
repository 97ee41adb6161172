r"""Every reference of the published datasets is correct in its own form. A changed reference is compared with a second reader.

Only where DAPO_JAX_DATA names a folder with the folders dapo_math_17k, aime_2024, gsm8k and math_500.
"""

import os
import random
import re

import pytest

from dapo_jax.data import load_rows
from dapo_jax.rewards import GRADERS
from dapo_jax.rewards.graders import UNREAD_BY
from tests.rewards import second_reader
from tests.rewards.second_reader import without_words
from tests.rewards.words import ENGLISH_WORDS, NUMBER_WORDS

DATA = os.environ.get("DAPO_JAX_DATA")
SPLITS = [("dapo_math_17k", "train"), ("aime_2024", "test"), ("math_500", "test"), ("gsm8k", "train"), ("gsm8k", "test")]  # fmt: skip
CHARACTERS = "0123456789+-*/^_.,()[]{}\\ abcdexyzi%$!'=|<>:;~√πm°′"  # noqa: RUF001 - a prime
WORDS = [*ENGLISH_WORDS, *NUMBER_WORDS]
CHANGES = int(os.environ.get("DAPO_JAX_CHANGES", "4000"))
"""The number of changed references for each grader; the graders were last compared on 60,000."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DATA, reason="DAPO_JAX_DATA names no folder with the four published datasets"),
]

# A second reader that knows no more than Python's notation disagrees about these. They are right: white space, thousands set apart by
# spaces, marks around the value, money, words of a unit, degrees, the name of a command without its backslash or with two or three, broken
# by a space or joined to a letter, the name of the value, a sign or a factor that changes nothing, and 2/9 times 3 for 2/3.
_EXPLAINED = (
    (r"°|\\[,;:!](?=sqrt|pi)|(?<=\d)\*(?=sqrt)", ""),
    (r"\\\\\\?(?=\s|\d|-)", ","),
    (";", ","),
    (r"\\cfrac", r"\\frac"),
    (r"\\frac\{(\d+)\}\d\{(\d)\}", r"\\frac{\1}{\2}"),
    (r"\\(?:text|mbox)\s*\{[ ~,.:;()]*(?:cents?|inch~?e?s|cm|degrees)[ ~,.:;()]*\}", "unit"),
    (r"guests\s+(?=unit)", ""),
    (r"\\|[\s~$]", ""),
    (r"\{[pb]?matrix\}|(?<=\d)[,;:]?!(?=\d\d\d)", ""),
    (
        r"(?<=(?<!\d)[12])!|√(?=1(?!\d))|(?<![\w)}!])\+|(?<=left|.cup)\+|(?<!\d)1(?=[a-z]=|frac\{sqrt|frac\{11|sqrt|x)|(?<=1)\+(?=frac)",
        "",
    ),
    (r"(?<![\w)}])[,;:!]", ""),
    (r"^\*?=?[a-z]?=|(?<!\d)0(?=\.)|(?<![\d.])(?<!\d,)0+(?=\d)|(?<=\d,)0(?=\d[,/])", ""),
    (r"(?<=\d),(?=\d{3}(?!\d))|[.,](?=unit|\})", ""),
    (r"^[*_:;,='!|(\[{<>]+|[%.,:;*]+$", ""),
)


def explained(text):
    """The text without what does not count."""
    for pattern, written in _EXPLAINED:
        text = re.sub(pattern, written, text)
    return text


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The rows of each dataset."""
    folder, found = tmp_path_factory.mktemp("datasets"), {}
    for source, split in SPLITS:
        found.setdefault(source, []).extend(load_rows(source, split, folder, path=f"{DATA}/{source}"))
    return found


STATED = "So it is.\nAnswer: {}".format
BOXED = r"So it is $\boxed{{{}}}$.".format


@pytest.mark.parametrize("source", ["dapo_math_17k", "aime_2024", "math_500"])
@pytest.mark.parametrize(
    ("grader", "written"),
    [("dapo", STATED), ("dapo_boxed", STATED), ("dapo_boxed", BOXED), ("math", STATED), ("math", BOXED)],
    ids=["dapo", "dapo_boxed", "dapo_boxed in a box", "math", "math in a box"],
)
def test_a_stated_or_boxed_answer_is_correct(rows, source, grader, written):
    answers = [row["answer"] for row in rows[source]]
    assert not [answer for answer in answers if not GRADERS[grader](written(answer), answer).correct]


def test_gsm8ks_worked_answers_are_correct(rows):
    graded = [(row["source_row"], GRADERS["gsm8k"](row["response"], row["answer"])) for row in rows["gsm8k"]]
    assert not [row for row, verdict in graded if not verdict.correct]


@pytest.mark.parametrize("source", ["dapo_math_17k", "aime_2024", "math_500", "gsm8k"])
def test_references_that_are_not_read_as_a_whole_are_bases_and_words(rows, source):
    answers = {row["answer"] for row in rows[source]}
    unread = [answer for answer in answers if UNREAD_BY["math"](answer)]
    assert all(re.fullmatch(r"\d+_\{?\d\}?|\\text\{.*\}", answer) for answer in unread)
    assert all(GRADERS["math"](f"Answer: {answer}", answer).correct for answer in answers)


def changes(answers, count):
    """Pairs of a reference and a changed one: a character inserted, replaced or left out, or a word inserted; most of them no plain integers."""
    generator = random.Random(0)
    integers = [answer for answer in answers if answer.isdigit()]
    others = [answer for answer in answers if not answer.isdigit()]
    while count:
        answer = generator.choice(others if others and generator.random() < 0.8 else integers)
        place, how = generator.randrange(len(answer) + 1), generator.randrange(6)
        if how > 2:  # a word before, after or in the answer
            place = (0, place, len(answer))[how - 3]
            changed = f"{answer[:place]} {generator.choice(WORDS)} {answer[place:]}".strip()
        else:
            new = "" if how == 0 else generator.choice(CHARACTERS)
            changed = answer[:place] + new + answer[place + (how != 1) :]
        if changed != answer and changed.strip():
            count -= 1
            yield answer, changed


def wrongly_right(grade, written, equal, pairs):
    """Yields each reference and response that the grader calls equal, but the reader does not."""
    for answer, changed in pairs:
        for response, reference in ((changed, answer), (answer, changed)):
            try:
                right = grade(written(response), reference).correct
            except ValueError:  # gsm8k: the changed reference has no number
                continue
            bare = [explained(without_words(text)) for text in (response, reference)]
            if right and not equal(response, reference) and bare[0] != bare[1]:
                yield reference, response


@pytest.mark.parametrize("grader", ["math", "gsm8k"])
def test_a_changed_reference_is_right_only_if_a_second_reader_calls_it_equal(rows, grader):
    sources, written, equal = {
        "math": (rows, "Answer: {}".format, second_reader.equal),
        "gsm8k": (["gsm8k"], "#### {}".format, second_reader.same_number),
    }[grader]
    answers = sorted({row["answer"] for source in sources for row in rows[source]})
    assert not [*wrongly_right(GRADERS[grader], written, equal, changes(answers, CHANGES))]
