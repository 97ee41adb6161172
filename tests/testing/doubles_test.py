"""The test doubles keep the promises that the real ones make."""

import jax
import numpy as np
import pytest

from dapo_jax.models.attention_mixer import ATTENTION
from dapo_jax.models.gated_delta import GatedDelta
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.interface import Engine, Insertion
from dapo_jax.testing import ScriptedEngine, tiny_decoder_config, tiny_params

KEY = jax.random.key(0)


def scripted(responses, *, steps=4, slots=3):
    """Response `index` of any prompt is `responses[index]`."""
    return ScriptedEngine(
        lambda _, index: responses[index], slots=slots, capacity=16, steps_per_call=steps, stop_ids=[1]
    )


def started(engine, limits, *, slots=None, length=2):
    """A state with responses 0, 1, ... in the given slots."""
    count = len(limits)
    (((_, prefix, _),),) = engine.prefill({}, [np.full(length, 5, np.int32)])
    insertion = Insertion(
        slots=np.array(range(count) if slots is None else slots, np.int32), prompts=np.zeros(count, np.int32),
        ordinals=np.zeros(count, np.int32), indices=np.arange(count, dtype=np.int32),
        limits=np.array(limits, np.int32), drawn=np.zeros(count, np.int32), turns=np.zeros(count, np.int32), fills=(),
    )  # fmt: skip
    return engine.insert(prefix, engine.init_decode_state(), insertion, KEY)


def valid_tokens(result):
    return [row[mask].tolist() for row, mask in zip(result.tokens, result.valid, strict=True)]


def test_the_scripted_engine_is_an_engine():
    assert isinstance(scripted([[1]]), Engine)


def test_slots_follow_their_script_to_the_end_token_or_the_limit_and_states_are_values():
    engine = scripted([[7, 8, 1, 9], [5, 6, 7, 8, 9, 9]])
    state = started(engine, [10, 5], slots=[2, 0])
    for _ in range(2):
        later, first = engine.generate({}, state, decoding())
        assert valid_tokens(first) == [[5, 6, 7, 8], [], [7, 8, 1]]
    assert first.live.tolist() == [True, False, False]
    assert first.logprobs[2].tolist() == [-7.0, -8.0, -1.0, 0.0]
    _, second = engine.generate({}, later, decoding())
    assert valid_tokens(second) == [[9], [], []]
    assert not second.live.any()
    assert engine.live_slots == [2, 2, 2, 1, 2, 2, 2, 1, 1]


def test_generate_returns_early_when_too_few_live_but_always_takes_a_step():
    engine = scripted([[7, 1], [5] * 9, [6] * 9])
    state, result = engine.generate({}, started(engine, [9, 9, 9]), decoding(), 3)
    assert [len(row) for row in valid_tokens(result)] == [2, 2, 2]
    _, result = engine.generate({}, state, decoding(), 3)
    assert [len(row) for row in valid_tokens(result)] == [0, 1, 1]


def test_a_released_slot_is_free():
    engine = scripted([[7, 8, 9, 1], [5, 6, 1]], steps=2)
    state = engine.release(started(engine, [9, 9]), [1])
    state, result = engine.generate({}, state, decoding())
    assert valid_tokens(result) == [[7, 8], [], []]
    assert engine.released == [1]


@pytest.mark.parametrize(
    ("script", "limit", "length", "message"),
    [
        (
            [7, 8],
            5,
            2,
            r"response 0 to prompt 0 has 2 tokens, but none of the end tokens \(1,\); .* limit of 5",
        ),
        ([1], 10, 7, r"7 tokens .* 17 tokens exceed capacity=16"),
    ],
)
def test_a_script_that_runs_out_or_outgrows_its_slot_is_refused(script, limit, length, message):
    with pytest.raises(ValueError, match=message):
        started(scripted([script]), [limit], length=length)


def test_tiny_parameters_have_nothing_at_its_start_value():
    config = tiny_decoder_config(qkv_bias=True, qk_norm="head", tied_embeddings=False)
    for leaf in map(np.asarray, jax.tree.leaves(tiny_params(config))):
        assert leaf.dtype == np.float32
        assert 0.1 < leaf.std() < 0.4
    leaves = zip(*(jax.tree.leaves(tiny_params(config, seed=seed)) for seed in (0, 0, 1)), strict=True)
    for one, same, other in leaves:
        np.testing.assert_array_equal(one, same)
        assert (np.asarray(one) != np.asarray(other)).all()


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_norms_of_tiny_parameters_have_factors_near_one(offset):
    """Factors of 2 would make scores of normed queries and keys 4 times as large, and with them the rounding errors of log-probabilities."""
    config = tiny_decoder_config(
        layers=2, qk_norm="head", norm_offset=offset, mixers=(GatedDelta(2, 4, 8, 8), ATTENTION)
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(tiny_params(config)):
        name = jax.tree_util.keystr(path)
        if "norm" in name:
            factors = np.asarray(leaf) + (0.0 if "delta_norm" in name else offset)
            assert 0.7 < factors.mean() < 1.3, name
