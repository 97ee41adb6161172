"""Reads the tests of a coding problem from a row in any of the formats that `docs/train_on_code.md` lists."""

import ast
import base64
import io
import json
import pickletools
import re
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from dapo_jax.sandbox.server import packed
from dapo_jax.text.evalplus import COMPARISONS, typed

MOST_BYTES = 256 << 20
"""Compressed tests may not be larger than this."""
_FIELDS = """
base_input test input_output public_tests public_test_cases tests verification_info official_tests verifier_metadata test_list test_cases assert_case
ground_truth reward_model
"""
"""The fields that may have tests. The first field that a row has is read: LeetCodeDataset has the examples of its `test` also in `input_output`."""
_FURTHER = {
    "public_tests": ("private_tests", "generated_tests"),
    "public_test_cases": ("private_test_cases",),
    "base_input": ("plus_input",),
}
"""The fields that have further tests."""
_INNER = ("unit_tests", "ground_truth", "test_cases", "assert_case")
"""Names under which a field may have its tests."""


_INTEGER = re.compile("0|-?[1-9][0-9]{0,18}")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_UNITS = {
    **dict.fromkeys(("", "s", "sec", "second", "m", "mb", "mib", "megabyte"), 1.0),
    **dict.fromkeys(("ms", "msec", "millisecond"), 1e-3),
    **dict.fromkeys(("b", "byte"), 2.0**-20),
    **dict.fromkeys(("k", "kb", "kib", "kilobyte"), 2.0**-10),
    **dict.fromkeys(("g", "gb", "gib", "gigabyte"), 2.0**10),
}
"""Units of limits, in seconds or MiB."""


@dataclass(frozen=True, kw_only=True)
class CodeTests:
    """The tests of a problem. They have `inputs` and `outputs`, or `code`."""

    inputs: list[Any] = field(default_factory=list)
    """The input of each test: a text for the standard input or, if `name` is set, a list of `packed` arguments."""
    outputs: list[Any] = field(default_factory=list)
    """The expected output of each test, or the `packed` value of the function."""
    name: str = ""
    """The function to call, for example `add` or `Solution().add`. Empty for programs that read the standard input."""
    is_wrapped: bool = False
    """Whether an expected value may be in a list of its own."""
    code: list[str] = field(default_factory=list)
    """Statements, each of them one test, that run after `setup`."""
    setup: str = ""
    prompt: str = ""
    """Code that precedes a response."""
    checker: str = ""
    """A program that decides whether an output is right."""
    reference: str = ""
    """A right program. Without `outputs`, its values are the expected ones."""
    tolerance: float = 1e-6
    compare: str = ""
    """How values are compared, see `same_result`."""
    cpu_s: float = 0.0
    """The problem's own limit of processor time, or 0."""
    memory_mb: float = 0.0
    """The problem's own memory limit, or 0."""

    @property
    def count(self) -> int:
        """The number of tests."""
        return len(self.inputs or self.code)


def tests_of(answer: str, row: Mapping[str, Any]) -> CodeTests:
    """Returns the tests in a row's answer, if it is JSON, or else in the row's other fields. Raises ValueError, with the field and the remedy, if there are no usable tests."""
    where = (
        "answer"
        if answer.lstrip()[:1] in ("{", "[")
        else next((n for n in _FIELDS.split() if row.get(n)), "")
    )
    if not where:
        names = ", ".join(_FIELDS.split())
        raise ValueError(f"no tests in the row's fields {sorted(row)}; the grader code reads {names}")
    try:
        tests = _read(where, {**row, "answer": answer})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error!s:.300}"
        raise ValueError(
            f"field {where!r}: cannot read the tests ({why}); compare it with docs/train_on_code.md, or remove the row"
        ) from error
    if not tests.count:
        raise ValueError(f"field {where!r} has no tests; remove the row")
    return tests


