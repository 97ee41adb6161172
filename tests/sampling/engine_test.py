"""Prefill, insert and generate of the decoder's engine, on a tiny decoder with every option."""

import functools
import logging
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dapo_jax.models.decoder import graph_of
from dapo_jax.models.presets import Experts
from dapo_jax.models.rope import Rope
from dapo_jax.models.tensors import shapes_of
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.weights import WeightTransfer
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.sampling.engine_spec import EngineSpec
from dapo_jax.sampling.interface import Insertion
from dapo_jax.sampling.page_tables import Pages
from dapo_jax.sampling.prompt_packing import PrefillShape
from dapo_jax.testing import tiny_decoder_config, tiny_params

CONFIG = tiny_decoder_config(qkv_bias=True, qk_norm="head", tied_embeddings=False)
WIDE = replace(CONFIG, head_dim=64)
"""With heads as wide as the narrowest block of the GPU's kernel."""
SWITCHED = tiny_decoder_config(
    layers=3, qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm="all", norm_place="both", norm_offset=1.0,
    windows=(6, 0, 6), ropes=(Rope(theta=100.0), None), rope_of_layer=(0, 1, 0), query_scale=0.3, query_growth=(0.1, 8),
    score_cap=5.0, logit_cap=8.0, logit_divisor=1.5, embed_scale=3.3, residual_scale=0.7, activation="gelu_tanh",
    clip_qkv=1.2, tied_embeddings=False, sinks=True,
)  # fmt: skip
"""With every switch of the decoder."""
EXPERTS = tiny_decoder_config(
    layers=3,
    mlps=(Experts(8, 2, normalize=True, biases=True),),
    gate_limit=0.5,
    gate_alpha=1.7,
    mlp_dim=16,
    qk_norm="all",
    tied_embeddings=False,
)
SLOTS, CAPACITY, STEPS, EOS = 4, 24, 8, 1
GREEDY = decoding(temperature=0.0)
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(devices=jax.devices()[:1])


def made(mesh, config=CONFIG, **changes):
    sizes = {"slots": SLOTS, "capacity": CAPACITY, "steps_per_call": STEPS, "stop_ids": [EOS]}
    return DecoderEngine(config, mesh, EngineSpec(**sizes | changes))


@pytest.fixture(scope="module")
def engine(mesh):
    return made(mesh)


@pytest.fixture(scope="module")
def transfer(mesh):
    return WeightTransfer(shapes_of(CONFIG), mesh, dtype="float32")


@pytest.fixture(scope="module")
def weights(transfer):
    return transfer(tiny_params(CONFIG))


def prompts(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(2, 20, length).astype(np.int32) for length in lengths]


def rows_of(sequences):
    """Rows padded to the capacity, and their lengths."""
    tokens = np.zeros((len(sequences), CAPACITY), np.int32)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence
    return tokens, np.array([len(sequence) for sequence in sequences])


@dataclass
class Prefilled:
    prefix: object
    places: list

    @property
    def logits(self):
        """Logits in the order of the prompts."""
        return self.prefix.logits[jnp.array(self.places)]


def prefilled(engine, weights, asked):
    (done,) = engine.prefill(weights, asked)
    assert len({id(prefix) for _, prefix, _ in done}) == 1
    return Prefilled(
        prefix=done[0][1], places=[place for _, _, place in sorted(done, key=lambda one: one[0])]
    )


def started(engine, read, slots, prompts, *, state=None, key=KEY, limits=9, ordinals=0):
    """Inserts prompts into empty slots: (state, `generate` with the pages of the slots)."""
    prefix, places = read.prefix, [read.places[prompt] for prompt in prompts]

    def column(values):
        return np.broadcast_to(np.asarray(values, np.int32), len(slots)).copy()

    pages, fills = Pages(engine.page_sizes), []
    for slot, place in zip(slots, places, strict=True):
        read = int(prefix.lengths[place])
        fills += [(place, fill) for fill in pages.start(slot, engine.capacity, read=read)]
    insertion = Insertion(
        slots=column(slots), prompts=column(places), ordinals=column(ordinals),
        indices=np.arange(len(slots), dtype=np.int32), limits=column(limits), drawn=column(0), turns=column(0), fills=fills,
    )  # fmt: skip

    def generate(weights, state, decoding, min_live=1):
        return engine.generate(weights, state, decoding, min_live, pages.rows(slice(engine.slots)))

    return engine.insert(prefix, state or engine.init_decode_state(), insertion, key), generate


