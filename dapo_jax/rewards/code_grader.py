"""The grader `code`: runs the program in a response on the tests of its row, in a sandbox, and compares the results outside of it."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dapo_jax.config.keys import key, prefixed
from dapo_jax.config.reading import read_file
from dapo_jax.config.section import entry
from dapo_jax.dapo.rollouts import Verdict
from dapo_jax.rewards.async_calls import once
from dapo_jax.rewards.code_equality import same_result, same_text, same_value
from dapo_jax.rewards.code_program import after_prompt, program_of
from dapo_jax.rewards.sample import Sample
from dapo_jax.sandbox import Limits, Outcome, Program
from dapo_jax.sandbox.servers import Server, ServerSandbox
from dapo_jax.text.code_tests import CodeTests, tests_of, with_integer_keys

VERDICTS = (
    "passed",
    "wrong_answer",
    "time_limit",
    "memory_limit",
    "output_limit",
    "crashed",
    "no_code",
    "refused",
)
_LIMITS = {**dict.fromkeys(("total", "cpu", "idle", "wall"), "time"), "memory": "memory", "output": "output"}
"""The limits that may end a program, by the way it ended."""
_CPU_FACTOR, _MEMORY_FACTOR, _LEAST_MEMORY_MB = 3.0, 2.0, 256
"""Factors for the limits of a problem, which were set for C++."""
_SHOWN = 200
_CHECKER = """
import sys
for name, text in ask({}).items():
    with open(name, "w") as file:
        file.write(text)
