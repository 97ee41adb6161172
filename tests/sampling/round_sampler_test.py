"""Responses in flight, round by round: each has the tokens that it has when sampled at once, with any number of slots and pages."""

import numpy as np
import pytest

from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.sampling.cache_sizes import PageSizes
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.requests import Request
from dapo_jax.sampling.round_sampler import RoundSampler
from dapo_jax.testing import ScriptedEngine
from tests.sampling.continuous_batching_schedule_test import PrefillsSlowly
from tests.sampling.continuous_batching_test import (
    EOS,
    GROUP,
    KEY,
    LIMIT,
    made,
    prompts,
    sample,
    weights_of,
)

ROUND = 5


def rounds_of(engine, *, weights=None, limit=LIMIT, stop=None, **how):
    return RoundSampler(
        engine, weights_of() if weights is None else weights, key=KEY, decoding=decoding(),
        max_response_tokens=limit, stop=stop, **how,
    )  # fmt: skip


class Flight:
    """Keeps `in_flight` responses to prompts 0, 1, 2, ... in flight, and their new tokens."""

    def __init__(self, asked, *, in_flight, samples=GROUP):
        self.left = [Request(prompt, index, 0) for prompt in asked for index in range(samples)]
        self.count, self.going, self.drawn, self.reasons = in_flight, [], {}, {}
        self.parts = []

    def round(self, sampler, tokens=ROUND):
        while self.left and len(self.going) < self.count:
            self.going.append(self.left.pop(0))
        found = sampler.draw(self.going, tokens)
        self.parts.append([part.new for part in found])
        for request, part in zip(self.going, found, strict=True):
            name = request.prompt.ordinal, request.index
            drawn = self.drawn.setdefault(name, ([], []))
            drawn[0].extend(part.record.ids.tolist())
            drawn[1].extend(part.record.logprobs.tolist())
            assert request.record.ids.tolist() == drawn[0]
            if part.finish_reason is not None:
                self.reasons[name] = part.finish_reason
            else:
                assert part.new == tokens, "a response that continues has the tokens of a whole round"
        self.going = [
            each for each, part in zip(self.going, found, strict=True) if part.finish_reason is None
        ]

    def rest(self):
        """Another sampler continues."""
        self.going = [request.rest() for request in self.going]

    def to_the_end(self, sampler, tokens=ROUND):
        while self.left or self.going:
            self.round(sampler, tokens)
        return self


def engine_for(slots, in_flight, **how):
    return made(slots, 4, in_flight=in_flight, page_tokens=4, **how)


@pytest.fixture(scope="module")
def at_once():
    """Five groups of six, each response sampled to its end."""
    return sample(engine_for(16, 16), prompts(0, 1, 2, 3, 4))


def assert_the_same(flight, expected, *, tolerance=1e-5):
    for ordinal, responses in expected.items():
        for index, response in enumerate(responses):
            tokens, logprobs = flight.drawn[ordinal, index]
            assert tokens == response.tokens.tolist()
            np.testing.assert_allclose(logprobs, response.logprobs, rtol=0, atol=tolerance)
            assert flight.reasons[ordinal, index] == response.finish_reason


@pytest.mark.parametrize(
    ("slots", "cache_tokens", "tokens"),
    [
        (3, 0, 3),
        (4, 48, 5),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((16, 0, 5), (12, 0, 1), (4, 0, 5), (4, 0, 16), (16, 96, 5))
        ),
    ],
)
def test_rounds_give_the_responses_that_are_sampled_at_once(at_once, slots, cache_tokens, tokens):
    """Twelve in flight: in as many slots or more; in turns of four or three; with pages for four of the longest sequences, or for two."""
    flight = Flight(prompts(0, 1, 2, 3, 4), in_flight=12)
    flight.to_the_end(rounds_of(engine_for(slots, 12, cache_tokens=cache_tokens)), tokens)
    assert_the_same(flight, at_once)


# Slow: compiles two samplers. tests/sampling/continuous_batching_test.py changes no bit, and the rounds above take turns in fewer slots.
@pytest.mark.slow
def test_turns_change_no_bit_where_sampling_is_batch_invariant():
    """Slots enough for all, and eight for sixteen: the same numbers, since a response continues from the logits that it paused with."""
    whole, turns = (
        Flight(prompts(0, 1, 2), in_flight=16).to_the_end(
            rounds_of(engine_for(slots, 16, batch_invariant=True))
        )
        for slots in (16, 8)
    )
    assert whole.drawn == turns.drawn
    assert whole.parts == turns.parts


def test_responses_in_flight_are_re_prefilled_for_new_weights(at_once):
    """After two rounds another sampler with the same weights continues, and nothing changes. With other weights the first tokens stay."""
    for seed in (0, 1):
        flight = Flight(prompts(0, 1, 2, 3, 4), in_flight=12)
        first = rounds_of(engine_for(3, 12))
        flight.round(first)
        flight.round(first)
        before = {name: list(tokens) for name, (tokens, _) in flight.drawn.items()}
        ended = set(flight.reasons)
        flight.rest()
        flight.to_the_end(rounds_of(engine_for(3, 12), weights=weights_of(seed)))
        if seed == 0:
            assert_the_same(flight, at_once)
        for name, tokens in before.items():
            assert flight.drawn[name][0][: len(tokens)] == tokens
        changed = {
            name for name in before.keys() - ended
            if flight.drawn[name][0] != at_once[name[0]][name[1]].tokens.tolist()
        }  # fmt: skip
        assert bool(changed) == (seed == 1)


