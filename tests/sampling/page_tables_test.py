"""Pages of the KV cache: which slots hold them, and how often."""

import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest

from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.sampling.cache_sizes import PageSizes
from dapo_jax.sampling.continuous_batching import Sampler
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.page_tables import Fill, Pages
from dapo_jax.testing import ScriptedEngine

EOS = 1


def pool(pages, *, slots=4, capacity=24, page_tokens=4, pools=1, **windows):
    sizes = {"holders": slots, "capacity": capacity, "page_tokens": page_tokens, "pools": pools}
    return Pages(PageSizes(**sizes, pool_pages=pages, **windows))


def test_a_slot_gets_pages_for_its_tokens_and_the_list_to_fill():
    """Room for 10 tokens with a prompt of 6, in pages of 4: three pages, two to fill."""
    pages = pool(8)
    assert pages.start(1, 10, read=6) == [Fill(0, 0), Fill(4, 1)]
    assert pages.held(1) == [0, 1, 2]
    assert pages.rows([1])[0][0, :3].tolist() == [0, 1, 2]
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


def test_pages_before_a_window_are_freed():
    """A window of 6 tokens and calls of 4: 9 tokens in 1 + 2 pages of 4 at most. The token after a prompt of 11 attends to tokens 6 to 11, in pages 1 and 2; the token after
    14 attends to tokens 9 to 14, in pages 2 and 3. Responses to a prompt share page 1 until the last one frees it."""
    pages = pool(12, slots=2, windows=(0, 6), call_tokens=4)
    assert [pages.sizes.holder_pages(table) for table in (0, 1)] == [6, 3]
    whole, window = pages.tables
    fills = pages.start(0, 15, read=11, prompt="a", prompt_tokens=11)
    assert [(fill.table, fill.first) for fill in fills] == [(0, 0), (0, 4), (0, 8), (1, 4), (1, 8)]
    pages.start(1, 15, read=11, prompt="a", prompt_tokens=11)
    assert (window.held, window.begins) == ([[0, 1, 2], [0, 3, 4]], [1, 1])
    for holder in (0, 1):
        assert pages.grow(holder, 18, cached=14)
    assert [len(held) for held in whole.held] == [5, 5]
    assert (window.held, window.begins) == ([[1, 2, 5], [3, 4, 0]], [2, 2]), "page 0 is free after the second"


def test_bytes_are_divided_so_that_only_the_first_table_runs_out():
    """Tokens of 1 byte in layers without a window and of 3 bytes in others; 4 holders of 6 pages, or 3 with the window. Up to 12 pages, the pools have the same size and a
    page of 4 tokens needs 16 bytes in both; further pages need 4 bytes."""
    sizes = pool(20, windows=(0, 6), call_tokens=4).sizes
    each = {0: 1, 6: 3}
    assert sizes.bytes(each) == 4 * (20 * 1 + 12 * 3)
    assert [sizes.fitting(room, each) for room in (160, 192, 200, 240, 10**6)] == [10, 12, 14, 24, 24]
    assert [replace(sizes, pool_pages=pages).pages_of(1) for pages in (10, 20)] == [10, 12]
    assert [sizes.response_cache_bytes(tokens, each) for tokens in (10, 24)] == [40, 24 + 3 * 12]


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
    assert pages.rows([3])[0][0, :2].tolist() == [0, 1]
    assert (pages.free(0), pages.free(1)) == (6, 4)
    assert len(pages.start(0, 8, read=8, prompt="a", prompt_tokens=8)) == 2, "devices share nothing"