sys.argv = ["checker", "input", "output", "submission"]
"""
_JUDGE = (
    Path(__file__).with_name("code_judge.py").read_text(encoding="utf-8") + "\nmain(ask, packed, unpacked)\n"
)


@dataclass(frozen=True, kw_only=True)
class CodeConfig:
    """The settings in the file of `code:FILE.yaml`."""

    compare: str = key("lines", choices=["lines", "tokens", "exact"])
    score: str = key("all", choices=["all", "fraction"])


class CodeGrader:
    """An async reward function. It raises SandboxError if the sandbox fails, which ends the run with a checkpoint."""

    kind = "code"
    limits_itself = True  # so `AsyncCalls` does not limit its calls, which wait for a slot

    def __init__(self, sandbox: ServerSandbox, limits: Limits, path: str = "") -> None:
        """Reads the settings in the file at `path`, if there is one. Raises ConfigError if they are invalid."""
        self.config = CodeConfig()
        if path:
            with prefixed(path, OSError):
                self.config = entry("code", read_file(Path(path).expanduser()), CodeConfig)
        self.sandbox, self.limits, self.__qualname__ = sandbox, limits, "code"
        self.counts = Counter(dict.fromkeys((*VERDICTS, "cache_hits", "restarts"), 0))
        self._pending = dict[str, asyncio.Future[Verdict]]()
        """Pending verdicts on a program and its tests. Equal programs of a group run once."""
        self._checked = dict[int, str]()
        """Failures of reference solutions, by the hash of their tests."""

    def close(self) -> None:
        """Ends the sandbox's servers."""
        self.sandbox.close()

    async def __call__(self, sample: Sample) -> Verdict:
        """Returns the verdict on a response. `extracted` is the program, and `reason` names the verdict and the first failed test."""
        tests = tests_of(sample.answer, sample.prompt.row)
        name, is_complete = tests.name.rpartition(".")[2], sample.finish_reason == "stop"
        program, in_block = program_of(
            sample.response, prompt=sample.prompt.text, is_complete=is_complete, name=name
        )
        if tests.prompt and program:
            program = after_prompt(program, tests.prompt, name)
        request = f"{in_block} {program} {tests}"
        self.counts["cache_hits"] += request in self._pending
        verdict = await once(self._pending, request, lambda: self._verdict(program, tests, in_block=in_block))
        self.counts[verdict.reason.partition(":")[0]] += 1
        self.counts["restarts"] = self.sandbox.restarts
        return verdict

    async def _verdict(self, program: str, tests: CodeTests, *, in_block: bool) -> Verdict:
        results = await self._results(program, tests) if program else ["no_code: the response has no program"]
        if (
            program
            and tests.code
            and tests.reference
            and any(results)
            and (failed := await self._failed(tests))
        ):
            reason = f"refused: the reference solution fails ({failed}); remove the row"
            return Verdict(correct=False, extracted=program, reason=reason, lost="raised")
        number = next((number for number, result in enumerate(results) if result), 0)
        kind, _, why = results[number].partition(": ")
        if kind == "syntax":
            kind = "crashed" if in_block else "no_code"
        return Verdict(
            correct=not kind,
            extracted=program or None,
            reason=f"{kind}: test {number + 1} of {tests.count}: {why}" if why else kind or "passed",
            score=results.count("") / tests.count if self.config.score == "fraction" else None,
        )

    async def _results(self, program: str, tests: CodeTests) -> list[str]:
        """Returns a text for each test: empty if it passed, or else the verdict and the cause. The list may end with the first failure."""
        limits = self.limits
        if tests.cpu_s:
            limits = replace(limits, cpu_s=_CPU_FACTOR * tests.cpu_s)
        if tests.memory_mb:
            limits = replace(limits, memory_mb=max(_LEAST_MEMORY_MB, round(_MEMORY_FACTOR * tests.memory_mb)))
        job = self._asserted if tests.code else self._called if tests.name else self._printed
        results = await self.sandbox.surely(lambda: job(Program(source=program, limits=limits), tests))
        return results or ["crashed: the program ended the sandbox"]

    async def _failed(self, tests: CodeTests) -> str:
        """Returns the first failure of the reference solution, or an empty text. It fails if its tests need something that the judge does not have."""
        key = hash(str(tests))
        if key not in self._checked:
            results = await self._results(program_of(tests.reference)[0], tests)
            failures = (each for each in results if each and not each.startswith("syntax"))
            self._checked[key] = next(failures, "")
        return self._checked[key]

    def _ends(self, results: list[str]) -> bool:
        """Returns whether the last result ends the tests."""
        return bool(results[-1]) and self.config.score == "all"

    async def _printed(self, program: Program, tests: CodeTests) -> list[str]:
        """Returns the results of tests of the standard output."""
        results, total_s = list[str](), program.limits.total_s
        for given, expected in zip(tests.inputs, tests.outputs, strict=True):
            limits = replace(program.limits, total_s=total_s)
            outcome = await self.sandbox.script(replace(program, stdin=given.encode(), limits=limits))
            total_s = max(0.0, total_s - outcome.cpu_s)
            wrong = _failure(outcome)
            try:
                found = outcome.stdout.decode()
                if not wrong and not await self._is_right(tests.checker, given, expected, found):
                    wrong = f"wrong_answer: for the input {_shown(given)}, the output is {_shown(found)} instead of {_shown(expected)}"
            except UnicodeDecodeError:
                wrong = wrong or f"wrong_answer: the output {_shown(outcome.stdout)} is not UTF-8"
            results.append(wrong)
            if self._ends(results):
                break
        return results

    async def _is_right(self, checker: str, given: str, expected: str, found: str) -> bool:
        if not checker:
            return same_text(expected, found, self.config.compare)
        async with self.sandbox.live(Program(source=_CHECKER + checker), "judge") as judge:
            await judge.said()
            await judge.tell({"input": given, "output": expected, "submission": found})
            score = (await judge.ended()).stdout.split()
        return bool(score) and score[0] in (b"1", b"1.0")

    async def _called(self, program: Program, tests: CodeTests) -> list[str]:
        """Returns the results of calls of a function. Keys of dictionaries in JSON are texts. If a test fails, another process gets integers instead. The better results count."""
        results = await self._calls(program, tests)
        integers = [with_integer_keys(given) for given in tests.inputs] if any(results) else tests.inputs
        if integers != tests.inputs:
            others = await self._calls(program, replace(tests, inputs=integers))
            results = max(others, results, key=lambda each: each.count(""))
        return results

    async def _calls(self, program: Program, tests: CodeTests) -> list[str]:
        calls, outputs = [{"name": tests.name, "args": given} for given in tests.inputs], tests.outputs
        if tests.reference:
            async with self.sandbox.live(replace(program, source=tests.reference), "calls") as right:
                replies = [await _reply(right, call) for call in calls]
            if failed := next((reply for reply in replies if "value" not in reply), None):
                raise ValueError(f"the reference solution fails with {failed}; remove the row")
            outputs = [reply["value"] for reply in replies]
            if not all(tests.compare or same_value(value, value) for value in outputs):
                raise ValueError(
                    "the reference solution returns values that cannot be compared; remove the row"
                )
        results = list[str]()
        async with self.sandbox.live(program, "calls") as solution:
            for call, expected in zip(calls, outputs, strict=True):
                reply, shown = await _reply(solution, call), f"{tests.name}{_shown(call['args'])}"
                found, wrong = reply.get("value"), ""
                if "ended" in reply:
                    wrong = reply["ended"]
                elif "raise" in reply:
                    wrong = f"crashed: {shown} raised {_shown(reply['raise'])}"
                elif not any(
                    same_result(tests.compare, call["args"], expected, v, tests.tolerance)
                    for v in (found, [found])[: 1 + tests.is_wrapped]
                ):
                    wrong = f"wrong_answer: {shown} returned {_shown(found)} instead of {_shown(expected)}"
                results.append(wrong)
                if self._ends(results):
                    break
        return results

    async def _asserted(self, program: Program, tests: CodeTests) -> list[str]:
        """Returns the results of tests that are code. The judge runs them in a sandbox of its own, and asks the program in another sandbox."""
        results, questions, asked = list[str](), 0, False
        began, most_s = time.monotonic(), 10 * program.limits.total_s + 30
        async with (
            self.sandbox.live(replace(program, source=_JUDGE), "judge") as judge,
            self.sandbox.live(program, "calls") as solution,
        ):
            await judge.said()
            await judge.tell({"name": tests.name, "setup": tests.setup, "code": tests.code})
            for code in tests.code:
                while (message := await judge.said()) is not None and "why" not in message:
                    questions, reply = questions + 1, await _reply(solution, message)
                    if time.monotonic() - began > most_s:  # short sleeps and callbacks without end
                        reply = {"ended": f"time_limit: {questions:,} calls in {most_s:g} s"}
                    if "ended" in reply:
                        return [*results, reply["ended"]]
                    if message.get("name") == "error":  # whether a name that the tests import is an exception
                        reply = {"value": reply.get("value") is True, "args": []}
                    asked = asked or message.get("name") != "error" or reply["value"]
                    await judge.tell(reply)
                if message is None and not asked:
                    why = _failure(await judge.ended())
                    remedy = "remove the row, or set sandbox.python to an interpreter with the packages"
                    if not questions or "ModuleNotFoundError" in why:
                        raise ValueError(f"tests that do not ask the program end with {why}; {remedy}")
                if message is None:
                    return [*results, "crashed: the program ended the tests"]
                wrong = f"wrong_answer: {_shown(code)} raised {_shown(message['why'])}"
                results.append(wrong if message["why"] else "")
                if self._ends(results):
                    break
                await judge.tell({})
        if not asked and questions and not any(results):  # the program may lack an exception
            return ["wrong_answer: the tests do not call the program"]
        if not asked and not questions:
            raise ValueError(f"the tests {_shown(tests.code)} do not call the program; remove the row")
        return results


