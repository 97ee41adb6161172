"""The cache that would fit, each number derived by hand."""

from dataclasses import replace

import pytest

from dapo_jax.config import (
    DataConfig,
    ModelConfig,
    OverlongConfig,
    RewardConfig,
    SamplingConfig,
    TrainConfig,
)
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.plan.cache_fit import cache_fit
from dapo_jax.plan.memory import Phase
from dapo_jax.plan.workload import Assumptions, workload_of
from dapo_jax.sampling.pages import PageSizes

SMALL = DecoderConfig(vocab_size=32, embed_dim=8, layers=3, heads=4, kv_heads=2, head_dim=6, mlp_dim=16)
CONFIG = TrainConfig(
    run_dir="out",
    model=ModelConfig(compute_dtype="bfloat16"),
    data=DataConfig(max_prompt_tokens=6),
    sampling=SamplingConfig(max_response_tokens=10, slots=64),
    reward=RewardConfig(overlong=OverlongConfig(buffer_tokens=2)),
)
PAGES = PageSizes(holders=64, capacity=16, page_tokens=4, pools=2, pool_pages=30)


def fit(limit, slots=64, parts=("decode state",)):
    """A phase of 2500 bytes; a token has 10, and each of 2 devices 30 pages of 4."""
    config = replace(CONFIG, sampling=replace(CONFIG.sampling, slots=slots))
    phase = Phase(name="decode", program="generate", parts=dict.fromkeys(parts, 2500 // len(parts)))
    work = workload_of(config, Assumptions(informative=0.5))
    return cache_fit(config, SMALL, work, PAGES, [phase], limit=limit, token_bytes=10, spread=2)


@pytest.mark.parametrize(("limit", "tokens"), [(3000, 168), (2500, 120), (2000, 68)])
def test_what_is_left_is_filled_with_whole_pages(limit, tokens):
    """1200 bytes of the phase are the 120 tokens that there are: with 500 more left they are 170, in pages of 4 168; on two devices. A response
    holds a mean context of 6 + 4.5 tokens and half a page."""
    found = fit(limit)
    assert (found.tokens, found.slots) == (2 * tokens, 64)
    assert found.in_flight == pytest.approx(2 * (limit - 1300) / 10 / 12.5)


def test_responses_beyond_the_slots_need_logits_too():
    """4 slots of a device hold 4 responses. Each more takes 125 bytes of cache and 4 copies of 32 logits of 4 bytes: of the 1700 that are left and
    the 4 x 512 that are there already, (1700 + 2048) / 637 = 5.88 responses of 12.5 tokens: 73, in whole pages 72."""
    found = fit(3000, slots=8)
    assert found.in_flight == pytest.approx(2 * 3748 / 637)
    assert (found.tokens, found.slots) == (2 * 72, 10)


def test_nothing_fits_where_no_longest_sequence_would_and_nothing_is_known_without_a_phase():
    """A slot may come to 16 tokens, 160 bytes."""
    assert fit(1300 + 159) is None
    assert fit(1300 + 160).tokens == 32
    assert fit(3000, parts=("train state",)) is None
