"""Episodes on their event loop: the rewards of good environments, and the losses of bad ones."""

import asyncio
import inspect
import re
import threading
import time
from dataclasses import replace

import pytest

from dapo_jax.config import ConfigError
from dapo_jax.dapo.rollouts import Continuation, Prompt, Standing, Verdict
from dapo_jax.environments import Episodes, Step
from dapo_jax.environments.rendering import Rendering
from dapo_jax.environments.tools import ToolEnvironment
from dapo_jax.rewards.functions import RewardError
from tests.environments.playing import TOKENIZER, drawn, verdicts_of
from tests.environments.tools_test import add

PROMPT = Prompt(ordinal=7, tokens=TOKENIZER.encode("q"), text="q", answer="a", row={"level": 3})


class Echo:
    """Appends each turn in capitals; the third turn ends the episode."""

    def __init__(self, row, seed):
        self.row, self.seed, self.turns = row, seed, []

    async def step(self, turn):
        self.turns.append(turn)
        last, metrics = len(self.turns) == 3, {"heard": float(len(self.turns))}
        correct = True if last else None
        return Step(reward=0.5, append=turn.text.upper(), done=last, correct=correct, metrics=metrics)


class Making:
    """An environment whose episodes `make` makes."""

    def __init__(self, make, group_rewards=None):
        self._make, self.made = make, []
        if group_rewards is not None:
            self.group_rewards = group_rewards

    def episode(self, row, seed):
        self.made.append(self._make(row, seed))
        return self.made[-1]


def started(environment, **how):
    settings = {"seed": 1, "max_turns": 4, "timeout_s": 0.3, "calls": 8, "text_of": TOKENIZER.decode, **how}
    return Episodes(environment, Rendering(tokenizer=TOKENIZER), **settings)


def step(episodes, text, index=0, prompt=PROMPT):
    return episodes.step(prompt, index, drawn(text)).result(5)


def stepped(episodes, count):
    """The futures of one turn of each of so many episodes."""
    return [episodes.step(PROMPT, index, drawn("a")) for index in range(count)]


def begin(episodes, count=1, texts="", prompt=PROMPT):
    """Begins so many episodes of a prompt, each with a turn for each character."""
    for index in range(count):
        episodes.start(prompt, index).result(5)
        for text in texts:
            step(episodes, text, index, prompt)


def judge(episodes, count=1, prompt=PROMPT):
    return verdicts_of(episodes, prompt, count)


def in_order(*kinds):
    """Makes episodes of these classes."""
    made = iter(kinds)
    return lambda row, seed: next(made)(row, seed)


def test_an_episode_receives_each_turn_and_its_reward_is_the_sum():
    environment = Making(Echo)
    with started(environment) as episodes:
        assert episodes.start(PROMPT, 0).result(5).tokens.tolist() == []
        for text in "ab":
            assert TOKENIZER.decode(step(episodes, text).tokens) == text.upper()
        assert step(episodes, "c") is None
        [verdict] = judge(episodes)
    assert verdict == Verdict(correct=True, score=1.5, parts={"heard": 3.0}, turn_rewards=(0.5, 0.5, 0.5))
    [echo] = environment.made
    assert echo.row == {"prompt": "q", "answer": "a", "level": 3}
    assert [(each.number, each.text) for each in echo.turns] == [(0, "a"), (1, "b"), (2, "c")]
    assert [each.logprobs.tolist() for each in echo.turns] == [drawn("a").record.logprobs.tolist()] * 3


def test_seeds_of_episodes_depend_on_the_prompt_and_on_the_seed_of_the_run():
    environment = Making(Echo)
    other = replace(PROMPT, ordinal=8)
    for seed, asked in ((1, (PROMPT, PROMPT, other)), (2, (PROMPT,)), (1, (PROMPT,))):
        with started(environment, seed=seed) as episodes:
            for index, prompt in enumerate(asked):
                episodes.start(prompt, index).result(5)
    first, second, of_other, of_run, again = [echo.seed for echo in environment.made]
    assert first == second == again
    assert len({first, of_other, of_run}) == 3


