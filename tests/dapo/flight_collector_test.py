"""A step's sampling by the clock, over responses of one token a round: which groups it trains on, and what it leaves."""

from dataclasses import replace

import numpy as np
import pytest

from dapo_jax.dapo.dynamic_sampling import Collecting, ShortfallError
from dapo_jax.dapo.flight_collector import FlightCollector
from dapo_jax.dapo.in_flight import NOTHING, Drawn, EpisodeSoFar, PresentTurn, Standing
from dapo_jax.dapo.rollouts import ContextSpan, Continuation, Group, Prompt, Rollout, Span, Verdict
from dapo_jax.dapo.virtual_clock import ClockSizes, ResponseId, VirtualClock

SIZES = ClockSizes(in_flight=4, samples_per_prompt=2, needed=2, verdict_rounds=0)


def drawn(token, finish_reason=None):
    return Drawn(
        tokens=np.array([token], np.int32),
        logprobs=np.array([-token], np.float32),
        finish_reason=finish_reason,
    )


def collector(in_flight=None, ready=(), *, max_groups=99, metric="correct", enabled=True):
    return FlightCollector.of(SIZES, in_flight, ready, max_groups=max_groups, metric=metric, enabled=enabled)


def graded(ordinal, responses, *, right=(True, False)):
    rollouts = tuple(
        Rollout(response=response, text="", verdict=Verdict(correct=correct), reward=float(correct))
        for response, correct in zip(responses, right, strict=True)
    )
    prompt = Prompt(ordinal=ordinal, tokens=np.array([2], np.int32), text="?", answer="!")
    return Group(prompt=prompt, rollouts=rollouts)


def one_round(found, lengths, *, right=(True, False)):
    """Every response in flight draws a token; it ends with that of its length."""
    found.start()
    parts = {}
    for one in list(found.clock.in_flight()):
        have = len(found.responses[one].tokens)
        ends = have + 1 >= lengths[one.ordinal]
        parts[one] = drawn(10 * one.ordinal + have, "stop" if ends else None)
    found.take(parts)
    _, whole, due = found.end_round()
    groups = [graded(ordinal, found.responses_to(ordinal), right=right) for ordinal in due]
    found.judge(groups)
    return whole


def test_groups_go_on_from_step_to_step_and_know_their_weights():
    """Group 0 has responses of three tokens, the others of one. Two groups are in flight: 1, 2 and 3 end in the first three rounds, one in each, so
    the first step trains on 1 and 2, and the second on 0, which ends in the third round, and 3."""
    lengths = {0: 3, **dict.fromkeys(range(1, 9), 1)}
    first = collector()
    assert isinstance(first, Collecting)
    assert (first.needed, first.kept, first.cursor) == (2, 0, 0)
    assert one_round(first, lengths) == [1]
    assert (first.kept, first.tally.groups, first.stage) == (1, 1, "round 1")
    one_round(first, lengths)
    assert not first.goes_on
    found = first.finish()
    assert [group.prompt.ordinal for group in found.groups] == [1, 2]
    assert (found.version, found.rounds, found.drawn_tokens, found.surplus, found.waves) == (0, 2, 8, 0, 0)
    assert {one.ordinal for one in found.in_flight.responses} == {0}

    second = collector(found.in_flight, found.carry)
    one_round(second, lengths)
    later = second.finish()
    assert [group.prompt.ordinal for group in later.groups] == [0, 3]
    old = later.groups[0].rollouts[0].response
    assert old.tokens.tolist() == [0, 1, 2]
    assert old.spans == (Span(0, 0), Span(2, 1))
    assert (later.groups[0].oldest, later.groups[0].newest, later.groups[1].oldest) == (0, 1, 1)
    # The snapshot of the step before is as it was.
    assert len(found.in_flight.responses[ResponseId(0, 0)].tokens) == 2
    assert found.in_flight.clock.version == 1


def test_what_was_sampled_is_in_the_order_of_ordinals_and_not_of_verdicts():
    """Group 0 takes three rounds, 1 and 2 one each, in the place beside it. The step needs three groups."""
    found = collector()
    found.clock = VirtualClock(replace(SIZES, needed=3))
    while found.goes_on:
        one_round(found, {0: 3, 1: 1, 2: 1, 3: 1, 4: 9})
    ordinals = [group.prompt.ordinal for group in found.finish().sampled]
    assert ordinals == sorted(ordinals) == [0, 1, 2, 3]


def test_the_cursor_is_behind_a_group_that_has_half_begun():
    """Four places, and groups of two: once one response of group 0 has ended, the first of group 2 has started and its second has not."""
    found = collector()
    found.start()
    found.take(
        {one: drawn(5, "stop" if one == ResponseId(0, 0) else None) for one in found.clock.in_flight()}
    )
    found.end_round()
    assert found.start() == [ResponseId(2, 0)]
    assert found.cursor == 3


