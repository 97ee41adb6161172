"""The adapter against JetStream's own package: its interface, and what only the adapter knows."""

import logging
import socket
from contextlib import contextmanager

import jax
import numpy as np
import pytest

pytest.importorskip("jetstream", reason="needs the extra jetstream")

from jetstream.engine import engine_api

from dapo_jax.config import ConfigError
from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.weights import weight_transfer
from dapo_jax.run.policy import Policy, find_policy
from dapo_jax.sampling.continuous_batching import Sampler
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.serving import adapter, jetstream_fixes, orchestrator
from dapo_jax.serving.adapter import JetStreamEngine
from dapo_jax.serving.engine_types import BoundedPrompt
from dapo_jax.serving.serve import ServeOptions, serve, serving_engine
from dapo_jax.serving.server import Server
from dapo_jax.serving.tokenizer import JetStreamTokenizer
from dapo_jax.testing import tiny_decoder_config, tiny_params
from dapo_jax.text.formatting import PromptFormat
from dapo_jax.text.tokenizers import CharTokenizer

TOKENIZER = CharTokenizer("abcdefghijklmnopqr")
CONFIG = tiny_decoder_config(vocab_size=TOKENIZER.vocab_size, layers=1)
SLOTS, CAPACITY, STEPS = 3, 24, 4
PROMPT = np.array([5, 9, 3, 12, 7], np.int32)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def transfer(mesh):
    return weight_transfer(tiny_params(CONFIG), mesh, dtype="float32")


@pytest.fixture(scope="module")
def weights(transfer):
    """Of two models."""
    return [transfer(tiny_params(CONFIG, seed=seed)) for seed in (1, 2)]


@pytest.fixture(scope="module")
def decoder(mesh):
    return DecoderEngine(
        CONFIG, slots=SLOTS, capacity=CAPACITY, steps_per_call=STEPS, stop_ids=(TOKENIZER.eos_id,), mesh=mesh
    )


@pytest.fixture(scope="module")
def serving(decoder, mesh, weights):
    """Makes adapters over the one decoder; it is they that hold a server's state."""

    def make(temperature=0.0, **how):
        how = {"key": jax.random.key(0), "max_prefill_length": 16, **how}
        return JetStreamEngine(
            decoder, weights[0], TOKENIZER, mesh, decoding=decoding(temperature=temperature), **how
        )

    return make


@pytest.fixture(scope="module")
def sampled(decoder):
    """The direct answer: (weights, limit) -> the greedy response to PROMPT by the library's own sampler."""

    def sample(weights, limit):
        left = [Prompt(ordinal=0, text="", tokens=PROMPT, answer="")]
        ((_, (response,)),) = Sampler(decoder, prefill_prompts=1).sample(
            weights, lambda count: [left.pop() for _ in left[:1]], key=jax.random.key(0), decoding=decoding(temperature=0.0),
            samples_per_prompt=1, max_response_tokens=limit,
        )  # fmt: skip
        return response

    return sample


@pytest.fixture(scope="module")
def paged(mesh):
    """(cache_tokens) -> a decoder whose slots take pages of 4 tokens, 6 for a whole one."""

    def make(cache_tokens=0):
        return DecoderEngine(
            CONFIG, slots=SLOTS, capacity=CAPACITY, steps_per_call=STEPS, stop_ids=(TOKENIZER.eos_id,), mesh=mesh,
            page_tokens=4, cache_tokens=cache_tokens,
        )  # fmt: skip

    return make


def padded(prompt=PROMPT, limit=9, abandoned=lambda: False):
    tokens = np.pad(prompt, (0, 16 - len(prompt)))
    return BoundedPrompt(tokens=tokens, max_response_tokens=limit, abandoned=abandoned)


def prefilled(engine, **prompt):
    return engine.prefill(
        params=engine.load_params(), padded_tokens=padded(**prompt), true_length=len(PROMPT)
    )


def drawn(result, slot):
    """The valid tokens of a slot, as JetStream reads them."""
    data = result.convert_to_numpy().get_result_at_slot(slot)
    return data.tokens[data.valid.astype(bool)].tolist()


def answer(engine, state, slot, calls):
    """Tokens of so many `generate`s, and the state after them."""
    tokens = []
    for _ in range(calls):
        state, result = engine.generate(engine.load_params(), state)
        tokens += drawn(result, slot)
    return tokens, state


@contextmanager
def programs_compiled(caplog):
    """The names of the programs that XLA compiles inside the block."""
    names = []
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        caplog.clear()
        yield names
    lines = (record.getMessage() for record in caplog.records)
    names += [line.split()[1] for line in lines if line.startswith("Compiling ")]


