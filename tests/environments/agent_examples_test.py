"""The agents in `examples/agents` end with a reward. `tests/run/agents_run_test.py` trains with `guess.py`."""

import sys
from concurrent.futures import Future

import pytest

pytest.importorskip("aiohttp", reason="needs the extra http")

from dapo_jax.dapo.rollouts import Verdict
from dapo_jax.environments import load_environment
from tests.environments.agent_clients import CHAT, Policy, prompt_of, started
from tests.environments.playing import call, verdicts_of
from tests.sandbox.running import run


def played(name, prompt, *texts, **how):
    with started(load_environment(f"command:{sys.executable} examples/agents/{name}", variables=["PATH", "HOME", "PYTHONPATH"]), timeout_s=60.0, **how) as episodes:  # fmt: skip
        policy = Policy(episodes, prompt)
        policy.play(*texts)
        [verdict] = verdicts_of(episodes, policy.prompt)
    return verdict, policy


# Slow: each starts a process with the package openai.
@pytest.mark.slow
@pytest.mark.parametrize(("count", "reward"), [(2, 1.0), (9, 0.0)])
def test_the_shop_fills_a_basket_within_a_budget(count, reward):
    """Two pens cost 4, and nine cost 18. The budget is 10."""
    pytest.importorskip("openai")
    texts = call("search", tag="gift"), f"Pens. {call('add', item='pen', count=count)}", "Done.", "Pens."
    verdict, policy = played("shop.py", prompt_of(text="I need a gift.", answer="gift 10"), *texts)
    assert verdict.score == reward, verdict.reason
    assert verdict.parts["agent_tool_calls"] == 2
    # The first request has tools, so it is not the row's prompt.
    assert [before.new_context for before in policy.befores] == [True, False, False, False]


@pytest.mark.slow
def test_the_python_tool_runs_in_the_agents_process_and_the_last_answer_is_graded():
    pytest.importorskip("openai")
    run("pass")  # skips without bubblewrap
    graded = []

    def grade(samples):
        graded.extend(sample.response for sample in samples)
        verdicts = Future()
        verdicts.set_result([Verdict(correct=True) for _ in samples])
        return verdicts

    verdict, policy = played(
        "python_tool.py", prompt_of(), call("python", code="print(6 * 7)"), "It is 42.", grade=grade
    )
    assert (verdict.correct, graded) == (True, ["It is 42."]), verdict.reason
    assert "<|im_start|>tool\n42<|im_end|>" in CHAT.spelled(policy.befores[1].tokens)
