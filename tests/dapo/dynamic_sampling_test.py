"""Dynamic sampling: which groups carry a signal, and what a step trains on whatever order they end in."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_jax.dapo.dynamic_sampling import Collector, InformativeShare, ShortfallError, is_informative
from dapo_jax.dapo.rollouts import Group, Prompt, Response, Rollout, Span, Verdict

RIGHT, WRONG, MIXED = "xx", "..", "x."


def make_group(ordinal, verdicts, *, rewards=None, scores=None, version=0):
    """One rollout per character of `verdicts`: x is correct, anything else is wrong."""
    count = len(verdicts)
    scores = scores or [None] * count
    rewards = rewards or [1.0 if mark == "x" else -1.0 for mark in verdicts]
    response = Response(
        tokens=np.array([1], np.int32),
        logprobs=np.zeros(1, np.float32),
        finish_reason="stop",
        spans=(Span(0, version),),
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


def simple_waves(kind_of, *, needed, wave, max_waves, carried, share, surplus):
    """The rule in words: waves, one after the other, until enough groups are mixed. They are whole, or where surplus is
    carried, of as many prompts as give what is missing and its square root, if as many are mixed as were of late."""
    cursor = waves = 0
    mixed = []
    while (missing := needed - carried - len(mixed)) > 0 and cursor < max_waves * wave:
        size = wave
        if surplus == "carry":
            sampled, informative = share.sampled / 2 + cursor, share.informative / 2 + len(mixed)
            expected = math.ceil((missing + math.sqrt(missing)) * (sampled + 1) / (informative + 1))
            size = min(wave, max_waves * wave - cursor, expected)
        mixed += [o for o in range(cursor, cursor + size) if kind_of(o) == MIXED]
        cursor, waves = cursor + size, waves + 1
    return cursor, waves, mixed


@given(
    kinds=st.lists(st.sampled_from([RIGHT, WRONG, MIXED]), min_size=1, max_size=12),
    order=st.randoms(use_true_random=False),
    needed=st.integers(1, 9),
    wave=st.integers(1, 6),
    max_waves=st.integers(1, 5),
    carried=st.integers(0, 3),
    slots=st.integers(1, 6),
    surplus=st.sampled_from(["discard", "carry"]),
    counts=st.tuples(st.floats(0, 9), st.floats(0, 9)),
)
def test_the_trained_set_is_the_first_by_ordinal_whatever_order_groups_end_in(
    kinds, order, needed, wave, max_waves, carried, slots, surplus, counts
):
    def kind_of(ordinal):
        return kinds[ordinal % len(kinds)]

    earlier = [make_group(-1 - place, MIXED) for place in range(carried)]
    share = InformativeShare(informative=min(counts), sampled=max(counts))
    collector = Collector(
        needed=needed,
        cursor=0,
        prompts_per_wave=wave,
        max_waves=max_waves,
        version=1,
        carried=earlier,
        share=share,
        surplus=surplus,
        max_age_steps=2,
    )
    run(collector, kind_of, slots=slots, pick=lambda waiting: order.randrange(len(waiting)))
    cursor, waves, mixed = simple_waves(
        kind_of,
        needed=needed,
        wave=wave,
        max_waves=max_waves,
        carried=carried,
        share=share,
        surplus=surplus,
    )
    every = [*ordinals(earlier), *mixed]
    if len(every) < needed:
        with pytest.raises(ShortfallError):
            collector.finish()
        return
    found = collector.finish()
    assert ordinals(found.groups) == every[:needed]
    assert ordinals(found.carry) == (every[needed:] if surplus == "carry" else [])
    assert found.share == share.later(informative=len(mixed), sampled=cursor)
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
    collector = run(Collector(needed=2, cursor=0, prompts_per_wave=4, surplus=surplus), lambda ordinal: MIXED)
    found = collector.finish()
    assert ordinals(found.groups) == [0, 1]
    assert ordinals(found.carry) == carried
    assert found.surplus == 2


def test_carried_groups_come_first():
    carried = [make_group(3, MIXED), make_group(4, MIXED)]
    collector = Collector(needed=3, cursor=8, prompts_per_wave=2, carried=carried, surplus="carry")
    found = run(collector, lambda ordinal: MIXED).finish()
    assert ordinals(found.groups) == [3, 4, 8]
    assert ordinals(found.carry) == [9]
    assert ordinals(found.sampled) == [8, 9]  # metrics of sampling speak of this step's prompts alone


def test_what_would_be_older_than_a_step_is_dropped_and_counted():
    """Five groups for two: of the left ones 2 was carried once already, 3 and 4 have just been sampled."""
    carried = [make_group(ordinal, MIXED, version=6) for ordinal in range(3)]
    collector = Collector(needed=2, cursor=3, prompts_per_wave=2, version=7, carried=carried, surplus="carry")
    collector._sampled = [make_group(3, MIXED, version=7), make_group(4, MIXED, version=7)]
    for max_age_steps, kept in ((1, [(3, 7), (4, 7)]), (2, [(2, 6), (3, 7), (4, 7)])):
        found = replace(collector, max_age_steps=max_age_steps).finish()
        assert ordinals(found.groups) == [0, 1]
        assert [(group.prompt.ordinal, group.oldest) for group in found.carry] == kept
        assert (found.surplus, found.dropped_old) == (3, 3 - len(kept))
    assert replace(collector, surplus="discard").finish().dropped_old == 0


@pytest.mark.parametrize("mixed", [0.3, 0.7])
def test_with_carrying_every_step_samples_and_trains_mostly_on_what_it_sampled(mixed):
    """60 steps of 16 groups with waves of at most 48 prompts, where so many groups are mixed. A wave for m groups asks for m + sqrt(m):
    about 4 of 16 are a step old. (With whole waves, at 0.7: 27% were 2 steps old or older, and 52% of the steps sampled
    nothing.) All that is mixed is used, but for the last step's: 16 / `mixed` prompts a step, of which the share of 60 steps has a
    deviation of sqrt(0.3 x 0.7 / (60 x 16 / 0.3)) = 0.008."""
    random = np.random.default_rng(0)
    cursor, carry, share, ages, prompts = 0, [], InformativeShare(), Counter(), []
    for step in range(60):
        collector = Collector(
            needed=16,
            version=step,
            cursor=cursor,
            prompts_per_wave=48,
            carried=carry,
            share=share,
            surplus="carry",
        )
        while drawn := collector.draw(16):
            for ordinal in drawn:
                collector.add(make_group(ordinal, MIXED if random.random() < mixed else WRONG, version=step))
        found = collector.finish()
        cursor, carry, share = found.cursor, found.carry, found.share
        ages.update(step - group.oldest for group in found.groups)
        prompts.append(len(found.sampled))
    assert min(prompts) > 0
    assert ages.keys() == {0, 1}
    assert ages[1] / ages.total() < 4 / 16
    assert np.mean(prompts) == pytest.approx(16 / mixed, rel=0.1)


def test_a_first_wave_asks_for_no_more_than_what_is_needed_and_its_square_root():
    """Nothing is known of the share: 9 + 3 of the 27 prompts that a wave may have."""
    collector = Collector(needed=9, cursor=0, prompts_per_wave=27, surplus="carry")
    assert len(collector.draw(99)) == 12


def test_a_whole_wave_that_is_certain_is_not_waited_for_and_a_smaller_one_is():
    """Ten groups needed, waves of at most 4. While the first 4 are in flight at least 6 are missing: a whole wave whatever they give.
    While 8 are, at least 2 are, which is 2 + sqrt(2): a whole one if all are mixed. With 12 in flight none may be missing; three flat
    ones later 1 is certain to be, for which 2 prompts do if all others are mixed: how many it takes is known at their end."""
    collector = Collector(needed=10, cursor=0, prompts_per_wave=4, surplus="carry")
    assert [collector.draw(4) for _ in range(4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], []]
    for ordinal in (11, 3, 6):
        collector.add(make_group(ordinal, WRONG))
        assert collector.draw(4) == []
    for ordinal in (0, 1, 2, 4, 5, 7, 8, 9):
        collector.add(make_group(ordinal, MIXED))
        assert collector.draw(4) == []
    collector.add(make_group(10, MIXED))
    assert collector.draw(4) == [12, 13, 14]  # (1 + 1) x 13 / 10 = 2.6


def test_the_prompts_of_a_step_are_at_most_those_of_its_whole_waves():
    """Three waves of 10. For 4 groups the first has 4 + 2 prompts, and of 6 none is mixed: 6 x 7 = 42 were asked for."""
    collector = Collector(needed=4, cursor=0, prompts_per_wave=10, max_waves=3, surplus="carry")
    run(collector, lambda ordinal: WRONG)
    with pytest.raises(
        ShortfallError, match=r"found 0 of the 4 .* in 4 waves of at most 10 prompts: of 30 groups"
    ):
        collector.finish()


def test_enough_carried_groups_sample_nothing():
    carried = [make_group(ordinal, MIXED) for ordinal in range(3)]
    collector = Collector(needed=2, cursor=8, prompts_per_wave=2, carried=carried, surplus="carry")
    found = run(collector, lambda ordinal: MIXED).finish()
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


def run_scores(scores_of, **how):
    """A step of groups with these scores; above 0 they count as correct, as a bare number does."""
    collector = Collector(needed=2, cursor=0, prompts_per_wave=4, max_waves=2, **how)
    for ordinal in iter(lambda: next(iter(collector.draw(1)), None), None):
        scores = scores_of(ordinal)
        collector.add(make_group(ordinal, "".join("x" if s > 0 else "." for s in scores), scores=scores))
    return collector


def test_a_shortfall_by_verdict_names_the_scores_that_differ():
    """Numbers of 0 and less: of two waves of four, all count as wrong; in those of even ordinals they differ."""
    collector = run_scores(lambda ordinal: [-0.5, -0.25] if ordinal % 2 == 0 else [-1.0, -1.0])
    with pytest.raises(ShortfallError) as error:
        collector.finish()
    message = str(error.value)
    assert "of 8 groups 0 were all correct, 8 all wrong, 0 mixed" in message
    assert "In 4 of these the scores differ" in message
    assert "set dynamic_sampling.metric=score" in message


def test_a_shortfall_without_scores_does_not_speak_of_them():
    collector = run(Collector(needed=2, cursor=0, prompts_per_wave=2, max_waves=1), lambda ordinal: WRONG)
    with pytest.raises(ShortfallError) as error:
        collector.finish()
    assert "score" not in str(error.value)


def test_a_shortfall_by_score_speaks_of_scores_alone():
    """Of two waves of four one group differs; the others have one score each, from 0 (ordinal 0) to 3.5 (ordinal 7)."""
    collector = run_scores(lambda ordinal: [0.5, 1.0] if ordinal == 3 else [ordinal / 2] * 2, metric="score")
    with pytest.raises(ShortfallError) as error:
        collector.finish()
    message = str(error.value)
    assert "found 1 of the 2 informative groups it needs in 2 waves of 4 prompts" in message
    assert "of 8 groups 1 had scores that differ, 7 one score for all responses (0 to 3.5)" in message
    assert not any(word in message for word in ("correct", "wrong", "mixed", "grader"))


def test_train_fewer_trains_on_what_there_is():
    collector = Collector(needed=5, cursor=0, prompts_per_wave=4, max_waves=1, surplus="carry")
    run(collector, lambda ordinal: MIXED if ordinal == 2 else WRONG)
    found = collector.finish(on_shortfall="train_fewer")
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
