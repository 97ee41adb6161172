"""The engine adapter against JetStream's own interface."""

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
from dapo_jax.serving import adapter, jetstream_server
from dapo_jax.serving.adapter import BoundedPrompt, JetStreamEngine, JetStreamTokenizer
from dapo_jax.serving.serve import ServeOptions, serve, serving_engine
from dapo_jax.testing import tiny_decoder_config, tiny_params
from dapo_jax.text.formatting import PromptFormat
from dapo_jax.text.tokenizers import CharTokenizer

TOKENIZER = CharTokenizer("abcdefghijklmnopqr")
CONFIG = tiny_decoder_config(vocab_size=TOKENIZER.vocab_size, layers=1)
SLOTS, CAPACITY, STEPS = 3, 24, 4
PROMPT = np.array([5, 9, 3, 12, 7], np.int32)
MESH = make_mesh(devices=jax.devices()[:1])


def decoder_of(**pages):
    return DecoderEngine(
        CONFIG, slots=SLOTS, capacity=CAPACITY, steps_per_call=STEPS, stop_ids=(TOKENIZER.eos_id,), mesh=MESH, **pages
    )  # fmt: skip


@pytest.fixture(scope="module")
def weights():
    """The weights of two models."""
    transfer = weight_transfer(tiny_params(CONFIG), MESH, dtype="float32")
    return [transfer(tiny_params(CONFIG, seed=seed)) for seed in (1, 2)]


@pytest.fixture(scope="module")
def decoder():
    return decoder_of()


@pytest.fixture(scope="module")
def serving(decoder, weights):
    """Makes adapters, which hold a server's state, around one decoder."""

    def make(temperature=0.0, engine=decoder, max_prefill_length=16):
        return JetStreamEngine(
            engine, weights[0], TOKENIZER, MESH, decoding=decoding(temperature=temperature), key=jax.random.key(0),
            max_prefill_length=max_prefill_length,
        )  # fmt: skip

    return make


@pytest.fixture(scope="module")
def sampled(decoder):
    """(weights, limit) -> the greedy response to PROMPT by the library's own sampler."""

    def sample(weights, limit):
        left = [Prompt(ordinal=0, text="", tokens=PROMPT, answer="")]
        ((_, (response,)),) = Sampler(decoder, prefill_prompts=1).sample(
            weights, lambda count: [left.pop() for _ in left[:1]], key=jax.random.key(0), decoding=decoding(temperature=0.0),
            samples_per_prompt=1, max_response_tokens=limit,
        )  # fmt: skip
        return response.tokens.tolist()

    return sample


def prefilled(engine, limit=9, abandoned=lambda: False):
    tokens = np.pad(PROMPT, (0, 16 - len(PROMPT)))
    prompt = BoundedPrompt(tokens=tokens, max_response_tokens=limit, abandoned=abandoned)
    return engine.prefill(params=engine.load_params(), padded_tokens=prompt, true_length=len(PROMPT))


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


def first_answer(engine, calls=3, **prompt):
    state = engine.insert(prefilled(engine, **prompt), engine.init_decode_state(), 0)
    return answers(engine, state, [0], calls)[0][0]


@contextmanager
def programs_compiled(caplog):
    """The names of the programs that XLA compiles inside the block."""
    names = []
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        caplog.clear()
        yield names
    lines = (record.getMessage() for record in caplog.records)
    names += [line.split()[1] for line in lines if line.startswith("Compiling ")]


def test_results_have_jetstreams_layout(serving, sampled, weights):
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
    assert first.data[0].tolist() == [*sampled(weights[0], 9)[:4], 1, 1, 1, 1, 4]
    assert first.data[1:, 4:].sum() == 0
    _, second = engine.generate(engine.load_params(), state)
    assert second.convert_to_numpy().data[0, -1] == 8


def test_a_response_has_exactly_as_many_tokens_as_its_limit(serving, sampled, weights):
    """9 = 4 + 4 + 1. Then no token is valid, which ends the response in JetStream."""
    engine = serving()
    state = engine.insert(prefilled(engine, limit=9), engine.init_decode_state(), 1)
    [tokens], state = answers(engine, state, [1], calls=3)
    assert tokens == sampled(weights[0], 9)
    assert len(tokens) == 9
    assert answers(engine, state, [1], calls=1)[0] == [[]]


