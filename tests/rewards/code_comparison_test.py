"""How the grader `code` finds programs and compares outputs, without a sandbox."""

import numpy as np
import pytest

from dapo_jax.rewards.code_equality import same_text, same_value
from dapo_jax.rewards.code_program import MOST_BYTES, after_prompt, program_of
from dapo_jax.sandbox.server import packed


@pytest.mark.parametrize(
    ("expected", "found", "equal"),
    [
        ("1 2\n3", "\n1  2 \r\n3\n\n", True),
        ("1\n\n2", "1\n2", False),
        ("0.5", "0.5000001", True),
        ("0.5", "0.50001", False),
        ("1000000.0", "1000000.9", True),  # 1e-6 of the value is 1
        ("5", "5.0", True),
        ("5", "5.0000001", False),
        ("007", "7", True),
        ("9007199254740993", "9007199254740992.0", False),  # 2**53 + 1 is not a float
        ("1e999", "inf", False),
        ("nan", "nan", True),
        ("1" * 5000, "1" * 5000, True),
        ("1" * 500, "0" + "1" * 500, False),  # long numbers are text
        ("٣", "3", False),
        ("1_0", "10", False),
        ("YES", "yes", False),
    ],
)
def test_texts(expected, found, equal):
    assert same_text(expected, found) is equal


def test_ways_to_compare():
    assert [same_text("1 2\n", "1\n2", way) for way in ("lines", "tokens", "exact")] == [False, True, False]
    assert same_text("1\n", "1\n", "exact")


@pytest.mark.parametrize(
    ("expected", "found", "equal"),
    [
        ([1, [2.0]], (1, (2.0000001,)), True),
        ({"1": 2}, {1: 2}, True),
        ({"1": 2}, {1: 2, 3: 4}, False),
        ({1, 2}, {2, 1}, True),
        ([1, 2], {1, 2}, False),
        (True, "True", False),
        (1, "1", False),
        (None, "", False),
        (3, 3.0, True),
        (2**70, float(2**70), False),
        (float("nan"), float("nan"), True),
        ("", object(), False),
        (b"a", b"a", True),
        ([3, True, 0.5], [np.int64(3), np.bool_(True), np.float32(0.5)], True),
        (4, np.int64(3), False),
        ([1, 2], np.array([1, 2]), False),
    ],
)
def test_values(expected, found, equal):
    assert same_value(packed(expected), packed(found)) is equal


@pytest.mark.parametrize(
    "forged",
    [
        {"opaque": "int"},
        {"dict": 3},
        {"dict": [[1]]},
        {"dict": [[1, 2, 3]]},
        {"set": [{}]},
        {},
        {"a": 1, "b": 2},
        {"literal": "x"},
        {"list": 3},
        {"set": 3},
    ],
)
def test_data_that_a_program_forged_equals_nothing(forged):
    for expected in (3, {"1": 2}, {1}, [], "x", object()):
        assert not same_value(packed(expected), forged)


def test_long_integers():
    assert same_value(packed(10**5000), packed(10**5000))
    assert not same_value(packed(10**5000), packed(10**5000 + 1))
    assert not same_value(packed(1.0), packed(10**400))  # too large for a float


def test_deep_data_is_not_followed():
    deep = []
    for _ in range(500):
        deep = [deep]
    assert not same_value(deep, deep)


@pytest.mark.parametrize(
    ("response", "options", "program"),
    [
        ("```cpp\nint x;\n```", {}, ("", True)),
        ("```\nx = 1\n```\n```text\n1\n```", {}, ("x = 1\n", True)),
        ("~~~Python\nx = 1\n```\n~~~", {}, ("x = 1\n```\n", True)),
        ("````py\n```\n````", {}, ("```\n", True)),
        ("```python\nx = 1", {"is_complete": False}, ("", True)),
        ("```python\nx = 1", {}, ("x = 1", True)),
        ("<think>```python\nx = 1\n```", {}, ("", False)),
        ("no</think>x = 1", {"prompt": "<think>"}, ("x = 1", False)),
        ("```python\nf = 1\n```\n```python\ng = 2\n```", {"name": "f"}, ("f = 1\n", True)),
        ("# " + "x" * MOST_BYTES, {}, ("", False)),
        ("My program:```python\nx = 1\n```", {}, ("x = 1\n", True)),
        ("I use ```python fences.\n```python\nx = 1\n```", {}, ("x = 1\n", True)),
        ("1. ```python\n   if x:\n       y\n   ```", {}, ("if x:\n    y\n", True)),
        ("* ```\n  x = 1\n  ```", {}, ("x = 1\n", True)),
        (
            '```python\n"""\n```python\nf(1)\n```\n"""\nx = 1\n```',
            {},
            ('"""\n```python\nf(1)\n```\n"""\nx = 1\n', True),
        ),
        *(
            (f"```python\nx = 1\n```{after}\n", {}, ("x = 1\n", True))
            for after in (" This works.", "This works.", " Done", " It sets `x`:\n- x", " Explanation:", ".")
        ),
        (
            '```python\n"""\n```python title\n```\n```sh\n``` A text.\n```x``` and\n"""\n```',
            {},
            ('"""\n```python title\n```\n```sh\n``` A text.\n```x``` and\n"""\n', True),
        ),
        ("  - a\n\n    ```python\n    if x:\n\n        y\n    ```", {}, ("if x:\n\n    y\n", True)),
    ],
)
def test_programs_in_responses(response, options, program):
    assert program_of(response, **options) == program


def test_a_line_of_many_characters_takes_no_time():
    """With backtracking it would take 10^10 steps."""
    assert program_of("```" + "a" * 100_000 + "`") == ("```" + "a" * 100_000 + "`", False)


@pytest.mark.parametrize(
    ("program", "whole"),
    [
        ("x = 1\ndef f(): 1", "import a\nx = 1\ndef f(): 1"),
        ("    return 1", "import a\ndef f():\n    return 1"),
        (
            "from __future__ import annotations\nimport b\ndef f(): 1",
            "from __future__ import annotations\nimport a\nimport b\ndef f(): 1",
        ),
        (
            "# b\n'''b'''\n\nfrom __future__ import (  # b\n  division,\n)  # b\nfrom __future__ import annotations; x = 1\ndef f(): 1",
            "# b\n'''b'''\n\nfrom __future__ import (  # b\n  division,\n)  # b\nfrom __future__ import annotations; x = 1\nimport a\ndef f(): 1",
        ),
        (
            "x = 1\nfrom __future__ import annotations\ndef f(): 1",
            "import a\nx = 1\nfrom __future__ import annotations\ndef f(): 1",
        ),
    ],
)
def test_code_of_a_prompt_precedes_a_program(program, whole):
    """But imports from `__future__` come first, if they begin the program."""
    assert after_prompt(program, "import a\ndef f():\n", "f") == whole