def test_it_is_an_engine_of_jetstream_with_every_member(serving):
    engine = serving()
    assert isinstance(engine, engine_api.Engine)
    assert not type(engine).__abstractmethods__
    assert (engine.max_concurrent_decodes, engine.samples_per_slot) == (SLOTS, 1)
    # Of the unreleased main branch.
    assert (engine.use_chunked_prefill, engine.prefill_chunk_size) == (False, engine.max_prefill_length)


def test_results_lie_where_jetstream_looks_for_them(serving, sampled, weights):
    """4 tokens, 4 validities and a length to a slot, of which the first has one response and the others none."""
    engine = serving()
    response = sampled(weights[0], 9)
    state = engine.insert(prefilled(engine), engine.init_decode_state(), 0)
    state, first = engine.generate(engine.load_params(), state)
    first.copy_to_host_async()
    first = first.convert_to_numpy()
    assert isinstance(first, engine_api.ResultTokens)
    assert (first.tokens_idx, first.valid_idx, first.length_idx) == ((0, 4), (4, 8), (8, 9))
    assert first.data.shape == (SLOTS, 9)
    assert first.data[0].tolist() == [*response.tokens[:4], 1, 1, 1, 1, 4]
    assert first.data[1:, 4:].sum() == 0
    np.testing.assert_allclose(first.log_prob[0], response.logprobs[:4], atol=1e-5)
    state, second = engine.generate(engine.load_params(), state)
    assert second.convert_to_numpy().data[0, -1] == 8


def test_a_response_has_exactly_the_tokens_that_were_asked_for(serving, sampled, weights):
    """9 = 4 + 4 + 1; then nothing, which is how JetStream learns of the end."""
    engine = serving()
    state = engine.insert(prefilled(engine, limit=9), engine.init_decode_state(), 1)
    tokens, state = answer(engine, state, 1, calls=3)
    assert tokens == sampled(weights[0], 9).tokens.tolist()
    assert len(tokens) == 9
    assert answer(engine, state, 1, calls=1)[0] == []


def test_a_cache_in_pages_answers_as_one_of_whole_slots_does(paged, mesh, weights, sampled):
    """Slot after slot in turn, each twice, so that pages come back and are written again; two slots share a prompt's full page."""
    engine = JetStreamEngine(
        paged(), weights[0], TOKENIZER, mesh,
        decoding=decoding(temperature=0.0), key=jax.random.key(0), max_prefill_length=16,
    )  # fmt: skip
    expected, state = sampled(weights[0], 9).tokens.tolist(), engine.init_decode_state()
    for slot in (0, 2, 1, 2, 0, 1):
        tokens, state = answer(engine, engine.insert(prefilled(engine), state, slot), slot, calls=3)
        assert tokens == expected
    state = engine.bulk_insert(prefilled(engine), state, [0, 2])
    drawn_together = {0: [], 2: []}
    for _ in range(3):
        state, result = engine.generate(engine.load_params(), state)
        for slot, tokens in drawn_together.items():
            tokens += drawn(result, slot)
    assert drawn_together == {0: expected, 2: expected}


def test_a_cache_smaller_than_its_slots_is_refused(paged, mesh, weights):
    """17 pages of 4 tokens, where 3 slots of 24 may need 18: JetStream takes no response back."""
    with pytest.raises(ValueError, match=r"17 pages, 3 slots of 24 tokens may need 18; .*cache_tokens at 0"):
        JetStreamEngine(
            paged(17 * 4), weights[0], TOKENIZER, mesh,
            decoding=decoding(), key=jax.random.key(0), max_prefill_length=16,
        )  # fmt: skip


def test_an_array_is_a_prompt_without_a_limit(serving, sampled, weights):
    """As JetStream's own driver hands it over: the response may fill the slot."""
    engine = serving()
    prefix = engine.prefill(params=weights[0], padded_tokens=padded().tokens, true_length=len(PROMPT))
    tokens, _ = answer(engine, engine.insert(prefix, engine.init_decode_state(), 0), 0, calls=6)
    assert tokens == sampled(weights[0], CAPACITY - len(PROMPT)).tokens.tolist()


