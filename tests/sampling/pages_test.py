"""Pages of the KV cache: which slots hold them, and how often."""

import itertools

import jax
import numpy as np
import pytest

from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.sampling.continuous_batching import Sampler
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.pages import Fill, Pages, PageSizes, pages_for
from dapo_jax.testing import ScriptedEngine

EOS = 1


def pool(pages, *, slots=4, capacity=24, page_tokens=4, pools=1):
    return Pages(
        PageSizes(holders=slots, capacity=capacity, page_tokens=page_tokens, pools=pools, pool_pages=pages)
    )


def test_a_slot_gets_pages_for_its_tokens_and_the_list_to_fill():
    """Room for 10 tokens with a prompt of 6, in pages of 4: three pages, two to fill."""
    pages = pool(8)
    assert pages.start(1, 10, read=6) == [Fill(0, 0), Fill(4, 1)]
    assert pages.held(1) == [0, 1, 2]
    assert pages.tables[1, :3].tolist() == [0, 1, 2]
    assert pages.free(0) == 5


def test_the_full_pages_of_a_prompt_are_shared_and_filled_once():
    """A prompt of 9 tokens: two full pages are shared; each slot has its own third page."""
    pages = pool(8)
    first = pages.start(0, 12, read=9, prompt="a", prompt_tokens=9)
    second = pages.start(1, 12, read=9, prompt="a", prompt_tokens=9)
    other = pages.start(2, 12, read=9, prompt="b", prompt_tokens=9)
    assert [fill.page for fill in first] == [0, 1, 2]
    assert second == [Fill(8, 3)]
    assert pages.held(1) == [0, 1, 3]
    assert [fill.page for fill in other] == [4, 5, 6]
    pages.release(0)
    assert pages.free(0) == 2, "only its own page is free again"
    assert pages.start(3, 9, read=9, prompt="a", prompt_tokens=9) == [Fill(8, 2)]
    for slot in (1, 2, 3):
        pages.release(slot)
    assert pages.free(0) == 8
    assert len(pages.start(0, 9, read=9, prompt="a", prompt_tokens=9)) == 3, "the shared pages are free too"


def test_without_enough_free_pages_nothing_starts_and_nothing_changes():
    pages = pool(4)
    pages.start(0, 9, read=9, prompt="a", prompt_tokens=9)
    assert pages.start(1, 20, read=9, prompt="a", prompt_tokens=9) is None
    assert (pages.free(0), pages.held(1)) == (1, [])
    assert pages.start(1, 12, read=9, prompt="a", prompt_tokens=9) is not None


def test_slots_on_other_devices_have_pools_of_their_own():
    """Four slots over two devices: tables count pages within a pool, fills over all pools."""
    pages = pool(6, pools=2)
    assert pages.start(3, 8, read=8, prompt="a", prompt_tokens=8) == [Fill(0, 6), Fill(4, 7)]
    assert pages.tables[3, :2].tolist() == [0, 1]
    assert (pages.free(0), pages.free(1)) == (6, 4)
    assert len(pages.start(0, 8, read=8, prompt="a", prompt_tokens=8)) == 2, "devices share nothing"


