"""The task of the second study: long sums with distractors. Writes its data with `python -m benchmarks.study.picked_sums FOLDER`.

The prompt `a3B8c5d9` asks for the last digit of 3 + 5 + 9: a digit after a capital letter does not count. A response writes steps and
then the answer. A step starts with the running total, adds digits, and gives the next total. The response `0+a3>3,3+c5>8,8+d9>7,=7`
has three steps. The steps may come in any order, and one step may add two digits: `0+c5a3>8,8+d9>7,=7`. A step may also name a digit that
does not count: `B-,`. Only the answer is graded.

A policy must not forget a digit or add it twice, which is hard in a random order. At the limit of 128 tokens, a response has room for 17 steps with one digit. On average, 16.7 of 24 digits count, so there is hardly room to name the others.
"""

import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from dapo_jax.data.own_builder import uniform
from dapo_jax.rewards import Sample

LABELS = "abcdefghijklmnopqrstuvwx"
ALPHABET = f"0123456789{LABELS}{LABELS.upper()}+>,=-"
"""All characters that occur in prompts and responses."""
LENGTHS = range(8, 25, 4)
"""Possible numbers of digits. Each occurs in the same number of rows."""
QUESTIONS = {"warm_start": 6000, "train": 600, "test": 24}
"""Number of questions in each split for each number of digits. No two splits share a question."""
DISTRACTOR = 1 / 3
"""Probability that a digit does not count. The first two digits of a question always count."""
DEMONSTRATIONS = 2
IN_ORDER = 0.25
"""Probability that the steps of a demonstration are in the order of the prompt. Otherwise, their order is random."""
AT_ONCE = 0.1
"""Probability that a demonstration is the answer alone."""
NAMES_DISTRACTORS = 0.6
"""Probability that a demonstration names the distractors."""
TWO = 0.05
"""Probability that a step of a demonstration adds two digits, if two are left."""
FORGETS = 0.15
"""Probability that a demonstration forgets its last digit. If this digit counts, the answer is wrong."""
REPEATS = 0.05
"""Probability that a demonstration repeats its last step until it is `LONGEST` characters long."""
LONGEST = 160
"""Length of a demonstration that repeats a step, in characters."""

Question = tuple[str, ...]
"""A question, as its digits with their labels, such as ("a3", "B8", "c5")."""


def answer(entries: Question) -> str:
    """Returns the last digit of the sum of the digits that count.

    >>> answer(("a3", "B8", "c5", "d9"))
    '7'
    """
    return str(sum(int(entry[1]) for entry in entries if entry[0].islower()) % 10)


def right(sample: Sample) -> bool:
    """Grades a response by its answer. A response without an answer at its end, such as a truncated one, is wrong.

    >>> from types import SimpleNamespace as Row
    >>> [right(Row(response=text, prompt=Row(answer="7"))) for text in ("0+a7>7,=7", "=7", "0+a7>7,", "=7,", "=3")]
    [True, True, False, False, False]
    """
    found = re.fullmatch(r"[^=]*=([0-9])", sample.response)
    return found is not None and found[1] == sample.prompt.answer


def demonstration(entries: Question, draw: int) -> str:
    """Returns demonstration number `draw` for a question."""
    place = ("demonstration", *entries, draw)
    if uniform(*place, "at once") < AT_ONCE:
        return f"={answer(entries)}"
    left = [*entries]
    if uniform(*place, "order") >= IN_ORDER:
        left.sort(key=lambda entry: uniform(*place, entry))
    if uniform(*place, "distractors") >= NAMES_DISTRACTORS:
        left = [entry for entry in left if entry[0].islower()]
    if uniform(*place, "forgets") < FORGETS:
        left.pop()
    total, steps = 0, []
    while left:
        entry = left.pop(0)
        if entry[0].isupper():
            steps.append(f"{entry[0]}-,")
            continue
        added = [entry]
        if left and left[0][0].islower() and uniform(*place, "two", len(left)) < TWO:
            added.append(left.pop(0))
        before, total = total, (total + sum(int(one[1]) for one in added)) % 10
        steps.append(f"{before}+{''.join(added)}>{total},")
    if uniform(*place, "repeats") < REPEATS:
        steps += [steps[-1]] * ((LONGEST - sum(map(len, steps))) // len(steps[-1]))
    return f"{''.join(steps)}={total}"


def questions(count: int) -> Iterator[Question]:
    """Yields different questions of `count` digits. The first two digits of each question count."""
    seen = set()
    for place in itertools.count():
        entries = tuple(
            f"{label.upper() if index > 1 and uniform('kind', count, place, index) < DISTRACTOR else label}"
            f"{1 + int(9 * uniform('digit', count, place, index))}"
            for index, label in enumerate(LABELS[:count])
        )
        if entries not in seen:
            seen.add(entries)
            yield entries


def rows(split: str, entries: Question) -> dict[str, object]:
    """Returns the row of a question, in the split `warm_start` with demonstrations."""
    row: dict[str, object] = {"prompt": "".join(entries), "answer": answer(entries)}
    if split == "warm_start":
        row["responses"] = [demonstration(entries, draw) for draw in range(DEMONSTRATIONS)]
    return row


def write(folder: Path) -> None:
    """Writes the datasets `warm_start` (train.jsonl) and `questions` (train.jsonl, test.jsonl), with the questions in random order."""
    found: dict[str, list[dict[str, object]]] = {split: [] for split in QUESTIONS}
    for count in LENGTHS:
        several = questions(count)
        for split in ("test", "train", "warm_start"):
            found[split] += [rows(split, one) for one in itertools.islice(several, QUESTIONS[split])]
    for split, made in found.items():
        made.sort(key=lambda row: uniform("order", str(row["prompt"])))
        target = folder / ("warm_start/train.jsonl" if split == "warm_start" else f"questions/{split}.jsonl")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("".join(json.dumps(row) + "\n" for row in made))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