def test_swapped_weights_take_effect_at_the_next_call_and_compile_nothing(
    serving, sampled, weights, transfer, caplog
):
    with programs_compiled(caplog) as seen:
        jax.jit(lambda x: x + 1)(np.float32(1))
    assert seen  # or nothing would be seen below either
    engine = serving()
    engine.warm_up()
    params = engine.load_params()  # JetStream asks once
    with programs_compiled(caplog) as compiled:
        before, _ = answer(engine, engine.insert(prefilled(engine), engine.init_decode_state(), 0), 0, 3)
        engine.swap(transfer(tiny_params(CONFIG, seed=2)))
        assert engine.load_params() is params
        after, _ = answer(engine, engine.insert(prefilled(engine), engine.init_decode_state(), 0), 0, 3)
    assert before == sampled(weights[0], 9).tokens.tolist()
    assert after == sampled(weights[1], 9).tokens.tolist()
    assert before != after
    assert compiled == []


def test_weights_of_another_model_are_refused(serving, mesh, weights):
    engine = serving()
    wider = tiny_decoder_config(vocab_size=TOKENIZER.vocab_size, layers=1, mlp_dim=64)
    other = weight_transfer(tiny_params(wider), mesh, dtype="float32")(tiny_params(wider))
    with pytest.raises(ValueError, match=r"'down'.*float32\[32, 64\].*served one is float32\[32, 48\]"):
        engine.swap(other)
    with pytest.raises(ValueError, match="another structure"):
        engine.swap({"ends": weights[0]["ends"]})
    assert engine.load_params().current is weights[0]


@pytest.mark.parametrize("how", ["abandoned", "freed"])
def test_a_slot_that_nobody_waits_for_ends_at_the_next_call(how, serving):
    engine, gone = serving(), []
    prefix = prefilled(engine, limit=19, abandoned=lambda: bool(gone))
    state = engine.insert(prefix, engine.init_decode_state(), 2)
    state = engine.insert(prefilled(engine, limit=19), state, 0)
    tokens, state = answer(engine, state, 2, calls=1)
    assert len(tokens) == STEPS
    if how == "freed":
        engine.free_resource(2)
    else:
        gone.append(True)
    state, result = engine.generate(engine.load_params(), state)
    assert drawn(result, 2) == []
    assert len(drawn(result, 0)) == STEPS
    # The next owner of the slot has nothing to do with it.
    state = engine.insert(prefilled(engine), state, 2)
    assert answer(engine, state, 2, calls=1)[0] == tokens


def test_a_group_is_prefilled_once_and_each_response_draws_its_own(serving):
    def group():
        engine = serving(temperature=1.0)
        prefix, first = engine.prefill_multisampling(
            params=engine.load_params(), padded_tokens=padded(), true_length=len(PROMPT), num_samples=SLOTS
        )
        assert [len(first.get_result_at_slot(slot).tokens) for slot in range(1)] == [SLOTS]
        state = engine.bulk_insert(prefix, engine.init_decode_state(), list(range(SLOTS)))
        state, result = engine.generate(engine.load_params(), state)
        return [drawn(result, slot) for slot in range(SLOTS)]

    found = group()
    assert len({tuple(tokens) for tokens in found}) == SLOTS
    assert found == group()


def test_warming_up_changes_nothing_that_is_drawn(serving):
    def first(warm):
        engine = serving(temperature=1.0)
        if warm:
            engine.warm_up()
        return answer(engine, engine.insert(prefilled(engine), engine.init_decode_state(), 0), 0, 1)[0]

    assert first(warm=True) == first(warm=False)


@pytest.mark.parametrize("length", [0, 8, 17, 24, 48, 65536])
def test_a_prefill_length_that_jetstream_does_not_pad_to_is_refused(length, serving):
    with pytest.raises(
        ValueError, match=f"max_prefill_length={length} must be a power of two from 16 to 32768"
    ):
        serving(max_prefill_length=length)


@pytest.mark.parametrize("length", [0, 17, CAPACITY])
def test_a_prompt_that_does_not_fit_is_refused(length, serving):
    """JetStream's own tokenizers cut a prompt to 16 tokens and still say that it has 17."""
    engine = serving()
    with pytest.raises(ValueError, match=f"a prompt of {length} tokens .* needs 1 to 16"):
        engine.prefill(params=engine.load_params(), padded_tokens=padded().tokens, true_length=length)
    with pytest.raises(ValueError, match="existing_prefix"):
        engine.prefill(
            params=engine.load_params(), existing_prefix=1, padded_tokens=padded().tokens, true_length=1
        )