@functools.cache
def trainer(dtype, config=CONFIG):
    """(params, tokens) -> logits of whole rows, as the trainer's decoder computes them."""
    graph = graph_of(config, compute_dtype=dtype)

    def run(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
        decoder = nnx.merge(graph, params)
        found = decoder(tokens, positions, jnp.ones_like(tokens))
        return decoder.ends.logits(found if config.experts is None else found[0])

    return jax.jit(run)


def last_logits(sequences, *, dtype="float32"):
    """The trainer's logits after the last token of each sequence."""
    tokens, lengths = rows_of(sequences)
    logits = np.asarray(trainer(dtype)(tiny_params(CONFIG), tokens))
    return logits[np.arange(len(tokens)), lengths - 1]


@pytest.mark.parametrize("lengths", [(3, 8, 1, 5), (15, 16, 16, 9), (1,), (9, 2, 2, 3, 1)], ids=str)
def test_prefill_gives_the_logits_after_each_prompt_however_they_are_packed(
    engine, weights, lengths, platform
):
    """In rows of 24: 3, 8, 1 and 5 tokens are one; 15, 16, 16 and 9 are 16 | 16 | 15 + 9, a call of 4 rows."""
    asked = prompts(*lengths)
    prefix = prefilled(engine, weights, asked)
    np.testing.assert_allclose(prefix.logits, last_logits(asked), rtol=1e-4, atol=1e-5)


def test_long_prompts_are_prefilled_in_parts(mesh, engine, weights):
    """Rows of 7 tokens: a prompt of 24 takes four parts, and other slots may decode after each."""
    narrow = made(mesh, prefill=PrefillShape(rows=2, width=7, longest=CAPACITY))
    asked = prompts(24, 5, 8)
    parts = list(narrow.prefill(weights, asked))
    assert [[index for index, _, _ in part] for part in parts] == [[1], [], [], [], [0], [], [2]]
    found = {index: prefix.logits[place] for part in parts for index, prefix, place in part}
    np.testing.assert_allclose(
        np.stack([found[i] for i in range(3)]), last_logits(asked), rtol=1e-4, atol=1e-5
    )


def test_scores_are_the_trainers_logprobs_also_of_prompts_in_parts(mesh, weights):
    """Rows of 7 tokens: prompts of 24 and 8 tokens are scored part by part. A top token that comes next has the same bits in both columns."""
    narrow = made(mesh, prefill=PrefillShape(rows=2, width=7, longest=CAPACITY))
    first = np.array([2], np.int32)
    asked = [*prompts(24, 5, 1, 8), np.append(first, last_logits([first])[0].argmax()).astype(np.int32)]
    logprobs = jax.nn.log_softmax(np.asarray(trainer("float32")(tiny_params(CONFIG), rows_of(asked)[0])))
    parts = [one for part in narrow.prefill(weights, asked, score=True) for one in part]
    scores = {index: prefix.scores[place] for index, prefix, place in parts}
    for index, (prompt, wanted) in enumerate(zip(asked, np.asarray(logprobs), strict=True)):
        found = scores[index]
        wanted, following = wanted[: len(prompt)], np.arange(len(prompt) - 1)
        np.testing.assert_allclose(found.logprobs[:-1], wanted[following, prompt[1:]], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.top_logprobs, wanted.max(1), rtol=1e-4, atol=1e-5)
        assert found.top.tolist() == wanted.argmax(1).tolist()
        is_top = found.top[:-1] == prompt[1:]
        assert (is_top == (found.logprobs[:-1] == found.top_logprobs[:-1])).all()
    assert is_top.all()


# Slow: compiles all programs of other models. The programs of "every switch" have the same names.
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(CONFIG, id="plain", marks=pytest.mark.slow),
        pytest.param(SWITCHED, id="every switch"),
        pytest.param(EXPERTS, id="experts", marks=pytest.mark.slow),
    ],
)
def test_all_programs_of_a_run_can_be_compiled_beforehand(mesh, config, caplog):
    """After compiling from shapes alone, prompts of any length are prefilled, inserted and decoded without a compilation."""
    transfer = WeightTransfer(shapes_of(config), mesh, dtype="float32")
    weights = transfer(tiny_params(config))
    shape = PrefillShape(rows=2, width=7, longest=CAPACITY)
    engine = made(mesh, config, slots=3, prefill=shape, records_routes=True)
    for lower in engine.programs(transfer.shapes, GREEDY).values():
        lower().compile()
    engine._rope  # noqa: B018 - tables of positions, which are arrays
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        caplog.clear()
        for asked in (prompts(24, 5, 8), prompts(7, 7, 7), prompts(1)):
            for part in engine.prefill(weights, asked):
                for _, prefix, place in part:
                    read = Prefilled(prefix=prefix, places=[place])
                    state, generate = started(engine, read, [1], [0])
                    generate(weights, engine.release(state, [0]), GREEDY)
    compiled = [record.getMessage() for record in caplog.records if "Compiling jit(" in record.getMessage()]
    assert [line for line in compiled if "_program" in line] == []