def _read(where: str, row: Mapping[str, Any]) -> CodeTests:
    """Returns the tests in a field, and in the fields with further ones."""
    memory = _number(row.get("memory_limit")) or _number(row.get("memory_limit_bytes")) / 2**20
    rest: dict[str, Any] = {"cpu_s": _number(row.get("time_limit")), "memory_mb": memory}
    name, prompt = row.get("entry_point") or "", row.get("code_prompt") or row.get("prompt") or ""
    if where == "test":  # code with functions that test
        is_check = name and "def check(" in row["test"]
        calls = [f"check(stub({name!r}))"] if is_check else _calls(row["test"])
        rest |= {"prompt": _code(prompt) if name else "", "setup": row["test"] if calls else ""}
        rest["reference"] = "" if name else row.get("solution") or ""
        return CodeTests(code=calls or [row["test"]], name=name, **rest)
    found = [one for key in (where, *_FURTHER.get(where, ())) for one in _listed(row.get(key))]
    if where == "base_input":
        reference, tolerance = prompt + row["canonical_solution"], float(row.get("atol") or 0) or 1e-6
        rest |= {"prompt": prompt, "reference": reference, "tolerance": tolerance}
        found = [packed(typed(str(row.get("task_id")), one)) for one in found]
        compare = COMPARISONS.get(name, "")
        return CodeTests(inputs=found, outputs=[None] * len(found), name=name, compare=compare, **rest)
    tests = [*{json.dumps(packed(one)): one for one in found}.values()]  # without repetitions
    if all(isinstance(one, str) for one in tests):
        setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or [])
        return CodeTests(code=tests, setup=setup, **rest)
    if row.get("input_file"):
        raise ValueError(f"it must read the file {row['input_file']!r}, but only standard input is supported")
    metadata = _decoded(tests[0].get("metadata") or row.get("metadata") or {})
    name = tests[0].get("fn_name") or (metadata.get("func_name") if "testtype" in tests[0] else "") or ""
    pairs = [(one["input"], one["output"]) for one in tests]
    if not name:
        inputs, outputs = ([*map(_lines, values)] for values in zip(*pairs, strict=True))
        return CodeTests(inputs=inputs, outputs=outputs, checker=row.get("generated_checker") or "", **rest)
    in_text = isinstance(pairs[0][0], str)
    if in_text:  # one JSON value in each line
        pairs = [([_json(line) for line in a.split("\n") if line.strip()], _json(b)) for a, b in pairs]
    if wrong := [given for given, _ in pairs if not isinstance(given, list)]:
        raise ValueError(f"the input {wrong[0]!r:.80} of {name} must be a list of arguments")
    inputs, outputs = ([*map(packed, values)] for values in zip(*pairs, strict=True))
    return CodeTests(inputs=inputs, outputs=outputs, name=name, is_wrapped=not in_text, **rest)


def with_integer_keys(value: Any) -> Any:
    """Returns a `packed` value from JSON. In dictionaries whose keys are all texts of integers, the keys are integers.

    >>> with_integer_keys([packed({"1": {"-2": 3}}), packed({"1": 2, "01": 3})])
    [{'dict': [[1, {'dict': [[-2, 3]]}]]}, {'dict': [['1', 2], ['01', 3]]}]
    """
    if isinstance(value, list):
        return [*map(with_integer_keys, value)]
    if not isinstance(value, dict) or "dict" not in value:
        return value
    keys, items = [key for key, _ in value["dict"]], [with_integer_keys(item) for _, item in value["dict"]]
    if all(isinstance(key, str) and _INTEGER.fullmatch(key) for key in keys):
        keys = [*map(int, keys)]
    return {"dict": [[key, item] for key, item in zip(keys, items, strict=True)]}


def _code(prompt: Any) -> str:
    """Returns a prompt that is code, possibly without the body of its last function. For a question, returns an empty text."""
    for end in ("", "\n    pass"):
        with suppress(SyntaxError, TypeError):
            return prompt if ast.parse(prompt + end) else ""
    return ""


