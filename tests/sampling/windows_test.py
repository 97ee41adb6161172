"""Layers with a window have page tables of their own. Their pages are freed during decoding, and no response changes.

Windows of 3 and 5 tokens are shorter than prompts (1 to 8 tokens) and responses (up to 16). Pages have 2 tokens, so windows begin within pages and at their borders.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest

from tests.sampling import continuous_batching_test as whole
from tests.sampling.round_sampler_test import Flight, assert_the_same, rounds_of
from tests.sampling.turns_test import Appending, new_context

CONFIG = replace(whole.CONFIG, layers=4, windows=(3, 0, 5, 3))
ASKED = whole.prompts(0, 1, 2, 3, 4)


weights = functools.partial(whole.weights_of, config=CONFIG)


@functools.cache
def engine_of(slots, steps, **how):
    return whole.made(slots, steps, config=CONFIG, **how)


def sample(engine, **how):
    return whole.sample(engine, ASKED, weights=weights(), **how)


@functools.cache
def dense():
    """Sampled with a cache that keeps all tokens."""
    return sample(engine_of(4, 8))


def test_each_window_has_pages_for_one_call_of_each_holder():
    """Four slots of 24 tokens need 12 pages each. A call of 4 steps reads and writes 5 + 4 - 1 = 8 tokens of a window of 5, and 6 of a window of 3: in 4 + 1 and 3 + 1
    pages of two tokens if the first is the last of its page."""
    engine = engine_of(4, 4, page_tokens=2)
    sizes = engine.page_sizes
    assert sizes.windows == (0, 5, 3)
    assert [sizes.pages_of(table) for table in range(3)] == [4 * 12, 4 * 5, 4 * 4]
    assert [layer.values.shape[0] for layer in engine.state_structs.layers] == [16, 48, 20, 16]
    assert {layer.values.shape[0] for layer in engine_of(4, 8).state_structs.layers} == {4}, "whole slots"


def test_the_sampler_agrees_with_the_trainer():
    assert np.abs(whole.differences(dense(), config=CONFIG)).max() <= 2e-5


@pytest.mark.parametrize(
    ("slots", "steps", "how"),
    [
        # Slow: compile further samplers. With pages for two of the longest sequences, responses are preempted.
        pytest.param(4, 4, {"page_tokens": 2}, marks=pytest.mark.slow),
        (16, 3, {"page_tokens": 2, "cache_tokens": 48}),
        pytest.param(8, 1, {"page_tokens": 1, "cache_tokens": 24}, marks=pytest.mark.slow),
    ],
)
def test_freed_pages_change_no_response(slots, steps, how):
    whole.assert_same(sample(engine_of(slots, steps, **how)), dense())


# Slow with few pages: compiles another sampler. The test above preempts, and tests/sampling/round_sampler_test.py pauses with few pages.
@pytest.mark.parametrize("cache_tokens", [0, pytest.param(48, marks=pytest.mark.slow)])
def test_paused_responses_continue_with_the_pages_of_their_windows(cache_tokens):
    """Twelve responses in flight take turns in four slots."""
    engine = engine_of(4, 4, in_flight=12, page_tokens=2, cache_tokens=cache_tokens)
    flight = Flight(ASKED, in_flight=12).to_the_end(rounds_of(engine, weights=weights()))
    assert_the_same(flight, dense())


def test_episodes_continue_with_the_pages_of_their_windows():
    """The trainer computes the same log-probabilities for each context as a whole."""
    engine = engine_of(8, 3, has_turns=True, page_tokens=2)
    kept = sample(engine, environments=Appending(new_context, turn_tokens=3))
    assert np.abs(whole.differences(kept, config=CONFIG)).max() <= 2e-5


# Slow: compiles two samplers. Batch invariance without windows is tested in continuous_batching_test.py.
@pytest.mark.slow
def test_batch_invariant_sampling_changes_no_bit():
    few, many = (
        sample(engine_of(slots, steps, batch_invariant=True, page_tokens=2))
        for slots, steps in ((8, 4), (32, 3))
    )
    whole.assert_same(few, many, logprob_tolerance=0)