def test_the_present_context_is_the_last_one_that_began():
    """Contexts of two and three tokens begin anew with tokens 1 and 4; behind the second one token is drawn: it has four."""
    begun = replace(NOTHING, episode=EpisodeSoFar(due=None))
    for token, context in ((5, 2), (6, 3)):
        part = drawn(token, "stop")
        anew = Continuation(np.full(context, 9, np.int32), anew=True)
        begun = begun.longer(part, 0).turn_ended(part, due=0).answered(anew, Standing(), None, 0)
    begun = begun.longer(drawn(7), 0)
    assert begun.tokens.tolist() == [5, 9, 9, 6, 9, 9, 9, 7]
    assert begun.episode.contexts == (ContextSpan(1, 3), ContextSpan(4, 7))
    assert begun.context_tokens == 4
    assert begun.present_turn == PresentTurn(number=2, begun=7, anew=4)


def test_what_teaches_nothing_is_counted_and_left_out():
    found = collector()
    one_round(found, dict.fromkeys(range(9), 1), right=(True, True))
    assert (found.kept, found.tally.correct, found.goes_on) == (0, 2, True)
    everything = collector(enabled=False)
    one_round(everything, dict.fromkeys(range(9), 1), right=(True, True))
    assert (everything.kept, everything.goes_on) == (2, False)


def test_a_step_that_finds_too_little_says_what_it_found():
    found = collector(max_groups=4)
    for _ in range(2):
        assert found.goes_on
        one_round(found, dict.fromkeys(range(9), 1), right=(False, False))
    assert not found.goes_on
    with pytest.raises(
        ShortfallError, match=r"found 0 of the 2 .* among the 4 whose .* 0 were all correct, 4 all wrong"
    ):
        found.finish(on_shortfall="train_fewer")
    one = collector(max_groups=2)
    one.start()
    one.take({each: drawn(1, "stop") for each in one.clock.in_flight()})
    due = one.end_round().due
    one.judge([graded(at, one.responses_to(at), right=(True, not at)) for at in due])
    with pytest.raises(ShortfallError, match="found 1 of the 2"):
        one.finish()
    assert [group.prompt.ordinal for group in one.finish(on_shortfall="train_fewer").groups] == [1]


def test_spans_begin_where_the_version_changes_and_only_with_a_token():
    some = NOTHING.longer(drawn(1), 4).longer(drawn(2), 4)
    assert some.spans == (Span(0, 4),)
    nothing = replace(drawn(3), tokens=np.empty(0, np.int32), logprobs=np.empty(0, np.float32))
    assert some.longer(nothing, 5).spans == (Span(0, 4),)
    assert some.longer(drawn(3, "stop"), 6).whole(0).spans == (Span(0, 4), Span(2, 6))


@pytest.mark.parametrize(("answer_rounds", "rounds_of_turns"), [(0, [0, 1]), (1, [1, 3]), (2, [2, 5])])
def test_answers_of_environments_are_taken_so_many_rounds_after_what_they_answer(
    answer_rounds, rounds_of_turns
):
    """Turns of one token, two of them. With an answer k rounds later the first is drawn after k rounds, the second after 1 + 2 k."""
    found = collector()
    found.answer_rounds = answer_rounds
    drew = []

    def answer():
        for one in found.answers_due():
            over = len(found.responses[one].episode.turns) == 2
            before = None if over else Continuation(np.array([9], np.int32))
            found.answer(one, before, Standing(), end="stop" if over else None)

    one = ResponseId(0, 0)
    for number in range(9):
        found.start()
        answer()
        drawing = [each for each in found.clock.in_flight() if found.draws(each)]
        drew += [number] * (one in drawing)
        found.take({each: drawn(5, "stop") for each in drawing})
        answer()
        ended, whole, due = found.end_round()
        if one in ended:
            break
        assert not whole
        assert not due
    assert drew == rounds_of_turns
    assert number == rounds_of_turns[-1] + answer_rounds
    assert found.responses[one].whole(0).turns == ((1, 2), (3, 4))
    assert found.drawn_tokens == 2 * 4, "what environments say is not drawn"


def test_an_episode_that_is_over_before_its_first_turn_draws_nothing():
    found = collector()
    found.answer_rounds = 0
    first, *others = found.start()
    for one in found.answers_due():
        end = "stop" if one == first else None
        found.answer(one, None if end else Continuation(np.array([9], np.int32)), Standing(), end=end)
    assert [found.draws(one) for one in (first, *others)] == [False, True, True, True]
    found.take({one: drawn(5) for one in others})
    assert found.end_round().ended == [first]


def test_an_episode_without_a_token_is_as_old_as_its_group():
    """Both of group 0 are lost before their first turns in a run that has made five steps."""
    found = collector()
    found.answer_rounds, found.clock.version = 0, 5
    started = found.start()
    for one in found.answers_due():
        found.answer(one, None, Standing(lost="raised"), end="stop")
    found.take({})
    assert found.end_round().whole == [0, 1]
    assert len(started) == 4
    assert graded(0, found.responses_to(0)).oldest == 5
