"""An environment in worker processes: the same answers as in this process, and whatever befalls a worker costs the episode that did it, and no other."""

import asyncio
import inspect
import itertools
import json
import math
import re
import subprocess
import sys
import textwrap
import time
from concurrent.futures import wait
from pathlib import Path

import numpy as np
import pytest

from dapo_jax.dapo.rollouts import DrawnTurn, Prompt
from dapo_jax.environments import Episodes, Step, load_environment
from dapo_jax.environments.rendering import Rendering
from dapo_jax.environments.workers import LEFT_BEHIND, THREADS_LEFT, worker_environment
from dapo_jax.rewards.sample import Sample
from dapo_jax.text.tokenizers import ByteTokenizer
from tests.environments import bad_environments_test, episodes_test
from tests.environments.scripted import Scripted

HERE = Path(__file__)
SCRIPTED = HERE.with_name("scripted.py")
TOKENIZER = ByteTokenizer()
TIMEOUT_S = 2.0


class BadSteps:
    """Steps that none should make, by the names of the tests that have them in this process."""

    def episode(self, row, seed):
        return BadStep()


class BadStep:
    async def step(self, turn):
        if turn.text not in episodes_test.BAD_STEPS:
            return Step(append=turn.text.upper(), reward=0.5)
        step = episodes_test.BAD_STEPS[turn.text][0]
        if inspect.iscoroutinefunction(step):
            return await step(self, turn)
        return await asyncio.to_thread(step, self, turn)


class BadEpisodes:
    """Episodes that none should make, likewise."""

    def episode(self, row, seed):
        make, _ = bad_environments_test.LOSSES.get(
            row["name"], (lambda row: bad_environments_test.Good(), "")
        )
        return make(row)


class Unmakeable:
    def __init__(self):
        raise OSError("no index")


def workers(source=f"{SCRIPTED}:Scripted", *, count=1, timeout_s=TIMEOUT_S, memory_mb=512):
    return worker_environment(source, workers=count, timeout_s=timeout_s, memory_mb=memory_mb)


def playing(environment, rendering=None, text_of=TOKENIZER.decode):
    """Episodes as a run has them; workers end with them, and keep the time."""
    return Episodes(
        environment,
        rendering or Rendering(tokenizer=TOKENIZER),
        text_of=text_of,
        seed=1,
        max_turns=9,
        timeout_s=math.inf,
        on_close=getattr(environment, "close", lambda: None),
    )


_ORDINALS = itertools.count()


def prompt(**row):
    """A prompt of its own."""
    return Prompt(ordinal=next(_ORDINALS), tokens=TOKENIZER.encode("q"), text="q", answer="a", row=row)


def turn(text, tokenizer=TOKENIZER):
    tokens = tokenizer.encode(text)
    logprobs = np.linspace(-3.1, -0.1, len(tokens)).astype(np.float32)
    return DrawnTurn(tokens=tokens, logprobs=logprobs, finish_reason="stop")


def said(future):
    """What an episode appended, as a text; None if it is over."""
    found = future.result(60)
    return None if found is None else TOKENIZER.decode(found.tokens)


def tell(episodes, asked, index, *texts):
    """The answer to the last of these turns."""
    return [said(episodes.step(asked, index, turn(text))) for text in texts][-1]


def verdicts(episodes, asked, count):
    empty = Sample(prompt=asked, response="", tokens=np.zeros(0, np.int32), finish_reason="stop")
    return [future.result(60) for future in episodes.verdicts([empty] * count)]


def pid_of(episodes, asked, index=0):
    return int(tell(episodes, asked, index, "pid"))


