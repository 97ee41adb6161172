"""An environment in worker processes: the same answers as in this process, and an accident costs only the episode at fault."""

import itertools
import json
import math
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.environments import Episodes, load_environment
from dapo_jax.environments.rendering import Rendering
from dapo_jax.environments.worker_environment import WorkerEnvironment
from tests.environments.playing import TOKENIZER, drawn
from tests.environments.playing import verdicts_of as verdicts
from tests.environments.scripted import Scripted
from tests.rewards.grading_pool_test import assert_ends, lives

HERE = Path(__file__)
SCRIPTED = HERE.with_name("scripted.py")


class Unmakeable:
    def __init__(self):
        raise OSError("no index")


def workers(source=f"{SCRIPTED}:Scripted", *, count=1, timeout_s=2.0, memory_mb=512):
    return WorkerEnvironment(source, workers=count, timeout_s=timeout_s, memory_mb=memory_mb)


def playing(environment):
    """Episodes as a run has them; workers end with them, and keep the time."""
    rendering, close = Rendering(tokenizer=TOKENIZER), getattr(environment, "close", lambda: None)
    limits = {"max_turns": 9, "timeout_s": math.inf}
    return Episodes(environment, rendering, text_of=TOKENIZER.decode, seed=1, on_close=close, **limits)


ORDINALS = itertools.count()


def prompt(**row):
    return Prompt(ordinal=next(ORDINALS), tokens=TOKENIZER.encode("q"), text="q", answer="a", row=row)


def appended(future):
    """The text that an episode appended; None if it is over."""
    found = future.result(60)
    return None if found is None else TOKENIZER.decode(found.tokens)


def begun(episodes, count, **row):
    """A new prompt with so many episodes."""
    asked = prompt(**row)
    for index in range(count):
        episodes.start(asked, index).result(60)
    return asked


def play(episodes, asked, index, *texts):
    """The answer to the last of these turns."""
    return [appended(stepped(episodes, asked, index, text)) for text in texts][-1]


def stepped(episodes, asked, index, text):
    """The future of the answer to a turn."""
    return episodes.step(asked, index, drawn(text))


def pid_of(episodes, asked, index=0):
    return int(play(episodes, asked, index, "pid"))


@pytest.fixture(scope="module")
def scripted():
    """The episodes of one worker at a time."""
    with playing(workers()) as episodes:
        yield episodes


def test_answers_are_the_same_as_without_workers():
    asked, beginning = prompt(), prompt(begins="a context", level=4)
    answers = []
    for environment in (Scripted(), workers()):
        with playing(environment) as episodes:
            found = [appended(episodes.start(asked, index)) for index in range(2)]
            found += [play(episodes, asked, 0, "a", "b", "echo"), play(episodes, asked, 1, "c")]
            found.append(play(episodes, asked, 0, "context abc"))
            context = episodes.start(beginning, 0).result(60)
            found += [context.tokens.tolist(), context.new_context]
            assert stepped(episodes, asked, 0, "done").result(60) is None
            found += [verdicts(episodes, asked, 2), verdicts(episodes, beginning, 1)]
            answers.append(found)
    assert answers[0] == answers[1]
    tokens, logprobs, *rest = json.loads(answers[1][2])
    assert (tokens, rest[:4]) == (TOKENIZER.encode("echo").tolist(), ["int32", "float32", "stop", 2])
    assert np.array(logprobs, np.float32).tolist() == drawn("echo").record.logprobs.tolist(), "to the bit"
    context = TOKENIZER.decode(np.array([97, 98, 99], np.int32))
    assert answers[1][:5] == ["?", "?", answers[1][2], "c", context]
    assert answers[1][-2][0].score == 2.0


def test_a_row_arrives_as_it_is_with_arrays_and_tuples_as_lists(scripted):
    row = {"share": 0.1, "tags": ("ä", "\ud800"), "matrix": np.eye(2), "n": np.int64(5), "none": None}
    asked, refused = begun(scripted, 1, **row), begun(scripted, 1, raw=b"bytes")
    found = json.loads(play(scripted, asked, 0, "row"))
    [lost] = verdicts(scripted, refused, 1)
    lists = {"tags": ["ä", "\ud800"], "matrix": [[1.0, 0.0], [0.0, 1.0]]}
    assert found == {"prompt": "q", "answer": "a", **row, "n": 5, **lists}
    assert re.search(r"'raw' .*workers\.count=0", lost.reason)


