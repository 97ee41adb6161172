"""How the sampler keeps its slots full: driven by an engine without a model, so every response is known."""

import heapq
import itertools
import weakref
from collections import Counter, deque

import jax
import numpy as np
import pytest

from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.sampling.cache_sizes import PageSizes
from dapo_jax.sampling.continuous_batching import Sampler
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.requests import Request
from dapo_jax.sampling.slots import Slots
from dapo_jax.testing import ScriptedEngine

EOS, LIMIT = 1, 40


def prompt(ordinal, tokens=(2, 3)):
    return Prompt(ordinal=ordinal, tokens=np.array(tokens, np.int32), text="", answer="")


def prompts(count):
    """Prompts of 2 to 6 tokens, each beginning with its own number."""
    return [prompt(ordinal, (ordinal + 2,) * (2 + ordinal % 5)) for ordinal in range(count)]


def response(ordinal, index, length):
    """`length` tokens that say whose they are, the end token last."""
    return [100 * ordinal + index + 2] * (length - 1) + [EOS]


def scripted(length_of=lambda ordinal, index: 3 + (7 * ordinal + 5 * index) % 11, *, slots=4, steps=4):
    return ScriptedEngine(
        lambda ordinal, index: response(ordinal, index, length_of(ordinal, index)),
        slots=slots, capacity=6 + LIMIT, steps_per_call=steps, stop_ids=[EOS],
    )  # fmt: skip


def drawing(items):
    left = iter(items)
    return lambda count: list(itertools.islice(left, count))


def sample(engine, draw, *, samples=3, limit=LIMIT, stop=None, **options):
    return Sampler(engine, **options).sample(
        {}, draw, key=jax.random.key(0), decoding=decoding(), samples_per_prompt=samples, max_response_tokens=limit,
        stop=stop,
    )  # fmt: skip


def test_each_prompt_is_prefilled_once():
    engine = scripted(slots=4)
    asked = [prompt(0, range(2, 5)), prompt(1, range(2, 11)), prompt(2, [7] * 16), prompt(3, [8] * 17)]
    list(sample(engine, drawing(asked), samples=6, limit=8, prefill_prompts=1))
    assert [[tuple(tokens) for tokens in call] for call in engine.prefills] == [
        [tuple(p.tokens)] for p in asked
    ]


def test_a_response_that_a_stop_function_ends_gives_up_its_slot():
    """All would run to the limit of 40 tokens; stopped at 6, seen after 8, they take 8 steps a round of four slots."""
    engine = scripted(lambda ordinal, index: LIMIT + 1)
    found = list(
        sample(engine, drawing(prompts(4)), stop=lambda tokens, start: 6 if len(tokens) >= 6 else None)
    )
    assert {len(got.tokens) for _, responses in found for got in responses} == {6}
    assert {got.finish_reason for _, responses in found for got in responses} == {"stop"}
    assert engine.released == [0, 1, 2, 3] * 3
    assert len(engine.live_slots) == 3 * 8


def test_the_second_wave_starts_while_the_tail_of_the_first_still_runs():
    engine = scripted(lambda ordinal, index: 40 if ordinal == 0 else 2, slots=8)
    pending = prompts(2)

    def draw(count):
        taken, pending[:] = pending[:count], pending[count:]
        return taken

    for p, _ in sample(engine, draw, samples=2):
        if p.ordinal == 1:
            pending += prompts(4)[2:]
    assert engine.inserted[-1] == (3, 1)
    assert len(engine.live_slots) == 40, "the second wave cost no step of its own"


def test_prompts_are_asked_for_only_when_slots_are_free_and_few_at_a_time():
    """6 responses a prompt and 4 slots: a second prompt is read when the line is empty."""
    engine, counts = scripted(slots=4), []
    source = drawing(prompts(3))

    def draw(count):
        counts.append((count, len(engine.inserted)))
        return source(count)

    list(sample(engine, draw, samples=6, prefill_prompts=1))
    assert {count for count, _ in counts} == {1}
    assert counts[0] == (1, 0)
    # Asked again only when all in line have a slot.
    assert counts[1][1] == 6
    assert counts[2][1] == 12


def long_tailed(ordinal, index):
    """Lengths from 5 to 40 with a median of 7 and a mean of 11: Pareto's, from a hash of the names."""
    uniform = ((ordinal * 7919 + index * 104_729 + 13) * 2_654_435_761 % 2**32) / 2**32
    return int(min(2 + 3 * (1 - uniform) ** -0.9, LIMIT))


