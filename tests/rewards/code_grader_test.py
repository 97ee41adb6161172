"""The grader `code` on problems, on reports of users of other libraries, on rows of other projects, and on programs that try to cheat."""

import asyncio
import json
import os
import random
import signal
import socket
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from dapo_jax.config import ConfigError, RewardConfig, SandboxConfig
from dapo_jax.rewards.code_grader import VERDICTS, CodeGrader
from dapo_jax.rewards.functions import RewardError
from dapo_jax.run.grader_setup import submit_of
from dapo_jax.sandbox import Limits, SandboxError
from dapo_jax.text import code_tests
from tests.rewards.samples import sample
from tests.sandbox.running import IN_CONTAINER, run, with_sandbox

FILES = Path(__file__).with_name("coding")
SUM = {"inputs": ["1 2\n", "10 -4\n", "0 0\n"], "outputs": ["3\n", "6\n", "0\n"]}
ADD = {"fn_name": "add", "inputs": [[1, 2], [10, -4], [0, 0]], "outputs": [3, 6, 0]}
ASSERTS = ["assert add(1, 2) == 3", "assert add(10, -4) == 6", "assert add(0, 0) == 0"]
PLAIN, SHORT = Limits(), Limits(cpu_s=0.5, idle_s=0.5)
"""Limits for programs that should exceed them."""


def rows(name):
    return [json.loads(line) for line in (FILES / f"{name}.jsonl").read_text().splitlines()]


def fenced(source):
    return f"```python\n{source}\n```"


def case(name, expected, response, tests=None, *, row=None, limits=PLAIN, ended="stop"):
    """A response with its expected verdicts."""
    answer = "see the row" if tests is None else json.dumps(tests)
    graded = replace(sample(response, prompt="Solve it.", answer=answer, row=row), finish_reason=ended)
    return name, [expected] if isinstance(expected, str) else expected, graded, limits


def graded(cases, *, slots=2, path=""):
    """The verdict on each case. They are graded at once, by one grader for each set of limits."""

    async def job(sandbox):
        graders = {limits: CodeGrader(sandbox, limits, path) for *_, limits in cases}
        return await asyncio.gather(*(graders[limits](each) for *_, each, limits in cases))

    return with_sandbox(job, slots=slots)


def check(cases, **how):
    """Fails unless all verdicts are as expected."""
    verdicts = graded(cases, **how)
    wrong = {
        name: verdict.reason
        for (name, expected, *_), verdict in zip(cases, verdicts, strict=True)
        if verdict.reason.partition(":")[0] not in expected or verdict.correct != (verdict.reason == "passed")
    }
    assert not wrong
    assert all(verdict.reason.isprintable() and len(verdict.reason) < 1000 for verdict in verdicts)


def problems():
    for row in rows("problems"):
        limits = replace(Limits(), **row["limits"])
        yield case(f"{row['id']} right", "passed", fenced(row["right"]), row["tests"], limits=limits)
        for number, wrong in enumerate(row["wrong"]):
            yield case(
                f"{row['id']} {number}",
                wrong["verdict"],
                fenced(wrong["source"]),
                row["tests"],
                limits=limits,
            )


def test_problems():
    check([*problems()])


@pytest.mark.slow  # three times the programs of the test above
@pytest.mark.parametrize("slots", [1, 2, 8])
def test_verdicts_do_not_depend_on_order_and_slots(slots):
    cases = [*problems()]
    random.Random(slots).shuffle(cases)
    check(cases, slots=slots)


@pytest.mark.slow  # the machine is loaded for some seconds
def test_verdicts_do_not_depend_on_the_load():
    """A program of about 0.4 s has a limit of 2 s of processor time, while four processes per core compute."""
    import subprocess
    import sys

    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4 * (os.cpu_count() or 1))
    ]
    try:
        source = "n = 0\nfor i in range(3_000_000): n += i\nprint(3)"
        tests = {"inputs": ["1 2\n"], "outputs": ["3\n"]}
        check(
            [
                case(
                    number,
                    "passed",
                    fenced(f"{source}\n# {number}"),
                    tests,
                    limits=Limits(cpu_s=2.0, idle_s=1.0),
                )
                for number in range(10)
            ]
        )
    finally:
        for process in busy:
            process.kill()
            process.wait()


