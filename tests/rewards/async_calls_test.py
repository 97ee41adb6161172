"""Async reward functions: many at a time, each with its time, and their verdicts in order."""

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from dapo_jax.dapo.rollouts import Verdict
from dapo_jax.rewards import whole_group
from dapo_jax.rewards.async_calls import AsyncCalls
from dapo_jax.rewards.functions import load_reward
from tests.rewards.samples import samples

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True, scope="module")
def collected_tasks():
    """asyncio logs a task that raised when it is collected. This parses source, which must not happen during an import (CPython's gh-106905)."""
    yield
    gc.collect()


def submitted(loop, function, *responses):
    return loop.submit(load_reward(function), samples(*responses))


def graded(function, *responses, at_once=8, timeout_s=20.0):
    with closing(AsyncCalls(at_once=at_once, timeout_s=timeout_s)) as loop:
        return submitted(loop, function, *responses).result()


async def judge(sample):
    """Longer responses answer sooner; a number is the score."""
    await asyncio.sleep(0.05 / (1 + len(sample.response)))
    return float(sample.response)


def test_verdicts_are_in_the_order_of_the_responses_whichever_comes_first():
    assert [verdict.score for verdict in graded(judge, "1", "2222", "-3")] == [1.0, 2222.0, -3.0]


def test_calls_overlap_up_to_the_limit_and_all_run_in_one_other_thread():
    under_way, most, threads = 0, 0, set()

    async def counted(sample):
        nonlocal under_way, most
        threads.add(threading.get_ident())
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.02)
        under_way -= 1
        return True

    assert all(verdict.correct for verdict in graded(counted, *"abcdefghij", at_once=3))
    assert most == 3
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_time_spent_waiting_for_a_free_place_is_not_the_calls():
    async def takes_its_time(sample):
        await asyncio.sleep(0.15)
        return True

    verdicts = graded(takes_its_time, *"abcdef", at_once=1, timeout_s=0.6)  # the last begins after 0.75 s
    assert [verdict.lost for verdict in verdicts] == [""] * 6


def test_an_exception_names_the_prompt_and_other_calls_continue():
    async def broken(sample):
        match sample.response:
            case "a":
                raise ZeroDivisionError("by hand")
            case "late":  # a time limit of the function's own is its error
                async with asyncio.timeout(0.01):
                    await asyncio.sleep(60)
        return True

    with closing(AsyncCalls(at_once=4, timeout_s=20.0)) as loop:
        failed, late, fine = (submitted(loop, broken, text) for text in ("a", "late", "b"))
        with pytest.raises(RuntimeError, match=r"broken raised TimeoutError: .*; prompt 7 \('6\*7'\)"):
            late.result()
        by_hand = r"broken raised ZeroDivisionError: by hand .*; prompt 7 .*response 'a'"
        with pytest.raises(RuntimeError, match=by_hand):
            failed.result()
        assert fine.result()[0].correct


def test_a_whole_group_is_judged_in_one_call_which_is_lost_as_one():
    calls = []

    @whole_group
    async def ranked(group):
        calls.append(len(group))
        await asyncio.sleep(60 if group[0].response == "hang" else 0)
        order = sorted(sample.response for sample in group)
        return [float(order.index(sample.response)) for sample in group]

    with closing(AsyncCalls(at_once=4, timeout_s=0.3)) as loop:
        reward = load_reward(ranked)
        first, second = loop.submit(reward, samples("b", "a", "c")), loop.submit(reward, samples("hang", "a"))
        assert [verdict.score for verdict in first.result()] == [1.0, 0.0, 2.0]
        assert [verdict.lost for verdict in second.result()] == ["timeout", "timeout"]
    assert calls == [3, 2]


def test_a_function_that_cancels_its_own_call_is_an_error_with_its_name():
    async def cancels(sample):
        asyncio.current_task().cancel()
        await asyncio.sleep(60)

    with pytest.raises(RuntimeError, match=r"cancels: its own code cancelled"):
        graded(cancels, "a")


def test_closing_cancels_all_calls_and_ends_the_thread():
    begun, ended = threading.Event(), []

    async def endless(sample):
        begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            ended.append(sample.response)

    before = set(threading.enumerate())
    loop = AsyncCalls(at_once=1, timeout_s=600.0)
    future = submitted(loop, endless, "a", "b", "c")
    assert begun.wait(20)
    (thread,) = set(threading.enumerate()) - before  # other threads may end meanwhile
    loop.close()
    loop.close()  # a second time changes nothing
    assert future.cancelled()
    assert ended == ["a"]
    assert not thread.is_alive()


def test_a_function_that_stops_the_loop_ends_no_later_call():
    async def meddling(sample):
        if sample.response == "stop":
            asyncio.get_running_loop().stop()
        await asyncio.sleep(0.05)
        return True

    with closing(AsyncCalls(at_once=8, timeout_s=20.0)) as loop:
        assert submitted(loop, meddling, "stop").result(timeout=20.0)[0].correct
        assert submitted(loop, meddling, "a").result(timeout=20.0)[0].correct


def test_a_function_that_swallows_its_cancellation_is_lost_at_the_limit():
    """A retry loop with a bare `except`, which is common; here an event ends it."""
    stop = threading.Event()

    async def stubborn(sample):
        while sample.response == "stubborn" and not stop.is_set():
            try:
                await asyncio.sleep(0.02)
                raise ConnectionError
            except:  # noqa: E722
                pass
        return True

    loop = AsyncCalls(at_once=1, timeout_s=0.2)
    first, second = submitted(loop, stubborn, "stubborn", "a").result(timeout=10)
    assert first == Verdict(correct=False, reason="no verdict within 0.2 s", lost="timeout")
    assert second.correct  # its place is free
    stop.set()
    loop.close()


def test_a_function_that_blocks_the_loop_costs_its_neighbour_no_verdict():
    """The other call is ready after 0.05 s, but the loop notices only after the limit of 0.2 s."""

    async def blocks(sample):
        if sample.response == "block":
            time.sleep(0.6)
        else:
            await asyncio.sleep(0.05)
        return True

    neighbour, blocker = graded(blocks, "a", "block", timeout_s=0.2)
    assert (neighbour.lost, blocker.lost) == ("", "")


def test_a_thread_that_a_function_waits_for_does_not_hold_up_the_end_of_the_process():
    program = textwrap.dedent("""
        import asyncio, time
        from contextlib import closing
        from dapo_jax.rewards.async_calls import AsyncCalls
        from dapo_jax.rewards.functions import load_reward
        from tests.rewards.samples import samples

        async def waits(sample):
            await asyncio.to_thread(time.sleep, 60)

        with closing(AsyncCalls(at_once=1, timeout_s=0.1)) as loop:
            print(loop.submit(load_reward(waits), samples("a")).result()[0].lost)
    """)
    output = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True, timeout=40)
    assert output == "timeout\n"
