"""Tests that are code: what they pass to a program, get from it, and how they run as in pytest."""

import pytest

from dapo_jax.sandbox import Limits
from dapo_jax.text import code_tests
from tests.rewards.code_grader_test import case, check, fenced, graded

MARKS = """
import types
def parametrize(names, values):
    def marked(test):
        mark = types.SimpleNamespace(name="parametrize", args=(names,), kwargs={"argvalues": values})
        test.pytestmark = [mark, *getattr(test, "pytestmark", [])]
        return test
    return marked
class ParameterSet:
    def __init__(self, *values): self.values = values
"""
"""The marks of pytest, which the interpreter of the sandbox may not have."""


def row(test, **more):
    return {"question": "?", "test": test, **more}


@pytest.mark.parametrize(
    ("source", "test"),
    [
        ("f = lambda d: d.replace(day=d.day + 1)", "from datetime import date\ndef test(): assert f(date(2020, 1, 1)) == date(2020, 1, 2)"),
        ("f = lambda d: d + timedelta(1)", "from datetime import *\ndef test(): assert f(datetime(2020, 1, 1, 5, tzinfo=timezone.utc)) == datetime(2020, 1, 2, 5, tzinfo=timezone.utc)"),
        ("f = lambda d: {d: [d * 2]}", "from decimal import Decimal as D\ndef test(): assert f(D('1.5')) == {D('1.5'): [D('3')]}"),
        ("f = lambda d: d * 2", "from fractions import Fraction as F\ndef test(): assert f(F(1, 3)) == F(2, 3)"),
        ("f = lambda d: (d.pop(), d)", "from collections import deque\ndef test(): assert f(deque([2, 3], 5)) == (3, deque([2]))"),
        ("f = lambda d: [*d]", "def test(): assert f(range(1, 9, 3)) == [1, 4, 7] == f(x for x in [1, 4, 7]) == f({1: 0, 4: 0, 7: 0}.keys())"),
    ],
)  # fmt: skip
def test_values_of_the_standard_library(source, test):
    source = f"from datetime import *\n{source}"
    test = row(f"from solution import f\n{test}")
    check([case("", "passed", fenced(source), row=test)])
    wrong = fenced(f"{source}\ng = f\nf = lambda d: [g(d)]")
    check([case("", "wrong_answer", wrong, row=test)])


POINTS = """
from dataclasses import dataclass
from enum import Enum
class Color(Enum):
    RED = 1
    BLUE = 2
MOST = 3
class Bad(ValueError):
    def __init__(self, code): super().__init__("bad"); self.code = code
@dataclass(frozen=True)
class P:
    x: int
    def __add__(self, other): return P(self.x + other.x)
    def __lt__(self, other): return self.x < other.x
    def __enter__(self): return self
    def __exit__(self, *error): return False
def other(color): return Color.BLUE if color is Color.RED else Color.RED
def same(value): return value
def check(n):
    if n > MOST: raise Bad(n)
    return n
async def later(n): return n
"""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("assert P(1) + P(2) == P(3) and P(1) < P(2) and max(P(1), P(2)).x == 2", "passed"),
        ("assert P(1) + P(2) == P(4)", "wrong_answer"),
        ("assert len({P(1), P(1)}) == 1 and P(1) in [P(1)]\n    p = P(1)\n    assert same(p) is p", "passed"),
        ("with P(1) as p:\n        assert p.x == 1", "passed"),
        ("assert other(Color.RED) == Color.BLUE and Color.BLUE.value == 2 and check(3) == MOST", "passed"),
        ("assert other(Color.RED) == Color.RED", "wrong_answer"),
        ("try: check(4)\n    except Bad as e: assert isinstance(e, ValueError) and e.code == 4 and str(e) == 'bad'\n    else: assert 0", "passed"),
        ("import solution\n    try: solution.check(4)\n    except solution.Bad as e: assert e.args == ('bad',)\n    else: assert 0", "passed"),
        ("try: check(3)\n    except Bad: return\n    assert 0", "wrong_answer"),
        ("assert asyncio.run(later(1)) == 1", "passed"),
        ("assert asyncio.run(later(1)) == 2", "wrong_answer"),
    ],
)  # fmt: skip
def test_classes_exceptions_and_constants_of_the_program(body, expected):
    names = "from solution import P, Color, MOST, Bad, other, same, check, later\nimport asyncio\n"
    check([case("", expected, fenced(POINTS), row=row(f"{names}def test():\n    {body}\n"))])


