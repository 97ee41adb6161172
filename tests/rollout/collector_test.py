"""A step's sampling by the clock: which groups it trains on, and which it leaves. With rollouts in flight, over responses of one token a round; in waves, in any order."""

from dataclasses import replace

import numpy as np
import pytest

from dapo_jax.dapo.dynamic_sampling import ShortfallError
from dapo_jax.dapo.rollouts import Continuation, Group, Prompt, Rollout, Span, Standing, Verdict
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.rollout.collector import Collector, Position
from dapo_jax.rollout.virtual_clock import ClockSizes, ResponseId, VirtualClock
from dapo_jax.sampling.requests import EpisodeLimits
from dapo_jax.sampling.round_sampler import Drawn
from tests.dapo.dynamic_sampling_test import make_group

RIGHT, WRONG, MIXED = "xx", "..", "x."
SIZES = ClockSizes(in_flight=4, samples_per_prompt=2, needed=2, answer_rounds=0)
BEGIN = Position()
LIMITS = EpisodeLimits(max_turns=9, turn_tokens=0, episode_tokens=99, capacity=99)


def drawn(token, finish_reason=None):
    return Drawn(record=Tokens([token], logprobs=[-token]), new=1, finish_reason=finish_reason)


def prompt_at(ordinal):
    return Prompt(ordinal=ordinal, tokens=np.array([2], np.int32), text="?", answer="!")


def group_of(ordinal, verdicts, version=0, **given):
    rollouts = tuple(
        replace(each, response=replace(each.response, spans=(Span(0, version),)))
        for each in make_group(verdicts, **given).rollouts
    )
    return Group(prompt=prompt_at(ordinal), rollouts=rollouts)


def collector(position=BEGIN, sizes=SIZES, *, max_groups=99, **options):
    return Collector.after(position, sizes, prompt_at=prompt_at, max_groups=max_groups, **options)


def graded(ordinal, responses, *, right=(True, False)):
    rollouts = tuple(
        Rollout(response=response, text="", verdict=Verdict(correct=correct), reward=float(correct))
        for response, correct in zip(responses, right, strict=True)
    )
    return Group(prompt=prompt_at(ordinal), rollouts=rollouts)


def one_round(found, lengths, *, right=(True, False)):
    """Every response in flight samples a token, and ends if it has its length."""
    found.start()
    parts = {}
    for one in list(found.clock.in_flight()):
        have = found.responses[one].drawn
        ends = have + 1 >= lengths[one.ordinal]
        parts[one] = drawn(10 * one.ordinal + have, "stop" if ends else None)
    found.take(parts, here=())
    _, whole, due = found.end_round()
    for ordinal in due:
        found.end_group(graded(ordinal, found.responses_to(ordinal), right=right))
    return whole


def test_groups_continue_from_step_to_step_and_know_their_weights():
    """Group 0 has responses of three tokens, the others of one. Two groups are in flight: 1, 2 and 3 end in the first three rounds, one in each, so
    the first step trains on 1 and 2, and the second on 0, which ends in the third round, and 3."""
    lengths = {0: 3, **dict.fromkeys(range(1, 9), 1)}
    first = collector()
    assert (first.needed, first.kept, first.cursor) == (2, 0, 0)
    assert one_round(first, lengths) == [1]
    assert (first.kept, first.tally.groups, first.stage) == (1, 1, "round 1")
    one_round(first, lengths)
    assert not first.goes_on
    found = first.finish()
    assert [group.prompt.ordinal for group in found.groups] == [1, 2]
    assert (found.version, found.rounds, found.drawn_tokens, found.surplus, found.waves) == (0, 2, 8, 0, 0)
    position = Position(step=1, cursor=found.cursor, carry=found.carry, in_flight=first.going_on())
    assert {one.ordinal for one in position.in_flight.responses} == {0}

    second = collector(position)
    one_round(second, lengths)
    later = second.finish()
    assert [group.prompt.ordinal for group in later.groups] == [0, 3]
    old = later.groups[0].rollouts[0].response
    assert old.tokens.tolist() == [0, 1, 2]
    assert old.spans == (Span(0, 0), Span(2, 1))
    assert (later.groups[0].oldest, later.groups[0].newest, later.groups[1].oldest) == (0, 1, 1)
    # The position between the steps is as it was.
    assert position.in_flight.responses[ResponseId(0, 0)].drawn == 2
    assert position.in_flight.clock.version == 1