def test_a_text_that_ends_a_response_ends_it_within_a_round():
    def third(tokens, seen):
        return 3 if len(tokens) >= 3 else None

    flight = Flight(prompts(0, 1), in_flight=12).to_the_end(rounds_of(engine_for(5, 12), stop=third), 4)
    assert {len(tokens) for tokens, _ in flight.drawn.values()} <= {1, 2, 3}
    assert {flight.reasons[name] for name, (tokens, _) in flight.drawn.items() if len(tokens) == 3} == {
        "stop"
    }


def scripted(seed, *, slots, in_flight, pages=None, limit=40, capacity=48, page=4, pools=1):
    def script(ordinal, index):
        length = int(np.random.default_rng((seed, ordinal, index)).integers(1, limit + 9))
        return [100 * ordinal + index + 2] * (length - 1) + [EOS]

    holders = max(slots, in_flight)
    sizes = PageSizes(
        holders=holders, capacity=capacity, page_tokens=page, pools=pools,
        pool_pages=pages or holders // pools * (capacity // page),
    )  # fmt: skip
    return ScriptedEngine(
        script, slots=slots, capacity=capacity, steps_per_call=3, stop_ids=[EOS], page_sizes=sizes
    )


def scripted_prompts(count):
    return [
        Prompt(ordinal=ordinal, tokens=np.full(1 + ordinal % 8, 7, np.int32), text="", answer="")
        for ordinal in range(count)
    ]


@pytest.mark.parametrize("seed", range(60))
def test_random_rounds_give_every_script_once(seed):
    """Any slots, pages down to what one sequence needs, one pool or two, and weights that change at random."""
    rng = np.random.default_rng(seed)
    pools = int(rng.integers(1, 3))
    slots, in_flight = (pools * int(rng.integers(1, 9)) for _ in range(2))
    pages = int(rng.integers(12, 12 * max(slots, in_flight) // pools + 1))
    engine = scripted(seed, slots=slots, in_flight=in_flight, pages=pages, pools=pools)
    flight, tokens = Flight(scripted_prompts(9), in_flight=in_flight, samples=4), int(rng.integers(1, 20))
    sampler = rounds_of(engine, weights={}, limit=40)
    while flight.left or flight.going:
        if rng.random() < 0.1:
            sampler = rounds_of(engine, weights={}, limit=40)
            flight.rest()
        flight.round(sampler, tokens)
    for (ordinal, index), (found, logprobs) in flight.drawn.items():
        assert found == list(engine._response(ordinal, index, 40))
        assert logprobs == [-token for token in found]
    slots_at_end = sampler._loop.slots
    assert all(slots_at_end.pages.free(pool) == pages for pool in range(pools)), (
        "every page is free at the end"
    )
    assert all(owner is None for owner in slots_at_end.owners)
    assert not slots_at_end.aside


@pytest.mark.parametrize("slots", [3, 8])
def test_nothing_is_prefilled_twice(slots):
    engine = scripted(0, slots=slots, in_flight=8)
    Flight(scripted_prompts(6), in_flight=8, samples=4).to_the_end(rounds_of(engine, weights={}, limit=40), 7)
    assert (engine.pauses > 0) == (slots < 8), "with a slot for each response, none leaves its slot"
    assert sum(map(len, engine.prefills)) <= 24, "each response's prompt at most once"
    assert slots < 8 or len(engine.inserted) == 24


@pytest.mark.parametrize("at_a_time", [1, 2, 16])
@pytest.mark.parametrize("steps", [1, 3, 64])
@pytest.mark.parametrize(("slots", "in_flight"), [(1, 3), (4, 4), (4, 8), (8, 6), (8, 24)])
def test_a_round_takes_the_ideal_steps_and_one_call_at_most(slots, in_flight, steps, at_a_time):
    """Each of the responses in flight samples 10 tokens a round, so slots take it in turn ceil(in_flight / slots) times."""
    engine = PrefillsSlowly(
        lambda o, i: [5] * 40, slots=slots, capacity=48, steps_per_call=steps, stop_ids=[EOS], at_a_time=at_a_time,
        page_sizes=PageSizes(holders=max(slots, in_flight), capacity=48, page_tokens=4, pools=1, pool_pages=12 * max(slots, in_flight)),
    )  # fmt: skip
    sampler, flight = (
        rounds_of(engine, weights={}, limit=40),
        Flight(scripted_prompts(24), in_flight=in_flight, samples=1),
    )
    for done in range(4):
        flight.round(sampler, 10)
        assert len(engine.live_slots) <= (done + 1) * (10 * -(-in_flight // slots) + steps)