def _calls(tests: str) -> list[str]:
    """Returns a call of `_run_test` for each test of a module for pytest. Raises ValueError if a test needs a fixture."""
    calls = dict[str, None]()
    for outer in ast.parse(tests).body:
        functions, marks, prefix = [outer], [], ""
        if isinstance(outer, ast.ClassDef):
            bases = " ".join(map(ast.unparse, outer.bases))
            is_test = outer.name.startswith("Test") or "TestCase" in bases
            functions, marks, prefix = outer.body if is_test else [], outer.decorator_list, outer.name
        for function in functions:
            if isinstance(function, _FUNCTIONS) and function.name.startswith("test"):
                given = " ".join(map(ast.unparse, [*marks, *function.decorator_list]))
                needed = [one.arg for one in function.args.args][bool(prefix) :]
                needed = needed[: len(needed) - len(function.args.defaults)]
                if missing := [one for one in needed if not re.search(rf"\b{one}\b", given)]:
                    raise ValueError(f"{function.name} needs the fixture {missing[0]!r}")
                names = f"{prefix}, {function.name!r}" if prefix else function.name
                calls[f"_run_test({names})"] = None
    return [*calls]


def _listed(value: Any) -> list[Any]:
    """Returns the tests in a field as a list of statements, of inputs, or of mappings with `input` and `output`."""
    value = _decoded(value or [])
    if isinstance(value, list):
        return value
    for name in _INNER:
        if name in value:
            return _listed(value[name])
    inputs, outputs = (_decoded(value.get(f"{kind}s", value.get(kind))) for kind in ("input", "output"))
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    name = value.get("fn_name")
    return [{"fn_name": name, "input": a, "output": b} for a, b in zip(inputs, outputs, strict=True)]


def _decoded(value: Any) -> Any:
    """Decodes JSON text, and text that is base64 of compressed JSON."""
    if not isinstance(value, str):
        return value
    return _json(value if value.lstrip()[:1] in ("{", "[") else _decompressed(value))


def _json(text: str) -> Any:
    return json.loads(text, parse_int=lambda digits: int(Decimal(digits)))  # `int` alone limits the length


def _decompressed(text: str) -> str:
    """Returns the text in base64 of zlib of a pickled text, which is never loaded: its instructions are read, and any other than one text is refused."""
    remedy = "convert the tests to JSON text"
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(text, validate=True), MOST_BYTES)
        if unpacker.unconsumed_tail:
            raise ValueError(f"more than {MOST_BYTES:,} bytes")
        if data[:1] in (b"[", b"{"):
            return data.decode()
        operations = [(code.name, value) for code, value, _ in pickletools.genops(io.BytesIO(data))]
    except (ValueError, zlib.error) as error:
        raise ValueError(f"neither JSON nor compressed JSON ({error}); {remedy}") from error
    passive = {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "STOP"}
    [(name, value), *others] = [one for one in operations if one[0] not in passive] or [("", "")]
    if others or name not in ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"):
        raise ValueError(f"a pickle of something other than text, which is never loaded; {remedy}")
    return str(value)


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _number(value: Any) -> float:
    """Returns a limit in seconds or MiB. It may be a number, a text with a unit, or a mapping with seconds and nanoseconds. Without a number, returns 0.

    >>> _number("256 megabytes"), _number("2.5 s"), _number("500 ms"), _number("1 GB"), _number(None)
    (256.0, 2.5, 0.5, 1024.0, 0.0)
    """
    if isinstance(value, Mapping):
        return value.get("seconds", 0) + value.get("nanos", 0) / 1e9
    found = re.match(r"\s*([0-9.]+)\s*([A-Za-z]*)", str(value))
    if found is None:
        return 0.0
    unit = found[2].lower()
    if (size := _UNITS.get(unit, _UNITS.get(unit.removesuffix("s")))) is None:
        raise ValueError(f"the limit {value!r} has an unknown unit; write it in seconds or MB")
    return float(found[1]) * size