def test_sampled_groups_are_in_the_order_of_ordinals_and_not_of_verdicts():
    """Group 0 takes three rounds, 1 and 2 one each, in the other place. The step needs three groups."""
    found = collector()
    found.clock = VirtualClock(replace(SIZES, needed=3))
    while found.goes_on:
        one_round(found, {0: 3, 1: 1, 2: 1, 3: 1, 4: 9})
    ordinals = [group.prompt.ordinal for group in found.finish().sampled]
    assert ordinals == sorted(ordinals) == [0, 1, 2, 3]


def test_the_cursor_is_after_a_group_that_has_half_begun():
    """Four places, and groups of two: once one response of group 0 has ended, the first of group 2 has started and its second has not."""
    found = collector()
    found.start()
    found.take(
        {one: drawn(5, "stop" if one == ResponseId(0, 0) else None) for one in found.clock.in_flight()}, ()
    )
    found.end_round()
    assert found.start() == [ResponseId(2, 0)]
    assert found.cursor == 3


def test_groups_without_signal_are_counted_and_left_out():
    found = collector()
    one_round(found, dict.fromkeys(range(9), 1), right=(True, True))
    assert (found.kept, found.tally.correct, found.goes_on) == (0, 2, True)
    everything = collector(enabled=False)
    one_round(everything, dict.fromkeys(range(9), 1), right=(True, True))
    assert (everything.kept, everything.goes_on) == (2, False)


def test_the_most_groups_of_a_step_end_its_rounds():
    found = collector(max_groups=4, trains_fewer=True)
    for _ in range(2):
        assert found.goes_on
        one_round(found, dict.fromkeys(range(9), 1), right=(False, False))
    assert not found.goes_on
    message = r"found 0 of the 2 .* the 4 groups of this step: of 4 groups, 0 were all correct, 4 all wrong"
    with pytest.raises(ShortfallError, match=message) as error:
        found.finish()
    assert "dynamic_sampling.max_waves" in str(error.value)
    assert "on_shortfall" not in str(error.value)  # the run has trains_fewer already


@pytest.mark.parametrize(("answer_rounds", "rounds_of_turns"), [(0, [0, 1]), (1, [1, 3]), (2, [2, 5])])
def test_answers_of_environments_are_taken_so_many_rounds_after_the_turn(answer_rounds, rounds_of_turns):
    """Turns of one token, two of them. With an answer k rounds later the first is sampled after k rounds, the second after 1 + 2 k."""
    found = collector(sizes=replace(SIZES, answer_rounds=answer_rounds), limits=LIMITS)
    drew = []

    def answer():
        for one in found.answers_due():
            over = found.responses[one].turns[1:] != ()
            found.answer(one, None if over else Continuation(np.array([9], np.int32)), Standing())

    one = ResponseId(0, 0)
    for number in range(9):
        found.start()
        answer()
        drawing = [each for each in found.clock.in_flight() if found.draws(each)]
        drew += [number] * (one in drawing)
        found.take({each: drawn(5, "stop") for each in drawing}, ())
        answer()
        ended, whole, due = found.end_round()
        if one in ended:
            break
        assert not whole
        assert not due
    assert drew == rounds_of_turns
    assert number == rounds_of_turns[-1] + answer_rounds
    assert found.responses[one].turns == ((1, 2), (3, 4))
    assert found.drawn_tokens == 2 * 4, "tokens of environments are not sampled"


