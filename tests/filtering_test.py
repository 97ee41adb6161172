"""Dynamic sampling: which groups carry a signal, and what a step trains on whatever order they end in."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_jax.filtering import Collector, ShortfallError, is_informative
from dapo_jax.rollouts import Group, Prompt, Response, Rollout, Verdict

RIGHT, WRONG, MIXED = "xx", "..", "x."


def make_group(ordinal, verdicts, *, rewards=None, scores=None):
    """One rollout per character of `verdicts`: x is correct, anything else is wrong."""
    count = len(verdicts)
    scores = scores or [None] * count
    rewards = rewards or [1.0 if mark == "x" else -1.0 for mark in verdicts]
    response = Response(
        tokens=np.array([1], np.int32), logprobs=np.zeros(1, np.float32), finish_reason="stop"
    )
    rollouts = tuple(
        Rollout(response=response, text="", verdict=Verdict(correct=mark == "x", score=score), reward=reward)
        for mark, score, reward in zip(verdicts, scores, rewards, strict=True)
    )
    prompt = Prompt(ordinal=ordinal, tokens=np.array([2], np.int32), text="?", answer="!")
    return Group(prompt=prompt, rollouts=rollouts)


def run(collector, kind_of, *, slots=4, pick=lambda waiting: 0):
    """A sampler with `slots` prompts in flight, of which the one that `pick` points at ends next."""
    in_flight = []
    while True:
        while len(in_flight) < slots and (drawn := collector.draw(slots - len(in_flight))):
            in_flight += drawn
        if not in_flight:
            return collector
        ordinal = in_flight.pop(pick(in_flight))
        collector.add(make_group(ordinal, kind_of(ordinal)))


def ordinals(groups):
    return [group.prompt.ordinal for group in groups]


@pytest.mark.parametrize(
    ("verdicts", "informative"), [("xx", False), ("..", False), ("x.", True), (".x", True), ("x", False)]
)
def test_a_group_is_informative_if_some_but_not_all_are_correct(verdicts, informative):
    assert is_informative(make_group(0, verdicts)) is informative


def make_lost(group, index):
    """The group, with the verdict of one rollout lost."""
    rollouts = list(group.rollouts)
    rollouts[index] = replace(rollouts[index], verdict=Verdict(correct=False, lost="died"))
    return replace(group, rollouts=tuple(rollouts))


@pytest.mark.parametrize(
    ("scores", "informative"),
    [([0.5, 0.5, 0.5], True), ([0.5, 0.25, 0.5], True)],
)
def test_by_score_a_lost_verdict_counts_as_a_worse_one(scores, informative):
    group = make_lost(make_group(0, "xxx", scores=scores), 2)
    assert is_informative(group, metric="score") is informative


def test_by_score_a_group_with_no_verdict_at_all_is_not_informative():
    group = make_lost(make_lost(make_group(0, "xx", scores=[1.0, 2.0]), 0), 1)
    assert not is_informative(group, metric="score")


def test_by_score_a_plain_verdict_beside_a_lost_one_is_still_refused():
    with pytest.raises(ValueError, match="needs a reward function that returns scores"):
        is_informative(make_lost(make_group(0, "xx"), 0), metric="score")


def test_the_overlong_penalty_does_not_make_a_group_informative():
    """All wrong, one of them 0.25 deep in the buffer: its advantages would be large, and about nothing but length."""
    assert not is_informative(make_group(0, "....", rewards=[-1.0, -1.0, -1.0, -1.25]))
    assert not is_informative(make_group(0, "xx", rewards=[1.0, 0.5]))


def test_a_mixed_group_of_equal_rewards_is_informative():
    """Decided on the verdict: a correct answer with the whole penalty may have a wrong one's reward."""
    assert is_informative(make_group(0, "x.", rewards=[-1.0, -1.0]))