@pytest.mark.parametrize(
    ("text", "lost", "reason"),
    [
        ("sleep 60", "timeout", "within 2 s"),
        ("raise", "raised", r"ValueError: no such tool \(scripted.py, line \d+\)"),
        ("append bytes", "raised", "bytes.*JSON"),
        ("append deep", "raised", "nested too deep"),
        ("append ids", "raised", "ids from 1000000"),
        ("huge 20000000", "raised", r"20,000,\d+ bytes"),
    ],
)
def test_a_bad_step_loses_its_episode_alone_and_the_worker_stays(scripted, text, lost, reason):
    asked = begun(scripted, 2)
    before = pid_of(scripted, asked, 1)
    assert stepped(scripted, asked, 0, text).result(60) is None
    assert pid_of(scripted, asked, 1) == before
    found, good = verdicts(scripted, asked, 2)
    assert (found.lost, good.lost) == (lost, "")
    assert re.search(reason, found.reason, re.DOTALL), found.reason[:500]


def test_an_episode_that_cannot_begin_is_lost(scripted):
    asked, silent = prompt(begins="not"), prompt(begins="with nothing")
    assert scripted.start(asked, 0).result(60) is None
    assert appended(scripted.start(silent, 0)) == ""
    assert verdicts(scripted, asked, 1)[0].reason.startswith("ValueError: no such task (scripted.py, line ")


def test_a_prompts_episodes_are_in_one_worker_and_prompts_are_spread():
    with playing(workers(count=2)) as episodes:
        assert [seat._worker for seat in episodes._environment._seats] == [None, None]
        asked = [begun(episodes, 3) for _ in range(4)]
        pids = [{pid_of(episodes, each, index) for index in range(3)} for each in asked]
        first, second, *_ = pids
        assert len(first) == len(second) == 1
        assert first != second
        assert pids == [first, second, first, second]


def test_rewards_are_compared_if_the_environment_compares(scripted):
    assert not hasattr(scripted._environment, "group_rewards")
    with playing(workers(f"{SCRIPTED}:Compared")) as episodes:
        rows = {}, {"compare": "exit"}, {"begins": "not"}
        asked, dying, all_lost = (begun(episodes, 3, **row) for row in rows)
        for index in range(3):
            play(episodes, dying, index, "a")
        play(episodes, asked, 0, "a", "b")
        play(episodes, asked, 1, "a")
        play(episodes, asked, 2, "huge 3000000")
        assert [(each.score, each.lost) for each in verdicts(episodes, dying, 3)] == [(None, "died")] * 3
        assert [(each.score, each.lost) for each in verdicts(episodes, all_lost, 3)] == [(None, "raised")] * 3
        found = verdicts(episodes, asked, 3)  # from a worker to which all turns were replayed
    assert [(each.score, each.lost) for each in found] == [(2.0, ""), (1.0, ""), (None, "raised")]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_closing_closes_episodes_and_ends_the_processes(tmp_path):
    episodes = playing(workers(count=2))
    asked, other = begun(episodes, 1, closed=str(tmp_path / "closed")), begun(episodes, 1)
    pids = [pid_of(episodes, each) for each in (asked, other)]
    assert len(set(pids)) == 2
    assert all(map(lives, pids))
    play(episodes, asked, 0, "a", "b")
    stepped(episodes, other, 0, "sleep 60")
    episodes.close()
    for pid in pids:
        assert_ends(pid)
    assert (tmp_path / "closed").read_text() == "a|b\n"