def test_fields_that_a_step_omits_keep_their_values():
    """The first turn is right, the second has no opinion on that, and a reward with which the sum is below 0."""
    steps = [
        Step(reward=0.5, correct=True, metrics={"a": 1.0, "b": 1.0}),
        Step(reward=-2.0, done=True, metrics={"b": 2.0}),
    ]

    class Listed(Echo):
        async def step(self, turn):
            return steps[turn.number]

    with started(Making(Listed)) as episodes:
        begin(episodes, 1, "aa")
        [verdict] = judge(episodes)
    assert (verdict.correct, verdict.score, verdict.parts) == (True, -1.5, {"a": 1.0, "b": 2.0})


def test_functions_that_are_not_async_have_threads_of_their_own():
    class Blocking(Echo):
        def step(self, turn):
            time.sleep(0.2)
            return Step(done=True, reward=float(threading.get_ident()))

    with started(Making(Blocking), timeout_s=5.0) as episodes:
        begin(episodes, 8)
        began = time.monotonic()
        assert {future.result(5) for future in stepped(episodes, 8)} == {None}
        assert time.monotonic() - began < 1.0, "eight blocked side by side"


def test_calls_beyond_the_most_wait_and_their_time_begins_when_they_do():
    class Slow(Echo):
        async def step(self, turn):
            await asyncio.sleep(0.2)
            return Step(done=True)

    with started(Making(Slow), calls=2, timeout_s=0.4) as episodes:
        begin(episodes, 8)
        assert {future.result(5) for future in stepped(episodes, 8)} == {None}
        assert not any(verdict.lost for verdict in judge(episodes, 8))


def test_compared_rewards_replace_the_rewards_of_turns_in_the_episodes_that_are_not_lost():
    """The second of three is lost. The rewards of the others are their places in the comparison, and count as the last turn's."""

    class Refusing(Echo):
        async def step(self, turn):
            raise ValueError("no")

    def places(episodes):
        assert [type(each) for each in episodes] == [Echo, Echo]
        return [float(place) for place in range(len(episodes))]

    with started(Making(in_order(Echo, Refusing, Echo), places)) as episodes:
        begin(episodes, 3, "ab")
        verdicts = judge(episodes, 3)
    assert [(each.lost, each.score) for each in verdicts] == [("", 0.0), ("raised", None), ("", 1.0)]
    assert [each.turn_rewards for each in verdicts[::2]] == [(0.0, 0.0), (0.0, 1.0)]


@pytest.mark.parametrize("compare", [None, lambda episodes: [1.0] * len(episodes)])
def test_an_episode_that_is_over_without_a_turn_is_lost_and_not_compared(compare):
    """The sampler found no room for a turn after the three bytes that the first episode begins with."""

    class Beginning(Echo):
        async def start(self):
            return "abc"

    with started(Making(in_order(Beginning, Echo), compare)) as episodes:
        begin(episodes, 2)
        step(episodes, "a", 1)
        first, second = judge(episodes, 2)
    assert (first.lost, first.score, second.lost) == ("raised", None, "")
    assert "with 3 tokens" in first.reason
    assert "sampling.max_response_tokens" in first.reason


@pytest.mark.parametrize("compared", [False, True])
def test_an_environment_that_loses_every_episode_ends_the_run_with_its_own_file_and_line(compared):
    """Groups of 16: at four prompts, and not before, which are more than 32 episodes."""

    class Broken(Echo):
        async def step(self, turn):
            raise KeyError("answr")

    line = inspect.getsourcelines(Broken)[1] + 2
    environment = Making(Broken, (lambda episodes: []) if compared else None)
    with started(environment, name="my.py:Broken", calls=64) as episodes:
        for asked in [replace(PROMPT, ordinal=ordinal) for ordinal in range(3)]:
            begin(episodes, 16, "a", asked)
            assert {verdict.lost for verdict in judge(episodes, 16, asked)} == {"raised"}
        begin(episodes, 16, "a")
        message = rf"my\.py:Broken: all 64 .* 4 prompts.*KeyError: 'answr' \(episodes_test\.py, line {line}\)"
        with pytest.raises(RewardError, match=message):
            judge(episodes, 16)