def lives(pid):
    """True if the process is there and is not only waiting to be collected."""
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def assert_ended(*pids):
    deadline = time.monotonic() + 20
    while any(map(lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(lives, pids))


@pytest.fixture(scope="module")
def scripted():
    """One worker's seat, for tests in which worker follows upon worker."""
    with playing(workers()) as episodes:
        yield episodes


# --- The same as in this process ---


def test_answers_are_those_of_the_environment_in_this_process():
    asked, beginning = prompt(), prompt(says="a context", level=4)
    told = []
    for environment in (Scripted(), workers()):
        with playing(environment) as episodes:
            found = [said(episodes.start(asked, index)) for index in range(2)]
            found += [tell(episodes, asked, 0, "a", "b", "told"), tell(episodes, asked, 1, "c")]
            found.append(tell(episodes, asked, 0, "context abc"))
            anew = episodes.start(beginning, 0).result(60)
            found += [anew.tokens.tolist(), anew.anew]
            assert episodes.step(asked, 0, turn("done")).result(60) is None
            found += [verdicts(episodes, asked, 2), verdicts(episodes, beginning, 1)]
            told.append(found)
    assert told[0] == told[1]
    tokens, logprobs, *rest = json.loads(told[1][2])
    assert (tokens, rest[:4]) == (TOKENIZER.encode("told").tolist(), ["int32", "float32", "stop", 2])
    assert np.array(logprobs, np.float32).tolist() == turn("told").logprobs.tolist(), "to the bit"
    assert told[1][:5] == ["?", "?", told[1][2], "c", TOKENIZER.decode(np.array([97, 98, 99], np.int32))]
    assert told[1][-2][0].score == 2.0


def test_an_environments_file_imports_its_neighbours_in_a_worker(tmp_path):
    (tmp_path / "words.py").write_text("answer = 'seven'\n")
    (tmp_path / "mine.py").write_text(
        "import words\nfrom dapo_jax.environments import Step\n"
        "class Mine:\n    def episode(self, row, seed):\n        return self\n"
        "    def step(self, turn):\n        return Step(append=words.answer)\n"
    )
    with playing(workers(f"{tmp_path}/mine.py:Mine")) as episodes:
        asked = prompt()
        said(episodes.start(asked, 0))
        assert tell(episodes, asked, 0, "?") == "seven"


def test_a_row_arrives_as_it_is_with_arrays_and_tuples_as_lists(scripted):
    row = {
        "level": 3,
        "share": 0.1,
        "tags": ("ä", "\ud800"),
        "matrix": np.eye(2),
        "n": np.int64(5),
        "none": None,
    }
    asked, refused = prompt(**row), prompt(raw=b"bytes")
    episodes = scripted
    episodes.start(asked, 0).result(60)
    found = json.loads(tell(episodes, asked, 0, "row"))
    assert episodes.start(refused, 0).result(60) is None
    [lost] = verdicts(episodes, refused, 1)
    lists = {"tags": ["ä", "\ud800"], "matrix": [[1.0, 0.0], [0.0, 1.0]]}
    assert found == {"prompt": "q", "answer": "a", **row, "n": 5, **lists}
    assert lost.reason.startswith(
        "TypeError: the row's field 'raw' holds b'bytes' (bytes), which JSON cannot hand"
    )
    assert "or use environment.workers=0" in lost.reason


@pytest.fixture(scope="module")
def bad_steps():
    with playing(workers(f"{HERE}:BadSteps", timeout_s=0.5)) as episodes:
        yield episodes


@pytest.mark.parametrize("number", range(len(episodes_test.BAD_STEPS)), ids=list(episodes_test.BAD_STEPS))
def test_a_bad_step_is_lost_for_the_reason_that_it_has_in_this_process(bad_steps, number):
    name = list(episodes_test.BAD_STEPS)[number]
    _, lost, reason = episodes_test.BAD_STEPS[name]
    asked = prompt()
    for index in range(2):
        bad_steps.start(asked, index).result(60)
    answers = [bad_steps.step(asked, index, turn(text)) for index, text in enumerate([name, "good"])]
    assert [said(answer) for answer in answers] == [None, "GOOD"]
    found, good = verdicts(bad_steps, asked, 2)
    assert (found.lost, good.lost, good.score) == (lost, "", 0.5)
    reason = {
        "hangs": "within 0.5 s",
        "blocks": "within 0.5 s",
        "goes on when cancelled": "within 0.5 s",
    }.get(name, reason)
    assert re.search(reason, found.reason, re.DOTALL), found.reason


@pytest.fixture(scope="module")
def bad_episodes():
    chat = bad_environments_test.CHAT
    environment = workers(f"{HERE}:BadEpisodes", timeout_s=0.5)
    with playing(environment, Rendering(tokenizer=chat), chat.decode) as episodes:
        asked = prompt(name="good")  # or the run ends, since every episode is lost
        episodes.start(asked, 0).result(60)
        episodes.step(asked, 0, turn("a", chat)).result(60)
        assert not verdicts(episodes, asked, 1)[0].lost
        yield episodes


@pytest.mark.parametrize(
    "number", range(len(bad_environments_test.LOSSES)), ids=list(bad_environments_test.LOSSES)
)
def test_a_bad_episode_is_lost_for_the_reason_that_it_has_in_this_process(bad_episodes, number):
    name = list(bad_environments_test.LOSSES)[number]
    asked = prompt(name=name)
    if bad_episodes.start(asked, 0).result(60) is not None:
        assert bad_episodes.step(asked, 0, turn("a", bad_environments_test.CHAT)).result(60) is None
    [found] = verdicts(bad_episodes, asked, 1)
    reason = bad_environments_test.LOSSES[name][1]
    assert found.lost in ("raised", "timeout")
    assert re.search(f"{reason}|workers answer in JSON|nested too deep", found.reason, re.DOTALL), (
        found.reason
    )
    assert len(found.reason) < 1000


def test_what_does_not_begin_is_lost(scripted):
    asked, silent = prompt(says="no"), prompt(says="nothing")
    episodes = scripted
    assert episodes.start(asked, 0).result(60) is None
    assert said(episodes.start(silent, 0)) == ""
    assert verdicts(episodes, asked, 1)[0].reason.startswith("ValueError: no such task (scripted.py, line ")


# --- Placement, comparison, closing ---


def test_a_prompts_episodes_are_in_one_worker_and_prompts_are_spread():
    asked = [prompt() for _ in range(4)]
    with playing(workers(count=2)) as episodes:
        for each in asked:
            for index in range(3):
                episodes.start(each, index).result(60)
        pids = [{pid_of(episodes, each, index) for index in range(3)} for each in asked]
        assert [len(of_one) for of_one in pids] == [1] * 4
        first, second, *_ = pids
        assert first != second
        assert pids == [first, second, first, second]
        for each in asked[::2]:  # those of the first worker are closed, so the next prompts are its own
            verdicts(episodes, each, 3)
        deadline = time.monotonic() + 20
        while episodes._environment._seats[0].groups and time.monotonic() < deadline:
            time.sleep(0.01)
        later = [prompt() for _ in range(2)]
        for each in later:
            episodes.start(each, 0).result(60)
        assert [{pid_of(episodes, each)} for each in later] == [first] * 2


def test_rewards_are_compared_where_the_environment_does(scripted):
    assert not hasattr(scripted._environment, "group_rewards")
    asked, dying, all_lost = prompt(), prompt(compare="exit"), prompt(says="no")
    with playing(workers(f"{SCRIPTED}:Compared")) as episodes:
        for each in (asked, dying, all_lost):
            for index in range(3):
                episodes.start(each, index).result(60)
        for index in range(3):
            tell(episodes, dying, index, "a")
        tell(episodes, asked, 0, "a", "b")
        tell(episodes, asked, 1, "a")
        tell(episodes, asked, 2, "huge 3000000")
        assert [(each.score, each.lost) for each in verdicts(episodes, dying, 3)] == [(None, "died")] * 3
        assert [(each.score, each.lost) for each in verdicts(episodes, all_lost, 3)] == [(None, "raised")] * 3
        found = verdicts(episodes, asked, 3)  # in a worker that had to be told all turns again
    assert [(each.score, each.lost) for each in found] == [(2.0, ""), (1.0, ""), (None, "raised")]


def test_closing_closes_episodes_and_ends_the_processes(tmp_path):
    asked, other = prompt(closed=str(tmp_path / "closed")), prompt()
    episodes = playing(workers(count=2))
    for each in (asked, other):
        episodes.start(each, 0).result(60)
    pids = [pid_of(episodes, each) for each in (asked, other)]
    assert len(set(pids)) == 2
    assert all(map(lives, pids))
    tell(episodes, asked, 0, "a", "b")
    episodes.step(other, 0, turn("sleep 60"))
    episodes.close()
    assert_ended(*pids)
    assert (tmp_path / "closed").read_text() == "a|b\n"


def test_no_process_is_there_before_the_first_episode_needs_it():
    environment = workers(count=2)
    assert [seat._worker for seat in environment._seats] == [None, None]
    with playing(environment) as episodes:
        episodes.start(prompt(), 0).result(60)
        assert [seat._worker is None for seat in environment._seats] == [False, True]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_end_with_a_run_that_is_killed(tmp_path):
    program = textwrap.dedent(f"""
        from tests.environments.workers_test import *
        episodes, asked = playing(workers(timeout_s=600.0)), prompt()
        episodes.start(asked, 0).result(60)
        pid = pid_of(episodes, asked)
        busy = episodes.step(asked, 0, turn("hold"))
        time.sleep(0.2)
        open({str(tmp_path / "pid")!r}, "w").write(str(pid))
        busy.result(600)
    """)
    run = subprocess.Popen([sys.executable, "-c", program], cwd=HERE.parents[2])
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.1)
    pid = int((tmp_path / "pid").read_text())
    assert lives(pid)
    run.kill()
    run.wait()
    assert_ended(pid)