class Remembering(ScriptedEngine):
    """Keeps in every page the identity of its tokens, (ordinal, index or None for the prompt, position), and checks at every step
    that each slot finds exactly its own tokens."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        sizes = self.page_sizes
        self.memory = [
            np.full((sizes.pools * sizes.pages_of(table), sizes.page_tokens), None, object)
            for table in range(len(sizes.windows))
        ]
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
                self.memory[fill.table][fill.page, offset] = token if position < length else "left over"
        return super().insert(prefix, state, insertion, key)

    def generate(self, params, state, decoding, min_live, tables, until=None):
        sizes, before = self.page_sizes, state
        state, result = super().generate(params, state, decoding, min_live, tables, until)
        live = [slot for slot in range(self.slots) if before[slot].live]
        for slot, (table, window) in itertools.product(live, enumerate(sizes.windows)):
            ordinal, index, prompt, _ = self.who[slot]
            place = sizes.pool_of(slot) * sizes.pages_of(table) + tables[table][slot]
            cached = prompt + before[slot].drawn
            for position in range(max(0, cached + 1 - window) if window else 0, prompt + state[slot].drawn):
                page, offset = divmod(position, sizes.page_tokens)
                token = (ordinal, None if position < prompt else index, position)
                if position >= cached:
                    self.memory[table][place[page], offset] = token
                assert self.memory[table][place[page], offset] == token, (slot, position, window)
        return state, result


def schedule(seed):
    """A random schedule: (engine, prompts, samples, limit)."""
    rng = np.random.default_rng(seed)
    limit, longest = int(rng.integers(1, 30)), int(rng.integers(1, 20))
    page_tokens, pools = int(rng.integers(1, 12)), int(rng.choice([1, 1, 2, 3]))
    slots = pools * int(rng.integers(1, 7))
    capacity, steps = limit + longest, int(rng.integers(1, 9))
    windows = ((0,), (0, int(rng.integers(1, 20))), (int(rng.integers(10, 20)), int(rng.integers(1, 10))))[
        seed % 3
    ]
    sizes = PageSizes(
        holders=slots, capacity=capacity, page_tokens=page_tokens, pools=pools, pool_pages=0, windows=windows, call_tokens=steps
    )  # fmt: skip
    most = sizes.holder_pages()
    sizes = replace(sizes, pool_pages=int(rng.integers(most, most * (slots // pools) + 1)))
    prompts = [
        Prompt(ordinal=ordinal, tokens=np.full(rng.integers(1, longest + 1), 2, np.int32), text="", answer="")
        for ordinal in range(int(rng.integers(1, 12)))
    ]  # fmt: skip

    def script(ordinal, index):
        length = int(np.random.default_rng((seed, ordinal, index)).integers(1, limit + 5))
        return [100 * ordinal + index + 2] * (length - 1) + [EOS]

    engine = Remembering(
        script, slots=slots, capacity=capacity, steps_per_call=steps, stop_ids=[EOS], page_sizes=sizes
    )
    return engine, prompts, int(rng.integers(1, 8)), limit


@pytest.mark.parametrize(
    "block",
    # The first forty schedules cover every way to run out of pages; the others take a minute.
    [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 25))],
)
def test_a_thousand_schedules_lose_no_page_and_mix_up_none(block, monkeypatch):
    """Every group comes back whole, every page is free at the end, and each slot reads only its own tokens."""
    made, again = [], 0
    monkeypatch.setattr("dapo_jax.sampling.slots.Pages", lambda sizes: made.append(Pages(sizes)) or made[-1])
    for seed in range(40 * block, 40 * (block + 1)):
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
        for at, table in enumerate(made[-1].tables):
            assert {len(free) for free in table.free} == {engine.page_sizes.pages_of(at)}, seed
        again += engine.again
    assert again > 40, "many schedules are short of pages"


def check(pages):
    """Compares the counts with the pages that are held."""
    for table in pages.tables:
        holders = np.zeros_like(table.holders)
        for slot, held in enumerate(table.held):
            assert len(set(held)) == len(held)
            holders[pages.sizes.pool_of(slot)][held] += 1
        np.testing.assert_array_equal(table.holders, holders)
        for free, counts in zip(table.free, holders, strict=True):
            assert sorted(free) == np.flatnonzero(counts == 0).tolist()