def test_graded_scores_are_informative_when_they_differ():
    assert is_informative(make_group(0, "xx", scores=[0.5, 0.7]), metric="score")
    assert not is_informative(make_group(0, "xx", scores=[0.5, 0.5]), metric="score")
    assert not is_informative(make_group(0, "xx", scores=[0.5, 0.7]), metric="correct")


def test_filtering_by_score_refuses_plain_verdicts():
    with pytest.raises(ValueError, match=r"dynamic_sampling\.metric=score needs a reward function"):
        is_informative(make_group(0, "x.", scores=[0.5, None]), metric="score")


def simple_waves(kind_of, *, needed, wave, max_waves, carried):
    """The rule in words: whole waves, one after the other, until enough groups are mixed."""
    cursor = waves = 0
    mixed = []
    while carried + len(mixed) < needed and waves < max_waves:
        mixed += [o for o in range(cursor, cursor + wave) if kind_of(o) == MIXED]
        cursor, waves = cursor + wave, waves + 1
    return cursor, waves, mixed


@given(
    kinds=st.lists(st.sampled_from([RIGHT, WRONG, MIXED]), min_size=1, max_size=12),
    order=st.randoms(use_true_random=False),
    needed=st.integers(1, 5),
    wave=st.integers(1, 4),
    max_waves=st.integers(1, 5),
    carried=st.integers(0, 3),
    slots=st.integers(1, 6),
)
def test_the_trained_set_is_the_first_by_ordinal_whatever_order_groups_end_in(
    kinds, order, needed, wave, max_waves, carried, slots
):
    def kind_of(ordinal):
        return kinds[ordinal % len(kinds)]

    earlier = [make_group(-1 - place, MIXED) for place in range(carried)]
    collector = Collector(
        needed=needed, cursor=0, prompts_per_wave=wave, max_waves=max_waves, carried=earlier
    )
    run(collector, kind_of, slots=slots, pick=lambda waiting: order.randrange(len(waiting)))
    cursor, waves, mixed = simple_waves(
        kind_of, needed=needed, wave=wave, max_waves=max_waves, carried=carried
    )
    every = [*ordinals(earlier), *mixed]
    if len(every) < needed:
        with pytest.raises(ShortfallError):
            collector.finish()
        return
    found = collector.finish(surplus="carry")
    assert ordinals(found.groups) == every[:needed]
    assert ordinals(found.carry) == every[needed:]
    assert ordinals(found.sampled) == list(range(cursor))
    assert (found.cursor, found.waves, found.surplus) == (cursor, waves, len(every) - needed)


def test_the_next_wave_opens_as_soon_as_it_is_certain_and_no_sooner():
    """Two groups needed, waves of two: while both could still be mixed, a second wave could be for nothing."""
    collector = Collector(needed=2, cursor=10, prompts_per_wave=2)
    assert collector.draw(8) == [10, 11]
    assert collector.draw(8) == []
    collector.add(make_group(11, WRONG))
    assert collector.draw(8) == [12, 13]  # 0 found + 1 in flight < 2: certain, though prompt 10 still runs
    collector.add(make_group(13, MIXED))
    assert collector.draw(8) == []  # 1 found + 2 in flight
    collector.add(make_group(10, RIGHT))
    assert collector.draw(8) == []  # 1 found + 1 in flight
    collector.add(make_group(12, MIXED))
    assert collector.draw(8) == []
    assert ordinals(collector.finish().groups) == [12, 13]


def test_a_wave_is_handed_out_in_parts_as_slots_free_up():
    collector = Collector(needed=3, cursor=0, prompts_per_wave=5)
    assert [collector.draw(2), collector.draw(2), collector.draw(2)] == [[0, 1], [2, 3], [4]]


def test_the_cursor_moves_by_whole_waves():
    """One mixed group of a wave of 4 is enough: the other three prompts are used up all the same."""
    collector = run(Collector(needed=1, cursor=100, prompts_per_wave=4), lambda ordinal: MIXED)
    found = collector.finish()
    assert (found.cursor, found.waves, len(found.sampled)) == (104, 1, 4)


