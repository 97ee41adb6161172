"""The grading pool: right and in order, whatever single calls do to their workers."""

import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from dapo_jax.rewards.functions import RewardError
from dapo_jax.rewards.grading_pool import GradingPool
from dapo_jax.workers import EndedError, Worker
from tests.rewards import samples

HOSTILE = Path(__file__).with_name("hostile.py")
TIMEOUT_S = 1.5

sample, samples = partial(samples.sample, answer="34"), partial(samples.samples, answer="34")


def pool(grader=f"{HOSTILE}:hostile", *, workers=1, timeout_s=TIMEOUT_S, memory_mb=128, **how):
    return closing(GradingPool(grader, workers=workers, timeout_s=timeout_s, memory_mb=memory_mb, **how))


def lives(pid):
    """True if the process runs, and is not a zombie."""
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def assert_ends(pid):
    deadline = time.monotonic() + 30
    while lives(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not lives(pid)


def test_a_thousand_calls_with_three_hostile_ones_come_back_right_and_in_order():
    responses = [str(number) for number in range(1000)]
    responses[100], responses[500], responses[900] = "hang", "eat slowly", "die"
    with pool(workers=2) as graders:
        start = time.monotonic()
        verdicts = graders.grade([sample(text, answer=str(i)) for i, text in enumerate(responses)])
        seconds = time.monotonic() - start
    assert [i for i, verdict in enumerate(verdicts) if not verdict.correct] == [100, 500, 900]
    assert [verdicts[i].lost for i in (0, 100, 500, 900, 999)] == ["", "timeout", "memory", "died", ""]
    assert "within 1.5 s" in verdicts[100].reason
    assert "SIGKILL" in verdicts[900].reason
    assert seconds >= TIMEOUT_S  # the call that hangs gets its time


def test_a_worker_continues_or_is_replaced_after_each_kind_of_accident():
    harmless = ("interrupt", "print", "fork", "close its input", "read its input")
    accidents = {"hang": "timeout", "eat": "memory", "exit": "died", **dict.fromkeys(harmless, "")}
    with pool(timeout_s=5.0) as graders:
        verdicts = graders.grade(samples(*(text for name in accidents for text in (name, "34", "35"))))
    assert [verdict.lost for verdict in verdicts[::3]] == list(accidents.values())
    assert [verdict.correct for verdict in verdicts[1::3]] == [True] * len(accidents)
    assert [verdict.correct for verdict in verdicts[2::3]] == [False] * len(accidents)
    assert "exit status 3" in verdicts[6].reason


class DiesSoon(Worker):
    """Gets three calls at once. The first worker dies after its first answer, before the pool has read the answer."""

    together, lives = 3, 0

    def ask(self, call):
        answer = super().ask(call)
        if call["samples"][0]["response"] == "35" and not DiesSoon.lives:
            DiesSoon.lives += 1
            while not self.answered:
                time.sleep(0.01)
            self.end(EndedError("died", "the worker process died (exit status 3)"))
        return answer


def test_a_death_before_the_answer_to_the_call_before_was_read_is_counted(capfd):
    with pool(worker=DiesSoon) as grading:
        verdicts = grading.grade(samples("34", "slow", "35"))
        assert grading._deaths == 1
    assert [verdict.lost for verdict in verdicts] == [""] * 3
    assert "response 'slow': the worker process died (exit status 3); retrying" in capfd.readouterr().err


def test_a_grader_that_ends_its_process_again_and_again_is_an_error(capfd):
    """The first two deaths are reported, the third is an error: 3 of at most 6 calls is more than 1 in 100."""
    with pool(f"{HOSTILE}:half_die") as graders:
        futures = [graders.submit([sample(str(number))]) for number in range(1, 8)]
        assert [future.result()[0].lost for future in futures[:4]] == ["died", "", "died", ""]
        with pytest.raises(RewardError, match=r"half_die: .* 3 times in 5 calls.*exit status 7"):
            futures[4].result()
    report = capfd.readouterr().err
    assert report.count("counts as wrong") == 2
    assert "half_die, on prompt 7, response '1'" in report


def test_a_timer_that_a_grader_leaves_costs_the_next_response_no_verdict(capfd):
    """A thread or timer ends the process during the next call, which is sent once more."""
    with pool() as grading:
        verdicts = grading.grade([sample("leave soon"), sample("slow", answer="slow"), sample("34")])
    assert [verdict.lost for verdict in verdicts] == [""] * 3
    assert [verdict.correct for verdict in verdicts[1:]] == [True, True]
    assert capfd.readouterr().err.count("retrying on a new worker") == 1


def test_a_response_that_ends_its_worker_is_sent_twice_at_most(tmp_path, capfd):
    with pool() as grading:
        asked = sample("count and die", answer=str(tmp_path / "asked"))
        _, lost, fine = grading.grade([sample("34"), asked, sample("34")])
    assert (lost.lost, fine.correct) == ("died", True)
    assert (tmp_path / "asked").read_text() == "asked\n" * 2
    report = capfd.readouterr().err
    assert report.count("retrying on a new worker") == report.count("counts as wrong") == 1


def test_an_exception_of_the_grader_is_the_callers_and_the_worker_stays():
    message = r"hostile raised ZeroDivisionError: by hand .*; prompt 11 .*'raise'"
    with pool(timeout_s=20.0, memory_mb=1024) as graders:
        failed, fine = (graders.submit([one]) for one in (sample("raise", ordinal=11), sample("34")))
        with pytest.raises(RewardError, match=message) as raised:
            failed.result()
        assert len(str(raised.value)) < 3000
        assert fine.result()[0].correct


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_busy_worker_ends_with_a_trainer_that_is_killed(tmp_path):
    graded = f'pool(timeout_s=600.0).thing.grade([sample("spin", answer={str(tmp_path / "pid")!r})])'
    program = f"from tests.rewards.grading_pool_test import pool, sample; {graded}"
    trainer = subprocess.Popen([sys.executable, "-c", program], cwd=HOSTILE.parents[2])
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.1)
    pid = int((tmp_path / "pid").read_text())
    trainer.kill()
    trainer.wait()
    assert_ends(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_children_of_a_hung_grader_end_with_it(tmp_path):
    with pool() as graders:
        [lost] = graders.grade([sample("start", answer=str(tmp_path / "pid"))])
    assert lost.lost == "timeout"
    assert_ends(int((tmp_path / "pid").read_text()))


def test_a_grader_that_cannot_be_loaded_is_named_for_each_call():
    with pool("no_such_module:grade", workers=2) as graders:
        for _ in range(2):
            with pytest.raises(ValueError, match="'no_such_module'"):
                graders.grade([sample("34")])


@pytest.mark.parametrize(
    ("line", "start_s", "how"),
    [("os._exit(4)", 60.0, "exit status 4"), ("time.sleep(60)", 0.5, r"within 0\.5 s")],
)
def test_a_worker_that_does_not_start_names_the_function_and_why(tmp_path, monkeypatch, line, start_s, how):
    monkeypatch.setattr("dapo_jax.workers.process.START_S", start_s)
    file = tmp_path / "mine.py"
    file.write_text(f"import os, time\n{line}\ndef f(sample):\n    return True\n")
    with pool(f"{file}:f") as graders, pytest.raises(RewardError, match=rf"{file}:f: .*not start.*{how}"):
        graders.grade([sample("34")])


def test_modules_of_the_current_folder_shadow_no_module_of_python_or_this_package(tmp_path, monkeypatch):
    for name in ("inspect.py", "token.py", "select.py", "dapo_jax.py"):
        (tmp_path / name).write_text("raise SystemExit(7)\n")
    (tmp_path / "my_rewards.py").write_text("def right(sample):\n    return sample.response == '34'\n")
    monkeypatch.chdir(tmp_path)
    with pool("my_rewards:right") as graders:  # which is in the current folder, too
        assert [verdict.correct for verdict in graders.grade(samples("34", "35"))] == [True, False]


def test_a_whole_group_is_one_call_and_lost_as_one():
    with pool(f"{HOSTILE}:hostile_group", workers=2, whole_group=True, timeout_s=1.0) as graders:
        groups = [["1", "22", "333"], ["1", "hang", "2"], ["die", "1"], ["4444", "1"]]
        futures = [graders.submit(samples(*group)) for group in groups]
        verdicts = [[(each.correct, each.lost) for each in future.result()] for future in futures]
    assert verdicts == [
        [(False, ""), (False, ""), (True, "")],
        [(False, "timeout")] * 3,
        [(False, "died")] * 2,
        [(True, ""), (False, "")],
    ]


def test_closing_cancels_waiting_calls_and_waits_for_the_call_that_is_being_graded():
    graders = pool(timeout_s=1.0).thing
    assert graders.grade([sample("34")])[0].correct
    hanging, waiting = graders.submit([sample("hang")]), graders.submit([sample("34")] * 50)
    time.sleep(0.3)
    graders.close()
    assert hanging.result()[0].lost == "timeout"
    assert waiting.cancelled()