def test_an_episode_that_is_over_before_its_first_turn_samples_nothing():
    found = collector(limits=LIMITS)
    first, *others = found.start()
    for one in found.answers_due():
        found.answer(one, None if one == first else Continuation(np.array([9], np.int32)), Standing())
    assert [found.draws(one) for one in (first, *others)] == [False, True, True, True]
    found.take({one: drawn(5) for one in others}, ())
    assert found.end_round()[0] == [first]


def test_an_episode_without_a_token_is_as_old_as_its_group():
    """Both of group 0 are lost before their first turns in a run that has made five steps."""
    found = collector(limits=LIMITS)
    found.clock.version = 5
    started = found.start()
    for one in found.answers_due():
        found.answer(one, None, Standing(lost="raised"))
    found.take({}, ())
    assert found.end_round()[1] == [0, 1]
    assert len(started) == 4
    assert graded(0, found.responses_to(0)).oldest == 5


def waves(kind_of, *, needed=2, wave=4, max_waves=9, position=BEGIN, **options):
    """The collector of a step in waves of groups of two, whose verdicts `kind_of` gives."""
    enabled = options.get("enabled", True)
    sizes = ClockSizes(
        in_flight=2 * (wave if enabled else needed), samples_per_prompt=2, needed=needed, answer_rounds=0, waves=True,
    )  # fmt: skip
    found = collector(position, sizes, max_groups=max_waves * wave if enabled else None, **options)
    waiting = []
    while True:
        waiting += [one.ordinal for one in found.start() if one.index == 0]
        if not waiting:
            return found
        ordinal = waiting.pop()
        kind = kind_of(ordinal)
        made = group_of(ordinal, kind, version=position.step) if isinstance(kind, str) else kind
        found.end_group(made)


def ordinals(groups):
    return [group.prompt.ordinal for group in groups]


@pytest.mark.parametrize(("keeps_surplus", "carried"), [(False, []), (True, [2, 3])])
def test_in_waves_surplus_groups_are_discarded_or_carried(keeps_surplus, carried):
    first = waves(lambda ordinal: MIXED, keeps_surplus=keeps_surplus)
    found = first.finish()
    assert (ordinals(found.groups), ordinals(found.carry)) == ([0, 1], carried)
    assert (found.cursor, found.waves, found.surplus, found.rounds) == (4, 1, 2, 0)
    assert first.going_on() is None
    position = Position(step=1, cursor=found.cursor, carry=found.carry)
    second = waves(lambda ordinal: MIXED, needed=3, position=position).finish()
    assert ordinals(second.groups) == [*carried, 4, 5, 6][:3]
    assert [group.oldest for group in second.groups] == [*[0] * len(carried), 1, 1, 1][:3]
    assert ordinals(second.sampled) == [4, 5, 6, 7], "metrics are about the prompts of this step"


def test_enough_carried_groups_sample_nothing():
    carry = [group_of(ordinal, MIXED) for ordinal in range(3)]
    found = waves(lambda ordinal: MIXED, position=Position(step=1, cursor=8, carry=carry)).finish()
    assert (found.cursor, found.waves, found.sampled) == (8, 0, [])
    assert (ordinals(found.groups), ordinals(found.carry)) == ([0, 1], [2])