def test_the_tokenizer_pads_as_jetstream_does_and_adds_nothing(serving):
    tokenizer = serving().build_tokenizer(serving().get_tokenizer())
    tokens, length = tokenizer.encode("abc", is_bos=True, max_prefill_length=16, jax_padding=True)
    assert (tokens.tolist(), length) == ([2, 3, 4] + [0] * 13, 3)
    assert tokenizer.decode([2, 3, 1, 4]) == "abc"
    assert tokenizer.stop_tokens == {1}
    with pytest.raises(ValueError, match="17 tokens, the longest may have 16"):
        tokenizer.encode("a" * 17)
    with pytest.raises(ValueError, match="token id 20 is not in the vocabulary of 20 ids, 0 to 19"):
        tokenizer.prompt([3, 20])


def test_a_text_is_put_through_the_prompt_format_and_ids_are_not():
    tokenizer = JetStreamTokenizer(TOKENIZER, 16, PromptFormat(template="a{prompt}b"))
    assert tokenizer.prompt("c").tolist() == [2, 4, 3]
    assert tokenizer.prompt([4]).tolist() == [4]


@pytest.fixture
def model(tmp_path):
    policy = Policy(decoder=CONFIG, params=tiny_params(CONFIG), tokenizer=TOKENIZER)
    policy.save(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"follow_s": 1.0}, "has no folder `checkpoints`"),
        ({"max_prompt_tokens": 40, "max_response_tokens": 30}, r"are 70 positions; the model has 64, .* up to 34"),
        ({"max_prompt_tokens": 8, "max_response_tokens": 80}, "prompts of up to 0"),
        ({"chat": True, "max_prompt_tokens": 8, "max_response_tokens": 8}, "the model has none"),
        ({"temperature": -1.0, "max_prompt_tokens": 8, "max_response_tokens": 8}, "temperature=-1.0"),
        ({"slots": 9, "max_prompt_tokens": 8, "max_response_tokens": 8}, "slots=9 must be a multiple"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_model_is_a_configuration_error(options, message, model):
    with pytest.raises(ConfigError, match=message):
        serve(model, ServeOptions(**{"slots": 8, "compilation_cache": "", **options}))


def test_every_option_reaches_the_engine(model, monkeypatch):
    made = []

    class Spy(JetStreamEngine):
        def __init__(self, engine, weights, *arguments, **options):
            made.append((engine, weights, options))

    monkeypatch.setattr(adapter, "JetStreamEngine", Spy)
    options = ServeOptions(
        slots=8, max_prompt_tokens=17, max_response_tokens=7, temperature=0.7, top_p=0.9, top_k=5, seed=3,
        steps_per_call=2, compute_dtype="bfloat16", compilation_cache="",
    )  # fmt: skip
    serving_engine(find_policy(model), options)
    ((engine, weights, told),) = made
    assert (engine.slots, engine.capacity, told["max_prefill_length"]) == (8, 24, 32)
    assert jax.tree.leaves(weights["ends"]["embedding"])[0].dtype == "bfloat16"
    assert told["decoding"] == decoding(temperature=0.7, top_p=0.9, top_k=5)
    assert told["key"] == jax.random.key(3)
    assert told["prompt_format"] == PromptFormat()


def test_importing_jetstream_leaves_the_root_logger_alone():
    root = logging.getLogger()
    assert root.level != logging.DEBUG
    assert jetstream_fixes.orchestrator.handler not in root.handlers


def test_a_port_that_is_taken_is_refused(serving):
    """gRPC alone would share it, and each server would get some of the requests."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen at 127.0.0.1:{port}: .*in use"):
            Server(serving(), host="127.0.0.1", port=port, max_prompt_tokens=16, max_response_tokens=8)


def test_the_generating_thread_survives_jetstreams_own_race(monkeypatch, serving):
    """Its assertion fails when the last response ends while it looks for a slot: then every slot is free."""
    driver = object.__new__(orchestrator.Driver)  # no threads: an exception in one would end this process
    driver.live, driver._engine, outcomes = True, serving(), [AssertionError(), None]
    driver._generate_slots = [jetstream_fixes.orchestrator.queue.Queue()]

    def their_thread(self, index):
        if outcome := outcomes.pop(0):
            raise outcome

    monkeypatch.setattr(jetstream_fixes.orchestrator.Driver, "_generate_thread", their_thread)
    for slot in range(SLOTS):
        driver._generate_slots[0].put(slot)
    driver._generate_thread(0)
    assert outcomes == []

    driver._generate_slots[0].get()  # one is in use: then it is something else that failed
    outcomes.append(AssertionError())
    with pytest.raises(AssertionError):
        driver._generate_thread(0)