def test_a_cache_in_pages_gives_the_same_tokens(serving, weights, sampled):
    """Each slot twice, so that pages are reused; then two slots share the full page of a prompt."""
    engine = serving(engine=decoder_of(page_tokens=4))
    expected, state = sampled(weights[0], 9), engine.init_decode_state()
    for slot in (0, 2, 1, 2, 0, 1):
        tokens, state = answers(engine, engine.insert(prefilled(engine), state, slot), [slot], calls=3)
        assert tokens == [expected]
    state = engine.bulk_insert(prefilled(engine), state, [0, 2])
    assert answers(engine, state, [0, 2], calls=3)[0] == [expected, expected]


def test_a_cache_with_too_few_pages_is_refused(serving):
    """17 pages of 4 tokens, where 3 slots of 24 tokens may need 18."""
    with pytest.raises(ValueError, match=r"17 pages.* need 18"):
        serving(engine=decoder_of(page_tokens=4, cache_tokens=17 * 4))


def test_an_array_is_a_prompt_without_a_limit(serving, sampled, weights):
    """JetStream's own driver passes arrays. The response may fill the slot."""
    engine = serving()
    tokens = np.pad(PROMPT, (0, 11))
    prefix = engine.prefill(params=weights[0], padded_tokens=tokens, true_length=len(PROMPT))
    state = engine.insert(prefix, engine.init_decode_state(), 0)
    assert answers(engine, state, [0], calls=6)[0] == [sampled(weights[0], CAPACITY - len(PROMPT))]


def test_new_weights_take_effect_at_the_next_call_and_compile_nothing(serving, sampled, weights, caplog):
    with programs_compiled(caplog) as seen:
        jax.jit(lambda x: x + 1)(np.float32(1))
    assert seen  # otherwise the last assertion would always hold
    engine = serving()
    engine.warm_up()
    params = engine.load_params()  # JetStream loads parameters once
    with programs_compiled(caplog) as compiled:
        before = first_answer(engine)
        engine.swap(lambda: weights[1])
        assert engine.load_params() is params
        after = first_answer(engine)
    assert (before, after) == (sampled(weights[0], 9), sampled(weights[1], 9))
    assert before != after
    assert compiled == []


@pytest.mark.parametrize("how", ["abandoned", "freed"])
def test_a_slot_whose_client_has_left_ends_at_the_next_call(how, serving):
    engine, gone = serving(), []
    prefix = prefilled(engine, limit=19, abandoned=lambda: bool(gone))
    state = engine.insert(prefix, engine.init_decode_state(), 2)
    state = engine.insert(prefilled(engine, limit=19), state, 0)
    [tokens], state = answers(engine, state, [2], calls=1)
    assert len(tokens) == STEPS
    if how == "freed":
        engine.free_resource(2)
    else:
        gone.append(True)
    (left, other), state = answers(engine, state, [2, 0], calls=1)
    assert (left, len(other)) == ([], STEPS)
    # The next response in the slot is not affected.
    state = engine.insert(prefilled(engine), state, 2)
    assert answers(engine, state, [2], calls=1)[0] == [tokens]


def test_responses_of_a_group_differ_and_repeat(serving):
    def group():
        engine = serving(temperature=1.0)
        state = engine.bulk_insert(prefilled(engine), engine.init_decode_state(), list(range(SLOTS)))
        return answers(engine, state, range(SLOTS), calls=1)[0]

    found = group()
    assert len({tuple(tokens) for tokens in found}) == SLOTS
    assert found == group()


def test_a_warm_up_does_not_change_sampled_tokens(serving):
    warm, cold = serving(temperature=1.0), serving(temperature=1.0)
    warm.warm_up()
    assert first_answer(warm, 1) == first_answer(cold, 1)


@pytest.mark.parametrize("length", [0, 8, 17, 65536])
def test_a_prefill_length_that_jetstream_does_not_pad_to_is_refused(length, serving):
    with pytest.raises(ValueError, match=f"max_prefill_length={length} .* 16 to 32768"):
        serving(max_prefill_length=length)


