"""The programs of one line: splits, and how often the demonstrations are right."""

import json
from functools import cache

import pytest

from dapo_jax.data.builders import one_line_programs
from dapo_jax.data.builders.one_line_programs import (
    POINTS,
    START,
    Builder,
    demonstration,
    infix,
    split_expressions,
    value,
)

ALPHABET = set("0123456789+-*:()=abdflmx ")
"""The tokenizer of `configs/code_quickstart_sft.yaml`."""


@pytest.fixture(autouse=True)
def generated_once(monkeypatch):
    monkeypatch.setattr(one_line_programs, "split_expressions", EXPRESSIONS)


EXPRESSIONS = cache(split_expressions)


def is_right(expression, program):
    try:
        function = eval(program.removeprefix("f="))
    except SyntaxError:
        return False
    return all(function(x) == value(expression, x) for x in POINTS)


def test_expressions_are_different_and_have_x():
    splits = EXPRESSIONS()
    assert {name: len(each) for name, each in splits.items()} == {"train": 8000, "test": 1000}
    together = splits["train"] + splits["test"]
    assert len(set(together)) == 9000
    assert all("x" in each and len(each) in (5, 7) for each in together)


def test_all_brackets_are_right_and_a_demonstration_is_right_less_than_half_of_the_time():
    """0.501 without brackets, so about 0.60 x 0.501 + 0.15 = 0.451, and a program without brackets cannot lose one: 0.455."""
    expressions = EXPRESSIONS()["train"]
    assert all(is_right(each, START + infix(each, True)) for each in expressions)
    shown = [(each, demonstration(each, draw)) for each in expressions for draw in range(2)]
    assert all(len(program) <= 22 and set(program) <= ALPHABET for _, program in shown)
    assert abs(sum(is_right(*pair) for pair in shown) / len(shown) - 0.455) < 0.001


def test_rows_have_the_values_at_five_points(tmp_path):
    rows = [*Builder(data_dir=str(tmp_path)).splits()["test"]]
    assert len(rows) == 1000
    expression = rows[0]["prompt"].removesuffix(":")
    tests = json.loads(rows[0]["answer"])
    assert tests["outputs"] == [eval(infix(expression, True), {"x": x}) for [x] in tests["inputs"]]
    assert rows[0]["response"] == rows[0]["responses"][0]