@pytest.mark.parametrize(
    ("kind_of", "metric", "message", "fewer"),
    [
        # Ordinals 0 mod 6 are right, 5 mod 6 mixed, the others wrong: of 8, 2 right, 1 mixed, 5 wrong.
        (lambda at: {0: RIGHT, 5: MIXED}.get(at % 6, WRONG), "correct", r"found 1 of the 2 .*2 waves of 4 prompts: of 8 groups, 2 .* 5 all wrong, 1 mixed.*max_waves", [5]),
        (lambda at: RIGHT, "correct", "found 0 of the 2 .* 8 were all correct", []),
        # Numbers of 0 and less all count as wrong; the scores of even ordinals differ.
        (lambda at: [-0.5, -0.25] if at % 2 == 0 else [-1.0, -1.0], "correct", r"8 all wrong.* 4 of the .*dynamic_sampling\.metric=score", []),
        # One group differs; the others have one score each, from 0 (ordinal 0) to 3.5 (ordinal 7).
        (lambda at: [0.5, 1.0] if at == 3 else [at / 2] * 2, "score", r"found 1 of the 2 .*8 groups, 1 .* 7 .*\(0 to 3\.5\)", [3]),
    ],
)  # fmt: skip
def test_a_shortfall_counts_the_groups_by_kind(kind_of, metric, message, fewer):
    """Of two waves of four. A step may train on fewer groups, but not on none."""

    def group(ordinal):
        if isinstance(kind := kind_of(ordinal), str):
            return kind
        return group_of(ordinal, "".join("x" if score > 0 else "." for score in kind), scores=kind)

    found = waves(group, max_waves=2, metric=metric)
    with pytest.raises(ShortfallError, match=message) as error:
        found.finish()
    words = {
        "correct": ["score"] if "score" not in message else [],
        "score": ["correct", "wrong", "mixed", "grader"],
    }
    assert not any(word in str(error.value) for word in words[metric])
    found.trains_fewer = True
    if fewer:
        assert ordinals(found.finish().groups) == fewer
    else:
        with pytest.raises(ShortfallError):
            found.finish()


def test_without_dynamic_sampling_a_step_is_one_wave_of_exactly_the_groups_it_needs():
    """A wave has eight prompts; without dynamic sampling three are sampled, and flat groups are kept."""
    kinds = [RIGHT, WRONG, MIXED]
    position = Position(step=2, cursor=6)
    found = waves(lambda ordinal: kinds[ordinal % 3], needed=3, wave=8, position=position, enabled=False)
    found = found.finish()
    assert ordinals(found.groups) == ordinals(found.sampled) == [6, 7, 8]
    assert (found.cursor, found.waves, found.surplus) == (9, 1, 0)


def shorter(group):
    return group.best(2, by="shortest")


def test_only_the_kept_responses_are_judged_and_trained_on():
    """Of three responses of 1, 2 and 3 tokens the first two are kept: of `xx.` all correct, of `x.x` one of two. The step samples, counts and carries all."""
    kinds = {0: "xx.", 1: "x.x", 2: ".x.", 3: "x.."}

    def group(ordinal):
        made = group_of(ordinal, kinds[ordinal])
        lengths = enumerate(made.rollouts)
        return replace(
            made,
            rollouts=tuple(
                replace(one, response=replace(one.response, record=Tokens(np.arange(index + 1))))
                for index, one in lengths
            ),
        )  # fmt: skip

    first = waves(group, max_waves=1, best=shorter)
    assert (first.tally.correct, first.tally.mixed) == (1, 3)
    found = first.finish()
    assert ordinals(found.groups) == ordinals(found.whole) == [1, 2]
    assert [group.kept for group in found.groups] == [(0, 1), (0, 1)]
    assert {len(group.rollouts) for group in (*found.whole, *found.sampled, *found.carry)} == {3}
    assert ordinals(found.carry) == [3]
    assert found.logged(1)[0] is found.sampled[0]


def test_with_rollouts_in_flight_all_responses_of_a_trained_group_are_logged():
    found = collector(best=lambda group: group.best(1, by="shortest"), enabled=False)
    one_round(found, dict.fromkeys(range(9), 1))
    collected = found.finish()
    assert [group.kept for group in collected.groups] == [(0,), (0,)]
    assert [len(group.rollouts) for group in collected.logged(4)] == [2, 2]


def test_a_shortfall_counts_the_kept_responses():
    """Of `xx.` the first two are kept, which have equal lengths."""
    found = waves(lambda ordinal: "xx.", max_waves=1, best=shorter)
    with pytest.raises(ShortfallError, match=r"found 0 of the 2 .* 4 were all correct"):
        found.finish()