@pytest.mark.slow  # all problems once more
@pytest.mark.parametrize("inside", [False, True])
def test_verdicts_do_not_depend_on_servers_that_are_killed(inside):
    """Each slot's bubblewrap, or the server inside of it, is killed once while programs run. The programs run again."""

    async def job(sandbox):
        graders = {}
        tasks = [
            asyncio.ensure_future(graders.setdefault(limits, CodeGrader(sandbox, limits))(each))
            for _, _, each, limits in problems()
        ]
        while not sandbox.restarts:
            await asyncio.sleep(0.3)
            own = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
            for pid in own:
                below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                for victim in below if inside else [pid]:
                    os.kill(int(victim), signal.SIGKILL)
            await asyncio.sleep(0.1)  # the deaths are noticed, so nothing is killed twice
        verdicts = await asyncio.gather(*tasks)
        assert sandbox.restarts >= 1
        return verdicts

    verdicts = with_sandbox(job)
    for (name, expected, *_), verdict in zip(problems(), verdicts, strict=True):
        assert verdict.reason.partition(":")[0] in expected, (name, verdict.reason)


def test_reports_of_users():
    """Idioms of input and output, forms of responses, and kinds of values that other graders have failed on."""
    small = {"recursion_endless": Limits(cpu_s=1.0, memory_mb=256)}  # it fills its memory
    cases = [
        case(
            row["id"],
            row["expect"],
            row["response"],
            row["tests"],
            ended=row["finish_reason"],
            limits=small.get(row["id"], PLAIN),
        )
        for row in rows("reports")
    ]
    check(cases)


STREAMS = {
    "text input": "import io, sys\nsys.stdin = io.TextIOWrapper(sys.stdin.buffer, encoding='utf-8')\nprint(sum(map(int, input().split())))",
    "text output": "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer)\nprint(sum(map(int, input().split())))",
    "by number": "import os, sys\nsys.stdout = os.fdopen(1, 'w')\nprint(sum(map(int, input().split())))",
    "second name": "import sys\nsys.__stdout__.write(str(sum(map(int, sys.__stdin__.readline().split()))))",
    "closed": "import sys\nprint(sum(map(int, input().split())))\nsys.stdout.close()",
    "at the end": "import atexit, io, os, sys\nsys.stdout = io.StringIO()\n"
        "atexit.register(lambda: os.write(1, sys.stdout.getvalue().encode()))\nprint(sum(map(int, input().split())))",
    "lost": "import io, sys\nsys.stdout = io.StringIO()\nprint(sum(map(int, input().split())))",
}  # fmt: skip


def test_a_program_may_replace_and_close_its_streams():
    """As with Python itself, whose second names of the streams keep them open."""
    expected = dict.fromkeys(STREAMS, "passed") | {"lost": "wrong_answer"}
    check([case(name, expected[name], fenced(source), SUM) for name, source in STREAMS.items()])


def test_functions_are_called_as_on_the_sites_of_their_tests():
    """With a recursion limit of 50,000, and methods of `Solution` before functions of the same name."""
    deep = "from functools import cache\nclass Solution:\n    def add(self, a, b):\n        @cache\n        def f(n): return f(n - 1) + 1 if n else 0\n        return f(5000) - 5000 + a + b"
    ignored = "def add(a, b): return a + b\nclass Solution:\n    def add(self, a, b): return 1"
    check([case("deep", "passed", fenced(deep), ADD), case("ignored", "wrong_answer", fenced(ignored), ADD)])
    check([case("a tag", "passed", f"<answer>\n{fenced('def add(a, b): return a + b')}</answer>", ADD)])


def test_keys_of_dictionaries_may_be_integers_or_texts():
    """JSON has texts only, so a program is right if it passes with either. It gets each kind in a process of its own."""
    tests = {
        "fn_name": "f",
        "inputs": [[{"1": [{"-5": 2}]}], [{"10": [{"0": 3}]}]],
        "outputs": [{"2": -5}, {"11": 0}],
    }
    integers = "def f(d):\n    [(key, [inner])] = d.items()\n    return {key + 1: min(inner)}"
    texts = integers.replace("key + 1: min(inner)", "str(int(key) + 1): int(min(inner)) + len(key[:0])")
    second = f"calls = 0\ndef f(d):\n    global calls\n    calls += 1\n    return {{2: -5}} if calls == 1 else {{11: 0}} if calls > {2}"
    check(
        [
            case("integers", "passed", fenced(integers), tests),
            case("texts", "passed", fenced(texts), tests),
            case("wrong", "wrong_answer", fenced(integers.replace("+ 1", "+ 2")), tests),
            case("keeps count", "wrong_answer", fenced(f"{second} else 0"), tests),
            case("mixed", "wrong_answer", fenced("def f(d): return 1 in d"), {"fn_name": "f", "inputs": [[{"1": 2, "a": 3}]], "outputs": [True]}),
        ]
    )  # fmt: skip


