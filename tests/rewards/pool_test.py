"""The grading pool: right and in order, whatever single calls do to their workers."""

import contextlib
import fcntl
import json
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from dapo_jax.dapo.rollouts import Prompt, Verdict
from dapo_jax.rewards import whole_group
from dapo_jax.rewards.calls import answer_of, call_of, samples_of, verdicts_of
from dapo_jax.rewards.functions import RewardError
from dapo_jax.rewards.pool import GradingPool
from dapo_jax.rewards.sample import Sample

HERE = Path(__file__)
TIMEOUT_S = 3.0
SLOW = r"Answer: \sqrt{10^{5000} + 7}"


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
        case "fork":
            os.fork()  # the child comes back from here as well
        case "fork and leave":
            if not os.fork():
                sys.exit(0)
        case "leave":
            sys.exit(5)
        case "leave soon":
            threading.Timer(0.1, os._exit, [9]).start()
        case "leave an alarm":
            signal.setitimer(signal.ITIMER_REAL, 0.1)
        case "close its calls":
            close_for_reading()
        case "slow":
            time.sleep(0.4)
        case "count and die":
            with open(sample.answer, "a") as file:
                file.write("asked\n")
            os._exit(3)
        case "forge":
            write_to_pipes(b'{"id": 1, "verdicts": [{"correct": true}]}\n' * 2)
        case "forge true":
            write_to_pipes(b'{"id": true, "verdicts": [{"correct": true}]}\n')
        case "forge nothing":
            write_to_pipes(b'{"id": 1}\n')
        case "raise an interrupt":
            raise KeyboardInterrupt
        case "raise without words":
            raise SpeechlessError
        case "return what cannot be shown":
            return SpeechlessError()
        case "close its input":
            sys.stdin.close()
        case "read its input":
            return subprocess.run(["cat"], capture_output=True, check=True, timeout=5).stdout == b""
        case "say too much":
            return Verdict(correct=True, reason="x" * 100_000_000)
        case "return too much":
            return "x" * 100_000_000
        case "raise too much":
            raise ValueError("x" * 100_000_000)
        case "flood":
            flood()
        case "spin":
            Path(sample.answer).write_text(str(os.getpid()))
            while True:
                pass
    return sample.response == sample.answer


class SpeechlessError(Exception):
    def __str__(self):
        raise ZeroDivisionError("in its text")

    __repr__ = __str__


def write_to_pipes(line):
    """Writes to whatever pipe of the worker takes it: one of them is the way back."""
    for descriptor in range(3, 16):
        with contextlib.suppress(OSError):
            os.write(descriptor, line)


def close_for_reading():
    """Closes the pipe that calls come from."""
    for descriptor in range(3, 16):
        with contextlib.suppress(OSError):
            mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
            if mode == os.O_RDONLY and stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                os.close(descriptor)


def flood():
    """Writes to whatever pipe of the worker takes it, for ever; 4 kB a millisecond stay below what is too much to be an answer."""
    while True:
        time.sleep(0.001)
        for descriptor in range(3, 16):
            with contextlib.suppress(OSError):
                os.write(descriptor, b"x" * 4096)


def close_to(sample):
    """Numpy's bool in a field, for half of the responses."""
    if sample.response == "34":
        return Verdict(correct=np.isclose(34.0, 34.0), score=np.float32(0.5), extracted=np.int64(34))
    return Verdict(correct=Fraction(0), score=Fraction(1, 4), parts={"a": np.float64(1.5)})


def matched(sample):
    return Verdict(correct=re.match("3", sample.response))


@dataclass(frozen=True, kw_only=True)
class Noted(Verdict):
    note: str = "mine"


def noted(sample):
    return Noted(correct=True if sample.response == "34" else "no")


def leaves_an_alarm(sample):
    """Each call outlasts the alarm of the one before."""
    time.sleep(0.2)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    return True


def half_die(sample):
    if int(sample.response) % 2:
        os._exit(7)
    return True


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


def test_numpy_and_fractions_in_a_verdict_are_taken():
    with pool(f"{HERE}:close_to", workers=1) as graders:
        verdicts = graders.grade([sample("34"), sample("35")])
    assert verdicts == [
        Verdict(correct=True, score=0.5, extracted="34"),
        Verdict(correct=False, score=0.25, parts={"a": 1.5}),
    ]