class Remembering(ScriptedEngine):
    """Keeps in every page the identity of its tokens, (ordinal, index or None for the prompt, position), and checks at every step
    that each slot finds exactly its own tokens."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        sizes = self.page_sizes
        self.memory = np.full((sizes.pools * sizes.pool_pages, sizes.page_tokens), None, object)
        self.who, self.again, self.tables = {}, 0, None

    def insert(self, prefix, state, insertion, key):
        for at, slot in enumerate(insertion.slots.tolist()):
            drawn = int(insertion.drawn[at])
            self.again += drawn > 0
            prompt = int(prefix[insertion.prompts[at]]) - drawn
            self.who[slot] = (int(insertion.ordinals[at]), int(insertion.indices[at]), prompt, prompt + drawn)
        of_place = dict(zip(insertion.prompts.tolist(), insertion.slots.tolist(), strict=True))
        for place, fill in insertion.fills:
            ordinal, index, prompt, length = self.who[of_place[place]]
            # Tokens of the prompt are the same for all responses; later ones belong to one response.
            for offset in range(self.page_sizes.page_tokens):
                position = fill.first + offset
                token = (ordinal, None if position < prompt else index, position)
                self.memory[fill.page, offset] = token if position < length else "left over"
        return super().insert(prefix, state, insertion, key)

    def generate(self, params, state, decoding, min_live, tables, until=None):
        sizes, before = self.page_sizes, state
        state, result = super().generate(params, state, decoding, min_live, tables, until)
        for slot in (slot for slot in range(self.slots) if before[slot].live):
            ordinal, index, prompt, _ = self.who[slot]
            place = sizes.pool_of(slot) * sizes.pool_pages + tables[slot]
            for position in range(prompt + state[slot].drawn):
                page, offset = divmod(position, sizes.page_tokens)
                token = (ordinal, None if position < prompt else index, position)
                if position >= prompt + before[slot].drawn:
                    self.memory[place[page], offset] = token
                assert self.memory[place[page], offset] == token, (slot, position)
        return state, result


def schedule(seed):
    """A random schedule: (engine, prompts, samples, limit)."""
    rng = np.random.default_rng(seed)
    limit, longest = int(rng.integers(1, 30)), int(rng.integers(1, 20))
    page_tokens, pools = int(rng.integers(1, 12)), int(rng.choice([1, 1, 2, 3]))
    slots = pools * int(rng.integers(1, 7))
    capacity = limit + longest
    most = pages_for(capacity, page_tokens)
    pages = int(rng.integers(most, most * (slots // pools) + 2))
    prompts = [
        Prompt(ordinal=ordinal, tokens=np.full(rng.integers(1, longest + 1), 2, np.int32), text="", answer="")
        for ordinal in range(int(rng.integers(1, 12)))
    ]  # fmt: skip

    def script(ordinal, index):
        length = int(np.random.default_rng((seed, ordinal, index)).integers(1, limit + 5))
        return [100 * ordinal + index + 2] * (length - 1) + [EOS]

    engine = Remembering(
        script, slots=slots, capacity=capacity, steps_per_call=int(rng.integers(1, 9)), stop_ids=[EOS],
        page_sizes=PageSizes(holders=slots, capacity=capacity, page_tokens=page_tokens, pools=pools, pool_pages=pages),
    )  # fmt: skip
    return engine, prompts, int(rng.integers(1, 8)), limit


@pytest.mark.parametrize(
    "block",
    # The first hundred schedules cover every way to run out of pages; the others take a minute.
    [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 10))],
)
def test_a_thousand_schedules_lose_no_page_and_mix_up_none(block, monkeypatch):
    """Every group comes back whole, every page is free at the end, and each slot reads only its own tokens."""
    made, again = [], 0
    monkeypatch.setattr("dapo_jax.sampling.slots.Pages", lambda sizes: made.append(Pages(sizes)) or made[-1])
    for seed in range(100 * block, 100 * (block + 1)):
        # Three of four schedules keep no spare pages, so that many slots are preempted.
        monkeypatch.setattr("dapo_jax.sampling.slots.SPARE_PAGES", (0, 0, 0, 2)[seed % 4])
        engine, prompts, samples, limit = schedule(seed)
        left = iter(prompts)
        sampled = Sampler(engine, prefill_prompts=1 + seed % 4).sample(
            {}, lambda count, left=left: list(itertools.islice(left, count)), key=jax.random.key(0), decoding=decoding(),
            samples_per_prompt=samples, max_response_tokens=limit,
        )  # fmt: skip
        groups = {prompt.ordinal: responses for prompt, responses in sampled}
        assert sorted(groups) == [prompt.ordinal for prompt in prompts]
        for ordinal, responses in groups.items():
            for index, response in enumerate(responses):
                assert response.tokens.tolist() == list(engine._response(ordinal, index, limit)), seed
        check(made[-1])
        assert all(
            made[-1].free(pool) == engine.page_sizes.pool_pages for pool in range(engine.page_sizes.pools)
        ), seed
        again += engine.again
    assert again > 100, "many schedules are short of pages"


def check(pages):
    """Compares the counts with the pages that are held."""
    holders = np.zeros_like(pages._holders)
    for slot in range(pages.sizes.holders):
        assert len(set(pages.held(slot))) == len(pages.held(slot))
        holders[pages.sizes.pool_of(slot)][pages.held(slot)] += 1
    np.testing.assert_array_equal(pages._holders, holders)
    for free, held in zip(pages._free, holders, strict=True):
        assert sorted(free) == np.flatnonzero(held == 0).tolist()