def test_an_exception_of_the_program_is_the_exception_of_python_that_it_extends():
    source = "class Bad(ValueError): pass\ndef add(a, b): raise Bad('no')"
    tests = [
        "try:\n    add(1, 2)\nexcept ValueError as error:\n    assert str(error) == 'no'\nelse:\n    assert False"
    ]
    check([case("", "passed", fenced(source), tests)])


def test_formats_of_datasets():
    wrong = [verdict for verdict in VERDICTS if verdict != "passed"]
    expected = {"right": "passed", "right_body": "passed", "wrong": wrong}
    check(
        [
            case(f"{row['format']} {kind}", verdicts, row[kind], row=row["row"])
            for row in rows("formats")
            for kind, verdicts in expected.items()
            if kind in row
        ]
    )


def test_a_question_is_not_code_and_tests_may_be_plain_asserts():
    """The prompt of HumanEval is code that precedes the response. The prompt of other rows is a question, as text or as messages."""
    check_, plain = "def check(candidate):\n    assert candidate(1, 2) == 3", "assert add(1, 2) == 3"
    right, begun = "def add(a, b):\n    return a + b", 'def add(a, b):\n    """Adds."""\n'
    message = [{"role": "user", "content": "Add two numbers."}]
    prompts = [("Add two numbers.", right), (message, right), (begun, right), (begun, "    return a + b")]
    graded = [
        (source, {"test": test, "prompt": prompt, "entry_point": "add"})
        for test in (check_, plain)
        for prompt, source in prompts
    ]
    check([case(str(row), "passed", fenced(source), row=row) for source, row in graded])
    wrong = [(source.replace("+", "-"), row) for source, row in graded]
    check([case(str(row), "wrong_answer", fenced(source), row=row) for source, row in wrong])


def attacks(folder, port):
    """Grades functions as calls and as asserts."""
    for row in rows("attacks"):
        if row["id"] == "read_host_files" and IN_CONTAINER:
            continue  # the image has its own files in /etc
        limits = SHORT if row["expect"] == ["time_limit"] else Limits()
        source = row["source"].replace("CANARY_FOLDER", str(folder)).replace("CANARY_PORT", str(port))
        yield case(
            row["id"], row["expect"], fenced(source), SUM if row["kind"] == "stdin" else ADD, limits=limits
        )
        if row["kind"] == "function":
            yield case(f"{row['id']} asserts", row["expect"], fenced(source), ASSERTS, limits=limits)