# --- What befalls a worker ---

DEATHS = {
    "hold": ("timeout", r"no answer of the environment within 2 s"),
    "exit": ("died", r"the worker of the environment died \(exit status 3\)"),
    "kill": ("died", r"the worker of the environment died \(SIGKILL\)"),
    "flood": ("died", r"what it sent is no answer: more than 33,554,432 bytes without an end"),
}


@pytest.mark.parametrize("what", DEATHS)
def test_what_ends_a_worker_costs_its_own_episode_alone(what, scripted):
    """Beside it in the same worker: one that waits for an answer meanwhile, one of another prompt, and one that is between two turns."""
    asked, other = prompt(), prompt()
    lost, reason = DEATHS[what]
    episodes = scripted
    for index in range(3):
        episodes.start(asked, index).result(60)
        tell(episodes, asked, index, "a", f"b{index}")
    episodes.start(other, 0).result(60)
    before = pid_of(episodes, other)
    assert tell(episodes, asked, 1, "print")
    waiting = [episodes.step(*who, turn("sleep 0.5")) for who in ((asked, 1), (other, 0))]
    time.sleep(0.1)
    assert episodes.step(asked, 0, turn(what)).result(60) is None
    assert [said(answer) for answer in waiting] == ["a|b1|print|sleep 0.5", "sleep 0.5"]
    assert tell(episodes, asked, 2, "c") == "a|b2|c", "told again all that it had heard"
    assert tell(episodes, asked, 1, "d") == "a|b1|print|sleep 0.5|d"
    assert pid_of(episodes, other) != before
    assert_ended(before)
    found = verdicts(episodes, asked, 3)
    assert [each.lost for each in found] == [lost, "", ""]
    assert re.search(reason, found[0].reason), found[0].reason