@pytest.mark.parametrize(
    "test",
    [
        "class TestF:\n    def setup_method(self): self.x = 1\n    def test_one(self): assert f(self.x) == 1\n    def test_two(self): assert f(2) == 2",
        "import unittest\nclass Cases(unittest.TestCase):\n    def setUp(self): self.x = 2\n    def test_two(self): self.assertEqual(f(self.x), 2)",
        "def test_one(): assert f(1) == 1\nasync def test_two(): assert f(2) == 2",
        f"{MARKS}@parametrize('a', [1, ParameterSet(2)])\n@parametrize(('b', 'c'), [(3, 4), (5, 6)])\ndef test(a, b, c): assert f(a) + b == a + c - 1",
        f"{MARKS}class TestF:\n    @parametrize('a, b', [(1, 1), (2, 2)])\n    def test(self, a, b): assert f(a) == b",
        "def test_one():\n    assert f(1) == 1\n    if f(2) != 2: raise SystemExit",
    ],
)  # fmt: skip
def test_all_tests_of_a_module_for_pytest_run(test):
    test = row(f"from solution import f\n{test}")
    check([case("right", "passed", fenced("def f(x): return x"), row=test)])
    check([case("wrong", "wrong_answer", fenced("def f(x): return 1"), row=test)])


def test_a_test_that_needs_a_fixture_is_refused():
    with pytest.raises(ValueError, match="test_b needs the fixture 'tmp_path'"):
        code_tests.tests_of("", row("def test_a(x=1): pass\ndef test_b(tmp_path): pass"))


def test_tests_that_reject_the_reference_solution_are_refused():
    """The program cannot get the object of a class of the tests. A wrong response to a row that can be graded stays wrong."""
    unfit = "from solution import f\nclass A: x = 1\ndef test(): assert f(A()) == 1"
    right = "def f(a): return a.x"
    [verdict] = graded([case("", "", fenced(right), row=row(unfit, solution=right))])
    assert verdict.reason.startswith("refused: the reference solution fails (wrong_answer")
    assert (verdict.correct, verdict.lost) == (False, "raised")
    fit = row("from solution import f\ndef test(): assert f(1) == 2", solution="def f(a): return a + 1")
    check([case("", "wrong_answer", fenced("def f(a): return a"), row=fit)])
    check([case("", "wrong_answer", fenced("def f(a): return a"), row={**fit, "solution": "Add one."})])


def evalplus(task, name, inputs, reference, **more):
    solution = {
        "entry_point": name,
        "prompt": "",
        "canonical_solution": f"def {name}(*a):\n    {reference}\n",
    }
    return {"task_id": task, "base_input": inputs, "plus_input": [], "atol": 0, **solution, **more}


@pytest.mark.parametrize(
    ("task", "inputs", "types"),
    [
        ("Mbpp/2", [[3], [4]], "[(3,), (4,)]"),
        ("Mbpp/63", [[[1, 2]]], "[[(1, 2)]]"),
        ("Mbpp/75", [[[1, 2]], 3], "[[(1, 2)], 3]"),
        ("Mbpp/106", [[1], [2]], "[[1], (2,)]"),
        ("Mbpp/115", [[[1], []]], "[[{1}, {}]]"),
        ("Mbpp/124", ["1", "1j"], "[1.0, 1j]"),
        ("Mbpp/307", [["a", [1]], 1, 2], "[('a', [1]), 1, 2]"),
        ("Mbpp/278", [[1, [2]]], "[(1, (2,))]"),
        ("Mbpp/722", [{"a": [1]}, 2], "[{'a': (1,)}, 2]"),
        ("Mbpp/580", [[1, [2, [3]]]], "[(1, (2, (3,)))]"),
        ("HumanEval/2", [[3]], "[[3]]"),
    ],
)
def test_inputs_of_evalplus_have_their_types(task, inputs, types):
    given = evalplus(task, "f", [inputs], "return 1")
    check([case("", "passed", fenced(f"def f(*a): return int([*a] == {types})"), row=given)])


@pytest.mark.parametrize(
    ("name", "inputs", "reference", "right", "wrong"),
    [
        ("similar_elements", [[1, 2]], "return (2, 1, 2)", ["(1, 2)", "[2, 1.0]", "{1, 2}"], ["(1,)", "1", "[[1], 2]", "{}"]),
        ("f", [], "return (2, 1)", ["(2, 1)"], ["(1, 2)"]),
        ("check_str", [], "return re.match('a', 'a')", ["True", "1", "re.match('a', 'a')"], ["None", "False"]),
        ("check_str", [], "return None", ["None", "False"], ["1", "True"]),
        ("find_zero", [[2, -3, 1]], "return 1", ["1", "2.0"], ["1.5", "None", "'1'", "1e308", "float('nan')"]),
        ("f", [], "return [float('nan'), 1]", ["[float('nan'), 1]"], ["[float('nan'), 2]", "[0.0, 1]"]),
    ],
)  # fmt: skip
def test_evalplus_compares_some_tasks_in_its_own_way(name, inputs, reference, right, wrong):
    given = evalplus("Own/1", name, [inputs], reference)
    check([case(value, "passed", fenced(f"def {name}(*a): return {value}"), row=given) for value in right])
    check(
        [case(value, "wrong_answer", fenced(f"def {name}(*a): return {value}"), row=given) for value in wrong]
    )


def test_a_reference_value_that_cannot_be_compared_is_refused():
    given = evalplus("Own/1", "f", [[]], "return re.match('a', 'a')")
    with pytest.raises(ValueError, match="returns values that cannot be compared; remove the row"):
        graded([case("", "", fenced("def f(): return 1"), row=given)])