@pytest.mark.parametrize(("surplus", "carried"), [("discard", []), ("carry", [2, 3])])
def test_surplus_groups_are_discarded_or_carried(surplus, carried):
    collector = run(Collector(needed=2, cursor=0, prompts_per_wave=4), lambda ordinal: MIXED)
    found = collector.finish(surplus=surplus)
    assert ordinals(found.groups) == [0, 1]
    assert ordinals(found.carry) == carried
    assert found.surplus == 2


def test_carried_groups_come_first():
    carried = [make_group(3, MIXED), make_group(4, MIXED)]
    collector = Collector(needed=3, cursor=8, prompts_per_wave=2, carried=carried)
    found = run(collector, lambda ordinal: MIXED).finish(surplus="carry")
    assert ordinals(found.groups) == [3, 4, 8]
    assert ordinals(found.carry) == [9]
    assert ordinals(found.sampled) == [8, 9]  # metrics of sampling speak of this step's prompts alone


def test_enough_carried_groups_sample_nothing():
    carried = [make_group(ordinal, MIXED) for ordinal in range(3)]
    collector = Collector(needed=2, cursor=8, prompts_per_wave=2, carried=carried)
    found = run(collector, lambda ordinal: MIXED).finish(surplus="carry")
    assert (found.cursor, found.waves, found.sampled) == (8, 0, [])
    assert (ordinals(found.groups), ordinals(found.carry)) == ([0, 1], [2])


def test_a_shortfall_counts_the_groups_by_kind():
    """3 waves of 4: ordinals 0 mod 6 are right, 5 mod 6 mixed, the rest wrong: of 12, 2 right, 2 mixed, 8 wrong."""
    kinds = {0: RIGHT, 5: MIXED}
    collector = Collector(needed=5, cursor=0, prompts_per_wave=4, max_waves=3)
    run(collector, lambda ordinal: kinds.get(ordinal % 6, WRONG))
    with pytest.raises(ShortfallError) as error:
        collector.finish(on_shortfall="error")
    message = str(error.value)
    assert "found 2 of the 5 informative groups it needs in 3 waves of 4 prompts" in message
    assert "of 12 groups 2 were all correct, 8 all wrong, 2 mixed" in message
    assert "max_waves" in message


def test_train_fewer_trains_on_what_there_is():
    collector = Collector(needed=5, cursor=0, prompts_per_wave=4, max_waves=1)
    run(collector, lambda ordinal: MIXED if ordinal == 2 else WRONG)
    found = collector.finish(on_shortfall="train_fewer", surplus="carry")
    assert (ordinals(found.groups), found.carry, found.surplus) == ([2], [], 0)


@pytest.mark.parametrize("on_shortfall", ["error", "train_fewer"])
@pytest.mark.parametrize("kind", [RIGHT, WRONG])
def test_nothing_informative_always_raises(on_shortfall, kind):
    collector = run(Collector(needed=2, cursor=0, prompts_per_wave=2, max_waves=2), lambda ordinal: kind)
    with pytest.raises(ShortfallError, match="found 0 of the 2"):
        collector.finish(on_shortfall=on_shortfall)


def test_without_dynamic_sampling_a_step_is_one_wave_of_exactly_what_it_needs():
    """Eight would be drawn in a wave; switched off, three are, and flat groups are kept."""
    kinds = [RIGHT, WRONG, MIXED]
    collector = Collector(needed=3, cursor=6, prompts_per_wave=8, enabled=False)
    found = run(collector, lambda ordinal: kinds[ordinal % 3], slots=2).finish()
    assert ordinals(found.groups) == ordinals(found.sampled) == [6, 7, 8]
    assert (found.cursor, found.waves, found.surplus) == (9, 1, 0)
