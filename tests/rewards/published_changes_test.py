r"""Every reference of the published datasets, and changes of one character or one word in them, with a second reader.

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


def references(folder):
    """Each dataset's references, without repetition."""
    found = {}
    for source, split in SPLITS:
        rows = load_rows(source, split, folder, path=f"{DATA}/{source}")
        found.setdefault(source, set()).update(row["answer"] for row in rows)
    return {source: sorted(answers) for source, answers in found.items()}


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


def disagreements(grade, written, equal, pairs):
    """(class, reference, response) where the grader finds it right and the reader does not, or the other way round."""
    for answer, changed in pairs:
        for response, reference in ((changed, answer), (answer, changed)):
            try:
                right = grade(written(response), reference).correct
            except ValueError:  # gsm8k: the changed reference has no number
                continue
            read = equal(response, reference)
            if right and not read:
                same = explained(without_words(response)) == explained(without_words(reference))
                yield "right, explained" if same else "right", reference, response
            elif read and not right:
                yield "wrong", reference, response


def compared(folder):
    """All disagreements of both graders."""
    answers = references(folder)
    everything = sorted({answer for found in answers.values() for answer in found})
    found = [
        ("math", *one)
        for one in disagreements(GRADERS["math"], "Answer: {}".format, second_reader.equal, changes(everything, CHANGES))
    ]  # fmt: skip
    return found + [
        ("gsm8k", *one)
        for one in disagreements(
            GRADERS["gsm8k"], "#### {}".format, second_reader.same_number, changes(answers["gsm8k"], CHANGES)
        )
    ]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return compared(tmp_path_factory.mktemp("datasets"))


@pytest.mark.parametrize("grader", ["math", "gsm8k"])
def test_a_changed_reference_is_right_only_if_a_second_reader_calls_it_equal(found, grader):
    assert not [one for one in found if one[:2] == (grader, "right")]


@pytest.mark.parametrize("source", ["dapo_math_17k", "aime_2024", "math_500", "gsm8k"])
def test_references_that_are_not_read_as_a_whole_are_bases_and_words(tmp_path, source):
    answers = references(tmp_path)[source]
    unread = [answer for answer in answers if UNREAD_BY["math"](answer)]
    assert all(re.fullmatch(r"\d+_\{?\d\}?|\\text\{.*\}", answer) for answer in unread)
    assert all(GRADERS["math"](f"Answer: {answer}", answer).correct for answer in answers)