def drawn_by(result):
    """The valid tokens of each slot."""
    return [row[mask] for row, mask in zip(*map(np.asarray, (result.tokens, result.valid)), strict=True)]


def test_greedy_decoding_is_the_argmax_of_the_whole_sequence(engine, weights, platform):
    """Each token is the argmax of a forward pass over all tokens before it: cache, positions and lengths are right.

    The prompts share rows, so the cache of a slot also holds tokens that followed its prompt there.
    """
    asked = prompts(3, 8, 1, 5)
    state, generate = started(engine, prefilled(engine, weights, asked), range(4), range(4))
    _, result = generate(weights, state, GREEDY)
    drawn = drawn_by(result)
    assert sorted(len(tokens) for tokens in drawn)[-3:] == [STEPS] * 3
    for step in range(STEPS):
        going = [row for row in range(4) if len(drawn[row]) > step]
        before = [np.concatenate([asked[row], drawn[row][:step]]) for row in range(4)]
        likeliest = last_logits(before).argmax(axis=-1)
        assert likeliest[going].tolist() == [drawn[row][step] for row in going]


def test_generate_comes_back_as_soon_as_too_few_slots_live(engine, weights):
    prefix = prefilled(engine, weights, prompts(4))
    how = decoding(temperature=0.01)

    def run(min_live):
        state, generate = started(
            engine, prefix, range(4), [0] * 4, limits=[2, 3, 5, 8], ordinals=[0, 1, 2, 3]
        )
        return generate(weights, state, how, min_live)

    lengths = sorted(np.asarray(run(1)[1].valid).sum(axis=1).tolist())
    assert len(set(lengths)) > 1, "the responses should end at different steps"
    for min_live in (2, 3, 4):
        # Fewer than m of four live once 5 - m have ended, at the step when the (5 - m)-th shortest does.
        _, result = run(min_live)
        assert np.asarray(result.valid).sum(axis=1).max() == lengths[4 - min_live]


# Slow: compiles two samplers each. Slots stay.
@pytest.mark.parametrize(
    "how",
    [{}, pytest.param({"cache": "pages", "has_turns": True}, marks=pytest.mark.slow)],
    ids=["slots", "turns"],
)
def test_a_fixed_number_of_steps_samples_the_same_tokens(mesh, weights, how):
    """As on a GPU: slots whose responses have ended, or pause, keep their state while the call runs to its end."""
    asked = [prompts(4)[0]] * 4

    def drawn(fixed):
        engine = made(mesh, steps_per_call=3, **how)
        engine._fixed_steps = fixed
        state, generate = started(
            engine, prefilled(engine, weights, asked), range(4), range(4), limits=[2, 4, 5, 11]
        )
        calls, min_live = [], 4
        while np.asarray(state.live).any():
            state, result = generate(weights, state, decoding(temperature=0.5), min_live)
            calls.append(result)
        tokens = [np.concatenate(rows) for rows in zip(*map(drawn_by, calls), strict=True)]
        return len(calls), tokens, np.asarray(state.lengths), np.asarray(state.generated)

    (few, *fixed), (many, *free) = drawn(True), drawn(False)
    assert few == 4 < many, "11 tokens, three at a time"
    for one, other in zip(jax.tree.leaves(fixed), jax.tree.leaves(free), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("slots", "steps"), [([3], [0, 0, 0, 1]), ([], [0, 0, 0, 0])])