def test_a_field_that_is_none_names_function_field_and_value():
    wrong = r"matched raised ValueError: Verdict: correct=<re.Match object.* \(Match\), needs a bool"
    with pool(f"{HERE}:matched", workers=1) as graders, pytest.raises(RewardError, match=wrong):
        graders.grade([sample("34")])


def test_a_subclass_of_verdict_is_checked_as_in_this_process():
    with pool(f"{HERE}:noted", workers=1) as graders:
        fine, wrong = graders.submit([sample("34"), sample("35")])
        assert fine.result() == Verdict(correct=True)
        words = (
            r"noted returned a Noted with a field that is none; Verdict: correct='no' \(str\), needs a bool"
        )
        with pytest.raises(RewardError, match=words):
            wrong.result()


def test_a_grader_that_ends_its_process_again_and_again_is_an_error(capfd):
    """The first two deaths are said, the third is an error: 3 of at most 6 calls is more than 1 in 100."""
    with pool(f"{HERE}:half_die", workers=1) as graders:
        futures = graders.submit([sample(str(number)) for number in range(1, 8)])
        assert [future.result().lost for future in futures[:4]] == ["died", "", "died", ""]
        with pytest.raises(RewardError, match=r"half_die: its worker died 3 times in 5 calls.*exit status 7"):
            futures[4].result()
    said = capfd.readouterr().err
    assert said.count("counts as wrong") == 2
    assert "half_die, on prompt 7, response '1': the grader ended its process (exit status 7)" in said


def test_a_grader_that_forks_and_comes_back_twice_shifts_no_verdict():
    """Twenty calls, right where the response is the answer; the child's answer is an error, and never another call's verdict."""
    with pool(workers=1) as graders:
        futures = graders.submit([sample("fork"), *(sample(text) for text in ["34", "35"] * 10)])
        found = []
        for future in futures:
            try:
                found.append(future.result().correct)
            except RewardError as error:
                found.append(str(error))
    errors = [one for one in found if isinstance(one, str)]
    assert len(errors) == 1
    assert "hostile" in errors[0]
    assert "forked, and the child (process" in errors[0]
    expected = [False, *[True, False] * 10]
    assert all(one == right for one, right in zip(found, expected, strict=True) if one not in errors)


@pytest.mark.parametrize("what", ["forge", "forge true", "forge nothing"])
def test_an_answer_that_no_worker_made_is_an_error_and_shifts_no_verdict(what):
    """A second answer to call 1 would be taken for that to call 2; True equals 1; an answer without verdicts is none.

    The forged answer to call 1 itself comes first, and cannot be told from the worker's: that a function decides anyway.
    """
    with pool(workers=1) as grading:
        futures = [future for each in (what, "35", "35") for future in grading.submit([sample(each)])]
        results = [future.exception() or future.result().correct for future in futures]
    errors = [each for each in results if isinstance(each, RewardError)]
    assert len(errors) == 1
    assert re.search("surplus answer, to call 1|is no answer|holds no verdicts", str(errors[0]))
    assert f"{HERE}:hostile" in str(errors[0])
    assert results[2] is False
    assert results.index(errors[0]) == (1 if what == "forge" else 0)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("raise an interrupt", "raised KeyboardInterrupt"),
        ("raise without words", "raised SpeechlessError: (its text raises ZeroDivisionError)"),
        (
            "return what cannot be shown",
            "returned a SpeechlessError that cannot be read: ZeroDivisionError: in its text",
        ),
    ],
)
def test_what_cannot_be_put_into_words_still_names_the_function(what, words):
    with pool(workers=1) as grading, pytest.raises(RewardError, match=re.escape(f"{HERE}:hostile {words}")):
        grading.grade([sample(what)])


def test_a_worker_that_ends_between_two_calls_costs_the_second_no_verdict(capfd):
    with pool(workers=1) as grading:
        assert not grading.grade([sample("leave soon")])[0].correct
        time.sleep(1.0)  # it ends after 0.1 s; the worker loads its grader anew for the next call
        assert grading.grade([sample("34")])[0].correct
    assert "the worker had ended (exit status 9); a new one is asked" in capfd.readouterr().err