HOSTILE = """
import os, sys, time
def forge(reply):
    frame = sys._getframe()
    while "self" not in frame.f_locals or not hasattr(frame.f_locals["self"], "called"):
        frame = frame.f_back
    frame.f_locals["self"].called = lambda **_: reply
"""


@pytest.mark.parametrize(
    ("verdict", "source", "test"),
    [
        ("wrong_answer", "os.write(3, b'null\\n')\ndef f(x): time.sleep(99)", "from solution import f\ndef test(): assert f(1) == 7919"),
        ("time_limit", "def f(g):\n    while True: g() or time.sleep(0.1)", "from solution import f\ndef test(): f(lambda: None)"),
        ("time_limit", "def f():\n    while True: yield time.sleep(0.1)", "from solution import f\ndef test(): list(f())"),
        ("crashed", "forge({'value': {'made': ['deque', [{'made': ['range', [0, 10**18]]}, 1]]}, 'args': []})", "from solution import Bad, f\ndef test(): assert f(1) == 2"),
        ("wrong_answer", "def f(x): return x", "from solution import Bad, f\ndef test(): assert issubclass(Bad, Exception) and f(1)"),
        ("wrong_answer", "class Stack(Exception): pass", "from solution import Stack\ndef test():\n    s = Stack(); s.push(1); assert s.pop() == 1"),
        ("wrong_answer", "x = 1", "from solution import Bad\ndef test(): assert callable(Bad)"),
        ("wrong_answer", "class A(list):\n    n = 0\n    def __len__(self): return 1\n    def __iter__(self): return self\n    def __next__(self):\n        A.n += 1\n        if A.n > 20: raise StopIteration\n        return A.n\n    def __getitem__(self, at): return A.n\ndef f(): return A()", "from solution import f\ndef test():\n    v = f()\n    assert len(v) == 1 and 12 in v and v[0] == 12"),
        ("wrong_answer", "class P:\n    def __enter__(self): return self\n    def __exit__(self, *_): return True\n    def f(self): return 0", "from solution import P\ndef test():\n    with P() as p: assert p.f() == 4"),
    ],
)  # fmt: skip
def test_wrong_programs_get_a_verdict_and_do_not_end_the_run(verdict, source, test):
    """A program may send `null`, sleep between many calls, forge a reply, lack an exception, or hide a failure in `__exit__`."""
    limits = Limits(cpu_s=2.0, idle_s=0.5, total_s=1.5)
    [found] = graded([case("", verdict, fenced(HOSTILE + source), row=row(test), limits=limits)])
    assert found.reason.partition(":")[0] == verdict
    assert not found.lost


SUBCLASSES = """
from collections import OrderedDict, namedtuple
from enum import Enum, IntEnum
DEBUG = True
class Color(Enum):
    RED = 1
class Level(IntEnum):
    LOW = 1
    HIGH = 2
Point = namedtuple("Point", "x y")
class Stack(list):
    def push(self, x): self.append(x)
class Cache(OrderedDict):
    def put(self, key, value):
        self[key] = value
        self.move_to_end(key)
def mid(a, b): return Point((a.x + b.x) / 2, (a.y + b.y) / 2)
def tally(): return {Color.RED: 1}
def high(): return Level.HIGH
def twice(f):
    def g(*args, **kwargs): return 2 * f(*args, **kwargs)
    return g
def order(values): values.sort()
"""


@pytest.mark.parametrize(
    "test",
    [
        "s = Stack(); s.push(3); assert s == [3] and s[0] == 3 and s.pop() == 3 and not s",
        "c = Cache(); c.put(1, 2); c.put(0, 3); c.put(1, 4); assert c[1] == 4 and list(c) == [0, 1] and len(c) == 2 and c == {0: 3, 1: 4}",
        "p = mid(Point(0, 0), Point(2, 4)); assert p == Point(1, 2) == (1.0, 2.0) and (p.x, p.y) == (1, 2) and p._replace(x=5).x == 5",
        "assert high() is Level.HIGH and high() == 2 and high().name == 'HIGH' and Level.LOW < high() and isinstance(high(), int)",
        "assert DEBUG and tally()[Color.RED] == 1 and {*tally()} == {Color.RED}",
        "assert twice(lambda x, *, y: x + y)(1, y=2) == 6 == twice(lambda x: twice(lambda y: y)(x) + 1)(1)",
        "s = Stack([1, 2, 3]); assert s[1:] == [2, 3] and 2 in s and 5 not in s and isinstance(p := mid(Point(0, 0), Point(2, 4)), Point) and p.x == 1",
        "v = [2, 1]; order(values=v); assert v == [1, 2]",
    ],
)  # fmt: skip
def test_classes_that_extend_plain_data_keep_their_methods(test):
    test = row(f"from solution import *\ndef test():\n    {test}")
    check([case("", "passed", fenced(SUBCLASSES), row=test)])
    wrong = "Stack = Cache = list\nmid = max\nhigh = lambda: 2.5\nDEBUG = False\ntwice = lambda f: f\ndef order(values): pass"
    check([case("", "wrong_answer", fenced(f"{SUBCLASSES}\n{wrong}"), row=test)])