def test_one_step_is_taken_when_fewer_slots_live_than_asked_for(engine, weights, slots, steps):
    prefix = prefilled(engine, weights, prompts(4))
    state, generate = started(engine, prefix, [3], [0])
    _, result = generate(weights, state if slots else engine.release(state, [3]), GREEDY, 4)
    assert np.asarray(result.valid).sum(axis=1).tolist() == steps
    assert slots or not np.asarray(result.live).any()


def test_no_logits_are_computed_once_the_last_response_has_ended(engine, weights):
    """After one token the slot keeps its logits. With two tokens, the logits are replaced."""
    prefix = prefilled(engine, weights, prompts(3))

    def keeps_its_logits(limit):
        state, generate = started(engine, prefix, [0], [0], limits=limit)
        before = np.asarray(state.logits[0])
        state, result = generate(weights, state, decoding())
        assert np.asarray(result.valid).sum() == limit
        assert state.lengths[0] == 3 + limit
        return np.array_equal(before, state.logits[0])

    assert keeps_its_logits(1)
    assert not keeps_its_logits(2)


def test_a_released_slot_stops_and_the_others_continue(engine, weights):
    prefix = prefilled(engine, weights, prompts(4))
    state, generate = started(engine, prefix, range(4), [0] * 4, limits=16, ordinals=[0, 1, 2, 3])
    going = set(np.flatnonzero(state.live)) - {1, 3}
    state = engine.release(state, [3, 1])
    assert set(np.flatnonzero(state.live)) == going == {0, 2}
    _, result = generate(weights, state, decoding(temperature=0.01))
    assert not np.asarray(result.valid)[[1, 3]].any()
    assert np.asarray(result.valid)[[0, 2]].any(axis=1).all()


def test_any_of_several_end_tokens_ends_a_response(mesh, weights):
    """The same samples: when a later token becomes an end token, the response ends there."""

    def drawn_until(*stop_ids):
        engine = made(mesh, stop_ids=stop_ids)
        state, generate = started(engine, prefilled(engine, weights, prompts(5)), [0], [0])
        return drawn_by(generate(weights, state, decoding(temperature=2.0))[1])[0].tolist()

    whole = drawn_until()
    place = next(place for place in range(2, STEPS) if whole[place] not in whole[:place])
    absent = next(token for token in range(20) if token not in whole)
    assert len(whole) == STEPS
    assert drawn_until(absent) == whole
    assert drawn_until(absent, whole[place]) == whole[: place + 1]


CACHES = ["slots", "pages", "tpu", "gpu"]