@pytest.mark.parametrize("what", ["leave soon", "leave an alarm", "close its calls"])
def test_what_a_grader_leaves_behind_costs_the_next_response_no_verdict(what, capfd):
    """A thread or timer that ends the process while the next call is under way, and a pipe that takes no call: it is asked once more."""
    with pool(workers=1) as grading:
        verdicts = grading.grade([sample(what), sample("slow", answer="slow"), sample("34")])
    assert [verdict.lost for verdict in verdicts] == [""] * 3
    assert [verdict.correct for verdict in verdicts[1:]] == [True, True]
    assert capfd.readouterr().err.count("a new one is asked") == 1


def test_a_grader_that_goes_on_leaving_behind_what_ends_its_worker_is_an_error():
    with pool(f"{HERE}:leaves_an_alarm", workers=1) as grading:
        futures = grading.submit([sample(str(number)) for number in range(4)])
        assert [future.result().correct for future in futures[:3]] == [True] * 3
        wrong = r"leaves_an_alarm: its worker died 3 times in 4 calls.*SIGALRM.*nor leave behind what ends it"
        with pytest.raises(RewardError, match=wrong):
            futures[3].result()


def test_a_response_that_ends_its_worker_is_asked_about_twice_at_most(tmp_path, capfd):
    with pool(workers=1) as grading:
        _, lost, fine = grading.grade(
            [sample("34"), sample("count and die", answer=str(tmp_path / "asked")), sample("34")]
        )
    assert (lost.lost, fine.correct) == ("died", True)
    assert (tmp_path / "asked").read_text() == "asked\n" * 2
    said = capfd.readouterr().err
    assert said.count("a new one is asked") == said.count("it counts as wrong") == 1


def test_a_child_that_leaves_by_itself_disturbs_nothing():
    with pool(workers=1) as graders:
        verdicts = graders.grade([sample("fork and leave"), sample("34"), sample("35")])
    assert [(verdict.correct, verdict.lost) for verdict in verdicts] == [(False, ""), (True, ""), (False, "")]


def test_a_grader_that_calls_sys_exit_has_raised():
    with pool(workers=1) as graders, pytest.raises(RewardError, match="hostile raised SystemExit: 5"):
        graders.grade([sample("leave")])


@pytest.mark.parametrize("what", ["close its input", "read its input"])
def test_what_a_grader_does_to_its_standard_input_costs_no_other_response(what):
    with pool(workers=1) as graders:
        verdicts = graders.grade([sample(what), sample("34"), sample("34")])
    assert [verdict.lost for verdict in verdicts] == [""] * 3
    assert [verdict.correct for verdict in verdicts[1:]] == [True, True]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("say too much", r"verdicts of 100,000,\d\d\d bytes, at most 16,777,216"),
        ("return too much", r"returned 'xxx[x]+ \(str\)"),
        ("raise too much", r"raised ValueError: xxx"),
    ],
)
def test_an_answer_beyond_all_bounds_is_an_error_of_bounded_length(what, message):
    graders = pool(workers=1, timeout_s=20.0, memory_mb=1024)
    with graders, pytest.raises(RewardError, match=message) as raised:
        graders.grade([sample(what)])
    assert len(str(raised.value)) < 3000


