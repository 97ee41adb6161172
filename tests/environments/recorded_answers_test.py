"""What environments answered is on disk, and is heard again by a step that is sampled again."""

import asyncio
import json
import random
import time
from dataclasses import replace

import numpy as np
import pytest

from dapo_jax.dapo.rollouts import DrawnTurn, Prompt, Response, TurnSpan
from dapo_jax.environments import Context, Episodes, Step
from dapo_jax.environments.recorded_answers import Answer, RecordedAnswers
from dapo_jax.environments.rendering import Rendering
from dapo_jax.rewards.grading import samples_of
from dapo_jax.text.tokenizers import ByteTokenizer

TOKENIZER = ByteTokenizer()
PROMPT = Prompt(ordinal=7, tokens=np.array([1], np.int32), text="?", answer="")


class Dice:
    """Never answers the same twice, and notes what it hears."""

    def __init__(self):
        self.heard, self.compared = [], 0

    def episode(self, row, seed):
        return Die(self)

    def group_rewards(self, episodes):
        self.compared += 1
        return [random.random() for _ in episodes]


class Alone(Dice):
    """Does not compare."""

    group_rewards = None


class Die:
    def __init__(self, dice):
        self.heard = []
        dice.heard.append(self.heard)

    async def start(self):
        return str(random.random())

    async def step(self, turn):
        self.heard.append(turn.text)
        if turn.text == "lost":
            raise ValueError("no luck")
        told = str(random.random())
        anew = Context(told) if turn.text == "anew" else None
        return Step(reward=random.random(), append=told, context=anew, metrics={"luck": random.random()})


def played(folder, texts, *, indices=(0,), environment=None, to_its_end=True):
    """What is heard of episodes that say `texts`: all continuations, the verdicts, and the environment."""
    environment = environment or Dice()
    rendering, found = Rendering(tokenizer=TOKENIZER), []
    with Episodes(environment, rendering, text_of=TOKENIZER.decode, seed=0, max_turns=9) as episodes:
        episodes.answers = answers = RecordedAnswers(folder)
        answers.begin(1, keep_from=0)
        for index in indices:
            found.append(episodes.start(PROMPT, index).result(20))
            for text in texts:
                tokens = TOKENIZER.encode(text)
                turn = DrawnTurn(
                    tokens=tokens, logprobs=np.zeros(len(tokens), np.float32), finish_reason="stop"
                )
                found.append(episodes.step(PROMPT, index, turn).result(20))
        response = Response(
            tokens=np.array([1], np.int32),
            logprobs=np.zeros(1, np.float32),
            finish_reason="stop",
            turns=(TurnSpan(0, 1),),
        )
        samples = samples_of(PROMPT, [response for _ in indices], tokenizer=TOKENIZER)
        verdicts = [verdict.result(20) for verdict in episodes.verdicts(samples)]
        answers.end() if to_its_end else None
        answers.close()
    said = [None if each is None else (each.tokens.tolist(), each.anew) for each in found]
    return said, verdicts, environment


def test_answers_are_heard_again_and_nobody_is_asked(tmp_path):
    texts = ["a", "anew", "b"]
    first = played(tmp_path, texts, indices=(0, 1))
    again = played(tmp_path, texts, indices=(0, 1))
    assert again[:2] == first[:2]
    assert first[0][1] != played(tmp_path / "other", texts)[0][1], "dice"
    assert any(anew for _, anew in first[0])
    assert again[2].heard == []
    assert (first[2].compared, again[2].compared) == (1, 0)


def test_what_was_not_answered_is_asked_by_an_environment_that_has_heard_all_before(tmp_path):
    first = played(tmp_path, ["a", "b"], environment=Alone())
    said, verdicts, environment = played(tmp_path, ["a", "b", "c", "d"], environment=Alone())
    assert said[:3] == first[0]
    assert environment.heard == [["a", "b", "c", "d"]]
    assert len(verdicts[0].turn_rewards) == 4
    assert verdicts[0].turn_rewards[:2] == first[1][0].turn_rewards


def test_an_answer_is_to_the_turns_that_were_heard_and_to_no_others(tmp_path):
    first = played(tmp_path, ["a", "b"])
    said, _, environment = played(tmp_path, ["a", "c"])
    assert said[:2] == first[0][:2]
    assert environment.heard == [["a", "c"]]
    assert played(tmp_path, ["ab"])[0][1] not in first[0], "not the same in two turns"


def test_an_episode_that_was_lost_is_lost_again(tmp_path):
    first, again = (played(tmp_path, ["a", "lost"]) for _ in range(2))
    assert again[:2] == first[:2]
    assert again[1][0].lost == "raised"
    assert "no luck" in again[1][0].reason
    assert again[2].heard == []


def test_what_was_lost_in_a_step_that_did_not_end_is_asked_again(tmp_path):
    """What stopped the run may be what lost it."""
    first = played(tmp_path, ["a", "lost"], to_its_end=False)
    again = played(tmp_path, ["a", "lost"])
    assert again[0][:2] == first[0][:2]
    assert again[2].heard == [["a", "lost"]]


def test_a_comparison_that_missed_an_episode_is_not_on_record(tmp_path):
    """Of two episodes whose turns are on record, the first cannot be told them in the second process, so one alone is compared. The third process compares both."""

    class Forgetful(Dice):
        def episode(self, row, seed):
            if not self.heard:
                self.heard.append([])
                raise ValueError("full")
            return Die(self)

    played(tmp_path, ["a"], indices=(0, 1), environment=Alone())
    _, verdicts, _ = played(tmp_path, ["a"], indices=(0, 1), environment=Forgetful())
    assert [each.lost for each in verdicts] == ["raised", ""]
    _, verdicts, environment = played(tmp_path, ["a"], indices=(0, 1))
    assert [each.lost for each in verdicts] == ["", ""]
    assert environment.compared == 1