@pytest.mark.parametrize(
    ("cache", "config"),
    [
        pytest.param("pages", SWITCHED, id="pages, every switch"),
        # Slow: compiles trainer and sampler. tests/sampling/paged_cache_test.py compares the attention of all caches, also interpreted
        # kernels; tests/sampling/routes_test.py compares sampler and trainer with experts.
        *(pytest.param(cache, CONFIG, marks=pytest.mark.slow) for cache in CACHES),
        *(
            pytest.param(cache, SWITCHED, id=f"{cache}, every switch", marks=pytest.mark.slow)
            for cache in ("slots", "tpu", "gpu")
        ),
        pytest.param("pages", EXPERTS, id="experts", marks=pytest.mark.slow),
        pytest.param("gpu", WIDE, id="gpu's kernel interpreted, heads of 64", marks=pytest.mark.slow),
        pytest.param(None, CONFIG, marks=pytest.mark.tpu, id="tpu"),
        pytest.param(None, CONFIG, marks=pytest.mark.gpu, id="gpu"),
        pytest.param(None, WIDE, marks=pytest.mark.gpu, id="gpu, heads of 64"),
        pytest.param(None, SWITCHED, marks=pytest.mark.gpu, id="gpu itself, every switch"),
    ],
)
def test_sampler_and_trainer_agree_in_bfloat16(mesh, cache, config):
    """Their log-probabilities differ by less than the trainer's own in bfloat16 and float32 (here 0.005 nats). The ratio of Qwen3-0.6B on one H100 was 0.69."""
    engine = made(mesh, config, compute_dtype="bfloat16", cache=cache)
    weights = WeightTransfer(shapes_of(config), mesh, dtype="bfloat16")(tiny_params(config))
    asked = prompts(8, 3, 6, 5)
    state, generate = started(engine, prefilled(engine, weights, asked), range(4), range(4))
    state, result = generate(weights, state, decoding())
    drawn, sampled = drawn_by(result), np.asarray(result.logprobs)[np.asarray(result.valid)]
    tokens, _ = rows_of([np.concatenate(pair) for pair in zip(asked, drawn, strict=True)])

    def scored(dtype):
        with jax.default_matmul_precision("highest" if dtype == "float32" else None):
            logprobs = jax.nn.log_softmax(trainer(dtype, config)(tiny_params(config), tokens), axis=-1)
        rows = zip(np.asarray(logprobs), asked, drawn, strict=True)
        return np.concatenate([row[len(prompt) - 1 + np.arange(len(new)), new] for row, prompt, new in rows])

    trained, exact = scored("bfloat16"), scored("float32")
    assert len(sampled) > 20
    assert result.logprobs.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(state.layers)} == {jnp.dtype(jnp.bfloat16)}
    assert np.abs(sampled - trained).mean() < 0.75 * np.abs(trained - exact).mean()


@pytest.mark.parametrize(
    ("cache", "config"),
    [
        ("pages", CONFIG),
        # Slow: compiles for four devices. tests/sampling/continuous_batching_test.py samples on eight with slots, and
        # tests/sampling/paged_cache_test.py compares the caches.
        *(pytest.param(cache, CONFIG, marks=pytest.mark.slow) for cache in CACHES if cache != "pages"),
        pytest.param("pages", SWITCHED, id="pages, every switch", marks=pytest.mark.slow),
        pytest.param("pages", EXPERTS, id="pages, experts", marks=pytest.mark.slow),
    ],
)
def test_slots_and_heads_over_several_devices_sample_as_one_device_does(mesh, cache, config):
    """Slots are spread over two devices, heads and vocabulary over two; each device samples for one slot."""
    spread = make_mesh(data=2, fsdp=1, tensor=2, devices=jax.devices()[:4])
    engine, several = made(mesh, config), made(spread, config, cache=cache)
    weights, params = (
        WeightTransfer(shapes_of(config), where, dtype="float32")(tiny_params(config))
        for where in (mesh, spread)
    )

    def drawn(engine, weights):
        prefix = prefilled(engine, weights, prompts(3, 8, 5))
        state, generate = started(engine, prefix, [2, 0, 3], [0, 1, 2])
        state, first = generate(weights, state, decoding(temperature=0.5))
        # One slot of each pair of devices continues.
        state, second = generate(weights, engine.release(state, [2]), decoding(temperature=0.5))
        return jax.device_get((first, second, state.lengths))

    for one, other in zip(
        jax.tree.leaves(drawn(engine, weights)), jax.tree.leaves(drawn(several, params)), strict=True
    ):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)
    place = several.init_decode_state().logits.sharding.shard_shape((SLOTS, CONFIG.vocab_size))
    assert place == (1, CONFIG.vocab_size)


@pytest.mark.parametrize(
    ("changes", "axes", "message"),
    [
        (
            {"slots": 6},
            {"data": 2, "fsdp": 2, "tensor": 2},
            r"slots=6 .* parallel.data x parallel.fsdp = 4, .* 8$",
        ),
        ({"slots": 8, "capacity": 65}, {}, "need 65 positions, .* has 64; lower data"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, axes, message):
    with pytest.raises(ValueError, match=message):
        made(make_mesh(**axes), **changes)