def test_attacks(tmp_path, monkeypatch):
    """No attack passes that should not, or ends as a failure of the sandbox. Right programs in other slots pass, and the host is as before."""
    run("pass")  # skips without bubblewrap
    monkeypatch.setenv("CANARY_SECRET", "secret")
    canary = tmp_path / "canary.txt"
    canary.write_text("secret")
    tmp_path.chmod(0o777)
    before = [(path.name, path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.iterdir()]
    core_pattern = Path("/proc/sys/kernel/core_pattern").read_bytes()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        with suppress(OSError):  # another test has it
            abstract.bind("\0dapo_jax_canary")
        server.settimeout(0)
        cases = [*attacks(tmp_path, server.getsockname()[1])]
        right = [
            case(f"right {n}", "passed", fenced(f"print(sum(map(int, input().split())))  # {n}"), SUM)
            for n in range(8)
        ]
        check([*cases, *right])
        with pytest.raises(BlockingIOError):
            server.accept()
    assert [(path.name, path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.iterdir()] == before
    assert Path("/proc/sys/kernel/core_pattern").read_bytes() == core_pattern


def test_the_reason_names_the_test_its_output_and_the_cause():
    tests = {**SUM, "outputs": ["3\n", "7\n", "0\n"]}
    wrong, crashed, none, empty = graded(
        [
            case("", "", fenced("a, b = map(int, input().split())\nprint(a + b)"), tests),
            case("", "", fenced("print(1 / 0)"), SUM),
            case("", "", "I cannot.", SUM),
            case("", "", "", SUM),
        ]
    )
    assert (
        wrong.reason
        == "wrong_answer: test 2 of 3: for the input '10 -4\\n', the output is '6\\n' instead of '7\\n'"
    )
    assert wrong.extracted == "a, b = map(int, input().split())\nprint(a + b)\n"
    assert crashed.reason.startswith("crashed: test 1 of 3: 'ZeroDivisionError: division by zero' after 0.0")
    assert none.reason.startswith("no_code: test 1 of 3: 'SyntaxError: ")
    assert (empty.reason, empty.extracted) == ("no_code: test 1 of 3: the response has no program", None)


def test_the_score_may_be_a_fraction_and_the_comparison_by_tokens(tmp_path):
    settings = tmp_path / "code.yaml"
    settings.write_text("score: fraction\ncompare: tokens\n")
    tests = {**SUM, "outputs": ["\n3\n", "7\n", "0\n"]}
    right_for_two = case("", "", fenced("print(sum(map(int, input().split())))"), tests)
    of_function = case("", "", fenced("def add(a, b):\n    return a + b if a < 5 else 1 // 0"), ADD)
    of_asserts = case("", "", fenced("def add(a, b):\n    return a + b if a < 5 else 0"), ASSERTS)
    verdicts = graded([right_for_two, of_function, of_asserts, case("", "", "", SUM)], path=str(settings))
    assert [verdict.score for verdict in verdicts] == [2 / 3, 2 / 3, 2 / 3, 0.0]
    settings.write_text("score: half\n")
    with pytest.raises(ConfigError, match=r"code\.score: found 'half', needs all or fraction"):
        graded([right_for_two], path=str(settings))


def test_the_sum_of_all_tests_has_a_limit():
    """Each test needs about 0.15 s, so two or three of them fit into 0.4 s."""
    tests = {"inputs": [f"{n}\n" for n in range(20)], "outputs": ["x"] * 20}
    source = "import time\nwhile time.process_time() < 0.15: pass\nprint('x')"
    [verdict] = graded([case("", "", fenced(source), tests, limits=Limits(total_s=0.4))])
    assert verdict.reason.startswith(("time_limit: test 3 of 20", "time_limit: test 4 of 20"))


def test_equal_programs_of_a_group_run_once():
    async def job(sandbox):
        grader = CodeGrader(sandbox, SHORT)
        right, slow = (
            case("", "", fenced(source), SUM)[2]
            for source in ("print(sum(map(int, input().split())))", "while True: pass")
        )
        verdicts = await asyncio.gather(*(grader(right) for _ in range(5)))
        await grader(slow)
        return verdicts, dict(grader.counts), await grader(right), len(grader._pending)

    verdicts, counts, again, pending = with_sandbox(job)
    assert all(verdict == again for verdict in verdicts)
    assert (counts["passed"], counts["cache_hits"], counts["time_limit"], pending) == (5, 4, 1, 0)


def test_a_program_that_ends_its_judge_early_has_not_passed():
    """Ending the process after the first of three asserts, or the connection, is not a pass."""
    sources = [
        "import os\ncalls = 0\ndef add(a, b):\n    global calls\n    calls += 1\n    return a + b if calls == 1 else os._exit(0)"
    ]
    sources += ["import os\ndef add(a, b):\n    os.close(3)\n    os._exit(0)", "raise SystemExit"]
    check(
        [
            case(number, "crashed", fenced(source), tests)
            for number, source in enumerate(sources)
            for tests in (ADD, ASSERTS)
        ]
    )


def forging(message):
    """A program that answers the first call itself, before it is asked."""
    return fenced(f"import os\ndef add(a, b): return 0\nos.write(3, {message.encode()!r} + b'\\n')")


def test_a_program_that_forges_replies_does_not_pass():
    """A reply names an exception, which may not be any other function of Python, and a deep reply ends neither the grader nor the judge."""
    code = "import __main__\nwhile True: __main__.ask({'why': ''})"
    names = [json.dumps({"raise": [name, code]}) for name in ("exec", "SystemExit", "missing")]
    deep = ['{"value": ' + "[" * depth + "]" * depth + ', "args": []}' for depth in (150, 940, 100_000)]
    odd = ['{"value": 3}', "[]", '{"ended": ""}', '{"why": ""}', "{"]
    check(
        [
            case(number, [verdict for verdict in VERDICTS if verdict != "passed"], forging(message), tests)
            for number, message in enumerate([*names, *deep, *odd])
            for tests in (ADD, ASSERTS)
        ]
    )


def test_asserts_see_types_changed_arguments_and_exceptions():
    source = """
def pair(x):
    return (x, [x])
def grow(values):
    values.append(1)
def fail():
    raise KeyError("gone")
"""
    tests = [
        "assert pair(1) == (1, [1]) and pair(1) != [1, [1]]",
        "values = [0]\ngrow(values)\nassert values == [0, 1]",
        "try:\n    fail()\nexcept KeyError as error:\n    assert str(error) == \"'gone'\"\nelse:\n    assert False",
    ]
    check([case("", "passed", fenced(source), tests), case("", "wrong_answer", fenced(source), ["fail()"])])


STACK = """
class Stack:
    def __init__(self, x=None): self.x = x or []
    def push(self, v): self.x.append(v)
    def pop(self): return self.x.pop()
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i]
    def __iter__(self): return iter(self.x)
    def __eq__(self, o): return self.x == o.x
    @classmethod
    def of(cls, *a): return cls(list(a))
def stacks(n): return [Stack([i]) for i in range(n)]
def count(n): yield from range(n)
def compose(*fs):
    def g(x):
        for f in fs: x = f(x)
        return x
    return g
def first(f, default):
    try: return f()
    except ZeroDivisionError: return default
"""


def test_tests_use_objects_of_the_program_and_give_it_functions():
    tests = [
        "s = Stack()\ns.push(1)\ns.push(2)\nassert len(s) == 2 and s[0] == 1 and list(s) == s.x == [1, 2]\nassert s.pop() == 2",
        "s = Stack.of(1, 2)\nassert s == Stack([1, 2]) and s != Stack([1]) and 2 in s and 3 not in s and isinstance(s, Stack)",
        "s = Stack()\ntry:\n    s.pop()\n    assert False\nexcept IndexError:\n    s.x = [5]\nassert s.pop() == 5",
        "assert [s.pop() for s in stacks(3)] == [0, 1, 2]",
        "assert list(count(3)) == [0, 1, 2]",
        "assert compose(lambda x: x + 1, lambda x: x * 2, str)(3) == '8'",
        "assert first(lambda: 1 / 0, 7) == 7",
    ]
    check(
        [
            *(case(test, "passed", fenced(STACK), [test]) for test in tests),
            case("wrong", "wrong_answer", fenced(STACK.replace("pop()", "pop(0)")), tests[:1]),
        ]
    )


def test_an_object_never_equals_a_value_of_the_tests():
    """An object that claims to equal everything, and operators that would tell the program an expected value."""
    source = "class A:\n    def __eq__(self, o): return True\n    def __hash__(self): return hash(3)\n" + "".join(
        f"    def __{name}__(self, *a): return {value}\n"
        for name, value in {"sub": 0, "rsub": 0, "lt": True, "contains": True, "abs": 0, "round": 3, "index": 3, "int": 3, "float": 3.0, "trunc": 3}.items()
    ) + "def f(): return A()\ndef g(): return [A()]"  # fmt: skip
    tests = ["f() == 3", "3 == f()", "g() == [3]", "f() in {3}", "abs(f() - 3) < 1", "f() < 4", "3 in f()", "round(f()) == 3", "range(9)[f()] == 3", "math.isclose(f(), 3)", "math.trunc(f()) == 3"]  # fmt: skip
    check([case(test, "wrong_answer", fenced(source), [f"assert {test}"]) for test in tests])


@pytest.mark.parametrize(
    ("source", "tests", "expected"),
    [
        ("def gcd(a, b): return a if not b else gcd(b, a % b)", ["gcd(12, 18) == 6", "gcd(5, 7) == 1"], "passed"),
        ("def gcd(a, b): return 1", ["gcd(12, 18) == 6"], "wrong_answer"),
        ("def sum(a, b): return a + b", ["sum(10, 15) == 25"], "passed"),
        ("def chain(a, b): return a + b", ["chain([1], [2]) == [1, 2]"], "passed"),
        ("def f(x): return x[::-1]", ["Counter(f('ab')) == Counter('ba')", "sum(map(ord, f('a'))) == 97"], "passed"),
        ("def f(x): return 0\ndef Counter(x): return 1\nsum = abs = len = Counter", ["Counter(f('ab')) == Counter('ba')", "abs(f(1)) == 1"], "wrong_answer"),
    ],
)  # fmt: skip
def test_a_function_may_have_a_name_of_python(source, tests, expected):
    """If a test calls only such names, they are the program's. Otherwise they are Python's, or a program could replace them."""
    check([case(tests, expected, fenced(source), [f"assert {test}" for test in tests])])


def test_tests_may_import_from_the_program_and_call_functions_of_python():
    source = "def gcd(a, b): return a if not b else gcd(b, a % b)\ndef double(x): return x * 2"
    tests = [
        "from solution import gcd\nassert sum([gcd(12, 18), 1]) == 7",
        "from solution import double\nassert len(double([1])) == 2",
        "import solution\nassert len(solution.double([1])) == 2",
        "from solution import *\nassert len(double([1])) == 2",
        "f = stub('double')\nassert len(f([1])) == 2",
    ]
    check([case(test, "passed", fenced(source), [test]) for test in tests])


def test_tests_that_do_not_call_the_program_are_refused():
    """Otherwise every program would pass."""
    with pytest.raises(ValueError, match="do not call the program; remove the row"):
        graded([case("", "", fenced("def f(): return 2"), ["import math", "assert math.sqrt(4) == 2"])])


def test_tests_that_cannot_run_are_no_verdict():
    """A package is missing in the sandbox, so every response would otherwise be wrong."""
    with pytest.raises(ValueError, match=r"ModuleNotFoundError.*set sandbox\.python"):
        graded(
            [
                case(
                    "",
                    "",
                    fenced("def add(a, b): pass"),
                    row={"test_list": ["assert add(1, 2)"], "test_imports": ["import missing"]},
                )
            ]
        )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"question": "?"},
            r"no tests in the row's fields \['question'\]; the grader code reads base_input, test, input_output",
        ),
        (
            {"input_output": '{"inputs": [], "outputs": []}'},
            "field 'input_output' has no tests; remove the row",
        ),
        (
            {"input_output": '{"inputs": ["1"], "outputs": []}'},
            r"field 'input_output': cannot read the tests \(ValueError: 1 inputs and 0 outputs\)",
        ),
        ({"input_output": '{"inputs": 3}'}, r"field 'input_output': cannot read the tests \(TypeError"),
        (
            {"public_tests": {"input": ["1"], "output": ["1"]}, "input_file": "a.txt"},
            "only standard input is supported",
        ),
        (
            {"input_output": {"fn_name": "f", "inputs": [{"a": 1}], "outputs": [1]}},
            r"\{'a': 1\} of f must be a list",
        ),
        (
            {"input_output": {"fn_name": "f", "inputs": [[1], 2], "outputs": [1, 2]}},
            "the input 2 of f must be a list",
        ),
        ({"ground_truth": "eJwrSS0uAQAEXQHB"}, "neither JSON nor compressed JSON"),
    ],
)
def test_rows_without_usable_tests_are_refused(row, message):
    with pytest.raises(ValueError, match=message):
        code_tests.tests_of("see the row", row)


