"""The progress of waves while they run, and warnings about them."""

from dataclasses import replace

import pytest
from rich.console import Console

from dapo_jax.config import BatchConfig, DynamicSamplingConfig, TeacherConfig, TrainConfig
from dapo_jax.dapo.rollouts import Verdict
from dapo_jax.rewards.grading import NOT_GRADED
from dapo_jax.rollout.collector import Collector, Position
from dapo_jax.rollout.virtual_clock import ClockSizes
from dapo_jax.run.observers import StepProgress
from dapo_jax.trackers.progress import Progress
from dapo_jax.training.state import TrainState
from tests.run.conftest import make_group

MIXED = [Verdict(correct=True), Verdict(correct=False)]
WRONG = [
    Verdict(correct=False, reason="no '=' in the response"),
    Verdict(correct=False, extracted="45", reason="expected '46'"),
]
RIGHT = [Verdict(correct=True)] * 2


class Shown(Progress):
    """Keeps its messages."""

    def __init__(self):
        super().__init__(9, console=Console(quiet=True))
        self.waves, self.messages, self.phases = [], [], []

    def phase(self, name, done=None, total=None):
        self.phases.append((name, done, total))

    def wave(self, words):
        self.waves.append(words)

    def message(self, text):
        self.messages.append(text)


def sampled(*steps, metric="correct", enabled=True, **sections):
    """Steps that need two groups, from waves of three (two without dynamic sampling); `steps` are the verdicts by prompt of each."""
    dynamic = DynamicSamplingConfig(prompts_per_wave=3, max_waves=2, metric=metric, enabled=enabled)
    config = TrainConfig(
        run_dir="run",
        dynamic_sampling=dynamic,
        batch=BatchConfig(prompts_per_step=2, groups_per_update=2),
        **sections,
    )
    shown, told = Shown(), []
    progress = StepProgress(config, shown)
    for number, verdicts in enumerate(steps):
        sizes = ClockSizes(
            in_flight=2 * (3 if enabled else 2), samples_per_prompt=2, needed=2, answer_rounds=0, waves=True,
        )  # fmt: skip
        most = 6 if enabled else None
        collector = Collector.after(Position(), sizes, max_groups=most, metric=metric, enabled=enabled)
        progress.before_sampling(Position(step=number), collector)
        while ordinals := [one.ordinal for one in collector.start() if one.index == 0]:
            for ordinal in ordinals:
                told.append(len(shown.messages))
                group = make_group(ordinal, verdicts[ordinal], text="12+34", answer="46")
                collector.end_group(group)
                progress.on_group(group, collector)
    return shown, told


def test_a_wave_shows_its_prompts_and_its_mixed_and_wrong_groups():
    shown, _ = sampled([MIXED, WRONG, RIGHT, WRONG, MIXED, MIXED])
    assert shown.waves == [
        "wave 1  prompts 1/3  mixed 1  all correct 0  all wrong 0",
        "wave 1  prompts 2/3  mixed 1  all correct 0  all wrong 1",
        "wave 1  prompts 3/3  mixed 1  all correct 1  all wrong 1",
        "wave 2  prompts 4/6  mixed 1  all correct 1  all wrong 2",
        "wave 2  prompts 5/6  mixed 2  all correct 1  all wrong 2",
        "wave 2  prompts 6/6  mixed 3  all correct 1  all wrong 2",
    ]
    assert shown.messages == []


def test_after_one_wave_of_wrong_verdicts_the_run_says_so_once_with_what_to_look_at():
    shown, told = sampled([WRONG] * 6, [WRONG] * 6)
    assert told == [0, 0, 0] + [1] * 9
    [said] = shown.messages
    assert said.startswith("step 1: every response in 3 groups is wrong")
    assert "prompt 0, '12+34', answer '46': response 'it is 1', extracted '45' (\"expected '46'\")" in said
    for words in ("reward.grader", "dapo-jax data show", "dapo-jax sft"):
        assert words in said


