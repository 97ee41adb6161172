"""The engine adapter against JetStream's own interface."""

import jax
import numpy as np
import pytest

pytest.importorskip("jetstream", reason="needs the extra jetstream")

from jetstream.engine import engine_api

from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.weights import WeightTransfer
from dapo_jax.sampling.continuous_batching import Sampler
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.sampling.engine_spec import EngineSpec
from dapo_jax.serving.adapter import JetStreamEngine
from dapo_jax.testing import tiny_decoder_config, tiny_params
from dapo_jax.text.tokenizers import CharTokenizer

TOKENIZER = CharTokenizer("abcdefghijklmnopqr")
CONFIG = tiny_decoder_config(vocab_size=TOKENIZER.vocab_size, layers=1)
SLOTS, CAPACITY, STEPS = 3, 24, 4
PROMPT = np.array([5, 9, 3, 12, 7], np.int32)
MESH = make_mesh(devices=jax.devices()[:1])


def decoder_of(**pages):
    return DecoderEngine(
        CONFIG,
        MESH,
        EngineSpec(
            slots=SLOTS, capacity=CAPACITY, steps_per_call=STEPS, stop_ids=(TOKENIZER.eos_id,), **pages
        ),
    )


@pytest.fixture(scope="module")
def weights():
    return WeightTransfer(tiny_params(CONFIG), MESH, dtype="float32")(tiny_params(CONFIG, seed=1))


@pytest.fixture(scope="module")
def decoder():
    return decoder_of()


@pytest.fixture(scope="module")
def serving(decoder, weights):
    """Makes adapters, which hold a server's state, around one decoder."""

    def make(temperature=0.0, engine=decoder):
        return JetStreamEngine(
            engine, weights, TOKENIZER, MESH, decoding=decoding(temperature=temperature), key=jax.random.key(0)
        )  # fmt: skip

    return make


@pytest.fixture(scope="module")
def sampled(decoder, weights):
    """The greedy response to PROMPT by the library's own sampler."""
    left = [Prompt(ordinal=0, text="", tokens=PROMPT, answer="")]
    ((_, (response,)),) = Sampler(decoder, prefill_prompts=1).sample(
        weights, lambda count: [left.pop() for _ in left[:1]], key=jax.random.key(0), decoding=decoding(temperature=0.0),
        samples_per_prompt=1, max_response_tokens=CAPACITY - len(PROMPT),
    )  # fmt: skip
    return response.tokens.tolist()


def prefilled(engine):
    tokens = np.pad(PROMPT, (0, 16 - len(PROMPT)))
    return engine.prefill(params=engine.load_params(), padded_tokens=tokens, true_length=len(PROMPT))


def valid_tokens(result, slot):
    data = result.convert_to_numpy().get_result_at_slot(slot)
    return data.tokens[data.valid.astype(bool)].tolist()


def answers(engine, state, slots, calls):
    """The tokens of each slot in so many calls of `generate`, and the state after them."""
    tokens = [[] for _ in slots]
    for _ in range(calls):
        state, result = engine.generate(engine.load_params(), state)
        for found, slot in zip(tokens, slots, strict=True):
            found += valid_tokens(result, slot)
    return tokens, state


def test_results_have_jetstreams_layout(serving, sampled):
    """Per slot 4 tokens, 4 validities and a length. The first slot has a response, the others are free."""
    engine = serving()
    assert isinstance(engine, engine_api.Engine)
    assert (engine.max_concurrent_decodes, engine.samples_per_slot) == (SLOTS, 1)
    state = engine.insert(prefilled(engine), engine.init_decode_state(), 0)
    state, first = engine.generate(engine.load_params(), state)
    first.copy_to_host_async()
    first = first.convert_to_numpy()
    assert isinstance(first, engine_api.ResultTokens)
    assert (first.tokens_idx, first.valid_idx, first.length_idx) == ((0, 4), (4, 8), (8, 9))
    assert first.data[0].tolist() == [*sampled[:4], 1, 1, 1, 1, 4]
    assert first.data[1:, 4:].sum() == 0
    _, second = engine.generate(engine.load_params(), state)
    assert second.convert_to_numpy().data[0, -1] == 8


def test_a_response_may_fill_its_slot(serving, sampled):
    """5 + 19 tokens. Then no token is valid, which ends the response in JetStream."""
    engine = serving()
    state = engine.insert(prefilled(engine), engine.init_decode_state(), 1)
    [tokens], state = answers(engine, state, [1], calls=5)
    assert tokens == sampled
    assert len(tokens) == CAPACITY - len(PROMPT)
    assert answers(engine, state, [1], calls=1)[0] == [[]]


def test_a_cache_in_pages_gives_the_same_tokens(serving, sampled):
    """Each slot twice, so that pages are reused."""
    engine = serving(engine=decoder_of(page_tokens=4))
    expected, state = sampled[:12], engine.init_decode_state()
    for slot in (0, 2, 1, 2, 0, 1):
        tokens, state = answers(engine, engine.insert(prefilled(engine), state, slot), [slot], calls=3)
        assert tokens == [expected]


def test_a_cache_with_too_few_pages_is_refused(serving):
    """17 pages of 4 tokens, where 3 slots of 24 tokens may need 18."""
    with pytest.raises(ValueError, match=r"17 pages.* need 18"):
        serving(engine=decoder_of(page_tokens=4, cache_tokens=17 * 4))


@pytest.mark.parametrize("length", [0, 17, CAPACITY])
def test_a_prompt_that_does_not_fit_is_refused(length, serving):
    """JetStream's own tokenizers cut a prompt to 16 tokens and still report a length of 17."""
    engine, tokens = serving(), np.zeros(16, np.int32)
    with pytest.raises(ValueError, match=f"a prompt has {length} tokens .* needs 1 to 16"):
        engine.prefill(params=engine.load_params(), padded_tokens=tokens, true_length=length)
    with pytest.raises(ValueError, match="existing_prefix"):
        engine.prefill(params=engine.load_params(), existing_prefix=1, padded_tokens=tokens, true_length=1)


def test_the_tokenizer_adds_no_token(serving):
    tokenizer = serving().build_tokenizer(serving().get_tokenizer())
    tokens, length = tokenizer.encode("abc", is_bos=True, max_prefill_length=16, jax_padding=True)
    assert (tokens.tolist(), length) == ([2, 3, 4], 3)
    assert tokenizer.decode([2, 3, 1, 4]) == "abc"
    assert tokenizer.stop_tokens == {1}