@pytest.mark.parametrize(
    ("text", "lost", "reason"),
    [
        ("kill", "died", "SIGKILL"),
        # Slow: waits for a timeout or another worker. "kill" ends a worker, too; tests/rewards/grading_pool_test.py has a worker that hangs.
        pytest.param("hold", "timeout", "within 2 s", marks=pytest.mark.slow),
        pytest.param("exit", "died", "exit status 3", marks=pytest.mark.slow),
    ],
)
def test_a_call_that_ends_a_worker_costs_its_own_episode_alone(text, lost, reason, scripted):
    """In the same worker: an episode that waits for an answer, one of another prompt, and one between two turns."""
    asked, other = begun(scripted, 3), begun(scripted, 1)
    for index in range(3):
        play(scripted, asked, index, "a", f"b{index}")
    before = pid_of(scripted, begun(scripted, 1))
    assert play(scripted, asked, 1, "print")
    waiting = [stepped(scripted, *episode, "sleep 0.5") for episode in ((asked, 1), (other, 0))]
    time.sleep(0.1)
    assert stepped(scripted, asked, 0, text).result(60) is None
    assert [appended(answer) for answer in waiting] == ["a|b1|print|sleep 0.5", "sleep 0.5"]
    assert play(scripted, asked, 2, "c") == "a|b2|c", "all turns were replayed to the new worker"
    assert play(scripted, asked, 1, "d") == "a|b1|print|sleep 0.5|d"
    assert pid_of(scripted, begun(scripted, 1)) != before
    found = verdicts(scripted, asked, 3)
    assert [each.lost for each in found] == [lost, "", ""]
    assert re.search(reason, found[0].reason), found[0].reason


def test_an_episode_whose_answers_the_next_worker_does_not_repeat_is_lost(scripted):
    """The answer to `pid` is the number of the process."""
    asked, other = begun(scripted, 1), begun(scripted, 1)
    play(scripted, asked, 0, "a", "pid", "b")
    assert stepped(scripted, other, 0, "kill").result(60) is None
    assert stepped(scripted, asked, 0, "c").result(60) is None
    [verdict] = verdicts(scripted, asked, 1)
    assert verdict.lost == "raised"
    assert "before turn 2 differs" in verdict.reason


def test_a_call_is_sent_again_to_the_next_worker_if_one_died_of_it_by_chance(tmp_path, scripted):
    asked = begun(scripted, 1)
    once = f"once {tmp_path / 'tried'}"
    assert play(scripted, asked, 0, "a", once) == f"a|{once}"
    assert [each.lost for each in verdicts(scripted, asked, 1)] == [""]


def test_of_many_calls_under_way_only_those_that_end_workers_are_lost(scripted):
    """Of eight calls at a time two end the process; sending them again one after another finds these."""
    asked = begun(scripted, 8)
    texts = ["sleep 0.2"] * 8
    texts[2] = texts[5] = "exit"
    answers = [stepped(scripted, asked, index, text) for index, text in enumerate(texts)]
    assert [appended(answer) for answer in answers] == [None if text == "exit" else text for text in texts]


def test_taking_too_much_memory_costs_its_own_episode_and_the_worker_stays():
    with playing(workers(memory_mb=256)) as episodes:
        asked = begun(episodes, 2)
        before = pid_of(episodes, asked, 1)
        assert stepped(episodes, asked, 0, "take 300").result(60) is None
        assert play(episodes, asked, 1, "take 100") == "100"
        assert pid_of(episodes, asked, 1) == before
        lost, fine = verdicts(episodes, asked, 2)
    assert (lost.lost, fine.lost) == ("raised", "")
    assert lost.reason.startswith("MemoryError")


def test_a_call_that_another_one_held_up_has_its_time_once_more():
    """The loop is blocked for longer than the time limit, but not long enough that the worker counts as blocked."""
    with playing(workers(timeout_s=0.8)) as episodes:
        asked = begun(episodes, 2)
        waiting = stepped(episodes, asked, 1, "sleep 0.3")
        time.sleep(0.1)
        stepped(episodes, asked, 0, "stall 1.6")
        assert appended(waiting) == "sleep 0.3"
        assert verdicts(episodes, asked, 2)[1].lost == ""


def test_a_turn_for_whose_threads_no_worker_has_room_is_lost():
    with playing(workers(timeout_s=20.0, memory_mb=96)) as episodes:
        asked, other = begun(episodes, 1), begun(episodes, 1)
        assert stepped(episodes, asked, 0, "threads 100").result(60) is None
        [verdict] = verdicts(episodes, asked, 1)
        assert (verdict.lost, "thread" in verdict.reason) == ("died", True)
        assert play(episodes, other, 0, "threads 1") == "threads 1"


@pytest.mark.parametrize("source", ["gess", f"{SCRIPTED}:Scriptid", f"{HERE}:Unmakeable"])
def test_an_environment_that_cannot_be_made_is_named_as_in_this_process(source):
    with pytest.raises(ValueError) as here:  # noqa: PT011 - whatever the message is
        load_environment(source)
    with pytest.raises(ValueError, match=re.escape(str(here.value))):
        workers(source)