def test_a_call_is_asked_again_of_the_next_worker_where_one_died_of_it_by_chance(tmp_path, scripted):
    asked = prompt()
    episodes = scripted
    episodes.start(asked, 0).result(60)
    once = f"once {tmp_path / 'tried'}"
    assert tell(episodes, asked, 0, "a", once) == f"a|{once}"
    assert [each.lost for each in verdicts(episodes, asked, 1)] == [""]


def test_of_many_that_were_under_way_only_those_that_end_workers_are_lost(scripted):
    """Eight at a time, two of which end the process: which it was is found out one after another."""
    asked = prompt()
    texts = ["sleep 0.2"] * 8
    texts[2] = texts[5] = "exit"
    episodes = scripted
    for index in range(8):
        episodes.start(asked, index).result(60)
    answers = [episodes.step(asked, index, turn(text)) for index, text in enumerate(texts)]
    found = [said(answer) for answer in answers]
    assert found == [None if text == "exit" else text for text in texts]


def test_taking_too_much_memory_costs_its_own_episode_and_the_worker_stays():
    asked = prompt()
    with playing(workers(memory_mb=256)) as episodes:
        for index in range(2):
            episodes.start(asked, index).result(60)
        before = pid_of(episodes, asked, 1)
        assert episodes.step(asked, 0, turn("take 300")).result(60) is None
        assert tell(episodes, asked, 1, "take 100") == "100"
        assert pid_of(episodes, asked, 1) == before
        lost, fine = verdicts(episodes, asked, 2)
    assert (lost.lost, fine.lost) == ("raised", "")
    assert lost.reason.startswith("MemoryError")


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        (3_000_000, "a text of 3,000,000 characters was appended"),
        (50_000_000, r"the environment's answer has 50,000,\d+ bytes in JSON; 16,777,216 are the most"),
    ],
)
def test_a_huge_answer_costs_its_own_episode_and_the_worker_stays(size, reason, scripted):
    asked = prompt()
    episodes = scripted
    for index in range(2):
        episodes.start(asked, index).result(60)
    before = pid_of(episodes, asked, 1)
    assert episodes.step(asked, 0, turn(f"huge {size}")).result(60) is None
    assert pid_of(episodes, asked, 1) == before
    lost, _ = verdicts(episodes, asked, 2)
    assert re.match(reason, lost.reason), lost.reason


def test_calls_that_can_be_given_up_replace_no_worker_however_many_they_are():
    asked = prompt()
    with playing(workers(timeout_s=0.5)) as episodes:
        many = range(1, LEFT_BEHIND + 2)
        for index in (0, *many):
            episodes.start(asked, index).result(60)
        before = pid_of(episodes, asked)
        answers = [episodes.step(asked, index, turn("sleep 60")) for index in many]
        assert [said(answer) for answer in answers] == [None for _ in many]
        assert pid_of(episodes, asked) == before
        assert [each.lost for each in verdicts(episodes, asked, len(many) + 1)] == [
            "",
            *("timeout" for _ in many),
        ]