def test_an_environment_that_has_answered_once_ends_no_run():
    """The first episode is good; a server may be away for a while afterwards."""

    class Breaking(Echo):
        async def step(self, turn):
            if len(environment.made) > 1:
                raise OSError("away")
            return Step(done=True)

    environment = Making(Breaking)
    with started(environment) as episodes:
        for ordinal in range(40):
            asked = replace(PROMPT, ordinal=ordinal)
            begin(episodes, 1, "a", asked)
            [verdict] = judge(episodes, 1, asked)
            assert verdict.lost == ("raised" if ordinal else "")


def test_an_environment_that_holds_the_event_loop_is_named_with_the_seconds_and_the_line(monkeypatch, capfd):
    monkeypatch.setattr("dapo_jax.environments.episodes.HELD_S", 0.3)

    class Holding(Echo):
        async def step(self, turn):
            time.sleep(1.0 if turn.text == "a" else 0.1)
            return Step(append="b")

    line = inspect.getsourcelines(Holding)[1] + 2
    with started(Making(Holding), name="my.py:Holding", timeout_s=5.0) as episodes:
        begin(episodes, 1, "bbbb")
        assert capfd.readouterr().err == ""
        step(episodes, "a")
        [message] = capfd.readouterr().err.splitlines()
    assert re.search(rf"my\.py:Holding: .* for 0\.3 s \(episodes_test\.py, line {line}\)", message)


def raising(error):
    def raises(*_):
        raise error

    return raises


async def hang(*_):
    await asyncio.sleep(60)


def block(*_):
    time.sleep(2)


async def stubborn(*_):
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        await asyncio.sleep(0.1)
        raise ValueError("never mind") from None


async def cancels_itself(*_):
    asyncio.current_task().cancel()
    await asyncio.sleep(1)


def answering(value):
    async def answers(*_):
        return value

    return answers


def stepping(**fields):
    """A step with fields that its type does not allow."""
    step = Step()
    for name, value in fields.items():
        object.__setattr__(step, name, value)
    return answering(step)


class Unreadable(list):
    """Raises when it is looked at."""

    def __iter__(self):
        raise OSError("gone")

    __len__ = __getitem__ = __iter__


async def leaves_a_task_that_exits(*_):
    async def exits():
        raise SystemExit(3)

    asyncio.get_running_loop().create_task(exits())
    await asyncio.sleep(0.05)
    raise ValueError("after that")


async def writes_to_the_turn(turn):
    turn.tokens[:] = 0


