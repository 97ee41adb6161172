"""An environment of tools: calls that work, and calls with errors."""

import asyncio
import time

import pytest

from dapo_jax.dapo.rollouts import Verdict
from dapo_jax.environments import Step
from dapo_jax.environments.tool_calls import BrokenCall, ToolCall
from dapo_jax.environments.tools import ToolEnvironment, ToolEpisode, Tools, conversation
from tests.environments.playing import call, played

ROW = {"prompt": "What is 2+2?", "answer": "4"}


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


async def wait(seconds: float) -> str:
    """Waits."""
    await asyncio.sleep(seconds)
    return "waited"


def right(text, row):
    return text.strip() == row["answer"]


def test_the_policy_calls_gets_results_and_answers():
    environment = ToolEnvironment([add, wait], right)
    context, [first, last], _ = played(environment, ROW, call("add", a=2, b=2), " 4 ")
    assert context.contents == [{"role": "user", "content": "What is 2+2?"}]
    assert [tool["function"]["name"] for tool in context.tools] == ["add", "wait"]
    assert first.append == [{"role": "tool", "name": "add", "content": "4"}]
    assert (first.done, first.reward, first.metrics) == (False, 0.0, {"tool_calls": 1.0, "tool_errors": 0.0})
    assert (last.done, last.reward, last.correct) == (True, 1.0, True)
    assert last.metrics == {"tool_calls": 1.0, "tool_errors": 0.0}


def test_an_error_of_a_known_tool_has_its_name():
    """The template of gpt-oss writes the name of the called function before a result, also before an error."""
    turn = call("add", a=2, b="2") + call("ad", a=2)
    _, [step], _ = played(ToolEnvironment([add], right), ROW, turn)
    assert [message.get("name") for message in step.append] == ["add", None]


@pytest.mark.parametrize(
    ("grade", "reward", "correct"),
    [
        (lambda text, row: False, 0.0, False),
        (lambda text, row: 0.25, 0.25, True),
        (lambda text, row: -1, -1.0, False),
        (lambda text, row: Verdict(correct=False, score=0.5), 0.5, False),
    ],
)
def test_the_grade_of_the_answer_is_what_reward_functions_return(grade, reward, correct):
    _, [step], _ = played(ToolEnvironment([add], grade), ROW, "5")
    assert (step.reward, step.correct, step.done) == (reward, correct, True)


def test_a_grade_may_be_async_and_a_subclass_may_grade():
    async def slowly(text, row):
        await asyncio.sleep(0.01)
        return text == "4"

    assert played(ToolEnvironment([add], slowly), ROW, "4")[1][0].reward == 1.0

    class Own(ToolEpisode):
        async def finish(self, turn):
            return Step(reward=float(self.calls), metrics={"own": 1.0})

    class Environment:
        def episode(self, row, seed):
            return Own(Tools([add]), row)

    _, [_, last], _ = played(Environment(), ROW, call("add", a=1, b=1), "done")
    assert (last.reward, last.metrics) == (1.0, {"tool_calls": 1.0, "tool_errors": 0.0, "own": 1.0})


def raises(kind: str) -> str:
    """Raises."""
    raise {"value": ValueError("no such row"), "exit": SystemExit(3), "endless": OSError("x" * 10**6), "memory": MemoryError()}[kind]  # fmt: skip


def gives(kind: str):
    """Returns values that are not text."""
    loop = []
    loop.append(loop)
    return {"bytes": b"\xff", "surrogate": "a\ud800", "loop": loop, "json": {"ü": [1, None]}, "nothing": None, "huge": "x" * 10**6}[kind]  # fmt: skip


def block(seconds: float) -> str:
    """Blocks."""
    time.sleep(seconds)
    return "late"


async def stop() -> str:
    """Stops its own task."""
    asyncio.current_task().cancel()
    await asyncio.sleep(1)
    return "never"


LIMITED = Tools([add, wait, raises, gives, block, stop], most_characters=200, timeout_s=0.2)


@pytest.mark.parametrize(
    ("call", "begins"),
    [
        (BrokenCall("it is not JSON"), "error: the call cannot be parsed: it is not JSON"),
        (ToolCall("ad", {}), "error: unknown tool 'ad'; the tools are ['add', 'block', 'gives', 'raises', 'stop', 'wait']"),
        (ToolCall("x" * 10**6, {}), "error: unknown tool 'xxx"),
        (ToolCall("__class__", {}), "error: unknown tool '__class__'"),
        (ToolCall("add", {"a": 1, "b": "2"}), "error: add: b must be integer; got '2'"),
        (ToolCall("raises", {"kind": "value"}), "error: raises: ValueError: no such row"),
        (ToolCall("raises", {"kind": "exit"}), "error: raises: SystemExit: 3"),
        (ToolCall("raises", {"kind": "endless"}), "error: raises: OSError: xxxx"),
        (ToolCall("raises", {"kind": "memory"}), "error: raises: MemoryError"),
        (ToolCall("gives", {"kind": "bytes"}), "error: gives returned a bytes"),
        (ToolCall("gives", {"kind": "surrogate"}), "error: gives returned a str"),
        (ToolCall("gives", {"kind": "loop"}), "error: gives returned a list"),
        (ToolCall("wait", {"seconds": 60}), "error: wait: no result within 0.2 s"),
        (ToolCall("block", {"seconds": 1}), "error: block: no result within 0.2 s"),
        (ToolCall("stop", {}), "error: stop: CancelledError"),
    ],
)  # fmt: skip
def test_an_error_in_a_call_is_a_short_text(call, begins):
    text, is_error = asyncio.run(LIMITED.result(call))
    assert is_error
    assert text.startswith(begins), text
    assert len(text) <= 300


def test_a_tools_result_is_a_short_text_or_json():
    huge = "x" * 200 + "\n(999,800 more characters were cut off)"
    for kind, text in (("json", '{"ü": [1, null]}'), ("nothing", "null"), ("huge", huge)):
        assert asyncio.run(LIMITED.result(ToolCall("gives", {"kind": kind}))) == (text, False)


def test_an_error_is_counted_and_the_episode_continues():
    environment = ToolEnvironment([add, raises], right, timeout_s=0.2)
    errors = [
        call("nothing"),
        "<tool_call>{</tool_call>",
        call("add", a="x", b=1),
        call("raises", kind="value"),
    ]
    _, steps, _ = played(environment, ROW, *errors, call("add", a=2, b=2), "4")
    assert [step.done for step in steps] == [False] * 5 + [True]
    assert [step.metrics["tool_errors"] for step in steps] == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]
    assert steps[-1].metrics["tool_calls"] == 5.0
    assert steps[-1].reward == 1.0


def test_tools_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two tools are named 'add'"):
        Tools([add, add])


def test_the_conversation_of_a_row_is_left_as_it_is():
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    row = {"prompt": asked}
    assert conversation(row) == asked
    assert conversation(row, "!")[-1] == {"role": "user", "content": "q!"}
    assert asked[-1]["content"] == "q"
    assert conversation({"prompt": "q"}) == [{"role": "user", "content": "q"}]
    with pytest.raises(ValueError, match="no messages"):
        conversation({"prompt": []})