def test_damaged_pieces_count_as_not_written(tmp_path):
    first = played(tmp_path, ["a", "b"])
    [piece] = tmp_path.iterdir()
    lines = piece.read_bytes().splitlines(keepends=True)
    for bad in [b"", b"{", b"[]\n", b'{"ordinal": 1}\n', b"\xff\xfe", b'"a"\n', b"nul\n"]:
        piece.write_bytes(bad)
        assert played(tmp_path, ["a"])[2].heard == [["a"]]
        for other in set(tmp_path.iterdir()) - {piece}:
            other.unlink()
    piece.rename(tmp_path / "step_x.jsonl")
    assert played(tmp_path, ["a"])[2].heard == [["a"]]
    for other in tmp_path.iterdir():
        other.unlink()
    piece.write_bytes(b"".join(lines[:2]))  # the beginning and the first turn
    said, _, environment = played(tmp_path, ["a", "b"])
    assert said[:2] == first[0][:2]
    assert environment.heard == [["a", "b"]]


@pytest.fixture
def recorded(tmp_path):
    made = []

    def make(folder=tmp_path):
        made.append(RecordedAnswers(folder))
        return made[-1]

    yield make
    for answers in made:
        answers.close()


def test_files_go_once_a_checkpoint_has_their_step(recorded, tmp_path):
    answers = recorded()
    for step in range(1, 6):
        answers.begin(step, keep_from=step - 2)
        answers.add(step, 0, "", Answer(tokens=[step]))
        answers.end()
    steps = {int(path.name[5:11]) for path in tmp_path.iterdir()}
    assert steps == {3, 4, 5}
    again, other = recorded(), recorded()
    for one in (again, other):  # two processes, each of which may find that the other was first
        one.begin(4, keep_from=4)
        assert [one.find(step, 0, "") is not None for step in range(1, 6)] == [False, False, True, True, True]
        assert not one.failed
    again.begin(6, keep_from=4)
    assert again.find(5, 0, "") is None, "nothing is remembered of steps that are over"


def test_a_folder_that_cannot_be_written_costs_no_answer(recorded, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    answers = recorded(blocked / "answers")
    answers.begin(1, keep_from=0)
    answers.add(1, 0, "", Answer(tokens=None))
    answers.end()
    assert "file" in answers.failed


def test_answers_are_on_disk_soon_and_a_step_that_ended_is_one_file(recorded, tmp_path, monkeypatch):
    monkeypatch.setattr("dapo_jax.environments.recorded_answers._PIECE_S", 0.01)
    answers = recorded()
    answers.begin(1, keep_from=0)
    for index in range(3):
        answers.add(1, index, "", Answer(tokens=[]))
        deadline = time.monotonic() + 20
        while len(list(tmp_path.glob("*.jsonl"))) <= index and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(list(tmp_path.glob("*.jsonl"))) == 3
    answers.end()
    [whole] = tmp_path.glob("*.jsonl")
    assert len(whole.read_bytes().splitlines()) == 3


def test_what_is_said_between_two_steps_is_on_record(tmp_path):
    """With rollouts in flight an answer, or a group's rewards, may come when a step is sampled and the next has not begun; and one that was lost is known only then."""

    class Slow(Dice):
        async def group_rewards(self, episodes):
            await asyncio.sleep(0.3)
            return [random.random() for _ in episodes]

    with Episodes(
        Slow(), Rendering(tokenizer=TOKENIZER), text_of=TOKENIZER.decode, seed=0, max_turns=9
    ) as episodes:
        episodes.answers = answers = RecordedAnswers(tmp_path)
        answers.begin(1, keep_from=0)
        episodes.start(PROMPT, 0).result(20)
        one = {
            "tokens": np.array([1], np.int32),
            "logprobs": np.zeros(1, np.float32),
            "finish_reason": "stop",
        }
        episodes.step(PROMPT, 0, DrawnTurn(**one)).result(20)
        response = Response(**one)
        verdicts = episodes.verdicts(samples_of(PROMPT, [response], tokenizer=TOKENIZER))
        answers.end()
        episodes.answers = None
        [verdict] = [each.result(20) for each in verdicts]
        answers.add(8, 0, "heard", Answer(tokens=None, lost="timeout", reason="late"))
        answers.begin(2, keep_from=1)
        answers.end()
        answers.close()
    found = RecordedAnswers(tmp_path)
    assert found.find(8, 0, "heard").lost == "timeout"
    [scores] = [
        each["scores"]
        for path in tmp_path.iterdir()
        for each in map(json.loads, path.read_text().splitlines())
        if each["index"] == -1
    ][-1:]
    assert scores == [verdict.score]
    found.close()


def test_episodes_of_an_evaluation_that_is_cut_short_are_closed():
    closed = []

    class Closing(Dice):
        def episode(self, row, seed):
            die = Die(self)
            die.close = lambda: closed.append(row["prompt"])
            return die

    with Episodes(
        Closing(), Rendering(tokenizer=TOKENIZER), text_of=TOKENIZER.decode, seed=0, max_turns=9
    ) as episodes:
        episodes.start(PROMPT, 0).result(20)

        def interrupted():
            with episodes.apart():
                episodes.start(replace(PROMPT, text="evaluated"), 0).result(20)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert episodes.standing(PROMPT, 0).lost == "", "the one behind is there"
    assert sorted(closed) == ["?", "evaluated"]