async def _reply(solution: Server, call: Mapping[str, Any]) -> dict[str, Any]:
    """Calls a function of a program. Returns its untrusted reply: `value` (packed) or `raise` (type and message); or `ended`, the verdict on a program that ended."""
    await solution.tell(call)
    reply = await solution.said()
    if reply is None:
        return {"ended": _failure(await solution.ended()) or "crashed: the program ended before it answered"}
    return reply if isinstance(reply, dict) and "ended" not in reply else {"raise": ["TypeError", "no reply"]}


def _failure(outcome: Outcome) -> str:
    """Returns the verdict on a program that did not end by itself with status 0, and the cause. Empty for other programs."""
    if outcome.ended == "exit" and outcome.status == 0:
        return ""
    lines = outcome.stderr.decode(errors="replace").strip().splitlines() or [f"status {outcome.status}"]
    limit = _LIMITS.get(outcome.ended)
    kind = f"{limit}_limit" if limit else "syntax" if outcome.ended == "syntax" else "crashed"
    cause = outcome.ended if limit else lines[-1]
    return f"{kind}: {_shown(cause)} after {outcome.cpu_s:.2f} s of processor time"


def _shown(value: Any) -> str:
    """Formats untrusted data for a reason: printable, and at most 200 characters."""
    text = value if isinstance(value, str | bytes) else json.dumps(value)
    short = repr(text[:_SHOWN])
    return short if len(text) <= _SHOWN else f"{short}... ({len(text)} characters)"
