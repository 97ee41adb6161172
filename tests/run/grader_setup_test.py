"""Graders from a configuration, alone and summed, and in a run: nothing that is learnt depends on when a verdict comes."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dapo_jax.commands import inference
from dapo_jax.config import ConfigError, EvaluateConfig, RewardConfig
from dapo_jax.config.reward_schema import GRADER_WORKERS
from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.rewards import Sample
from dapo_jax.rewards.functions import RewardError
from dapo_jax.rewards.grading_pool import GradingPool
from dapo_jax.run import build, grader_setup, learner
from dapo_jax.run.grader_setup import check_graders, submit_of, weighted
from tests.run.graders import brevity, judge, sum_of_fours

GRADERS = Path(__file__).with_name("graders.py")


def samples(*responses):
    prompt = Prompt(ordinal=7, tokens=np.array([1], np.int32), text="1+1", answer="2")
    return [
        Sample(prompt=prompt, response=response, tokens=np.array([3], np.int32), finish_reason="stop")
        for response in responses
    ]


def graded(config, *responses, reward=None, **workers):
    limits = GRADER_WORKERS._replace(**workers)
    submit, close = submit_of(config, check_graders(config, reward=reward), workers=limits)
    try:
        return submit(samples(*responses)).result()
    finally:
        close()


def in_workers(submit, close):
    close()
    return isinstance(getattr(submit, "__self__", None), GradingPool)


def test_workers_grade_where_they_are_needed_only():
    own = RewardConfig(grader=f"{GRADERS}:brevity")
    for here in (RewardConfig(), RewardConfig(grader="reasoning_gym")):
        assert not in_workers(*submit_of(here))
    assert not in_workers(*submit_of(own, workers=GRADER_WORKERS._replace(count=0)))
    for there in (own, RewardConfig(grader="math")):
        assert in_workers(*submit_of(there))
    # a function of this process
    assert not in_workers(*submit_of(own, check_graders(own, reward=lambda sample: True)))


def test_graders_of_every_kind_are_summed_by_weight():
    """In this process, in workers (one response, a whole group) and on the event loop. `=2`: 1 + 0.5 / 2 + 2 x 1 - 0.1 x 20 = 1.25;
    `=003`: -1 + 0.5 / 4 + 2 x -1 - 0.1 x 40 = -6.875."""
    config = RewardConfig(
        grader=[
            {"grader": "exact"},
            {"grader": f"{GRADERS}:brevity", "weight": 0.5},
            {"grader": f"{GRADERS}:shortest", "weight": 2},
            {"grader": f"{GRADERS}:judge", "weight": -0.1},
        ]
    )
    before = set(threading.enumerate())
    right, wrong = graded(config, "=2", "=003", count=1)
    assert set(threading.enumerate()) <= before  # an earlier test's may end meanwhile
    assert (right.score, wrong.score) == (pytest.approx(1.25), pytest.approx(-6.875))
    assert (right.correct, wrong.correct) == (True, False)
    assert right.parts == {"exact": 1.0, "brevity": 0.5, "shortest": 1.0, "judge": 20.0}
    assert [v.score for v in graded(config, "=2", "=003", count=0)] == [right.score, wrong.score]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_function_for_trl_compares_the_responses_of_a_group(workers):
    """Lengths 2, 4 and 3: the mean is 3."""
    config = RewardConfig(grader=f"trl:{GRADERS}:longer_than_the_mean")
    scores = [verdict.score for verdict in graded(config, "=2", "=002", "=02", count=workers)]
    assert scores == [-1.0, 1.0, 0.0]


def test_one_listed_grader_is_a_sum_of_one_and_the_grader_alone_is_a_plain_verdict():
    [listed] = graded(RewardConfig(grader=[{"grader": "exact", "weight": 3.0}]), "=2")
    [alone] = graded(RewardConfig(grader="exact"), "=2")
    assert (listed.score, listed.parts) == (3.0, {"exact": 1.0})
    assert (alone.score, alone.parts) == (None, {})


def test_functions_and_names_with_weights_are_summed_from_python_too():
    config = RewardConfig(grader=f"{GRADERS}:brevity", correct=2.0)
    pairs = [("exact", 1.0), (lambda sample: len(sample.response), -0.5), (judge, 1)]
    [verdict] = graded(config, "=2", reward=pairs)
    assert verdict.score == 2.0 - 1.0 + 20.0
    assert verdict.parts == {"exact": 2.0, "<lambda>": 2.0, "judge": 20.0}


def test_an_async_grader_is_held_to_its_limits(monkeypatch):
    most, under_way = 0, 0

    async def counted(sample):
        nonlocal most, under_way
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(60 if sample.response == "hang" else 0.01)
        under_way -= 1
        return True

    monkeypatch.setattr(grader_setup, "ASYNC_CALLS", 2)
    verdicts = graded(RewardConfig(), *"abcd", "hang", reward=counted, timeout_s=0.3)
    assert [verdict.lost for verdict in verdicts] == ["", "", "", "", "timeout"]
    assert most == 2


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ([], r"reward: found \[\]"),
        ("exact", r"reward: found 'exact', needs a function"),
        ([brevity], r"reward\[0\]: found <function brevity.*needs a pair"),
        ([("exact", 1.0), (brevity, 0)], r"reward\[1\]: found .*brevity.*, 0\), needs a pair"),
        ([(brevity, float("nan"))], r"reward\[0\]: found .*nan\), needs a pair"),
        ([(brevity, "2")], r"reward\[0\]: found .*'2'\), needs a pair"),
    ],
)
def test_a_wrong_list_of_rewards_is_refused_with_the_place_in_it(reward, message):
    with pytest.raises(ConfigError, match=message):
        weighted(reward)


def test_a_misspelt_name_in_a_weighted_list_is_named_with_its_place():
    with pytest.raises(ConfigError, match=r"reward\[1\]: .*'exat'; did you mean 'exact'"):
        check_graders(RewardConfig(), reward=[("exact", 1.0), ("exat", 1.0)])


def test_a_listed_grader_that_cannot_be_loaded_is_named_and_nothing_was_started():
    before = threading.active_count()
    listed = [
        {"grader": f"{GRADERS}:brevity"},
        {"grader": f"{GRADERS}:judge"},
        {"grader": f"{GRADERS}:jugde"},
    ]
    with pytest.raises(
        ConfigError, match=r"reward\.grader\[2\]\.grader: .* has no 'jugde'; did you mean 'judge'"
    ):
        submit_of(RewardConfig(grader=listed))
    assert threading.active_count() == before


def test_a_file_that_exits_while_it_is_loaded_is_refused_and_does_not_end_the_command(tmp_path):
    """An exit of status 0 would pass for a run that has ended well."""
    file = tmp_path / "leaves.py"
    file.write_text("import sys\ndef right(sample):\n    return True\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match=rf"reward\.grader: {file}:right: {file} calls sys\.exit\(0\)"):
        check_graders(RewardConfig(grader=f"{file}:right"))


def writes_to_what_it_is_handed(sample):
    sample.tokens[:] = 0
    return True


def test_a_function_that_writes_to_the_sampled_tokens_ends_the_run(micro, run_micro):
    with pytest.raises(RewardError, match=r"writes_to_what_it_is_handed raised ValueError: .*read-only"):
        run_micro(micro(steps=1), reward=writes_to_what_it_is_handed)


@pytest.mark.parametrize(
    "late", [pytest.param("late_sum_of_fours", marks=pytest.mark.slow), "awaited_sum_of_fours"]
)
def test_a_run_whose_verdicts_come_late_is_the_run_graded_at_once(late, micro, run_micro, same_run):
    """By workers, and by an async function."""
    # Two prompts a wave for two groups a step: a second wave is opened only by a verdict.
    waves = {"dynamic_sampling__prompts_per_wave": 2}
    here = run_micro(micro(**waves), reward=sum_of_fours)
    assert max(line["rollout/waves"] for line in here.metrics) > 1
    config = micro(reward__grader=f"{GRADERS}:{late}", workers__count=2, **waves)
    same_run(run_micro(config, reward=None), here)


def test_a_run_with_several_graders_logs_the_parts_and_filters_by_the_first(micro, run_micro):
    """Weights 1 and 2 on rewards of +1 or -1 and a constant 0.5: the mean is 1 x (2 accuracy - 1) + 2 x 0.5, length shaping apart."""
    pairs = [(sum_of_fours, 1.0), (lambda sample: 0.5, 2.0)]
    config = micro(steps=2, reward__overlong__enabled=False)
    result = run_micro(config, reward=pairs)
    for line in (line for line in result.metrics if line.get("rollout/waves")):
        assert line["reward/parts/sum_of_fours"] == pytest.approx(2 * line["rollout/accuracy"] - 1)
        assert line["reward/parts/<lambda>"] == 0.5
        assert line["reward/mean"] == pytest.approx(2 * line["rollout/accuracy"])
        assert 0 < line["rollout/trained_accuracy"] < 1


@pytest.mark.parametrize(
    ("grader", "message"),
    [
        (f"{GRADERS}:late_sum", r"has no 'late_sum'; did you mean 'late_sum_of_fours'"),
        ("no/such/rewards.py:right", "there is no file no/such/rewards.py"),
        ("mth", "no grader is named 'mth'; did you mean 'math'"),
    ],
)
def test_a_grader_that_cannot_be_loaded_is_refused_before_the_model_is_loaded(
    grader, message, micro, rows, monkeypatch
):
    def never(*told, **more):
        raise AssertionError(f"the model was loaded: {told}")

    monkeypatch.setattr(build, "tokenizer_of", never)
    monkeypatch.setattr(learner, "load_policy", never)
    monkeypatch.setattr(inference, "find_policy", never)
    config = micro(reward__grader=grader)
    with pytest.raises(ConfigError, match=rf"reward\.grader: .*{message}"):
        build.Run(config, prompts=rows)
    with pytest.raises(ConfigError, match=rf"reward\.grader: .*{message}"):
        inference.evaluate(config.model.source, EvaluateConfig(reward=config.reward))


LENGTH = {"grader": "kimi_length", "weight": 0.5}


def test_the_length_reward_follows_the_verdicts_of_the_first_grader():
    """All samples have one token, so the length reward is 0."""
    right, wrong = graded(RewardConfig(grader=[{"grader": "exact"}, LENGTH]), "=2", "=3")
    assert (right.parts, wrong.parts) == (
        {"exact": 1.0, "kimi_length": 0.0},
        {"exact": -1.0, "kimi_length": 0.0},
    )
    long = [
        replace(one, tokens=np.zeros(n, np.int32))
        for one, n in zip(samples("=2", "=3", "=3"), (1, 1, 3), strict=True)
    ]
    for reward, config in (
        (None, RewardConfig(grader=[{"grader": "exact"}, LENGTH])),
        ([("exact", 1), ("kimi_length", 0.5)], RewardConfig()),
    ):
        submit, _ = submit_of(config, check_graders(config, reward=reward))
        assert [verdict.parts["kimi_length"] for verdict in submit(long).result()] == [0.5, 0.0, -0.5]


@pytest.mark.parametrize(
    ("config", "reward"),
    [
        (RewardConfig(grader="kimi_length"), None),
        (RewardConfig(grader=[LENGTH, {"grader": "exact"}]), None),
        (RewardConfig(), [("kimi_length", 0.5)]),
    ],
)
def test_the_length_reward_alone_is_refused(config, reward):
    with pytest.raises(ConfigError, match=r"kimi_length .*reward\.grader=\[\{grader: math\}"):
        submit_of(config, check_graders(config, reward=reward))