@pytest.mark.parametrize("steps", [4, 16])
def test_long_tailed_lengths_leave_few_slots_idle(steps):
    """A batch that waits for its longest response would keep 11 / 40 = 28 % busy.

    Slots are refilled when 2 of the 16 are free, so at most one is idle on the way: 15 / 16 = 94 %. The prompts of one prefill
    fill the slots exactly, which must not leave the line empty.
    """
    engine = scripted(long_tailed, slots=16, steps=steps)
    list(sample(engine, drawing(prompts(64)), samples=8, prefill_prompts=2))
    # Without the last stretch, when nothing is left to refill with.
    assert np.mean(engine.live_slots[:-LIMIT]) > 15


class Prefix(np.ndarray):
    """An array that can be weakly referenced and counted."""


class Watching(ScriptedEngine):
    """Prefills one prompt at a time, and counts the prefixes that are still referenced at each call of `generate`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.held, self.alive = [], []

    def prefill(self, params, asked):
        for index, lengths, place in next(super().prefill(params, asked)):
            prefix = lengths.view(Prefix)
            self.held.append(weakref.ref(prefix))
            yield [(index, prefix, place)]

    def generate(self, params, state, how, min_live, tables, until=None):
        self.alive.append(sum(reference() is not None for reference in self.held))
        return super().generate(params, state, how, min_live, tables, until)


def test_a_prefix_is_released_once_its_last_response_has_a_slot():
    engine = Watching(lambda o, i: response(o, i, 30), slots=4, capacity=46, steps_per_call=4, stop_ids=[EOS])
    list(sample(engine, drawing(prompts(4)), samples=2, prefill_prompts=1))
    assert len(engine.held) == 4
    assert max(engine.alive) <= 1


def log_normal(ordinal, index):
    """20 to 250 tokens, most of them short."""
    return int(min(250, 20 + np.random.default_rng((ordinal, index)).lognormal(3.5, 0.8)))


def short_of_pages(engine=ScriptedEngine, *, share, slots=32):
    """The engine after sampling with pages for this share of the tokens that all slots may have."""
    capacity, page = 260, 4
    sizes = PageSizes(
        holders=slots,
        capacity=capacity,
        page_tokens=page,
        pools=1,
        pool_pages=int(share * slots * capacity / page),
    )
    engine = engine(
        lambda o, i: [2] * (log_normal(o, i) - 1) + [EOS],
        slots=slots, capacity=capacity, steps_per_call=8, stop_ids=[EOS], page_sizes=sizes,
    )  # fmt: skip
    assert len(list(sample(engine, drawing(prompts(32)), samples=8, prefill_prompts=8, limit=250))) == 32
    return engine


def test_few_prefilled_prompts_wait_when_pages_run_out():
    """A re-prefill does not wait for other prompts to be prefilled first: all of their prefixes would then wait on the device."""
    engine = short_of_pages(Watching, share=0.12, slots=64)
    assert len(engine.inserted) > 32 * 8, "no response was preempted"
    assert max(engine.alive) <= 2


def test_few_responses_are_preempted_when_pages_run_out():
    """32 prompts of 8 responses: those that start leave the others pages to grow. Without spare pages there are 195 re-prefills, with them 70."""
    started = Counter(short_of_pages(share=0.12).inserted)
    assert 0 < sum(started.values()) - 256 < 100


@pytest.mark.parametrize(("pool_pages", "limit", "calls"), [(5, 10, 1), (6, 14, 2)])
def test_the_younger_response_is_preempted_and_goes_to_the_head_of_the_line(pool_pages, limit, calls):
    """Pages of 4 tokens. Two responses have two pages each for 6 tokens, or three each for 10. Both need another, and the older one gets it."""
    pages = PageSizes(holders=2, pools=1, pool_pages=pool_pages, page_tokens=4, capacity=16)
    engine = ScriptedEngine(
        lambda *_: [2] * 20, slots=2, capacity=16, steps_per_call=4, stop_ids=[EOS], page_sizes=pages
    )
    slots, waiting = Slots(engine), deque([Request(prompt(2), 0, limit=limit)])
    older, younger = (Request(prompt(ordinal), 0, limit=limit) for ordinal in range(2))
    for request in (older, younger):
        assert slots.take(request, waiting) is not None
    for _ in range(calls):
        for request in (older, younger):
            request.append(Tokens([2] * 4))
        slots.make_room(waiting)
    assert [request.prompt.ordinal for request in waiting] == [1, 2]
    assert [owner and owner.prompt.ordinal for owner in slots.owners] == [0, None]


def test_of_two_paused_responses_the_younger_is_preempted():
    """Six pages of 4 tokens. Three responses have two pages each for 6 tokens. Two of them pause there, and the third needs another page."""
    pages = PageSizes(holders=3, pools=1, pool_pages=6, page_tokens=4, capacity=16)
    engine = ScriptedEngine(
        lambda *_: [2] * 20, slots=3, capacity=16, steps_per_call=4, stop_ids=[EOS], page_sizes=pages
    )
    slots, waiting = Slots(engine), deque[Request]()
    for ordinal, target in enumerate((4, 4, 10)):
        request = Request(prompt(ordinal), 0, limit=10, target=target)
        assert slots.take(request, waiting) is not None
        request.append(Tokens([2] * 4))
    slots.make_room(waiting)
    assert [owner and owner.prompt.ordinal for owner in slots.owners] == [0, None, 2]


class PrefillsSlowly(ScriptedEngine):
    """Prefills `at_a_time` prompts in one part, and a prompt of 6 tokens in three parts; keeps the order of its calls."""

    def __init__(self, *args, at_a_time=1, **kwargs):
        super().__init__(*args, **kwargs)
        self.order, self.at_a_time = [], at_a_time

    def prefill(self, params, asked):
        done = next(super().prefill(params, asked))
        for start in range(0, len(done), self.at_a_time):
            some = done[start : start + self.at_a_time]
            for _ in range(2 if any(len(asked[index]) == 6 for index, *_ in some) else 0):
                self.order.append("prefill")
                yield []
            self.order.append("prefill")
            yield some

    def generate(self, params, state, how, min_live, tables, until=None):
        before = len(self.live_slots)
        found = super().generate(params, state, how, min_live, tables, until)
        self.order.append(f"{len(self.live_slots) - before} steps")
        return found


def ideal_steps(lengths, slots):
    """Decoding steps if each slot takes the next response as soon as it is free: without knowing the lengths beforehand, nothing is faster."""
    ends = [0] * slots
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def equal(ordinal, index):
    return LIMIT


@pytest.mark.parametrize("length_of", [equal, lambda o, i: 3 + (7 * o + 5 * i) % 31, long_tailed])
@pytest.mark.parametrize("at_a_time", [1, 2, 16])
@pytest.mark.parametrize("steps", [1, 4, 64])
@pytest.mark.parametrize(("slots", "count", "samples"), [(1, 3, 2), (4, 7, 3), (8, 5, 8), (8, 40, 1)])
def test_sampling_takes_the_ideal_steps_and_one_call_at_most(
    slots, count, samples, steps, at_a_time, length_of
):
    """However few prompts one prefill has, no slot idles through a call while prompts wait. Up to 8 slots, one free slot is enough to be refilled."""
    engine = PrefillsSlowly(
        lambda o, i: response(o, i, length_of(o, i)),
        slots=slots, capacity=6 + LIMIT, steps_per_call=steps, stop_ids=[EOS], at_a_time=at_a_time,
    )  # fmt: skip
    list(sample(engine, drawing(prompts(count)), samples=samples))
    lengths = [length_of(ordinal, index) for ordinal in range(count) for index in range(samples)]
    assert len(engine.live_slots) <= ideal_steps(lengths, slots) + steps


def test_slots_are_not_held_up_by_a_long_prompt_that_has_no_slot_yet():
    """Both slots are busy: the third prompt is prefilled one part at a time, between calls."""
    engine = PrefillsSlowly(
        lambda o, i: response(o, i, 30), slots=2, capacity=46, steps_per_call=4, stop_ids=[EOS]
    )
    list(sample(engine, drawing([prompt(0), prompt(1), prompt(2, (2,) * 6)]), samples=1, prefill_prompts=1))
    assert engine.order[:7] == ["prefill", "prefill", "prefill", "4 steps", "prefill", "4 steps", "prefill"]


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (0, r"prompt 5 has 0 tokens; a slot of 46 tokens has room for 1 to 46 - 40 \(response\) = 6"),
        (7, r"prompt 5 has 7 tokens; a slot of 46 tokens has room for 1 to 46 - 40 \(response\) = 6"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused_with_the_arithmetic(length, message):
    with pytest.raises(ValueError, match=message):
        list(sample(scripted(), drawing([prompt(4), prompt(5, [3] * length)])))


def test_on_look_is_called_before_each_call_of_the_engine():
    """One response of 9 tokens, 4 a call, is three calls."""
    looks = []
    list(
        sample(
            scripted(lambda *_: 9), drawing([prompt(0)]), samples=1, on_look=lambda: looks.append(len(looks))
        )
    )
    assert looks == [0, 1, 2]