def test_a_pickle_is_not_loaded():
    """It would run a command. Only a pickled text is read."""
    import base64
    import zlib

    hostile = b"\x80\x04cbuiltins\nexec\n(X\x05\x00\x00\x001 / 0tR."
    row = {"public_test_cases": "[]", "private_test_cases": base64.b64encode(zlib.compress(hostile)).decode()}
    with pytest.raises(ValueError, match="never loaded; convert the tests to JSON text"):
        code_tests.tests_of("see the row", row)


def test_the_grader_is_chosen_by_name_and_a_failure_of_the_sandbox_ends_the_run(monkeypatch):
    run("pass")
    submit, close = submit_of(
        RewardConfig(grader="code"), sandbox=SandboxConfig(slots=1, limits={"cpu_s": 3})
    )
    try:
        tests = json.dumps(SUM)
        verdicts = submit(
            [sample(fenced("print(sum(map(int, input().split())))"), answer=tests), sample("", answer=tests)]
        ).result()
        assert [verdict.correct for verdict in verdicts] == [True, False]
        monkeypatch.setattr("dapo_jax.sandbox.servers.ServerSandbox.surely", _fails)
        with pytest.raises(RewardError, match=r"reward function code raised SandboxError: no sandbox"):
            submit([sample(fenced("print(2)"), answer=tests)]).result()
    finally:
        close()
    with pytest.raises(ConfigError, match=r"sandbox\.limits\.cpus: found 3, needs a known name"):
        submit_of(RewardConfig(grader="code"), sandbox=SandboxConfig(limits={"cpus": 3}))


async def _fails(sandbox, program):
    raise SandboxError("no sandbox")