def test_a_call_that_another_one_held_up_has_its_time_once_more():
    """The loop stands still for longer than a call may take, and shorter than it takes to think the worker blocked."""
    asked = prompt()
    with playing(workers(timeout_s=0.8)) as episodes:
        for index in range(2):
            episodes.start(asked, index).result(60)
        waiting = episodes.step(asked, 1, turn("sleep 0.3"))
        time.sleep(0.1)
        episodes.step(asked, 0, turn("stall 1.6"))
        assert said(waiting) == "sleep 0.3"
        assert verdicts(episodes, asked, 2)[1].lost == ""


def test_functions_that_block_side_by_side_answer_and_one_that_spins_holds_up_none():
    asked = prompt()
    with playing(workers(f"{SCRIPTED}:Blocking", timeout_s=3.0)) as episodes:
        for index in range(6):
            assert said(episodes.start(asked, index)) == ""
        spinning = episodes.step(asked, 0, turn("spin"))
        began = time.monotonic()
        answers = [episodes.step(asked, index, turn("sleep 0.5")) for index in range(1, 6)]
        assert [said(answer) for answer in answers] == ["sleep 0.5"] * 5
        assert time.monotonic() - began < 2.5
        assert spinning.result(60) is None
        assert [each.lost for each in verdicts(episodes, asked, 6)] == ["timeout"] + [""] * 5


def test_a_worker_in_which_many_calls_go_on_is_replaced_and_the_others_hear_all_again():
    asked = prompt()
    many = LEFT_BEHIND + 1
    with playing(workers(f"{SCRIPTED}:Blocking", timeout_s=0.5)) as episodes:
        for index in range(many):
            episodes.start(asked, index).result(60)
        tell(episodes, asked, 0, "a")
        before = pid_of(episodes, asked)
        for index in range(1, many):
            assert lives(before)
            assert episodes.step(asked, index, turn("sleep 60")).result(60) is None
        assert_ended(before)
        assert tell(episodes, asked, 0, "b") == "a|b"


@pytest.mark.parametrize(("memory_mb", "per_turn"), [(4096, THREADS_LEFT // 2), (160, 8)])
def test_a_worker_that_threads_of_its_episodes_exhaust_is_replaced_and_no_episode_is_lost(
    memory_mb, per_turn
):
    """With much memory after two episodes, which leave so many threads; with little at the first thread that has no room for its stack."""
    pids, lost = [], []
    with playing(workers(f"{SCRIPTED}:Leaving", timeout_s=20.0, memory_mb=memory_mb)) as episodes:
        for _ in range(6):
            asked = prompt()
            episodes.start(asked, 0).result(60)
            pids.append(tell(episodes, asked, 0, str(per_turn)))
            lost += [each.reason for each in verdicts(episodes, asked, 1)]
            wait(episodes._farewells, timeout=60)
    assert lost == [""] * 6
    assert len(set(pids)) > 1


def test_a_turn_for_whose_threads_no_worker_has_room_is_lost():
    with playing(workers(f"{SCRIPTED}:Leaving", timeout_s=20.0, memory_mb=96)) as episodes:
        asked, other = prompt(), prompt()
        for each in (asked, other):
            episodes.start(each, 0).result(60)
        assert episodes.step(asked, 0, turn("100")).result(60) is None
        [verdict] = verdicts(episodes, asked, 1)
        assert verdict.lost == "died"
        assert "leaves threads behind" in verdict.reason
        assert tell(episodes, other, 0, "1").isdigit()


# --- Loading ---


@pytest.mark.parametrize(
    "source",
    [
        "gess",
        "nowhere:Env",
        f"{SCRIPTED}:Scriptid",
        f"{HERE}:Unmakeable",
        "builtins:dict",
        f"{HERE.parent}/none.py:Env",
    ],
)
def test_an_environment_that_cannot_be_made_is_named_as_in_this_process(source):
    with pytest.raises(ValueError) as here:  # noqa: PT011 - whatever it says
        load_environment(source)
    with pytest.raises(ValueError, match=re.escape(str(here.value))):
        workers(source)


def test_an_environment_that_ends_its_process_while_it_is_loaded_is_named(tmp_path):
    file = tmp_path / "ending.py"
    file.write_text("import os\nos._exit(4)\n")
    with pytest.raises(ValueError, match=r"ending.py:Env: its worker did not start: exit status 4"):
        workers(f"{file}:Env")