def test_without_an_answer_in_any_response_the_first_one_is_shown():
    [said] = sampled([WRONG[:1] * 2] * 6)[0].messages
    assert "response 'it is 0', no answer found" in said


def test_one_right_response_in_a_wave_is_something_to_learn_from():
    assert sampled([WRONG, WRONG, MIXED, WRONG, WRONG, WRONG])[0].messages == []
    assert sampled([RIGHT] * 6)[0].messages == []


def test_a_step_without_dynamic_sampling_is_one_wave():
    shown, _ = sampled([WRONG] * 2, enabled=False)
    assert shown.waves[-1] == "prompts 2/2  mixed 0  all correct 0  all wrong 2"
    assert len(shown.messages) == 1


@pytest.mark.parametrize("metric", ["correct", "score"])
@pytest.mark.parametrize("verdicts", [[NOT_GRADED] * 2, WRONG], ids=["not graded", "of an environment"])
def test_a_run_that_learns_from_a_teacher_alone_is_not_told_about_verdicts(metric, verdicts):
    """Every group has something to learn from, whatever its verdicts are. With teacher.rewards, the verdicts count again."""
    alone = TeacherConfig(source="teacher")
    shown, _ = sampled([verdicts] * 2, [verdicts] * 2, metric=metric, enabled=False, teacher=alone)
    assert shown.messages == []
    assert set(shown.waves) == {"prompts 1/2", "prompts 2/2"}
    both = replace(alone, rewards=True)
    shown, _ = sampled([verdicts] * 2, metric=metric, enabled=False, teacher=both)
    assert len(shown.messages) == 1


def scores(*values):
    return [Verdict(correct=value > 0, score=value) for value in values]


def test_numbers_of_0_and_less_are_told_the_key_after_one_wave():
    [said] = sampled([scores(-1.0, -0.5)] * 6)[0].messages
    assert "every response in 3 groups counts as wrong, because only a score above 0 is correct" in said
    assert "the scores differ in 3" in said
    assert "dynamic_sampling.metric=score" in said
    assert "score -1" in said


def test_where_scores_count_a_wave_speaks_of_scores():
    shown, _ = sampled([scores(-1.0, -0.5)] * 6, metric="score")
    assert shown.waves == [f"wave 1  prompts {n}/3  scores differ in {n}" for n in (1, 2, 3)]
    assert shown.messages == []
    [said] = sampled([scores(0.25, 0.25)] * 6, metric="score")[0].messages
    assert "the scores differ in none of the 3 groups so far" in said
    assert "score 0.25" in said
    assert not any(word in said for word in ("wrong", "right", "correct", "grader"))


def test_the_first_response_without_a_verdict_is_said_once():
    lost = [
        Verdict(correct=False, reason="no verdict within 1 s", lost="timeout"),
        Verdict(correct=True, score=1.0),
    ]
    mixed = [Verdict(correct=False, score=-1.0), Verdict(correct=True, score=1.0)]
    several = [replace(lost[0], score=-1.0, parts={"exact": 0.0, "judge": -1.0}), lost[1]]
    for first, metric, counts in (
        (lost, "correct", "wrong"),
        (lost, "score", "the worst of its group"),
        (several, "correct", "the worst of its group for one grader"),
    ):
        shown, _ = sampled([mixed, first, lost], [lost, mixed, mixed], metric=metric)
        assert [said for said in shown.messages if "verdict" in said] == [
            f"step 1: a response to prompt 1 got no verdict (no verdict within 1 s) and counts as {counts}; the metric reward/lost counts all such responses"
        ]


def test_phases_tell_how_far_a_step_is():
    """Of prompts 0 to 2, of which the first and the last are mixed, two are kept; then three updates."""
    shown, _ = sampled([MIXED, WRONG, MIXED])
    assert shown.phases == [("sample", 0, 2), ("sample", 1, 2), ("sample", 1, 2), ("sample", 2, 2)]
    progress = StepProgress(TrainConfig(run_dir="run"), shown)
    progress.before_update(TrainState(params=None, opt_state=None), (), index=1, count=3)
    assert shown.phases[4:] == [("update", 1, 3)]