def test_the_time_limit_holds_while_data_arrive():
    """A grader that writes to its worker's pipe without end: no line ends, and the limit is 3 s."""
    start = time.monotonic()
    with pool(workers=1) as graders:
        [verdict] = graders.grade([sample("flood")])
    assert verdict.lost == "timeout"
    assert time.monotonic() - start < 10 * TIMEOUT_S


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_busy_worker_ends_with_a_trainer_that_is_killed(tmp_path):
    """The trainer is killed while its worker spins; nobody is left to end the worker."""
    program = textwrap.dedent(f"""
        from tests.rewards.pool_test import pool, sample
        graders = pool(workers=1, timeout_s=600.0)
        graders.grade([sample("spin", answer={str(tmp_path / "pid")!r})])
    """)
    trainer = subprocess.Popen([sys.executable, "-c", program], cwd=HERE.parents[2])
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.1)
    pid = int((tmp_path / "pid").read_text())
    trainer.kill()
    trainer.wait()
    while _lives(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _lives(pid)


def _lives(pid):
    """True if the process is there and is not only waiting to be collected."""
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


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
    while _lives(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _lives(pid)


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


@pytest.mark.parametrize(
    ("line", "start_s", "how"),
    [
        ("os._exit(4)", 60.0, r"the grader ended its process \(exit status 4\)"),
        ("time.sleep(60)", 0.5, "it was not ready within 0.5 s"),
    ],
)
def test_a_worker_that_does_not_start_names_the_function_and_why(tmp_path, monkeypatch, line, start_s, how):
    monkeypatch.setattr("dapo_jax.rewards.pool.START_S", start_s)
    file = tmp_path / "mine.py"
    file.write_text(f"import os, time\n{line}\ndef f(sample):\n    return True\n")
    wrong = (
        rf"reward function {file}:f: its worker did not start: .*{how}; .*neither wait nor end the process"
    )
    with pool(f"{file}:f", workers=1) as graders, pytest.raises(RewardError, match=wrong):
        graders.grade([sample("34")])


def test_modules_of_the_current_folder_shadow_neither_the_standard_library_nor_this_package(
    tmp_path, monkeypatch
):
    for name in ("inspect.py", "token.py", "select.py", "dapo_jax.py"):
        (tmp_path / name).write_text("raise SystemExit(7)\n")
    (tmp_path / "my_rewards.py").write_text(
        "def right(sample):\n    return sample.response == sample.answer\n"
    )
    monkeypatch.chdir(tmp_path)
    with pool("my_rewards:right", workers=1) as graders:  # and one of one's own is found
        assert [verdict.correct for verdict in graders.grade([sample("34"), sample("35")])] == [True, False]


def test_a_worker_finds_the_module_that_this_process_finds(tmp_path, monkeypatch):
    """A module of one's own may have a name of the standard library's, where it comes first on Python's path."""
    (tmp_path / "colorsys.py").write_text("def short(sample):\n    return len(sample.response) <= 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pool("colorsys:short", workers=1) as graders:
        assert graders.grade([sample("34")])[0].correct


def test_a_file_imports_its_neighbours_in_a_worker(tmp_path):
    """When it is loaded and when it is called; another file's neighbour of the same name is another worker's."""
    for answer in ("34", "35"):
        folder = tmp_path / answer
        folder.mkdir()
        (folder / "late.py").write_text(f"answer = {answer!r}\n")
        (folder / "early.py").write_text("def right(sample, answer):\n    return sample.response == answer\n")
        text = "import early\ndef f(sample):\n    from late import answer\n    return early.right(sample, answer)\n"
        (folder / "mine.py").write_text(text)
        with pool(f"{folder}/mine.py:f", workers=1) as graders:
            found = graders.grade([sample("34"), sample("35")])
        assert [verdict.correct for verdict in found] == [answer == "34", answer == "35"]


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


def test_an_answer_that_takes_too_long_to_read_is_lost_at_the_configured_limit():
    """The root of a number of 5,001 digits: sympy looks for its factors for minutes. That is no wrong answer."""
    with pool("math", workers=1, timeout_s=7.0) as graders:
        start = time.monotonic()
        verdicts = graders.grade([sample("Answer: 68/2"), sample(SLOW), sample("Answer: 34")])
    assert [(verdict.correct, verdict.lost) for verdict in verdicts] == [
        (True, ""),
        (False, "timeout"),
        (True, ""),
    ]
    assert verdicts[1].reason == "no verdict within 7 s"
    assert time.monotonic() - start >= 7.0


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


def test_submitting_after_the_end_is_refused():
    graders = pool(workers=1)
    graders.close()
    with pytest.raises(RuntimeError, match=r"grading pool of .*:hostile was closed"):
        graders.submit([sample("34")])


def test_ctrl_c_does_not_reach_a_worker():
    with pool(workers=1) as graders:
        assert [v.correct for v in graders.grade([sample("interrupt"), sample("34")])] == [False, True]


@pytest.mark.parametrize("wrong", [{"workers": 0}, {"timeout_s": 0.0}, {"memory_mb": 0}])
def test_limits_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=0"):
        pool(**wrong)
