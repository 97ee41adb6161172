"""The grading pool: right and in order, whatever single calls do to their workers."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from dapo_jax.rewards import whole_group
from dapo_jax.rewards.calls import answer_of, call_of, samples_of, verdicts_of
from dapo_jax.rewards.pool import GradingPool
from dapo_jax.rewards.sample import Sample
from dapo_jax.rollouts import Prompt, Verdict

HERE = Path(__file__)
TIMEOUT_S = 3.0


def sample(response, *, answer="34", row=None, ordinal=7):
    prompt = Prompt(
        ordinal=ordinal, tokens=np.array([1, 2], np.int32), text="6*7", answer=answer, row=row or {}
    )
    return Sample(
        prompt=prompt, response=response, tokens=np.array([3, 4, 5], np.int32), finish_reason="stop"
    )


def hostile(sample):
    """A reward function that does what its response says; run in a worker."""
    match sample.response:
        case "hang":
            while True:
                time.sleep(1)
        case "eat":
            return len(bytearray(1 << 40)) > 0
        case "eat slowly":
            kept = []
            while True:
                kept.append(bytearray(1 << 24))
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        case "close":
            os.closerange(3, 64)  # the way back is one of them
            time.sleep(60)
        case "exit":
            os._exit(3)
        case "start":
            started = subprocess.Popen(["sleep", "600"])
            Path(sample.answer).write_text(str(started.pid))
            time.sleep(600)
        case "raise":
            raise ZeroDivisionError("by hand")
        case "print":
            print("a line on the standard output")
    return sample.response == sample.answer


@whole_group
def hostile_in_company(group):
    """Does what one of the responses says; otherwise each is right if it is the longest."""
    for one in group:
        hostile(one)
    most = max(len(one.response) for one in group)
    return [len(one.response) == most for one in group]


@whole_group
def one_too_few(group):
    return [True] * (len(group) - 1)


def pool(grader=f"{HERE}:hostile", *, workers=2, timeout_s=TIMEOUT_S, memory_mb=128, **how):
    return GradingPool(grader, workers=workers, timeout_s=timeout_s, memory_mb=memory_mb, **how)


def test_a_thousand_calls_with_three_hostile_ones_come_back_right_and_in_order():
    responses = [str(number) for number in range(1000)]
    responses[100], responses[500], responses[900] = "hang", "eat slowly", "die"
    with pool() as graders:
        start = time.monotonic()
        verdicts = graders.grade([sample(text, answer=str(i)) for i, text in enumerate(responses)])
        seconds = time.monotonic() - start
    assert [i for i, verdict in enumerate(verdicts) if not verdict.correct] == [100, 500, 900]
    assert [verdicts[i].lost for i in (0, 100, 500, 900, 999)] == ["", "timeout", "memory", "died", ""]
    assert verdicts[100].reason == "no verdict within 3 s"
    assert verdicts[500].reason == "the grader ran out of memory"
    assert verdicts[900].reason == "the grader ended its process (SIGKILL)"
    assert seconds >= TIMEOUT_S  # the one that hangs is given its time


def test_one_worker_goes_on_after_each_kind_of_loss():
    with pool(workers=1) as graders:
        told = graders.grade(
            [sample(text) for text in ("hang", "34", "die", "34", "eat", "34", "exit", "34")]
        )
    assert [verdict.correct for verdict in told] == [False, True] * 4
    assert told[6].reason == "the grader ended its process (exit status 3)"


def test_a_worker_that_closes_its_pipe_and_stays_is_replaced():
    with pool(workers=1, timeout_s=20.0) as graders:
        lost, fine = graders.grade([sample("close"), sample("34")])
    assert (lost.lost, fine.correct) == ("died", True)
    assert "its pipe closed, the process going on" in lost.reason


def test_what_a_hung_grader_started_ends_with_it(tmp_path):
    with pool(workers=1) as graders:
        [lost] = graders.grade([sample("start", answer=str(tmp_path / "pid"))])
    assert lost.lost == "timeout"
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 30
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid):
    """True if the process is there and is not only waiting to be collected."""
    try:
        return "(sleep) Z" not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def test_what_a_grader_prints_does_not_disturb_the_answers():
    with pool(workers=1) as graders:
        assert [v.correct for v in graders.grade([sample("print"), sample("34")])] == [False, True]


def test_an_exception_of_the_grader_is_the_callers_and_the_worker_stays():
    with pool(workers=1) as graders:
        failed, fine = graders.submit([sample("raise", ordinal=11), sample("34")])
        with pytest.raises(
            RuntimeError, match=r"hostile raised ZeroDivisionError: by hand .*; prompt 11 .*'raise'"
        ):
            failed.result()
        assert fine.result().correct


def test_a_grader_that_cannot_be_loaded_is_named():
    with pool("no_such_module:grade") as graders:
        with pytest.raises(ValueError, match="cannot import the module 'no_such_module'"):
            graders.grade([sample("34")])
        with pytest.raises(ValueError, match="no_such_module"):  # again, and for each call
            graders.grade([sample("34")])


def test_a_whole_group_is_one_call_and_lost_as_one():
    with pool(f"{HERE}:hostile_in_company", whole_group=True, timeout_s=1.0) as graders:
        groups = [["1", "22", "333"], ["1", "hang", "2"], ["die", "1"], ["4444", "1"]]
        futures = [graders.submit([sample(text) for text in group]) for group in groups]
        verdicts = [[future.result() for future in group] for group in futures]
    assert [[v.correct for v in group] for group in verdicts] == [
        [False, False, True],
        [False] * 3,
        [False] * 2,
        [True, False],
    ]
    assert [[v.lost for v in group] for group in verdicts] == [
        [""] * 3,
        ["timeout"] * 3,
        ["died"] * 2,
        [""] * 2,
    ]


def test_the_time_limit_of_a_plain_grader_is_each_responses_own():
    with pool(timeout_s=1.0) as graders:
        lost = [verdict.lost for verdict in graders.grade([sample(text) for text in ("34", "hang", "35")])]
    assert lost == ["", "timeout", ""]


def test_a_wrong_number_of_verdicts_from_a_worker_names_both_numbers():
    group = [sample("a"), sample("b"), sample("c")]
    wrong = pytest.raises(RuntimeError, match="returned 2 verdicts for 3 responses")
    with pool(f"{HERE}:one_too_few", workers=1, whole_group=True) as graders, wrong:
        graders.grade(group)


def test_math_verify_keeps_its_own_time_in_a_worker():
    with pool("math") as graders:
        verdicts = graders.grade([sample("Answer: 68/2"), sample("Answer: 9^9^9^9^9"), sample("Answer: 34")])
    assert [verdict.correct for verdict in verdicts] == [True, False, True]


def test_a_call_holds_all_that_a_reward_function_may_read():
    row = {
        "answer": "34",
        "level": 3,
        "tags": ("a", "b"),
        "matrix": np.eye(2),
        "n": np.int64(5),
        "none": None,
    }
    [there] = samples_of(json.loads(json.dumps(call_of([sample("Äπ\n34", row=row)]))))
    assert there.prompt.row == {
        "answer": "34",
        "level": 3,
        "tags": ["a", "b"],
        "matrix": [[1.0, 0.0], [0.0, 1.0]],
        "n": 5,
        "none": None,
    }
    assert (there.response, there.answer, there.finish_reason) == ("Äπ\n34", "34", "stop")
    assert (there.prompt.ordinal, there.prompt.text, there.response_tokens) == (7, "6*7", 3)
    np.testing.assert_array_equal(there.prompt.tokens, [1, 2])


def test_a_verdict_comes_back_as_it_was():
    verdict = Verdict(correct=True, extracted="34", reason="equal", score=0.5, parts={"exact": 1.0})
    plain = Verdict(correct=False)
    assert verdicts_of(json.loads(json.dumps(answer_of([verdict, plain])))) == [verdict, plain]


@pytest.mark.parametrize("thing", [{1, 2}, {3: "an integer's name would become a text"}, b"bytes"])
def test_a_row_that_json_would_change_is_refused(thing):
    with pytest.raises(TypeError, match=r"the row's field 'thing' holds .* JSON cannot hand"):
        call_of([sample("34", row={"thing": [thing]})])


def test_closing_cancels_what_waits_and_finishes_what_is_being_graded():
    graders = pool(workers=1, timeout_s=1.0)
    assert graders.grade([sample("34")])[0].correct
    [hanging, *waiting] = graders.submit([sample("hang"), *(sample("34") for _ in range(50))])
    while graders.waiting == len(waiting) + 1:
        time.sleep(0.01)
    graders.close()
    assert hanging.result().lost == "timeout"
    assert all(call.cancelled() for call in waiting)


def test_ctrl_c_does_not_reach_a_worker():
    with pool(workers=1) as graders:
        assert [v.correct for v in graders.grade([sample("interrupt"), sample("34")])] == [False, True]


@pytest.mark.parametrize("wrong", [{"workers": 0}, {"timeout_s": 0.0}, {"memory_mb": 0}])
def test_limits_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=0"):
        pool(**wrong)