@pytest.mark.parametrize("length", [0, 17, CAPACITY])
def test_a_prompt_that_does_not_fit_is_refused(length, serving):
    """JetStream's own tokenizers cut a prompt to 16 tokens and still report a length of 17."""
    engine, tokens = serving(), np.zeros(16, np.int32)
    with pytest.raises(ValueError, match=f"a prompt of {length} tokens .* needs 1 to 16"):
        engine.prefill(params=engine.load_params(), padded_tokens=tokens, true_length=length)
    with pytest.raises(ValueError, match="existing_prefix"):
        engine.prefill(params=engine.load_params(), existing_prefix=1, padded_tokens=tokens, true_length=1)


def test_the_tokenizer_pads_as_jetstream_does_and_adds_no_token(serving):
    tokenizer = serving().build_tokenizer(serving().get_tokenizer())
    tokens, length = tokenizer.encode("abc", is_bos=True, max_prefill_length=16, jax_padding=True)
    assert (tokens.tolist(), length) == ([2, 3, 4] + [0] * 13, 3)
    assert tokenizer.decode([2, 3, 1, 4]) == "abc"
    assert tokenizer.stop_tokens == {1}
    with pytest.raises(ValueError, match=r"17 tokens.* 16"):
        tokenizer.encode("a" * 17)
    with pytest.raises(ValueError, match=r"token id 20 .* 0 to 19"):
        tokenizer.prompt([3, 20])


def test_the_prompt_format_is_applied_to_texts_and_not_to_ids():
    tokenizer = JetStreamTokenizer(TOKENIZER, 16, PromptFormat(template="a{prompt}b"))
    assert tokenizer.prompt("c").tolist() == [2, 4, 3]
    assert tokenizer.prompt([4]).tolist() == [4]


@pytest.fixture
def model(tmp_path):
    Policy(decoder=CONFIG, params=tiny_params(CONFIG), tokenizer=TOKENIZER).save(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"follow_s": 1.0}, "`checkpoints`"),
        ({"max_prompt_tokens": 40, "max_response_tokens": 30}, r"70 positions.* 64, .* up to 34"),
        ({"max_prompt_tokens": 8, "max_response_tokens": 80}, "up to 0"),
        ({"chat": True, "max_prompt_tokens": 8, "max_response_tokens": 8}, "--chat"),
        ({"slots": 9, "max_prompt_tokens": 8, "max_response_tokens": 8}, "slots=9"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_the_model_are_configuration_errors(options, message, model):
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
    ((engine, weights, given),) = made
    assert (engine.slots, engine.capacity, engine.steps_per_call, given["max_prefill_length"]) == (
        8,
        24,
        2,
        32,
    )
    assert jax.tree.leaves(weights["ends"]["embedding"])[0].dtype == "bfloat16"
    assert given["decoding"] == decoding(temperature=0.7, top_p=0.9, top_k=5)
    assert given["key"] == jax.random.key(3)
    assert given["prompt_format"] == PromptFormat()


def test_importing_jetstream_does_not_change_the_root_logger():
    root = logging.getLogger()
    assert root.level != logging.DEBUG
    assert jetstream_server.orchestrator.handler not in root.handlers


def test_a_port_that_is_taken_is_refused(serving):
    """By default gRPC shares a port among servers, and each gets some of the requests."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{port}.*--port 0"):
            jetstream_server.Server(
                serving(), host="127.0.0.1", port=port, max_prompt_tokens=16, max_response_tokens=8
            )


def test_the_generate_thread_survives_jetstreams_own_race(monkeypatch, serving):
    """JetStream's assertion fails if the last response ends just before it: then every slot is free."""
    driver = object.__new__(jetstream_server.Driver)  # without threads, whose errors would kill this process
    driver.live, driver._engine, outcomes = True, serving(), [AssertionError(), None]
    driver._generate_slots = [jetstream_server.orchestrator.queue.Queue()]

    def their_thread(self, index):
        if outcome := outcomes.pop(0):
            raise outcome

    monkeypatch.setattr(jetstream_server.orchestrator.Driver, "_generate_thread", their_thread)
    for slot in range(SLOTS):
        driver._generate_slots[0].put(slot)
    driver._generate_thread(0)
    assert outcomes == []

    driver._generate_slots[0].get()  # one slot is in use: the assertion has another cause
    outcomes.append(AssertionError())
    with pytest.raises(AssertionError):
        driver._generate_thread(0)
