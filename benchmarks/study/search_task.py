"""The task of the second study: find operations between digits by trial and error. Writes its data with `python -m benchmarks.study.search_task FOLDER`.

The prompt `a3b8c5>4` asks for operations (`+`, `-` or `*`) that turn the digits 3, 8 and 5, from left to right and modulo 11, into 4. A
response contains attempts, separated by `?`. A step of an attempt has a digit's label, an operation and the result so far, where `x` is
10. An attempt ends with the distance of its result from the target: in `b+0c+5>1?b*2c+7>3?b+0c-6>2`, three attempts fail. A response ends
in `=` after an attempt, and is correct if this attempt is complete and its operations give the target. Results and distances are not
checked, so a false one only misleads the policy.

One of eleven random attempts is correct, so a policy can search, give up, or choose its last operations with foresight. The
demonstrations contain all of these. At the limit of 160 tokens, a response has room for 13 attempts with 4 digits, or 6 attempts with 8 digits.
"""

import functools
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from dapo_jax.data.own_builder import chosen, uniform
from dapo_jax.rewards import Sample

LABELS = "abcdefgh"
MODULUS = 11
NUMERALS = "0123456789x"
ALPHABET = f"{NUMERALS}{LABELS}+-*>?="
"""All characters that occur in prompts and responses."""
OPERATIONS = {"+": 0.6, "-": 0.3, "*": 0.1}
"""The operations with their probabilities in demonstrations. In questions, they are equally probable."""
DIGITS = range(4, 9)
"""Possible numbers of digits. Each occurs in the same number of rows."""
QUESTIONS = {"warm_start": 6000, "train": 600, "test": 24}
"""Number of questions in each split for each number of digits. No two splits share a question."""
FORESIGHT = 0.5
"""Probability that the last operation of an attempt in a demonstration gives the target, if any operation does."""
GIVES_UP = 0.15
"""Probability that a demonstration ends in `=` after an attempt that fails."""
REPEATS = 0.08
"""Probability that a demonstration repeats an attempt to the end, from a random attempt on."""
LONGEST = 200
"""Demonstrations end before an attempt that would exceed this number of characters."""
DEMONSTRATIONS = 2


def result(left: int, operation: str, right: int) -> int:
    """Returns the result of one step.

    >>> result(3, "+", 8), result(3, "-", 8), result(3, "*", 8)
    (0, 6, 2)
    """
    return {"+": left + right, "-": left - right, "*": left * right}[operation] % MODULUS


def total(digits: list[int], operations: str) -> int:
    """Returns the result of all steps, from left to right.

    >>> total([3, 8, 5], "+*"), total([3, 8, 5], "*+")
    (0, 7)
    """
    steps = zip(operations, digits[1:], strict=True)
    return functools.reduce(lambda left, step: result(left, *step), steps, digits[0])


def attempt(digits: list[int], target: int, operations: str) -> str:
    """Returns the text of an attempt.

    >>> attempt([3, 8, 5], 4, "*+")
    'b*2c+7>3'
    """
    steps = (
        f"{LABELS[place]}{operations[place - 1]}{NUMERALS[total(digits[: place + 1], operations[:place])]}"
        for place in range(1, len(digits))
    )
    return "".join(steps) + f">{NUMERALS[(total(digits, operations) - target) % MODULUS]}"


def solved(sample: Sample) -> bool:
    """Grades a response: whether its last attempt uses every digit once and gives the target.

    >>> from types import SimpleNamespace as Row
    >>> [solved(Row(prompt=Row(text="a3b8c5>7"), response=text)) for text in ("b*2c+7>0=", "b+0c+5>9?b*2c+7>0=", "b*2c+7>0", "c+7>0=", "b+0c*7>0=")]
    [True, True, False, False, False]
    """
    question, _, target = sample.prompt.text.partition(">")
    digits = [int(digit) for digit in question[1::2]]
    *_, last = sample.response.split("?")
    steps = re.findall(r"([a-h])([-+*])[0-9x]", last)
    labels = "".join(label for label, _ in steps)
    whole = re.fullmatch(r"([a-h][-+*][0-9x])+>[0-9x]=", last)
    if not whole or labels != LABELS[1 : len(digits)]:
        return False
    return NUMERALS[total(digits, "".join(operation for _, operation in steps))] == target


def demonstration(digits: list[int], target: int, draw: int) -> str:
    """Returns demonstration number `draw` for a question: attempts until one is correct, or until it gives up or has no room for another."""
    place = ("demonstration", *digits, target, draw)
    most = LONGEST // (3 * len(digits))
    repeats = uniform(*place, "repeats") < REPEATS
    attempts: list[str] = []
    for count in range(5 if repeats else most):
        lucks = (uniform(*place, count, step) for step in range(len(digits) - 1))
        operations = "".join(chosen(OPERATIONS, luck) for luck in lucks)
        if uniform(*place, count, "foresight") < FORESIGHT:
            endings = (operations[:-1] + last for last in OPERATIONS)
            operations = next((ops for ops in endings if total(digits, ops) == target), operations)
        attempts.append(attempt(digits, target, operations))
        over = total(digits, operations) == target or uniform(*place, count, "gives up") < GIVES_UP
        if over and not repeats:
            break
    if repeats:
        first = 1 + int(uniform(*place, "first") * len(attempts))
        attempts = attempts[:first] + attempts[first - 1 : first] * (most - first)
    return "?".join(attempts) + "="


def questions(count: int) -> Iterator[tuple[list[int], int]]:
    """Yields different questions of `count` digits, each with its target, which some operations reach."""
    seen = set()
    for place in itertools.count():
        digits = [1 + int(9 * uniform("digit", count, place, index)) for index in range(count)]
        luck = [uniform("operation", count, place, index) for index in range(count - 1)]
        target = total(digits, "".join("+-*"[int(3 * one)] for one in luck))
        if (*digits, target) not in seen:
            seen.add((*digits, target))
            yield digits, target


def rows(split: str, digits: list[int], target: int) -> dict[str, object]:
    """Returns the row of a question. The answer is the target."""
    prompt = "".join(f"{label}{digit}" for label, digit in zip(LABELS, digits, strict=False))
    row: dict[str, object] = {"prompt": f"{prompt}>{NUMERALS[target]}", "answer": NUMERALS[target]}
    if split == "warm_start":
        row["responses"] = [demonstration(digits, target, draw) for draw in range(DEMONSTRATIONS)]
    return row


def write(folder: Path) -> None:
    """Writes the datasets `warm_start` (train.jsonl) and `questions` (train.jsonl, test.jsonl), with the questions in random order."""
    found: dict[str, list[dict[str, object]]] = {split: [] for split in QUESTIONS}
    for count in DIGITS:
        several = questions(count)
        for split in ("test", "train", "warm_start"):
            found[split] += [rows(split, *one) for one in itertools.islice(several, QUESTIONS[split])]
    for split, made in found.items():
        made.sort(key=lambda row: uniform("order", str(row["prompt"])))
        target = folder / ("warm_start/train.jsonl" if split == "warm_start" else f"questions/{split}.jsonl")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("".join(json.dumps(row) + "\n" for row in made))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