BAD_STEPS = {
    "leaves a task that exits": (leaves_a_task_that_exits, "raised", "ValueError: after that"),
    "writes to the turn": (writes_to_the_turn, "raised", "read-only"),
    "appends what raises": (stepping(append=Unreadable()), "raised", "answer raised OSError"),
    "hangs": (hang, "timeout", r"no answer from the environment within 0\.3 s"),
    "blocks": (block, "timeout", r"within 0\.3 s"),
    "goes on when cancelled": (stubborn, "timeout", r"within 0\.3 s"),
    "cancels itself": (cancels_itself, "raised", "CancelledError"),
    "raises an endless text": (raising(ValueError("x" * 10**6)), "raised", r"x{500} \(episodes_test\.py, line \d+\)$"),
    "exits": (raising(SystemExit(3)), "raised", "SystemExit: 3"),
    "answers nothing": (answering(None), "raised", r"returned None \(NoneType\); it must return a Step"),
    "reward is a text": (stepping(reward="1"), "nonfinite", "the reward '1'; it must be a finite number"),
    "reward is nan": (stepping(reward=float("nan")), "nonfinite", "the reward nan"),
    "done is a text": (stepping(done="yes"), "raised", "done='yes'; it must be True or False"),
    "appends a number": (stepping(append=5), "raised", r"5 \(int\) cannot be appended"),
    "appends half a character": (stepping(append="\ud800"), "raised", "cannot be tokenized"),
    "appends foreign ids": (stepping(append=[10**6]), "raised", "ids from 1000000 to 1000000"),
    "appends messages": (stepping(append=[{"role": "tool", "content": "4"}]), "raised", "no chat template"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_STEPS)
def test_a_bad_step_ends_its_episode_as_lost_and_costs_no_other(name):
    step, lost, reason = BAD_STEPS[name]
    bad = type("Bad", (Echo,), {"step": staticmethod(step)})
    with started(Making(in_order(bad, Echo, Echo))) as episodes:
        begin(episodes, 3)
        answers = [future.result(5) for future in stepped(episodes, 3)]
        assert answers[0] is None
        assert [TOKENIZER.decode(answer.tokens) for answer in answers[1:]] == ["A", "A"]
        verdicts = judge(episodes, 3)
    assert (verdicts[0].correct, verdicts[0].lost, verdicts[0].score) == (False, lost, None)
    assert re.search(reason, verdicts[0].reason, re.DOTALL), verdicts[0].reason[:300]
    assert [(each.lost, each.score) for each in verdicts[1:]] == [("", 0.5)] * 2


class Starting(Echo):
    def __init__(self, row, seed, start):
        super().__init__(row, seed)
        self.start = start


@pytest.mark.parametrize(
    ("make", "lost", "reason"),
    [
        (block, "timeout", "within"),
        (lambda row, seed: None, "raised", "None (NoneType) has no method step(turn)"),
        (lambda row, seed: Starting(row, seed, raising(ValueError("bad row"))), "raised", "ValueError: bad row"),
        (lambda row, seed: Starting(row, seed, answering([{"role": "user", "content": "x"}])), "raised", "chat template"),
    ],
)  # fmt: skip
def test_an_episode_that_does_not_begin_is_lost(make, lost, reason):
    with started(Making(make)) as episodes:
        assert episodes.start(PROMPT, 0).result(5) is None
        [verdict] = judge(episodes)
    assert verdict.lost == lost
    assert reason in verdict.reason


def test_a_check_begins_an_episode_closes_it_and_leaves_no_trace():
    """The first of two episodes is of the check: it is closed, and the run's own is another."""
    closed = []

    class Closing(Echo):
        def close(self):
            closed.append(self)

        def start(self):
            return "abc"

    with started(Making(Closing)) as episodes:
        assert episodes.check(PROMPT, limit=4) == ""
        assert "with 3 tokens" in episodes.check(PROMPT, limit=3)
        begin(episodes)
        assert judge(episodes)[0].reason.count("with 3 tokens") == 1
    assert len(closed) == 3


def test_a_check_reports_a_lost_episode_and_refuses_a_template_that_loses_all():
    bad_row = raising(ValueError("bad row"))
    with started(Making(lambda row, seed: Starting(row, seed, bad_row))) as episodes:
        assert "ValueError: bad row" in episodes.check(PROMPT, limit=9)
    tools = started(ToolEnvironment([add], grade=lambda *_: True), name="my.py:tools")
    with tools as episodes, pytest.raises(ConfigError, match=r"my\.py:tools: .*no chat template"):
        episodes.check(PROMPT, limit=9)


@pytest.mark.parametrize(
    ("group_rewards", "lost", "reason"),
    [
        (answering([1.0]), "raised", "group_rewards returned 1 rewards for 2 episodes"),
        (answering([1.0, float("nan")]), "nonfinite", "group_rewards returned nan"),
        (answering(Unreadable()), "raised", "answer raised OSError"),
        (hang, "timeout", "within"),
    ],
)
def test_a_comparison_that_fails_loses_the_group_alone(group_rewards, lost, reason):
    with started(Making(Echo, group_rewards)) as episodes:
        begin(episodes, 2, "a")
        verdicts = judge(episodes, 2)
    for verdict in verdicts:
        assert verdict.lost == lost
        assert reason in verdict.reason


def test_turns_of_an_earlier_process_are_replayed_before_the_next_one():
    """Its account counts, and not what the environment answers this time."""
    environment = Making(Echo)
    with started(environment) as episodes:
        standing = Standing(rewards=(7.0, 9.0), metrics={"old": 1.0})
        episodes.reopen(PROMPT, 0, [drawn("a"), drawn("b")], standing)
        assert environment.made == []
        assert step(episodes, "c") is None
        assert [each.text for each in environment.made[0].turns] == ["a", "b", "c"]
        assert episodes.standing(PROMPT, 0).rewards == (7.0, 9.0, 0.5)
        [verdict] = judge(episodes)
    assert (verdict.score, verdict.parts) == (16.5, {"old": 1.0, "heard": 3.0})
    assert standing.rewards == (7.0, 9.0)


@pytest.mark.parametrize(
    ("changed", "lost"), [(None, ""), (0, "before turn 0"), (1, "before turn 1"), (2, "before turn 2")]
)
def test_a_replay_with_other_answers_loses_the_episode_with_the_turn(changed, lost):
    """Also if the answer before the turn that was being sampled differs."""

    class Begun(Echo):
        async def start(self):
            return "?"

    texts = ["?", "A", "B"]
    texts = [f"{text}!" if number == changed else text for number, text in enumerate(texts)]
    befores = [Continuation(TOKENIZER.encode(text)) for text in texts]
    one, two, three = (
        replace(drawn(text), before=before) for text, before in zip("abc", befores, strict=True)
    )
    with started(Making(Begun)) as episodes:
        episodes.reopen(PROMPT, 0, [one, two], Standing(rewards=(0.5, 0.5)))
        assert episodes.step(PROMPT, 0, three).result(5) is None
        [verdict] = judge(episodes)
    assert lost in verdict.reason
    assert bool(verdict.lost) is bool(lost)


def test_a_task_that_cancels_all_others_ends_no_run():
    """All calls under way are lost, and the sampler gets an answer to each."""

    class Cancelling(Echo):
        async def step(self, turn):
            await asyncio.sleep(0.05)
            for task in asyncio.all_tasks():
                task.cancel()
            await asyncio.sleep(1)

    class Slow(Echo):
        async def step(self, turn):
            await asyncio.sleep(0.3)

    with started(Making(in_order(Cancelling, Slow)), timeout_s=5.0) as episodes:
        begin(episodes, 2)
        assert [future.result(5) for future in stepped(episodes, 2)] == [None, None]
        assert [verdict.lost for verdict in judge(episodes, 2)] == ["raised", "raised"]


def test_a_row_that_an_episode_changes_is_its_own():
    asked = replace(PROMPT, row={"nested": {"list": [1]}})
    with started(Making(lambda row, seed: row["nested"]["list"].append(2) or Echo(row, seed))) as episodes:
        episodes.start(asked, 0).result(5)
    assert asked.row == {"nested": {"list": [1]}}


@pytest.mark.parametrize("compared", [False, True])
def test_an_episode_is_closed_whatever_ended_it(compared):
    closed = []

    def compare(episodes):
        assert closed == []
        return [1.0] * len(episodes)

    class Closing(Echo):
        async def step(self, turn):
            if turn.text == "lost":
                raise ValueError
            return Step(done=turn.text == "done")

        async def close(self):
            closed.append(self)
            raise ValueError("never mind")

    environment = Making(Closing, compare if compared else None)
    with started(environment) as episodes:
        for index, text in enumerate(["done", "lost", "cut off"]):
            episodes.start(PROMPT, index).result(5)
            step(episodes, text, index)
        assert closed == []
        verdicts = judge(episodes, 3)
    assert set(closed) == set(environment.made)
    assert [verdict.lost for verdict in verdicts] == ["", "raised", ""]


def test_closing_gives_up_calls_under_way():
    hanging = type("Hanging", (Echo,), {"step": staticmethod(hang)})
    episodes = started(Making(hanging), timeout_s=60.0)
    begin(episodes)
    [answer] = stepped(episodes, 1)
    time.sleep(0.05)
    episodes.close()
    assert not episodes._loop.thread.is_alive()
    assert answer.done() or not answer.running()
    episodes.close()
